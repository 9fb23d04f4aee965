"""Attention of a ragged batch over a paged cache: `attn.kernels.paged_attention` launched for torch's tensors."""

import functools
from typing import Any

import torch

from attn.kernels import hopper
from attn.kernels.launch import TOGETHER, TUNED, Launch, can_use_pdl, converts_e4m3, packs_rows, writes_rows
from attn.kernels.paged_attention import attention, merge
from attn.kernels.paged_launch import OF_MERGE, Kinds, Launches, LayerParams, strides_of
from attn.torch.kernels.direct import Prepared, Signature, arch, multiprocessors, operator, scratch, signature_of

Arrays = tuple[torch.Tensor | None, ...]
Strides = tuple[int, ...]
Factors = tuple[float, float]
Tuned = tuple[Launch | None, ...]
Flags = tuple[bool, bool, bool, bool]
_Prompts = tuple[int, int | None, bool]
_UNTUNED: Tuned = (None, None)


@functools.cache
def _hopper_prefill() -> Any:
    """The module `hopper_prefill`: Gluon is imported on Hopper only, and an import statement costs a microsecond per call."""
    from attn.torch.kernels import hopper_prefill

    return hopper_prefill


class _Launches:
    """The launches of `Launches` for tensors of one kind."""

    def __init__(self, kinds: Kinds, layer: LayerParams) -> None:
        self._rules = rules = Launches(kinds, layer)
        # by `keys_below`, which has few values: it decides the tiles of the Hopper kernel
        self._of_prompts = functools.cache(functools.partial(layer.of_prompts, rules.tokens))
        # None where no request has more tokens than a decode's tile, or where the Hopper kernel takes them.
        self._prefill = None if rules.prefill is None else Prepared(attention, **rules.prefill)
        #: by `SplitKV.block_r`, 0 for decodes that stay whole, and `SplitKV.crowded`
        self._decode = functools.cache(lambda block_r, crowded: Prepared(attention, **rules.decode(block_r, crowded)))
        #: by `SplitKV.merged`
        self._merge: dict[int, Prepared] = {}

    def __call__(
        self, arrays: Arrays, strides: Strides, factors: Factors, bounds: tuple[int, int, int], whole: bool, prompts: _Prompts
    ) -> None:
        """Launch them. bounds: requests, tokens and keys of each at most; whole: `paged_attention`'s; prompts: its
        `prefill_programs`, `keys_below` and `singles`."""
        # The last four are k_scale and the new rows with their slots, so that `mask` is (spans, prefix, is_causal).
        output, lse, starts, sinks, _, _, query, key_cache, value_cache, seq_lens, table, _, tree, *mask = arrays[:-4]
        rules, layer, kv_heads = self._rules, self._rules.layer, self._rules.kv_heads
        num_reqs, max_query_len, max_seq_len = bounds
        factor, v_factor = layer.factor(factors[0]), factors[1]
        lse_h, table_r = 0 if lse is None else lse.stride(0), 0 if table is None else table.stride(0)
        tree_w = 0 if tree is None else tree.shape[1]
        # In the order of the kernel's parameters; a launch without splits has no states, tiles of a split, and so on.
        numbers, no_plan = (factor, *factors, num_reqs), (0, lse_h, table_r, tree_w, 0, 0, 0)
        if rules.on_hopper:
            pointers = output, lse, query, key_cache, value_cache, starts, seq_lens, table, sinks, *mask
            # Before the decodes: their launch may then begin while this one runs (`beside`), on the multiprocessors that it
            # leaves.
            processors, of_prompts = prompts[0] or rules.kinds.processors, self._of_prompts(prompts[1])
            _hopper_prefill().prefill(pointers, of_prompts, (factor, v_factor), processors)
        elif self._prefill is not None:
            # Each request ends with at most one tile that is not full. The grid is this bound, since the lengths are on the
            # device.
            tiles = query.shape[0] // rules.prefill_tokens + num_reqs  # type: ignore[union-attr]
            self._prefill(tiles * kv_heads, (None, *arrays), *numbers, *no_plan, *strides)
        # Without pages (encoders) the prefill serves requests of any length.
        if not (rules.paged and rules.has_decodes(prompts[2])):
            return
        tiles = rules.tiles(num_reqs, query.shape[0])  # type: ignore[union-attr]
        split_kv = rules.split_kv(tiles, max_seq_len, whole)
        if split_kv is None:
            # one program more beside a prefill: it waits for that, so that no later launch starts before the prefill ends
            self._decode(0, False)(tiles * kv_heads + rules.beside, (None, *arrays), *numbers, *no_plan, *strides)
            return
        states, floats = rules.states(num_reqs, split_kv)
        # The splits' partial results, their log-sum-exps, and behind these the plan: the splits of each request, for the merge.
        memory = scratch(query, floats)  # type: ignore[arg-type]
        plan = states, lse_h, table_r, tree_w, split_kv.split_tiles, split_kv.max_splits, split_kv.whole_from
        programs = split_kv.items * kv_heads + rules.beside
        self._decode(split_kv.block_r, split_kv.crowded)(programs, (memory, *arrays), *numbers, *plan, *strides)
        of_merge = (memory, *arrays[: len(OF_MERGE)])
        merging = self._merge.get(split_kv.merged)
        if merging is None:
            merging = self._merge[split_kv.merged] = Prepared(merge, **rules.merge(split_kv))
        merging(rules.merge_programs(tiles, split_kv), of_merge, v_factor, num_reqs, states, lse_h, *strides[:2])


@functools.lru_cache(maxsize=1024)
def _launches(
    name: str, signature: Signature, shape: Strides, scales: Any, rules: Any, queries: int, flags: Flags, tuned: Tuned
) -> _Launches:
    """The launches of calls that agree in these. scales: two tuples or None; rules: of `LayerParams`; flags: `Kinds.same`,
    `wide`, `hopper` and `together`."""
    dtypes = tuple(None if dtype is None else str(dtype).removeprefix("torch.") for dtype in signature[1])
    device = name, multiprocessors(signature[0]), can_use_pdl(name)
    return _Launches(Kinds(*device, dtypes, shape, scales, queries, *flags, tuned), LayerParams(*rules))


@operator("triton_paged_attention", "output", "lse")
def paged_attention(
    output: torch.Tensor,
    lse: torch.Tensor | None,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    left: int | None = None,
    right: int | None = None,
    tree_right: int | None = None,
    soft_cap: float = 0.0,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    spans: torch.Tensor | None = None,
    prefix: torch.Tensor | None = None,
    is_causal: torch.Tensor | None = None,
    chunk_size: int | None = None,
    span_window: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_factor: float = 1.0,
    v_factor: float = 1.0,
    invariant: bool = False,
    sparse: list[int] | None = None,
    output_scale: torch.Tensor | None = None,
    prefill_programs: int = 0,
    keys_below: int | None = None,
    whole: bool = False,
    together: bool = False,
    singles: bool = True,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """Compute output [T, H, D] and, unless None, lse [H, T] for every token of every request.

    query: [T, H, D]; caches: [N, P, K, D]; query_start_loc: [R + 1], seq_lens: [R], block_table: [R, B], int32. Caches may also
    be [S, K, D], with each request's keys in a row: block_table is then [R, 1], the row of its first key. Without a block
    table, they are this call's own keys and values [T, K, D], and a request sees its own rows (encoders). A row at position p
    sees keys p - left <= j <= p + right; None means no bound (right = 0 is causal). tree: [R, W, W] bool; for
    requests of at most W tokens, it and `tree_right` replace `right`. spans: [T, 2] int32, prefix: [R] int32, chunk_size and
    span_window: docs/semantics.md §18; is_causal: [R] bool, the requests for which right = 0. k_scale, v_scale: float32 on the
    device: 0-d, [K], or [N, P, K] with equal strides and adjacent heads, one per token and head; k_factor, v_factor: the same
    if the host has the values. invariant: a request's bits depend on its own lengths, queries and keys only (`Launches`).
    sparse: [block_size, local_blocks, vert_stride, shift per head, first head] (docs/semantics.md §13). output_scale: 0-d
    float32 on the device; output is then float8_e4m3fn and holds result / output_scale, saturated and rounded to nearest even.
    prefill_programs: multiprocessors for the prefill of a mixed batch that runs concurrently with the decode (Hopper); 0 for
    all. keys_below: `hopper_prefill_launch.keys_below` of rows of prompts, None if that is not known.
    whole: do not split the keys of decodes (`launch.are_whole`). together: prompts are in the launch of the decodes
    (`launch.run_together`). singles: whether there may be requests that a decode's tile holds beside prompts.
    key, value: [T, K, D] to be written at slots [T] as by `kv_write.write_kv` before anything is read, to caches without a
    scale per token: each token at its position (or -1) in a page of no other request, where `launch.writes_rows` allows it; not
    in a traced graph.
    """
    num_reqs, (tokens, heads, size) = query_start_loc.shape[0] - 1, query.shape
    # the driver refuses a grid of no programs
    if num_reqs < 1 or tokens == 0 or max_query_len == 0:
        return
    name = arch()
    if output_scale is not None:
        # The kernel stores e4m3 codes as bytes: not every architecture has the type.
        output = output.view(torch.uint8)
    if slots is not None:
        assert key is not None and value is not None
        # slices of one projection are read where they are
        key, value = (x if x.stride()[1:] == (size, 1) else x.contiguous() for x in (key, value))
    if key_cache.dtype == torch.float8_e4m3fn and not converts_e4m3(name):
        # read as bytes and converted by the kernel (`converts_e4m3`)
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    arrays = (
        output, lse, query_start_loc, sinks, v_scale, output_scale, query, key_cache, value_cache, seq_lens, block_table,
        slopes, tree, spans, prefix, is_causal, k_scale, key, value, slots,
    )  # fmt: skip
    pattern = None if sparse is None else tuple(sparse)
    rules = (scale, soft_cap, left, right, tree_right, chunk_size, span_window, invariant, pattern)
    of = (output.stride(), query.stride(), key_cache.stride(), value_cache.stride())
    strides, same, wide = strides_of(*of, max(key_cache.shape[0], value_cache.shape[0]), block_table is not None)
    # strides of new rows, whose heads are contiguous by now
    strides += (0, 0) if key is None or value is None else (key.stride(0), value.stride(0))
    shape, group, stored = (heads, size, *key_cache.shape[1:]), heads // key_cache.shape[-2], key_cache.itemsize
    serves, tuned = False, _UNTUNED
    if name == "sm_90" and max_query_len > 1 and hopper.is_on("hopper_prefill"):
        # keys in a row [S, K, D] have no pages: 128 stands for a size that the kernel takes
        page = shape[2] if len(shape) == 5 else 128
        serves = _hopper_prefill().serves(query, key_cache, value_cache, group, page, scale < 0)
    # no measured launch for these: its tiles would depend on which batch was timed, and so would a request's bits
    if TUNED and not invariant:
        tuned = tuple([TUNED.get((step, name, group, size, query.itemsize, stored)) for step in ("decode", "prefill")])
    scales = (None if k_scale is None else k_scale.stride(), None if v_scale is None else v_scale.stride())
    together = together and not invariant and packs_rows(name, query.itemsize)
    # More tokens than any decode's tile holds are one kind: 16 by the rules, 256 rows in a measured tile. A record for every
    # length of the longest prompt would never be found again.
    queries = min(max_query_len, TOGETHER if together else (256 if TUNED else 16) + 1)
    flags, signature = (same, wide, serves, together), signature_of(arrays, strides)
    launches = _launches(name, signature, shape, scales, rules, queries, flags, tuned)
    prompts = prefill_programs, keys_below, singles
    assert slots is None or writes_rows(name, group, max_query_len, query.itemsize, together)
    launches(arrays, strides, (k_factor, v_factor), (num_reqs, max_query_len, max_seq_len), whole, prompts)
