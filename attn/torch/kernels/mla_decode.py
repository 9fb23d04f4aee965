"""Absorbed MLA over a paged cache of latents: `attn.kernels.mla_decode` launched for torch's tensors."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from attn.kernels.launch import LOG2E, can_use_pdl
from attn.kernels.mla_decode import attend, merge
from attn.kernels.mla_launch import Decode, MLALaunches, launches_of, prefers_hopper
from attn.torch.kernels.direct import Prepared, Signature, arch, multiprocessors, operator, signature_of, temporary
from attn.torch.kernels.plan import stream_k


@functools.lru_cache(maxsize=1024)
def _plan(of: Decode) -> tuple[MLALaunches, Callable[..., Prepared], Callable[..., Prepared]]:
    """The launches and both stages: equal for every layer of a model, so made once per batch."""
    made = launches_of(of)
    return made, _stage(attend, (*made.attend.items(),)), _stage(merge, (*made.merge.items(),))


@functools.lru_cache(maxsize=1024)
def _stage(kernel: Any, constants: tuple[tuple[str, Any], ...]) -> Callable[..., Prepared]:
    """A stage with these constants, which are equal for most batches of a layer, for calls that agree in its arguments."""

    @functools.lru_cache(maxsize=1024)
    def prepared(signature: Signature, **more: bool) -> Prepared:
        return Prepared(kernel, **dict(constants), **more)

    return prepared


@functools.cache
def _hopper_mla() -> Any:
    """The module `hopper_mla`: Gluon is imported on Hopper only, and an import statement costs a microsecond per call."""
    from attn.torch.kernels import hopper_mla

    return hopper_mla


@operator("triton_mla_decode", "out", "lse")
def mla_decode(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    query: torch.Tensor,
    cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    packed: bool = False,
    k_scale: torch.Tensor | None = None,
    k_factor: float = 1.0,
    limits: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    fixed_split: int = 0,
    uneven: bool = False,
) -> None:
    """Compute out [T, H, L] and, unless None, lse [H, T] for every token of every request.

    query: [T, H, L + Dr]; cache: [N, P, L + Dr], or [N, P, 656] uint8 when `packed`; query_start_loc: [R + 1], seq_lens:
    [R], block_table: [R, B], int32. k_scale: 0-d float32 on the device, or k_factor if the host has the value: a row is
    code * scale. limits: [T] int32, the number of keys that each row sees. indices: [T, topk] int32, the key positions that
    each row attends to instead of the causal ones. fixed_split: keys per split; 0 lets the rule choose by the batch.
    uneven: split keys by all lengths, by a plan on the device, instead of each request as the longest one is (all keys only).
    """
    requests, (tokens, heads, width), rank = query_start_loc.shape[0] - 1, query.shape, out.shape[2]
    # the driver refuses a grid of no programs
    if requests < 1 or tokens == 0 or max_query_len == 0:
        return
    strides = out.stride(2), query.stride(2), cache.stride(2)
    assert strides == (1, 1, 1), f"the last dimensions of out, query and cache have strides {strides}: must be dense"
    name, sparse, on_hopper = arch(), indices is not None, False
    # it serves 16-bit latents, which have no scale: a cache with one need not be examined
    if prefers_hopper(name, packed) and k_scale is None:
        on_hopper = _hopper_mla().serves(query, cache, rank, fixed_split, sparse)
    topk = indices.shape[1] if indices is not None else 0
    step = fixed_split or 16  # a plan counts whole tiles, of 16 keys and more: one for every token would miss each time
    plan, first, second = _plan(
        Decode(
            arch=name,
            processors=multiprocessors(query.device),
            pdl=can_use_pdl(name),
            on_hopper=on_hopper,
            requests=requests,
            heads=heads,
            rank=rank,
            rope=width - rank,
            max_query_len=max_query_len,
            keys=topk if sparse else -(-max_seq_len // step) * step,
            page=cache.shape[1],
            itemsize=query.itemsize,
            stored=cache.itemsize,
            fixed_split=fixed_split,
            sparse=sparse,
            packed=packed,
            uneven=uneven,
        )
    )
    # The kernels take every pointer in any case; where there are no states and no table, any tensor will do.
    groups, rows, partial, partial_lse, table = 0, plan.tiles * plan.block_m, out, out, out
    if plan.stream_k is not None:
        groups = plan.stream_k.groups
        # made on the device in each layer: a graph that is replayed with other lengths splits them anew
        table = stream_k(query_start_loc, seq_lens, heads, rows, groups, plan.stream_k.items, plan.block_n)
    # 0 where one program attends all keys of a row, and stores the result itself
    if states := plan.states(tokens * heads):
        partial = temporary(out.new_empty(states * rank, dtype=torch.float32))
        partial_lse = temporary(out.new_empty(states, dtype=torch.float32))
    # None: the rotary part of queries, which absorbed queries end with.
    arrays = out, lse, partial, partial_lse, query, None, cache, query_start_loc, seq_lens, limits
    # Values are the latents themselves, so the scale of a row multiplies both the scores and the result.
    factors = scale * k_factor * LOG2E, k_factor
    if on_hopper:
        _hopper_mla().attend((*arrays, table, block_table, indices), factors, plan, requests)
    else:
        _attend_generally(first, (*arrays, block_table, indices, table, k_scale), factors, plan, requests)
    if states:
        merged, (o_t, o_h, _) = (out, lse, partial, partial_lse, query_start_loc, seq_lens, limits, table), out.stride()
        kernel = second(signature_of(merged, (topk, o_t, o_h)))
        counts = plan.max_splits, plan.split_size, groups, max_query_len, 0 if lse is None else lse.stride(0), topk, o_t, o_h
        programs, columns = plan.merge_grid(requests, heads, max_query_len)
        kernel(programs, merged, *counts, columns=columns)


def _attend_generally(
    stage: Callable[..., Prepared], arrays: tuple[Any, ...], factors: tuple[float, float], plan: MLALaunches, requests: int
) -> None:
    """Launch the first stage, but for `hopper_mla`. arrays: its pointers; factors: of scores, into base 2, and of values."""
    out, lse, _, _, query, _, cache, *_, block_table, indices, _, k_scale = arrays
    if cache.dtype == torch.float8_e4m3fn and plan.attend["BYTES"]:
        # codes as bytes, for architectures without instructions for e4m3
        arrays = *arrays[:6], cache.view(torch.uint8), *arrays[7:]
    listed = (0, 0) if indices is None else (indices.shape[1], indices.stride(0))
    strides = *listed, *out.stride()[:2], *query.stride()[:2], *cache.stride()[:2]
    # 64-bit offsets only for caches that need them: they cost instructions in every load
    wide = cache.shape[0] * cache.stride(0) >= 2**31
    kernel = stage(signature_of(arrays, strides), WIDE=wide)
    numbers = plan.max_splits, plan.split_size, 0 if lse is None else lse.stride(0), block_table.stride(0)
    kernel(plan.programs(requests), arrays, *factors, *numbers, *strides, columns=plan.max_splits)
