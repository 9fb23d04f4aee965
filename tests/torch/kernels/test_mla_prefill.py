"""Attention of MLA's expanded heads called as a kernel; the conformance suite has the rest. 2 s on one core, interpreted."""

import pytest
import torch

pytest.importorskip("triton")

from attn.torch.kernels.mla_prefill import mla_prefill

pytestmark = [pytest.mark.triton_kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_heads_that_are_far_apart() -> None:
    """More than 2**31 elements from the first: of the 4 GiB, a CPU backs with memory only what is written."""
    far, tokens, heads, sizes = 2**30, 5, 3, (48, 48, 32, 32)  # of queries, keys, values and outputs
    memory = torch.empty(2 * far + tokens * sum(sizes), dtype=torch.float16, device=DEVICE)
    starts, apart, at = torch.tensor([0, 2, tokens], dtype=torch.int32, device=DEVICE), [], 0
    for size in sizes:
        apart.append(memory[at:].as_strided((tokens, heads, size), (size, far, 1)))
        apart[-1].copy_(torch.randn(tokens, heads, size))
        at += tokens * size
    dense = [x.contiguous() for x in apart]
    for query, key, value, out in (apart, dense):
        mla_prefill(out, None, query, key, value, starts, starts, 0.2, True)
    assert torch.equal(apart[3], dense[3])
