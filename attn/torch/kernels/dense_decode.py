"""Attention of one row per request over keys that are in no cache, where they are: one launch, with little work of the host.

A program computes the query heads of one kv head of one request over a split of its keys, with an online softmax in base 2
(Flash-Decoding). Several splits leave their states in scratch memory; the program that ends last, by a counter in memory,
merges them and resets the counter. All requests have the same number of splits, by a rule of the host. A request's keys may be
a run of them (`first`, `number`), which the device reads.

Values of masked keys are not loaded, and their scores are replaced by -inf. Weights in float16 are raised by 2**15, as in
`paged_attention`.
"""

import functools
from operator import itemgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import library

from attn.kernels.launch import LOG2E, UNBOUNDED, power_of_two, row_launch, row_splits
from attn.kernels.paged_attention import tanh
from attn.torch.kernels.direct import Prepared, Repeated, arch, memory_of_stream, multiprocessors, strides_that_count
from attn.torch.kernels.runs import Runs

_BY_KEY = itemgetter(0, 2, 1)  #: strides of [B, K, m, D] in the kernel's order: of requests, keys and heads


@triton.jit(
    do_not_specialize=("window", "keys", "splits", "m_b"),
    do_not_specialize_on_alignment=("sinks", "first", "number", "mask", "scratch", "counters"),
)
def _decode(  # type: ignore[no-untyped-def]
    output, scratch, counters, query, key, value, sinks, first, number, mask, factor, cap, window, keys, splits,
    q_b, q_h, k_b, k_t, k_h, v_b, v_t, v_h, m_b,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, SPLIT: tl.constexpr, NEGATE: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_RUNS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B * K, splits). scratch: float32 [B * K * splits * G * (D + 1)]: results, then their log-sum-exp in base 2."""
    LIFT: tl.constexpr = 15 if query.dtype.element_ty == tl.float16 else 0
    at, split = tl.program_id(0), tl.program_id(1)
    # 64 bits before they are multiplied by strides: a cache of a batch may have more than 2**31 elements.
    b, kv_head = (at // K).to(tl.int64), (at % K).to(tl.int64)
    end = keys
    if HAS_RUNS:
        # Positions below count from the run's first key, so that the window and the splits are those of the run; `begin` only
        # shifts addresses.
        begin = tl.load(first + b)
        end = tl.load(number + b)
    # The row is the last of its request, so causality hides nothing, and a window leaves the last `window` keys.
    low = tl.maximum(end - window, 0)
    # Whole tiles for each split. The host chose `splits` for the longest run it could be; a shorter one leaves the last splits
    # empty (start >= stop), whose states, 0 and -inf, count nothing in the merge.
    size = tl.cdiv(tl.cdiv(end - low, BLOCK_N), splits) * BLOCK_N
    start = low + split * size
    stop = tl.minimum(start + size, end)

    n, d, row = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    inside = (d < D)[None, :]
    q_at = query + b * q_b + (kv_head * G + row)[:, None] * q_h + d[None, :]
    q = tl.load(q_at, mask=(row < G)[:, None] & inside, other=0.0)
    # A maximum of unscaled scores is that of the scaled ones only for a positive scale: `factor` is its magnitude, the query
    # has its sign.
    if NEGATE:
        q = (0.0 - q.to(tl.float32)).to(q.dtype)
    k_at = key + b * k_b + kv_head * k_h
    v_at = value + b * v_b + kv_head * v_h
    if HAS_RUNS:
        k_at += begin.to(tl.int64) * k_t
        v_at += begin.to(tl.int64) * v_t
    if HAS_MASK:
        mask += b * m_b
        if HAS_RUNS:
            mask += begin
    # Scores times `by` are in base 2: capped ones are already, because the cap is passed in base 2.
    by = 1.0 if HAS_CAP else factor
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for tile in tl.range(start, stop, BLOCK_N):
        j = tile + n
        seen = j < stop
        # masked keys are loaded too, so that their load does not wait for that of the mask
        k = tl.load(k_at + j.to(tl.int64)[:, None] * k_t + d[None, :], mask=seen[:, None] & inside, other=0.0)
        if HAS_MASK:
            # a maximum of one element each: Triton lays out the operands of products by the narrowest load that they depend on
            # without a reduction, and does not read them by `ldmatrix` if that has 8 bits
            in_bounds = tl.load(mask + j[:, None], mask=seen[:, None], other=0).to(tl.int32)
            seen = seen & (tl.max(in_bounds, 1) != 0)
        v = tl.load(v_at + j.to(tl.int64)[:, None] * v_t + d[None, :], mask=seen[:, None] & inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_CAP:
            s = cap * tanh(s * factor)
        s = tl.where(seen[None, :], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        # A row that has seen no key yet subtracts 0: -inf minus -inf would be NaN.
        guard = tl.where(m_new == float("-inf"), 0.0, m_new)
        # subtracted before scaling, so that the largest score is exactly 0 and a single key's value is returned exactly
        p = tl.exp2((s - guard[:, None]) * by + LIFT) if LIFT else tl.exp2((s - guard[:, None]) * by)
        alpha = tl.exp2((m_i - guard) * by)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    # The lift is a factor of sums and results alike: it cancels between these, and only the logarithm has to be corrected.
    log = tl.where(l_i == 0, float("-inf"), m_i * by - LIFT + tl.log2(l_i))
    result = tl.where(l_i[:, None] == 0, 0.0, acc / l_i[:, None])
    if not SPLIT:
        _store(output, sinks, result, log, at.to(tl.int64), kv_head, row, d, G, D, HAS_SINKS)
    else:
        # States are in the order [B * K, splits, G], so that the program that merges reads one run of memory.
        logs = scratch + tl.num_programs(0).to(tl.int64) * splits * G * D
        out_row = (at.to(tl.int64) * splits + split) * G + row
        tl.store(scratch + out_row[:, None] * D + d[None, :], result, mask=(row < G)[:, None] & inside)
        tl.store(logs + out_row, log, mask=row < G)
        tl.debug_barrier()  # every thread has stored before the counter says so
        # Release: the stores above are visible where this count is. Acquire: the program that counts last sees those of all
        # others, if it reads past its L1 cache, which may hold older lines (`.cg` below).
        if tl.atomic_add(counters + at, 1, sem="acq_rel") == splits - 1:
            # No other program of this launch counts here any more, and the next launch on the stream has to find 0
            # (`memory_of_stream`).
            tl.store(counters + at, 0)
            g, s = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
            top_g = tl.full((BLOCK_G,), float("-inf"), tl.float32)
            norm_g = tl.zeros((BLOCK_G,), tl.float32)
            acc_g = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
            for step in tl.range(0, splits, BLOCK_S, num_stages=1):
                state = (at.to(tl.int64) * splits + step + s)[:, None] * G + g[None, :]
                mine = (step + s < splits)[:, None] & (g < G)[None, :]
                log_s = tl.load(logs + state, mask=mine, other=float("-inf"), cache_modifier=".cg")
                values = tl.load(
                    scratch + state[:, :, None] * D + d[None, None, :],
                    mask=mine[:, :, None] & (d < D)[None, None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                above_g = tl.maximum(top_g, tl.max(log_s, 0))
                guard_g = tl.where(above_g == float("-inf"), 0.0, above_g)
                weight = tl.exp2(log_s - guard_g[None, :])
                shrink_g = tl.exp2(top_g - guard_g)
                norm_g = norm_g * shrink_g + tl.sum(weight, 0)
                acc_g = acc_g * shrink_g[:, None] + tl.sum(values * weight[:, :, None], 0)
                top_g = above_g
            log_g = tl.where(norm_g == 0, float("-inf"), top_g + tl.log2(norm_g))
            result_g = tl.where(norm_g[:, None] == 0, 0.0, acc_g / norm_g[:, None])
            _store(output, sinks, result_g, log_g, at.to(tl.int64), kv_head, g, d, G, D, HAS_SINKS)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    output, sinks, result, log, at, kv_head, row, d, G: tl.constexpr, D: tl.constexpr, HAS_SINKS: tl.constexpr
):
    """Apply the sinks of a kv head's query heads, and store their results."""
    # BLOCK_M and BLOCK_G are powers of two, of which rows from G on are no query head.
    live = row < G
    if HAS_SINKS:
        sink = tl.load(sinks + kv_head * G + row, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        # sigmoid(lse - sink), docs/semantics.md §7, both in base 2; applied once, to the merged state.
        weight = 1.0 / (1.0 + tl.exp2(sink - log))
        result = tl.where((log == float("-inf"))[:, None], 0.0, result * weight[:, None])
    at_d = output + (at * G + row)[:, None] * D + d[None, :]
    tl.store(at_d, result.to(output.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


class Decoder:
    """The calls of layers of one shape, which have one row per request.

    device, dtype: of all arrays; shape: H, K and D; window: how many of a request's last keys its row sees.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        scale: float,
        soft_cap: float = 0.0,
        window: int | None = None,
    ) -> None:
        heads, kv_heads, size = shape
        self.device, self.heads, self.kv_heads, self.size = device, heads, kv_heads, size
        # Base 2, of which GPUs have an exponential in hardware. With a cap, tanh takes natural units, and its result is put in
        # base 2.
        self.factor, self.cap = abs(scale) * LOG2E, 0.0
        if soft_cap:
            self.factor, self.cap = abs(scale) / soft_cap, soft_cap * LOG2E
        self.window = UNBOUNDED if window is None else window
        rule, self.slots = row_launch(arch(), heads // kv_heads, size, dtype.itemsize, multiprocessors(device))
        block_d, block_g = power_of_two(size), power_of_two(heads // kv_heads)
        self.rule, self.block_n, self.width = rule, rule.block_n, block_g * block_d
        self.constants: Any = {"K": kv_heads, "G": heads // kv_heads, "D": size, "NEGATE": scale < 0, "HAS_CAP": soft_cap != 0}
        self.constants |= {"BLOCK_M": rule.block_m, "BLOCK_N": rule.block_n, "BLOCK_D": block_d, "BLOCK_G": block_g}
        # The states that one step of the merge holds in registers: 4,096 elements, or one state if that is larger.
        self.constants["BLOCK_S"] = max(1, 4096 // (block_g * block_d))
        # three tf32 products give float32's accuracy on NVIDIA's tensor cores; other targets have no such mode
        self.constants["PRECISION"] = "tf32x3" if dtype.itemsize == 4 and arch().startswith("sm") else "ieee"
        #: By sinks, runs, mask and splits of a call, by strides that Triton specializes, and by the sinks' dtype.
        self.kernels: dict[tuple[int, tuple[int, ...] | None, torch.dtype | None], Prepared] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        runs: Runs | None = None,
        mask: torch.Tensor | None = None,
        splits: int = 0,
    ) -> torch.Tensor:
        """Return [B, 1, H, D]. query: [B, H, 1, D]; key, value: [B, K, m, D], copied unless their last dimensions are dense;
        sinks: [H], of any float dtype; runs: each request's keys among the m, None for all; mask: bool [B, m], True for keys
        that count among those, None for all; splits: of the keys, 0 for the rule. A request without keys is 0."""
        device = self.device
        # Triton launches on the current device, wherever the tensors are.
        if query.is_cuda and torch._C._cuda_getDevice() != device.index:
            with torch.cuda.device(device):
                return self(query, key, value, sinks, runs, mask, splits)
        output = query.new_empty(key.shape[0], 1, self.heads, self.size)
        if key.shape[0] == 0:
            return output
        m_b, m_k = (0, 1) if mask is None else mask.stride()
        if not query.stride(-1) == key.stride(-1) == value.stride(-1) == m_k == 1:
            # `contiguous` would return a mask of one key unchanged, whatever its stride: a dimension of size 1 counts as dense
            mask = None if mask is None else mask.clone(memory_format=torch.contiguous_format)
            return self(query.contiguous(), key.contiguous(), value.contiguous(), sinks, runs, mask, splits)
        first, number = (None, None) if runs is None else (runs.first, runs.number)
        # bits in the order of the flags in `_prepared`; those of sinks and splits are added in `_planned`
        present = (runs is not None) << 1 | (mask is not None) << 2
        kernel, grid, memory, numbers = self._planned(query, key, value, sinks, present, splits)
        kernel(grid[0], (output, *memory, query, key, value, sinks, first, number, mask), *numbers, m_b, columns=grid[1])
        return output

    def _planned(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        present: int = 0,
        splits: int = 0,
    ) -> tuple[Prepared, tuple[int, int], tuple[torch.Tensor | None, torch.Tensor | None], tuple[float, ...]]:
        """Return a call's kernel, grid, scratch memory, and numbers but the mask's. present: bits of runs and mask."""
        (batch, _, keys, _), count = key.shape, key.shape[0] * self.kv_heads
        # From the extents alone: the lengths of runs are on the device, and a captured graph is replayed with others.
        splits = splits or row_splits(count, -(-min(keys, self.window) // self.block_n), self.slots, self.width)
        memory: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if splits > 1:
            memory = memory_of_stream(self.device, batch * splits * self.heads * (self.size + 1), count)
        strides = *query.stride()[:2], *_BY_KEY(key.stride()), *_BY_KEY(value.stride())
        present |= (sinks is not None) | (splits > 1) << 3
        key_of = present, strides_that_count(strides), None if sinks is None else sinks.dtype
        kernel = self.kernels.get(key_of) or self._prepared(key_of)
        return kernel, (count, splits), memory, (self.factor, self.cap, self.window, keys, splits, *strides)

    def bound(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None) -> Repeated:
        """Return this call, without runs, for arrays of these shapes, strides and dtypes: see `Prepared.again`."""
        batch = key.shape[0]
        if not batch or not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
            return self
        kernel, grid, memory, numbers = self._planned(query, key, value, sinks)
        # In the order of the kernel's parameters. Addresses are 0 for absent arrays, and here for those that each
        # call fills in.
        arguments = 0, *[0 if x is None else x.data_ptr() for x in memory], *[0] * 7, *numbers, 0
        shape, changing = (batch, 1, self.heads, self.size), [(0, 0), (3, 1), (4, 2), (5, 3)]
        if sinks is not None:
            changing.append((6, 4))
        return kernel.again(self, query.device, shape, grid, arguments, changing, memory)

    def _prepared(self, key_of: tuple[int, tuple[int, ...] | None, torch.dtype | None]) -> Prepared:
        flags = {name: bool(key_of[0] >> i & 1) for i, name in enumerate(("HAS_SINKS", "HAS_RUNS", "HAS_MASK", "SPLIT"))}
        rule = self.rule
        kernel = self.kernels[key_of] = Prepared(_decode, **self.constants, **flags, **rule.options())
        return kernel


#: The decoder of a shape, one for all layers; takes `Decoder`'s arguments.
decoder = functools.lru_cache(maxsize=256)(Decoder)


def run_of(mask: torch.Tensor) -> list[torch.Tensor]:
    """Return where the keys that count begin, and how many there are up to the last, int32 [B] each. mask: bool [B, m]."""
    at = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
    # a row without a key that counts has first = m and last = 0, so the number would be negative: it is clamped to 0
    first = torch.where(mask, at, mask.shape[1]).amin(1).to(torch.int32)
    return [first, (torch.where(mask, at + 1, 0).amax(1) - first).clamp(min=0).to(torch.int32)]


def row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    run: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute a `Decoder`'s call, in a graph as one operator, which CUDA graphs may capture.

    mask: bool [B, m], the keys that count; those before the first and after the last are not read. run: `run_of` it, if known.
    """
    if run is None:
        run = [] if mask is None else run_of(mask)
    call = _operator if torch.compiler.is_compiling() else _row
    return call(query, key, value, scale, soft_cap, sinks, mask, run)  # type: ignore[no-any-return]


def _row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    run: list[torch.Tensor],
) -> torch.Tensor:
    attend = decoder(query.device, query.dtype, (query.shape[1], key.shape[1], query.shape[3]), scale, soft_cap)
    out: torch.Tensor = attend(query, key, value, sinks, Runs(*run) if run else None, mask)
    return out


_operator = library.custom_op("attn::dense_row", _row, mutates_args=())


@_operator.register_fake
def _(query, *arguments):  # type: ignore[no-untyped-def]
    batch, heads, _, size = query.shape
    return query.new_empty(batch, 1, heads, size)
