"""Triton's kernels in Triton's interpreter, without a GPU: tests of kernels and the conformance suite, in other processes.

Triton reads TRITON_INTERPRET when it is imported, so a process interprets from its start or not at all: a test that needs
the interpreter never turns it on for the tests beside it. The Triton is the environment's. Without one it is the release
that runs on the GPUs here, which interprets with an older NumPy than the environment has; both live beside the environment,
in its folder `compilers`. What it computes is exact to rounding, bfloat16 by `attn.torch.interpreter`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn.torch import Attention

ROOT = Path(__file__).parents[2]
COMPILERS = Path(sys.prefix) / "compilers"

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None and not (COMPILERS / "triton").is_dir(),
        reason="triton is neither installed nor in the environment's folder compilers (make compilers puts it there)",
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine runs the kernels: attn conform TRITON_ATTN --jobs 8"),
]


def interpreted(*words: str, flag: str = "-m") -> None:
    """Run a Python module in a process with triton interpreting; its output is the message of a failure."""
    path = [os.environ.get("PYTHONPATH", ""), *([str(COMPILERS)] if importlib.util.find_spec("triton") is None else [])]
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, flag, *words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout


def test_dense_kernels() -> None:
    names = ("TRITON_ATTN", "TRITON_INT8_ATTN")
    interpreted("attn", "conform", *names, "--registry", "diffusion", "--only", "padded", "--kind", "interpreted")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="these tests run in this process")
def test_kernels(pytestconfig: pytest.Config) -> None:
    """In one process: tests of kernels, and the conformance suite."""
    tests = (
        "tests/torch/backends/test_triton_attn.py tests/torch/backends/mla/test_triton_mla.py tests/torch/test_interpreter.py "
        "tests/torch/test_autotune.py tests/torch/kernels tests/torch/interpreted "
        "tests/torch/diffusion/test_backends.py::test_calls_without_rows_or_keys_have_a_log_sum_exp "
        "tests/torch/diffusion/test_backends.py::test_padded_calls_like_one_before_are_not_checked_again"
    )
    full = ["--full"] if pytestconfig.getoption("full") else []
    interpreted("pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--slowest-files", "20", *full, *tests.split())


LAYERS = """
import torch
from attn import CommonAttentionMetadata
from attn.torch import Attention, MLAAttention

batch = CommonAttentionMetadata.from_lens([5, 1], [5, 21], [[3], [7, 4]], 16)
torch.manual_seed(0)
for dtype, atol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    given = [torch.randn(6, heads, 32, dtype=dtype) for heads in (4, 2, 2)]
    outs = []
    for name in ("TRITON_ATTN", "CPU_ATTN"):
        layer = Attention(4, 32, num_kv_heads=2, dtype=dtype, backend=name, return_lse=True)
        cache = layer.new_kv_cache(8)
        outs.append(layer(*given, cache, layer.build(batch)))
    for ours, theirs in zip(*outs):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol)
assert Attention(4, 32).selection.name == "CPU_ATTN", "an interpreter is never chosen unasked"
up, outs = torch.randn(32, 4, 32) / 6, []
given = torch.randn(6, 4, 32), torch.randn(6, 32), torch.randn(6, 16)
for name in ("TRITON_MLA", "TORCH_MLA"):
    layer = MLAAttention(4, 32, 16, 16, 16, up, dtype=torch.float32, block_size=16, backend=name)
    outs.append(layer(*given, layer.new_kv_cache(8), layer.build(batch)))
torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
"""


def test_a_layer_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TRITON_INTERPRET=1 a layer asked for by name is built for a CPU and gives the answers; without it, it is refused."""
    interpreted(LAYERS, flag="-c")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"platform=cpu \(supports cuda, rocm\)"):
        Attention(4, 32, backend="TRITON_ATTN")
