"""The tests that launch Triton's kernels run on a GPU, or in a process that starts with the interpreter."""

import importlib.util
import os

import pytest
import torch

_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `triton_kernels` or `triton_interpreter` where they cannot run, for the reason it says.

    Triton decides once, when it is imported, whether its functions are interpreted. If a test module asked for that
    while modules are collected, the tests of other modules would depend on which was imported first.
    """
    kernels, interpreter = (item.get_closest_marker(name) for name in ("triton_kernels", "triton_interpreter"))
    if not (kernels or interpreter):
        return
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (test_interpreted.py starts processes that have it)")
    if interpreter and not _INTERPRETS:
        pytest.skip("this process compiles Triton's kernels (test_interpreted.py starts one that interprets them)")
    if not (_INTERPRETS or torch.cuda.is_available()):
        pytest.skip("no GPU for Triton's kernels (test_interpreted.py starts a process that interprets them)")
