"""Attention of one row per request over keys that are in no cache, where they are: one launch, with little work of the host.

A program computes the query heads of one kv head of one request over a part of its keys, with an online softmax in base 2
(Flash-Decoding). Several parts leave their states in scratch memory; the program that ends last, by a counter in memory, merges
them and resets the counter. All requests have the same number of parts, so the host plans with two divisions; a request's keys
may be a run of them (`first`, `number`), which the device reads.

Masked keys are not loaded, and their scores are replaced by -inf. Weights in float16 are raised by 2**15, as in
`paged_attention`.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import library

from attn.torch.kernels.launch import Launch, arch, decode_launch, multiprocessors, power_of_two
from attn.torch.kernels.paged_attention import LOG2E, _tanh
from attn.torch.kernels.plan import UNBOUNDED
from attn.torch.kernels.runs import Runs

_MOST = 64  #: parts of a request


@triton.jit(
    do_not_specialize=("window", "keys", "parts", "m_b"),
    do_not_specialize_on_alignment=("sinks", "first", "number", "mask", "scratch", "counters"),
)
def _decode(  # type: ignore[no-untyped-def]
    output, scratch, counters, query, key, value, sinks, first, number, mask, factor, cap, window, keys, parts,
    q_b, q_h, k_b, k_t, k_h, v_b, v_t, v_h, m_b,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, SPLIT: tl.constexpr, NEGATE: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_RUNS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B * K, parts). scratch: float32 [B * K * parts * G * (D + 1)]: results, then their log-sum-exp in base 2."""
    LIFT: tl.constexpr = 15 if query.dtype.element_ty == tl.float16 else 0
    at, part = tl.program_id(0), tl.program_id(1)
    b, kv_head = (at // K).to(tl.int64), (at % K).to(tl.int64)
    end = keys
    if HAS_RUNS:
        begin = tl.load(first + b)
        end = tl.load(number + b)
    low = tl.maximum(end - window, 0)
    size = tl.cdiv(tl.cdiv(end - low, BLOCK_N), parts) * BLOCK_N
    start = low + part * size
    stop = tl.minimum(start + size, end)

    n, d, row = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    inside = (d < D)[None, :]
    q_at = query + b * q_b + (kv_head * G + row)[:, None] * q_h + d[None, :]
    q = tl.load(q_at, mask=(row < G)[:, None] & inside, other=0.0)
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
    by = 1.0 if HAS_CAP else factor
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for tile in tl.range(start, stop, BLOCK_N):
        j = tile + n
        seen = j < stop
        if HAS_MASK:
            seen = seen & (tl.load(mask + j, mask=seen, other=0) != 0)
        there = seen[:, None] & inside
        j = j.to(tl.int64)
        k = tl.load(k_at + j[:, None] * k_t + d[None, :], mask=there, other=0.0)
        v = tl.load(v_at + j[:, None] * v_t + d[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_CAP:
            s = cap * _tanh(s * factor)
        s = tl.where(seen[None, :], s, float("-inf"))
        above = tl.maximum(top, tl.max(s, 1))
        guard = tl.where(above == float("-inf"), 0.0, above)
        # subtracted before scaling, so that the largest score is exactly 0 and a single key's value is returned exactly
        p = tl.exp2((s - guard[:, None]) * by + LIFT) if LIFT else tl.exp2((s - guard[:, None]) * by)
        shrink = tl.exp2((top - guard) * by)
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = above
    log = tl.where(norm == 0, float("-inf"), top * by - LIFT + tl.log2(norm))
    result = tl.where(norm[:, None] == 0, 0.0, acc / norm[:, None])
    if not SPLIT:
        _store(output, sinks, result, log, at.to(tl.int64), kv_head, row, d, G, D, HAS_SINKS)
        return
    logs = scratch + tl.num_programs(0).to(tl.int64) * parts * G * D
    own = (at.to(tl.int64) * parts + part) * G + row
    tl.store(scratch + own[:, None] * D + d[None, :], result, mask=(row < G)[:, None] & inside)
    tl.store(logs + own, log, mask=row < G)
    tl.debug_barrier()  # every thread has stored before the counter says so
    if tl.atomic_add(counters + at, 1, sem="acq_rel") == parts - 1:
        tl.store(counters + at, 0)
        g, s = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
        top_g = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        norm_g = tl.zeros((BLOCK_G,), tl.float32)
        acc_g = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for step in tl.range(0, parts, BLOCK_S, num_stages=1):
            state = (at.to(tl.int64) * parts + step + s)[:, None] * G + g[None, :]
            mine = (step + s < parts)[:, None] & (g < G)[None, :]
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
):  # fmt: skip
    """Apply the sinks of a kv head's query heads, and store their results."""
    live = row < G
    if HAS_SINKS:
        sink = tl.load(sinks + kv_head * G + row, mask=live, other=0.0) * 1.4426950408889634
        share = 1.0 / (1.0 + tl.exp2(sink - log))
        result = tl.where((log == float("-inf"))[:, None], 0.0, result * share[:, None])
    at_d = output + (at * G + row)[:, None] * D + d[None, :]
    tl.store(at_d, result.to(output.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


_memories: dict[tuple[torch.device, int], "_Memory"] = {}
_UNEVEN = ~0x7FFFFFF0  #: the bits of an integer that is no multiple of 16 below 2**31


class Decoder:
    """The calls of layers of one shape, which have one row per request.

    device, dtype: of all arrays; heads, kv_heads, size: H, K and D; window: how many of a request's last keys its row sees.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        size: int,
        scale: float,
        soft_cap: float = 0.0,
        window: int | None = None,
    ) -> None:
        self.device, self.heads, self.kv_heads, self.size = device, heads, kv_heads, size
        self.factor, self.cap = abs(scale) * LOG2E, 0.0
        if soft_cap:
            self.factor, self.cap = abs(scale) / soft_cap, soft_cap * LOG2E
        self.window = UNBOUNDED if window is None else window
        self.processors = multiprocessors(device)
        name, group, itemsize, block_d = arch(), heads // kv_heads, dtype.itemsize, power_of_two(size)
        rule, block_g = decode_launch(name, group, size, itemsize, itemsize), power_of_two(group)
        if name == "sm_90" and itemsize == 2 and rule.block_m <= 32:  # measured (H100): two tiles on their way at any width
            rule = Launch(rule.block_m, 64, 4, 3)
        self.rule = rule
        self.constants = {
            "K": kv_heads, "G": group, "D": size, "BLOCK_M": rule.block_m, "BLOCK_N": rule.block_n, "BLOCK_D": block_d,
            "BLOCK_G": block_g, "BLOCK_S": max(1, 4096 // (block_g * block_d)),
            "PRECISION": "tf32x3" if itemsize == 4 and name.startswith("sm") else "ieee",
            "NEGATE": scale < 0, "HAS_CAP": soft_cap != 0,
        }  # fmt: skip
        #: By sinks, runs, mask and parts of a call, for addresses and strides that are multiples of 16: the compiled kernel and
        #: its last arguments, the constants.
        self.kept: list[tuple[Any, tuple[Any, ...]] | None] = [None] * 16

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        runs: Runs | None = None,
        mask: torch.Tensor | None = None,
        parts: int = 0,
    ) -> torch.Tensor:
        """Return [B, 1, H, D]. query: [B, H, 1, D]; key, value: [B, K, m, D], copied unless their last dimensions are dense;
        sinks: float32 [H]; runs: each request's keys among the m, None for all; mask: bool [B, m], True for keys that count
        among those, None for all; parts: of the keys, 0 for the rule. A request without keys is 0."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self(query, key, value, sinks, runs, mask, parts)
        batch, keys = query.shape[0], key.shape[2]
        output = query.new_empty(batch, 1, self.heads, self.size)
        count = batch * self.kv_heads
        if count == 0:
            return output
        parts = parts or _parts(count, -(-min(keys, self.window) // self.rule.block_n), self.processors)
        (q_b, q_h, _, q_d), (k_b, k_h, k_t, k_d), (v_b, v_h, v_t, v_d) = query.stride(), key.stride(), value.stride()
        m_b, m_k = (0, 1) if mask is None else mask.stride()
        if not q_d == k_d == v_d == m_k == 1:
            mask = None if mask is None else mask.clone(memory_format=torch.contiguous_format)
            return self(query.contiguous(), key.contiguous(), value.contiguous(), sinks, runs, mask, parts)
        numbers = self.factor, self.cap, self.window, keys, parts, q_b, q_h, k_b, k_t, k_h, v_b, v_t, v_h, m_b
        memory = _memory(self.device, batch * parts * self.heads * (self.size + 1), count) if parts > 1 else None
        variant = (sinks is not None) | (runs is not None) << 1 | (mask is not None) << 2 | (parts > 1) << 3
        kept = self.kept[variant]
        if kept is not None:
            q_at, k_at, v_at = query.data_ptr(), key.data_ptr(), value.data_ptr()
            if not ((q_at | k_at | v_at) & 15 or (q_b | q_h | k_b | k_t | k_h | v_b | v_t | v_h) & _UNEVEN):
                kernel, constants = kept
                where = (
                    output.data_ptr(),
                    0 if memory is None else memory.states_at,
                    0 if memory is None else memory.counters_at,
                    q_at,
                    k_at,
                    v_at,
                    0 if sinks is None else sinks.data_ptr(),
                    0 if runs is None else runs.first.data_ptr(),
                    0 if runs is None else runs.number.data_ptr(),
                    0 if mask is None else mask.data_ptr(),
                )
                kernel[count, parts, 1](*where, *numbers, *constants)
                return output
        states, counters = (output, output) if memory is None else (memory.states, memory.counters)
        lens = (None, None) if runs is None else (runs.first, runs.number)
        arrays = output, states, counters, query, key, value, *(output if x is None else x for x in (sinks, *lens, mask))
        flags = {"SPLIT": parts > 1, "HAS_SINKS": sinks is not None, "HAS_RUNS": runs is not None, "HAS_MASK": mask is not None}
        options: dict[str, Any] = {**self.constants, **flags}
        given = dict(zip(_decode.arg_names, (*arrays, *numbers), strict=False))
        rule = self.rule
        kernel = _decode[(count, parts)](**given, **options, **rule.options())
        even = not any(x.data_ptr() & 15 for x in (query, key, value)) and not any(x & _UNEVEN for x in numbers[5:-1])
        if even and isinstance(kernel, triton.compiler.CompiledKernel):  # else it is interpreted, or still being compiled
            self.kept[variant] = kernel, tuple(options[name] for name in _decode.arg_names[len(given) :])
        return output


#: The decoder of a shape, one for all layers; takes `Decoder`'s arguments.
decoder = functools.lru_cache(maxsize=256)(Decoder)


def row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a `Decoder`'s call, in a graph as one operator, which CUDA graphs may capture.

    mask: bool [B, m], the keys that count; those before the first and after the last are not read.
    """
    first = number = None
    if mask is not None:
        at = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
        first = torch.where(mask, at, mask.shape[1]).amin(1).to(torch.int32)
        number = (torch.where(mask, at + 1, 0).amax(1) - first).clamp(min=0).to(torch.int32)
    call = _operator if torch.compiler.is_compiling() else _row
    return call(  # type: ignore[no-any-return]
        query=query,
        key=key,
        value=value,
        sinks=sinks,
        mask=mask,
        first=first,
        number=number,
        scale=scale,
        soft_cap=soft_cap,
    )


def _row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    first: torch.Tensor | None,
    number: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    shape = query.shape[1], key.shape[1], query.shape[3]
    runs = None if first is None or number is None else Runs(first, number)
    found: torch.Tensor = decoder(query.device, query.dtype, *shape, scale, soft_cap)(query, key, value, sinks, runs, mask)
    return found


_operator = library.custom_op("attn::dense_row", _row, mutates_args=())


@_operator.register_fake
def _(query, *rest):  # type: ignore[no-untyped-def]
    batch, heads, _, size = query.shape
    return query.new_empty(batch, 1, heads, size)


@functools.lru_cache(maxsize=4096)
def _parts(programs: int, tiles: int, processors: int) -> int:
    """Return the parts of each request's keys: as many programs as multiprocessors, and no empty part."""
    parts = max(1, min(processors // programs, tiles, _MOST))
    return -(-tiles // -(-tiles // parts)) if tiles else 1


class _Memory:
    """Memory for states, and counters that are 0, with their addresses."""

    def __init__(self, device: torch.device, floats: int, counters: int) -> None:
        self.states = torch.empty(floats, dtype=torch.float32, device=device)
        self.counters = torch.zeros(counters, dtype=torch.int32, device=device)
        self.states_at, self.counters_at = self.states.data_ptr(), self.counters.data_ptr()
        self.sizes = floats, counters


def _memory(device: torch.device, floats: int, counters: int) -> _Memory:
    """Return memory that is kept per stream, whose launches run one after the other.

    A CUDA graph has its own, since it may be replayed on any stream.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if stream and torch.cuda.is_current_stream_capturing():
        return _Memory(device, floats, counters)
    kept = _memories.get((device, stream))
    if kept is None or kept.sizes[0] < floats or kept.sizes[1] < counters:
        sizes = max(1 << 20, power_of_two(floats)), max(1 << 12, power_of_two(counters))
        kept = _memories[device, stream] = _Memory(device, *sizes)
    return kept
