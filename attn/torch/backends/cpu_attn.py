"""CPU_ATTN: paged attention on a CPU, as fast as PyTorch's own primitives go; no compiler, no extension.

Decoding is bound by memory, so what counts is to read the cache once, in long runs, and to use what was read while it is
near: the cache is laid out by head within a block (HND), so that a block of one head is one run of bytes; a few
heads at a time are gathered by `index_select` into a buffer that the thread keeps; the heads of a group are folded into
query rows, so that one pass over the keys serves them all. The kernel beneath `F.scaled_dot_product_attention` is called
by its own name because it also returns the log-sum-exp, from which sinks follow. Prompts go through it whole, or a few
hundred rows at a time under a mask, so that little above the diagonal or outside the window is computed. What the kernel
cannot express is left to the written-out maths of `_ragged`. Measurements are in benchmarks/notes/cpu.md.
"""

import threading
from collections.abc import Iterable

import torch

from attn.capabilities import ATTN_TYPES, Capabilities
from attn.torch import kv_cache as caches
from attn.torch.backends import _cpu_kernel, _ragged
from attn.torch.backends._paged import HeadsFirstBackend, PagedCall
from attn.torch.backends._ragged import RaggedAttentionImpl, Rules, Work

_HOT = 4 << 20  #: bytes of keys and values a thread gathers before it attends them: a few times its private cache
_KEEP = 64 << 20  #: bytes of a buffer that a thread holds on to; a longer context allocates for the call
_ROWS = 256  #: query rows of a masked call: what lies above its diagonal is wasted
_FEW = 32  #: query rows up to which heads are folded: beyond, rows alone fill the kernel's tiles

#: One pair of gather buffers a thread, shared by all layers: it stays in the cache from layer to layer, where a buffer
#: a layer would be cold every time (and take a layer's memory each).
_buffers = threading.local()


class CPUAttentionBackend(HeadsFirstBackend):
    name = "CPU_ATTN"
    capabilities = Capabilities(
        framework="torch",
        platforms=("cpu",),
        dtypes=_ragged.DTYPES,
        kv_cache_dtypes=_ragged.KV_CACHE_DTYPES,
        attn_types=ATTN_TYPES,
        features=_ragged.FEATURES,
    )


class CPUAttentionImpl(RaggedAttentionImpl, backend=CPUAttentionBackend):
    def _attend_each(self, requests: Iterable[int], call: PagedCall, rules: Rules) -> None:
        if rules.plain() and call.meta.tree_mask is None and _in_runs(call.kv_cache[0]) and _in_runs(call.kv_cache[1]):
            requests = _decode(call, rules)
            if not requests:
                return
        super()._attend_each(requests, call, rules)

    def _gather(
        self, key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
        if not (_in_runs(keys) and _in_runs(values)):  # a caller's own layout
            return super()._gather(key_cache, value_cache, blocks)
        num_kv_heads = keys.shape[1]
        runs = _runs(blocks, num_kv_heads).flatten()
        return _Store(keys, 0).take(runs, num_kv_heads)[0], _Store(values, 1).take(runs, num_kv_heads)[0]

    def _attend_one(self, work: Work, rules: Rules) -> None:
        work = rules.drop_empty_rows(work)
        if work.query.shape[0] and not (rules.plain() and _prefill(work, rules)):
            _ragged.attend(work, rules)


def _runs(blocks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Where each head's part of some blocks [..., B] lies: [..., K, B], counted in such parts."""
    return blocks[..., None, :] * num_kv_heads + torch.arange(num_kv_heads, device=blocks.device)[:, None]


def _in_runs(pages: torch.Tensor) -> bool:
    """Whether pages [N, K, P, D] are runs of memory, one block of one head each, evenly apart: dense, or keys and values of
    a head and block side by side (vLLM's)."""
    (_, heads, _, width), (of_block, of_head, of_token, of_element) = pages.shape, pages.stride()
    return of_element == 1 and of_token == width and (heads == 1 or of_block == heads * of_head)


class _Store:
    """Keys or values as a table of runs, one block of one head each, from which runs are taken into a kept buffer."""

    def __init__(self, pages: torch.Tensor, which: int) -> None:
        """pages: [N, K, P, D], `_in_runs`; `which` of the thread's two buffers to use."""
        self.dtype, self.head_size, self.which = pages.dtype, pages.shape[3], which
        self.table = pages.view(-1, pages.shape[2] * pages.shape[3])
        if self.dtype.itemsize == 1:
            self.table = self.table.view(torch.uint8)
        self.shape = (-1, -1)

    def take(self, runs: torch.Tensor, heads: int) -> torch.Tensor:
        """The runs [heads * B] of some heads, one head's after another's: [1, heads, B * P, D], until the next call."""
        shape = (runs.shape[0], heads)
        if shape != self.shape:
            self.shape = shape
            self.buffer = _buffer(self.which, (runs.shape[0], self.table.shape[1]), self.table.dtype)
            self.view = self.buffer.view(self.dtype).view(1, heads, -1, self.head_size)
        torch.index_select(self.table, 0, runs, out=self.buffer)
        return self.view


def _buffer(which: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """This thread's buffer for keys (0) or values (1) in that shape, undefined."""
    length = shape[0] * shape[1] * dtype.itemsize
    kept: list[torch.Tensor | None] | None = getattr(_buffers, "kept", None)
    if kept is None:
        kept = _buffers.kept = [None, None]
    buffer = kept[which]
    if buffer is None or buffer.numel() < length:
        with torch.inference_mode(False):  # born inside, it could not be written outside
            buffer = torch.empty(length, dtype=torch.uint8, device="cpu")
        if length <= _KEEP:
            kept[which] = buffer
    return buffer[:length].view(dtype).view(shape)


def _decode(call: PagedCall, rules: Rules) -> list[int]:
    """Attend the requests of one query row, which sees every key in its window. Returns the requests still to do.

    A request's heads go through a few at a time, so that what is gathered is still in the core's cache when it is read;
    everything that does not depend on the request's length is done for all requests together.
    """
    query, kv_cache = call.query, call.kv_cache
    starts, lengths = (lens.tolist() for lens in call.meta.host_lens())
    mine = [r for r, total in enumerate(lengths) if total > 0 and starts[r + 1] - starts[r] == 1]
    rest = sorted(set(range(len(lengths))).difference(mine))
    if not mine:
        return rest
    _, num_kv_heads, block_size, head_size = kv_cache[0].shape
    kind = _kind(query, kv_cache)
    rows = torch.tensor([starts[r] for r in mine])
    queries = query.index_select(0, rows).to(kind).view(len(mine), num_kv_heads, -1, head_size)
    runs = _runs(call.meta.block_table, num_kv_heads)
    keys, values = _Store(kv_cache[0], 0), _Store(kv_cache[1], 1)
    threads = torch.get_num_threads()
    results, logs = [], []
    for i, r in enumerate(mine):
        total = lengths[r]
        low, _ = rules.span(total - 1, total - 1, total)
        first, last = low // block_size, -(-total // block_size)
        blocks = last - first
        held = slice(low - first * block_size, total - first * block_size)
        wanted = runs[r, :, first:last].flatten()
        step = threads * max(1, _HOT // (2 * blocks * block_size * head_size * kv_cache.itemsize))
        for head in range(0, num_kv_heads, step):
            heads = min(step, num_kv_heads - head)
            some = wanted[head * blocks : (head + heads) * blocks]
            key, value = (part.take(some, heads)[:, :, held].to(kind) for part in (keys, values))
            result, log = _cpu_kernel.attend(queries[i : i + 1, head : head + heads], key, value, rules.scale)
            results.append(result)
            logs.append(log)
    num_heads = query.shape[1]
    log, result = (parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in (logs, results))
    log, result = log.reshape(len(mine), num_heads), result.reshape(len(mine), num_heads, head_size)
    if not _cpu_kernel.all_exact(log):
        exact = _cpu_kernel.exact(log).all(1).tolist()
        rest = sorted(rest + [r for r, known in zip(mine, exact, strict=True) if not known])
    call.output.index_copy_(0, rows, _ragged.weigh(rules, result, log.T).to(call.output.dtype))
    if call.lse is not None:
        call.lse.index_copy_(1, rows, log.T.to(call.lse.dtype))
    return rest


def _prefill(work: Work, rules: Rules) -> bool:
    """Several rows, or keys that came with the call. False where that would not be exact:

    hidden keys are masked by adding and hidden values multiplied by 0, so that a NaN or an infinity there would reach
    every row of its tile.
    """
    n = work.query.shape[0]
    work = work.as_type(_kind(work.query, work.key))
    causal = rules.left is None and rules.right == 0
    if not rules.see_all(work):
        # what comes before the first row of a causal chunk is hidden from none
        masked = work.cut(0, n, work.position, work.end) if causal else work
        if not (_ragged.all_finite(masked.key) and _ragged.all_finite(masked.value)):
            return False
        if not (causal and work.position == work.first_key):
            return all([_rows(part, rules, _additive(part, rules, causal)) for part in rules.split(work, _ROWS)])
    return _rows(work, rules, None)


def _rows(work: Work, rules: Rules, mask: torch.Tensor | None) -> bool:
    """Rows under a mask [n, m] of 0 and -inf. Without one they see every key, or are a causal square."""
    n, num_heads, _ = work.query.shape
    num_kv_heads = work.key.shape[0]
    square = mask is None and not rules.see_all(work)
    folded = n <= _FEW and not square
    if folded:
        query = _ragged.fold(work.query, num_kv_heads)
        mask = None if mask is None else mask.repeat(num_heads // num_kv_heads, 1)
    else:
        query = work.query.transpose(0, 1)
    query = query[None].to(work.key.dtype)
    result, log = _cpu_kernel.attend(query, work.key[None], work.value[None], rules.scale, square, mask)
    log = log.reshape(-1, n)
    if not _cpu_kernel.finite(log):
        return False
    work.fill(_ragged.weigh(rules, _ragged.unfold(result[0], n) if folded else result[0].transpose(0, 1), log), log)
    _cpu_kernel.correct(work, rules, log)
    return True


def _additive(work: Work, rules: Rules, causal: bool) -> torch.Tensor | None:
    """The mask [n, m] of 0 and -inf, None where all is seen. The last rows of a sequence need a triangle only."""
    n, m = work.query.shape[0], work.key.shape[1]
    if causal:
        mask = torch.zeros(n, m, dtype=work.key.dtype, device=work.key.device)
        mask[:, m - n :] = torch.full((n, n), -torch.inf, dtype=mask.dtype, device=mask.device).triu_(1)
        return mask
    seen = rules.mask(work)
    return None if seen is None else torch.zeros_like(seen, dtype=work.key.dtype).masked_fill_(~seen, -torch.inf)


def _kind(query: torch.Tensor, stored: torch.Tensor) -> torch.dtype:
    """The dtype to compute in; codes are exact in every dtype of a query."""
    quantised = caches.is_quantised(stored.dtype)
    return query.dtype if quantised else torch.promote_types(query.dtype, stored.dtype)
