"""Triton's kernels in Triton's interpreter: the conformance suite without a GPU, in processes of their own.

Triton reads TRITON_INTERPRET when it is imported, and the release that runs on the GPUs here interprets with an older NumPy
than the environment has; both live beside the environment, in its folder `compilers`. What it computes is exact to rounding,
bfloat16 by `attn.torch.interpreter`. About 4 minutes of one core.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
COMPILERS = Path(sys.prefix) / "compilers"

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None and not (COMPILERS / "triton").is_dir(),
        reason="triton is neither installed nor in the environment's folder compilers (make compilers puts it there)",
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine runs the kernels: attn conform TRITON_ATTN --jobs 8"),
]
#: Every feature is TRITON_ATTN's; its relatives run what is theirs, and enough to show that they are wired up.
RUNS = [
    *(f"TRITON_ATTN --level quick --part {i}/8" for i in range(1, 9)),
    "TREE_ATTN --level smoke --only tree",
    "ROCM_ATTN --level smoke --only needle",
    "BLOCKSPARSE --level smoke --part 1/2",
    "BLOCKSPARSE --level smoke --part 2/2",
    "TRITON_MLA --level smoke --only needle",
    "TRITON_MLA_SPARSE --level smoke --only needle",
]


def interpreted(*words: str) -> None:
    """Run a Python module in a process with triton interpreting; its output is the message of a failure."""
    path = [os.environ.get("PYTHONPATH", ""), *([str(COMPILERS)] if importlib.util.find_spec("triton") is None else [])]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("run", RUNS)
def test_conformance(run: str) -> None:
    interpreted("attn", "conform", *run.split(), "--kind", "interpreted")


@pytest.mark.parametrize("run", ["TRITON_ATTN --only padded", "TRITON_INT8_ATTN --only padded"])
def test_dense_conformance(run: str) -> None:
    interpreted("attn", "conform", "--registry", "diffusion", *run.split(), "--kind", "interpreted")


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="these tests run in this process")
@pytest.mark.parametrize(
    "tests",
    [
        "tests/torch/test_triton_attn.py",
        "tests/torch/test_autotune.py tests/torch/test_interpreter.py",
        "tests/torch/kernels",
        "tests/torch/mla/test_triton_mla.py",
    ],
)
def test_kernels(tests: str) -> None:
    interpreted("pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *tests.split())
