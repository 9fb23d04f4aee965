"""CPU_ATTN: paged attention on a CPU with PyTorch's own operators; it needs no compiler and no extension.

Decode is memory bound, so the cache is read once, in long runs, and used while it is in the processor's cache. The layout is
HND, so that a block of one head is contiguous. `index_select` gathers a few heads at a time into a buffer that the thread
keeps. The heads of a group are folded into query rows, so that one pass over the keys serves them all. The operator that
implements `F.scaled_dot_product_attention` is called directly because it also returns the log-sum-exp, which sinks need. It
computes a prompt in one call, or a few hundred rows at a time under a mask, so that little above the diagonal or outside the
window is computed. `_ragged.attend` computes what this operator does not support.
"""

import threading
from collections.abc import Iterable

import torch

from attn.backends.paged import PagedCall
from attn.capabilities import ATTN_TYPES, Capabilities
from attn.torch import kv_cache as caches
from attn.torch.backends import _cpu_kernel, _ragged
from attn.torch.backends._paged import HeadsFirstBackend
from attn.torch.backends._ragged import RaggedAttentionImpl, RequestParams, Work

_HOT = 4 << 20  #: bytes of keys and values that a thread gathers before attending: a few times its private cache
_KEEP = 64 << 20  #: largest buffer, in bytes, that a thread keeps; a longer context allocates one for the call
_ROWS = 256  #: query rows of a masked call, which also computes the scores above its diagonal
_FEW = 32  #: most query rows for which heads are folded; more rows fill the kernel's tiles by themselves

#: One pair of gather buffers per thread, shared by all layers: they stay in the processor's cache from layer to layer, while
#: one buffer per layer would be cold every time, and take more memory.
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
    def _attend_each(self, requests: Iterable[int], call: PagedCall, rules: RequestParams) -> None:
        meta = call.meta
        if rules.plain() and meta.mask.is_plain and _in_runs(call.kv_cache[0]) and _in_runs(call.kv_cache[1]):
            requests = _decode(call, rules, one_by_one=self.batch_invariant)
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

    def _attend_one(self, work: Work, rules: RequestParams) -> None:
        # torch's kernel returns no log-sum-exp of -inf
        work = rules.drop_empty_rows(work)
        if work.query.shape[0] and not (rules.plain() and _prefill(work, rules)):
            _ragged.attend(work, rules)


def _runs(blocks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return the index of each head's keys in blocks [..., B], in units of a head's: [..., K, B]."""
    return blocks[..., None, :] * num_kv_heads + torch.arange(num_kv_heads, device=blocks.device)[:, None]


def _in_runs(pages: torch.Tensor) -> bool:
    """Whether each block and head of pages [N, K, P, D] is contiguous, at a constant stride.

    True for dense pages, and for vLLM's layout, where keys and values of a block and head are adjacent.
    """
    (_, heads, _, width), (of_block, of_head, of_token, of_element) = pages.shape, pages.stride()
    return of_element == 1 and of_token == width and (heads == 1 or of_block == heads * of_head)


class _Store:
    """Keys or values as a table of runs, one per block and head, which are gathered into the thread's buffer."""

    def __init__(self, pages: torch.Tensor, index: int) -> None:
        """pages: [N, K, P, D], with `_in_runs(pages)`. index: of the thread's buffers, 0 or 1."""
        self.dtype, self.head_size, self.index = pages.dtype, pages.shape[3], index
        # a row is the page of one head, which `index_select` copies as one run
        self.table = pages.view(-1, pages.shape[2] * pages.shape[3])
        if self.dtype.itemsize == 1:
            # codes of fp8, which it does not copy in every release
            self.table = self.table.view(torch.uint8)
        self.shape = (-1, -1)

    def take(self, runs: torch.Tensor, heads: int) -> torch.Tensor:
        """Gather runs [heads * B], head by head, to [1, heads, B * P, D]; the next call overwrites the result."""
        shape = (runs.shape[0], heads)
        # requests of one length have one view, made once
        if shape != self.shape:
            self.shape = shape
            self.buffer = _buffer(self.index, (runs.shape[0], self.table.shape[1]), self.table.dtype)
            self.view = self.buffer.view(self.dtype).view(1, heads, -1, self.head_size)
        torch.index_select(self.table, 0, runs, out=self.buffer)
        return self.view


def _buffer(index: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return this thread's buffer for keys (0) or values (1) in the given shape, uninitialised."""
    length = shape[0] * shape[1] * dtype.itemsize
    buffers: list[torch.Tensor | None] | None = getattr(_buffers, "tensors", None)
    if buffers is None:
        buffers = _buffers.tensors = [None, None]
    buffer = buffers[index]
    if buffer is None or buffer.numel() < length:
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            # the device is named, because `torch.set_default_device` may say another
            buffer = torch.empty(length, dtype=torch.uint8, device="cpu")
        if length <= _KEEP:
            buffers[index] = buffer
    return buffer[:length].view(dtype).view(shape)


def _decode(call: PagedCall, rules: RequestParams, one_by_one: bool) -> list[int]:
    """Attend the requests of one query row, which sees every key in its window. Returns the other requests.

    Everything that does not depend on a request's length is done for all requests together, unless `one_by_one`: torch
    computes the end of an array in another way than the rest, so a request's bits would depend on its index in the batch.
    """
    starts, lengths = (lens.tolist() for lens in call.meta.host_lens())
    # a request without keys is left to the definition
    decodes = [r for r, total in enumerate(lengths) if total > 0 and starts[r + 1] - starts[r] == 1]
    others = set(range(len(lengths))).difference(decodes)
    if decodes:
        runs = _runs(call.meta.block_table, call.kv_cache.shape[2])
        for batch in [[r] for r in decodes] if one_by_one else [decodes]:
            others.update(_decode_batch(call, rules, batch, starts, lengths, runs))
    return sorted(others)


def _decode_batch(
    call: PagedCall, rules: RequestParams, decodes: list[int], starts: list[int], lengths: list[int], runs: torch.Tensor
) -> list[int]:
    """Attend these decodes together. runs: `_runs` of all requests. Returns the requests whose result would not be exact.

    A few heads of a request are processed at a time, so that gathered keys are still in the core's cache when they are read.
    """
    query, kv_cache = call.query, call.kv_cache
    _, num_kv_heads, block_size, head_size = kv_cache[0].shape
    element = _compute_dtype(query, kv_cache)
    rows = torch.tensor([starts[r] for r in decodes], device=query.device)
    # the heads of a group become rows of one product: their keys are read once
    queries = query.index_select(0, rows).to(element).view(len(decodes), num_kv_heads, -1, head_size)
    keys, values = _Store(kv_cache[0], 0), _Store(kv_cache[1], 1)
    threads = torch.get_num_threads()
    results, logs = [], []
    for i, r in enumerate(decodes):
        total = lengths[r]
        low, _ = rules.reach(total - 1, total - 1, total)
        first, last = low // block_size, -(-total // block_size)
        blocks = last - first
        tokens = slice(low - first * block_size, total - first * block_size)
        pages = runs[r, :, first:last].flatten()
        # 2: keys and values; each thread attends some heads, whose keys are then in its core's cache
        step = threads * max(1, _HOT // (2 * blocks * block_size * head_size * kv_cache.itemsize))
        for head in range(0, num_kv_heads, step):
            heads = min(step, num_kv_heads - head)
            page_runs = pages[head * blocks : (head + heads) * blocks]
            key, value = (cache.take(page_runs, heads)[:, :, tokens].to(element) for cache in (keys, values))
            result, log = _cpu_kernel.attend(queries[i : i + 1, head : head + heads], key, value, rules.scale)
            results.append(result)
            logs.append(log)
    num_heads = query.shape[1]
    log, result = (heads[0] if len(heads) == 1 else torch.cat(heads, 1) for heads in (logs, results))
    log, result = log.reshape(len(decodes), num_heads), result.reshape(len(decodes), num_heads, head_size)
    inexact = []
    if not _cpu_kernel.all_exact(log):
        exact = _cpu_kernel.exact(log).all(1).tolist()
        inexact = [r for r, known in zip(decodes, exact, strict=True) if not known]
    # also rows that are not exact: the caller attends their requests again
    call.output.index_copy_(0, rows, _ragged.weigh(rules, result, log.T).to(call.output.dtype))
    if call.lse is not None:
        call.lse.index_copy_(1, rows, log.T.to(call.lse.dtype))
    return inexact


def _prefill(work: Work, rules: RequestParams) -> bool:
    """Attend several rows, or keys that came with the call. Returns False if the result would not be exact.

    The kernel adds the mask to scores and multiplies masked values by 0, so that a NaN or an infinity in masked keys or
    values would reach every row of its tile.
    """
    n = work.query.shape[0]
    work = work.as_type(_compute_dtype(work.query, work.key))
    causal = rules.is_causal()
    if not rules.see_all(work):
        # every row of a causal chunk sees the keys before its first row
        masked = work.narrow(0, n, work.position, work.end) if causal else work
        if not (_ragged.all_finite(masked.key) and _ragged.all_finite(masked.value)):
            return False
        if not (causal and work.position == work.first_key):
            return all([_rows(tile, rules, _additive(tile, rules, causal)) for tile in rules.split(work, _ROWS)])
    return _rows(work, rules, None)


def _rows(work: Work, rules: RequestParams, mask: torch.Tensor | None) -> bool:
    """Attend rows under a mask [n, m] of 0 and -inf. With mask None, rows see every key, or form a causal square.

    Returns False if a score was +inf or NaN.
    """
    n, num_heads, _ = work.query.shape
    num_kv_heads = work.key.shape[0]
    square = mask is None and not rules.see_all(work)
    # a square's mask is the kernel's own, of rows of one head
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


def _additive(work: Work, rules: RequestParams, causal: bool) -> torch.Tensor | None:
    """Return the mask [n, m] of 0 and -inf, or None if rows see every key. A causal mask is a triangle at its right end."""
    n, m = work.query.shape[0], work.key.shape[1]
    if causal:
        mask = torch.zeros(n, m, dtype=work.key.dtype, device=work.key.device)
        mask[:, m - n :] = torch.full((n, n), -torch.inf, dtype=mask.dtype, device=mask.device).triu_(1)
        return mask
    seen = rules.seen(work)
    return None if seen is None else torch.zeros_like(seen, dtype=work.key.dtype).masked_fill_(~seen, -torch.inf)


def _compute_dtype(query: torch.Tensor, stored: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in; codes of a quantised cache are exact in every dtype of a query."""
    quantised = caches.is_quantised(stored.dtype)
    return query.dtype if quantised else torch.promote_types(query.dtype, stored.dtype)
