"""The TRITON_ATTN family: what it declares, and the conformance cases that are small enough for Triton's interpreter.

On a GPU every quick case runs as it is. Without one the kernels run interpreted on the CPU, which is exact to rounding in
float32 and float16 but truncates bfloat16, so such cases run in float32. About 30 s on one core with triton, none without.
"""

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attn import selector
from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import Device, Request
from attn.errors import UnsupportedError
from attn.reference import block_sparse_mask, paged_attention
from attn.testing import Case, cases_for, check_conformance
from attn.torch import kv_cache as caches
from attn.torch.backends.blocksparse_attn import BlocksparseFlashAttentionBackend
from attn.torch.backends.rocm_attn import RocmAttentionBackend
from attn.torch.backends.tree_attn import TreeAttentionBackend
from attn.torch.backends.triton_attn import TritonAttentionBackend

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported
HERE = Device("torch", "cuda" if ON_GPU else "cpu")
H200, A100 = Device("torch", "cuda", "H200", "sm_90"), Device("torch", "cuda", "A100", "sm_80")
MI300 = Device("torch", "rocm", "MI300X", "gfx942")

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
# the interpreter computes with NumPy, which speaks of the infinities that kernels handle on purpose, and with its old ways
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")


def _cases() -> list[Case]:
    cases = [c for c in cases_for(TritonAttentionBackend, H200) if (c.num_blocks or 0) < 1000]
    if ON_GPU:
        return cases
    small = []
    for case in cases:
        work = case.num_heads * sum(q * m for q, m in zip(case.query_lens, case.seq_lens, strict=True))
        if case.check == "oracle" and 0 < work <= 6000 and case.head_size <= 128 and case.kv_cache_dtype != "bfloat16":
            small.append(case.replace(dtype="float32") if case.dtype == "bfloat16" else case)
    return small[::6]


@needs_triton
@quiet
@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_conformance(case: Case) -> None:
    check_conformance(TritonAttentionBackend, case, HERE)


@needs_triton
@quiet
@pytest.mark.parametrize("homo_head", [False, True])
def test_block_sparse(homo_head: bool) -> None:
    """Prefill, chunk and decode in one batch, against the oracle under the formula's mask."""
    rng = np.random.default_rng(0)
    heads, kv_heads, size, page, params = 4, 2, 32, 16, {"block_size": 8, "local_blocks": 2, "vert_stride": 3}
    q_lens, seq_lens = [30, 7, 1], [30, 50, 61]
    blocks = [-(-m // page) for m in seq_lens]
    tables = np.split(rng.permutation(sum(blocks)).astype(np.int32), np.cumsum(blocks)[:-1])
    batch = CommonAttentionMetadata.from_lens(q_lens, seq_lens, tables, page)
    spec = KVCacheSpec(page, kv_heads, size, "float32", num_blocks=sum(blocks))
    device = torch.device("cuda" if ON_GPU else "cpu")
    metadata = BlocksparseFlashAttentionBackend.get_builder_cls()(spec, ["layer"], None, device).build(0, batch)
    cache = caches.allocate(BlocksparseFlashAttentionBackend, spec, sum(blocks), device).normal_()
    query = torch.from_numpy(rng.standard_normal((sum(q_lens), heads, size), np.float32)).to(device)
    impl = BlocksparseFlashAttentionBackend.get_impl_cls()(
        heads, size, size**-0.5, kv_heads, blocksparse_params={**params, "homo_head": homo_head}
    )
    out = impl.forward(_layer(), query, None, None, cache, metadata)
    pattern = {"num_heads": heads, "homo_head": homo_head, **params}
    masks = [block_sparse_mask(n, m, **pattern) for n, m in zip(q_lens, seq_lens, strict=True)]
    want, _ = paged_attention(
        query.cpu().numpy(), *cache.cpu().numpy(), query_start_loc=batch.query_start_loc, seq_lens=batch.seq_lens,
        block_table=batch.block_table, causal=True, mask=masks,
    )  # fmt: skip
    np.testing.assert_allclose(out.cpu().numpy(), want, atol=2e-5)


@needs_triton
@quiet
def test_fixed_split_is_batch_invariant() -> None:
    """With a fixed split, a sequence alone and among others has the same bits; several splits are in play."""
    rng = np.random.default_rng(1)
    heads, kv_heads, size, page = 2, 1, 32, 16
    device = torch.device("cuda" if ON_GPU else "cpu")
    cache = torch.from_numpy(rng.standard_normal((2, 24, page, kv_heads, size), np.float32)).to(device)
    query = torch.from_numpy(rng.standard_normal((4, heads, size), np.float32)).to(device)
    impl = TritonAttentionBackend.get_impl_cls()(heads, size, size**-0.5, kv_heads)
    impl.fixed_split_size = 64
    table = rng.permutation(24).astype(np.int32)
    tables = [table[:12], table[12:18], table[18:20], table[20:24]]
    lens = [190, 90, 20, 64]
    spec = KVCacheSpec(page, kv_heads, size, "float32")
    build = TritonAttentionBackend.get_builder_cls()(spec, ["layer"], None, device).build

    def run(rows: list[int]) -> torch.Tensor:
        batch = CommonAttentionMetadata.from_lens([1] * len(rows), [lens[r] for r in rows], [tables[r] for r in rows], page)
        return impl.forward(_layer(), query[rows], None, None, cache, build(0, batch))

    together = run([0, 1, 2, 3])
    for r in range(4):
        assert torch.equal(run([r])[0], together[r])


def _layer() -> Any:
    one = torch.tensor(1.0)
    return SimpleNamespace(_k_scale=one, _v_scale=one, _k_scale_float=1.0, _v_scale_float=1.0)


def test_fp8_needs_ada() -> None:
    request = Request(128, "bfloat16", "fp8", 16)
    assert TritonAttentionBackend.why_not(request, H200) == []
    assert "supports sm_89+" in TritonAttentionBackend.why_not(request, A100)[0]
    assert TritonAttentionBackend.why_not(Request(128, "bfloat16", "fp8_e5m2", 16), A100) == []


def test_limits_are_said() -> None:
    for request, word in (
        (Request(24, "bfloat16"), "head_size=24"),
        (Request(264, "bfloat16"), "head_size=264"),
        (Request(128, "bfloat16", block_size=24), "block_size=24 (supports multiples of 16)"),
        (Request(128, "float64"), "dtype=float64"),
        (Request(128, "bfloat16", num_heads=512, num_kv_heads=1), "num_heads=512 for num_kv_heads=1"),
    ):
        assert any(word in why for why in TritonAttentionBackend.why_not(request, H200)), word


def test_the_family_keeps_to_its_platforms() -> None:
    request = Request(128, "bfloat16", block_size=16)
    assert "platform=cuda" in RocmAttentionBackend.why_not(request, H200)[0]
    assert RocmAttentionBackend.why_not(request, MI300) == []
    assert TreeAttentionBackend.why_not(request, H200) == []
    assert "serves block_sparse only" in BlocksparseFlashAttentionBackend.why_not(request, H200)[0]


def test_block_sparse_arguments() -> None:
    with pytest.raises(ValueError, match="vert_stride=0 must be an int of at least 1"):
        BlocksparseFlashAttentionBackend.get_impl_cls()(4, 64, 0.125, blocksparse_params={"vert_stride": 0})
    with pytest.raises(UnsupportedError, match="sliding_window not supported"):
        BlocksparseFlashAttentionBackend.get_impl_cls()(4, 64, 0.125, sliding_window=8)


def test_selector_branch_names_what_is_missing() -> None:
    """Without a GPU the block-sparse branch refuses by platform, not by a missing module."""
    if ON_GPU:
        pytest.skip("this machine serves it")
    with pytest.raises(UnsupportedError, match="BLOCKSPARSE"):
        selector.get_attn_backend(64, torch.float16, None, 16, is_blocksparse=True)
