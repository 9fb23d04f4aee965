"""MLA metadata for torch: which requests decode absorbed, which prefill expanded, and how their context is chunked.

A request of few new tokens is a *decode*: its queries are absorbed and attend latents in the cache. A request of many is a
*prefill*, which is cheaper with keys and values expanded to heads. Between the two it depends on the context, whose expansion
costs the same for any number of rows (`is_short`). Decodes and prefills may be in any order in the batch. If
all decodes come first (as a scheduler that reorders requests sends them), both groups are slices; otherwise rows are gathered
by index. Lengths are needed on the host only for batches with a query longer than the threshold.
"""

import functools
import itertools
from dataclasses import dataclass, field, replace
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch

from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.mla.common import dcp_row_limits
from attn.backends.mla.prefill.abstract import MLAContextChunk, MLAPrefillMetadata
from attn.torch.metadata import (
    LAUNCHED_BY,
    Kept,
    PagedAttentionMetadata,
    PagedAttentionMetadataBuilder,
    exportable,
    put_together,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from attn.backends.metadata import IntArray

Rows = slice | torch.Tensor


@dataclass
class MLADecodeMetadata:
    """The decode requests of a batch, packed.

    rows: their rows in the batch, a slice or int64 [Td]. query_start_loc: [Rd + 1], seq_lens: [Rd], block_table: [Rd, B],
    int32 on the device; `*_cpu` are NumPy copies on the host, None if the caller passed none.
    limits: [Td] int32 or None: how many of its request's cached keys each row sees, if not seq_len - q_len + i + 1 (decode
    context parallelism, where seq_lens and the cache are this rank's share).
    query_len: the new tokens per request, None if requests differ or the lengths are not on the host.
    plans: plans that a backend keeps for the following layers, by backend-specific keys.
    """

    rows: Rows
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    query_start_loc_cpu: "IntArray | None" = None
    seq_lens_cpu: "IntArray | None" = None
    limits: torch.Tensor | None = None
    plans: dict[Any, Any] = field(default_factory=dict)
    _microbatches: "dict[int, tuple[MLADecodeMetadata, ...]]" = field(default_factory=dict)

    @functools.cached_property
    def uneven(self) -> bool:
        """Whether one request is much longer than the others, or the lengths are not on the host: keys are split by a plan."""
        lens = self.seq_lens_cpu
        return lens is None or (len(lens) > 1 and bool(lens.max() > 1.5 * lens.mean()))

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors on the device, the rows excepted."""
        return self.query_start_loc, self.seq_lens, self.block_table, self.limits

    def host_lens(self) -> "tuple[IntArray, IntArray]":
        """Return (query_start_loc, seq_lens) on the host; without host copies this waits for the device."""
        if self.query_start_loc_cpu is None or self.seq_lens_cpu is None:
            self.query_start_loc_cpu, self.seq_lens_cpu = self.query_start_loc.cpu().numpy(), self.seq_lens.cpu().numpy()
        return self.query_start_loc_cpu, self.seq_lens_cpu

    def microbatches(self, most: int) -> "tuple[MLADecodeMetadata, ...]":
        """Return the requests with tokens in batches of at most `most` tokens, kept for the following layers.

        A request of more is a batch alone. Waits for the device without host copies of the lengths.
        """
        # By the size, since layers of different widths may share the batch.
        if most not in self._microbatches:
            bounds = _packed(np.diff(self.host_lens()[0]), most)
            self._microbatches[most] = tuple(self._microbatch(first, last) for first, last in bounds)
        return self._microbatches[most]

    def _microbatch(self, first: int, last: int) -> "MLADecodeMetadata":
        """Return the requests first..last, last excluded, as a batch."""
        starts, lens = self.host_lens()
        tokens, device, chosen = slice(int(starts[first]), int(starts[last])), self.seq_lens.device, slice(first, last)
        # a batch of its own begins at row 0
        start = starts[first : last + 1] - starts[first]
        return replace(
            self,
            rows=_rows_of(self.rows, tokens, device),
            # only the starts are new numbers; lengths and tables are views of the batch's
            query_start_loc=_put(start, device),
            seq_lens=self.seq_lens[chosen],
            block_table=self.block_table[chosen],
            num_reqs=last - first,
            num_tokens=tokens.stop - tokens.start,
            max_query_len=int(np.diff(start).max()),
            max_seq_len=int(lens[chosen].max()),
            query_start_loc_cpu=start,
            seq_lens_cpu=lens[chosen],
            limits=None if self.limits is None else self.limits[tokens],
            plans={},
            _microbatches={},
        )

    @functools.cached_property
    def query_len(self) -> int | None:
        if self.query_start_loc_cpu is None:
            # all that bounds tell: one token each, if there are as many tokens as requests
            return 1 if self.max_query_len == 1 and self.num_tokens == self.num_reqs else None
        lens = self.query_start_loc_cpu[1:] - self.query_start_loc_cpu[:-1]
        return int(lens[0]) if len(lens) and bool((lens == lens[0]).all()) else None


@dataclass(frozen=True)
class ContextChunk:
    """The context that is expanded and attended at once, of consecutive requests.

    rows: these requests' rows, of the batch's num_tokens. meta: the requests, with it as their only chunk. places: (pages
    [m], offsets [m]) int64 on the device, where the chunk's keys are in the cache.
    """

    rows: slice
    meta: MLAPrefillMetadata
    places: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ContextPlan:
    """new_tokens: the batch for its new tokens, without a context. chunks: the context. once: no row is in two chunks."""

    new_tokens: MLAPrefillMetadata
    chunks: tuple[ContextChunk, ...]
    once: bool


@dataclass
class MLAPrefillBatch:
    """The prefill requests of a batch, packed.

    rows: their rows in the batch that see a key, num_tokens of them; empty: int64, their rows before the start of the
    sequence (q_len > seq_len), which see no key, or None; block_table: [Rp, B] on the device; context_lens: [Rp] on the host.
    Requests with a context come first, so that a chunk of the plan has no row without one.
    """

    rows: Rows
    empty: torch.Tensor | None
    block_table: torch.Tensor
    query_lens: "IntArray"
    context_lens: "IntArray"
    num_tokens: int
    block_size: int
    plans: dict[int, ContextPlan] = field(default_factory=dict)
    _new_slots: tuple[torch.Tensor, torch.Tensor] | None = None

    @functools.cached_property
    def one_by_one(self) -> "tuple[MLAPrefillBatch, ...]":
        """The requests with rows that see a key, each as a batch of its own."""
        starts = _starts(self.query_lens)
        batches = []
        # requests without rows would be batches without any
        for r in np.flatnonzero(self.query_lens).tolist():
            tokens, one = slice(int(starts[r]), int(starts[r + 1])), slice(r, r + 1)
            batch = replace(
                self,
                rows=_rows_of(self.rows, tokens, self.block_table.device),
                empty=None,
                block_table=self.block_table[one],
                query_lens=self.query_lens[one],
                context_lens=self.context_lens[one],
                num_tokens=int(self.query_lens[r]),
                plans={},
                _new_slots=None,
            )
            batches.append(batch)
        return tuple(batches)

    def plan(self, workspace: int) -> ContextPlan:
        """Return chunks of at most `workspace` tokens of context, cached for the following layers."""
        if workspace not in self.plans:
            self.plans[workspace] = self._plan(workspace)
        return self.plans[workspace]

    def own_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of the new tokens' rows in the cache, cached for the following layers."""
        if self._new_slots is None:
            # from a token's index among all new ones to its position in its request
            shift = self.context_lens - _starts(self.query_lens)[:-1]
            counts, device_shift = put_together((self.query_lens, shift), self.block_table.device)
            self._new_slots = self._places(counts, device_shift, int(self.query_lens.sum()))
        return self._new_slots

    def _places(self, counts: torch.Tensor, shift: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (pages [m], offsets [m]) int64 on the device of `counts` [Rp] tokens of each request, one after another, m =
        `total` in all. A token's position in its request is its index plus `shift` [Rp]."""
        device = counts.device
        # `output_size`, or torch would wait for the device to know it
        owner = torch.repeat_interleave(torch.arange(len(counts), device=device), counts, output_size=total)
        position = torch.arange(total, device=device) + shift[owner]
        return self.block_table[owner, position // self.block_size].long(), position % self.block_size

    def _plan(self, workspace: int) -> ContextPlan:
        # Both are packed: all new tokens in one line, all tokens of contexts in another, request after request.
        queries, context = _starts(self.query_lens), _starts(self.context_lens)
        spans = context_spans(self.context_lens, workspace)
        starts = [queries[span.first : span.last + 1] - queries[span.first] for span in spans]
        # A request's context may begin before the span or end after it: only what is within counts.
        keys = [np.clip(context[span.first : span.last + 1], span.begin, span.end) - span.begin for span in spans]
        # One copy sends all that the device needs; it computes the slots of tokens, of which there may be millions.
        arrays = (queries, self.context_lens, -context[:-1], *starts, *keys)
        new, counts, shift, *cumulative = put_together(arrays, self.block_table.device)
        new_tokens = _prefills(new, queries)
        if not spans:
            return ContextPlan(new_tokens, (), True)
        # once for all chunks, which are slices of them
        pages, offsets = self._places(counts, shift, int(context[-1]))
        chunks = []
        for i, span in enumerate(spans):
            chunk = MLAContextChunk(cumulative[len(spans) + i], keys[i], int(keys[i][-1]), int(np.diff(keys[i]).max()))
            rows, tokens = slice(int(queries[span.first]), int(queries[span.last])), slice(span.begin, span.end)
            chunks.append(ContextChunk(rows, _prefills(cumulative[i], starts[i], chunk), (pages[tokens], offsets[tokens])))
        # a context that is longer than the workspace is in several chunks
        once = all(chunk.rows.stop <= after.rows.start for chunk, after in itertools.pairwise(chunks))
        return ContextPlan(new_tokens, tuple(chunks), once)


def _prefills(query_start_loc: torch.Tensor, mirror: "IntArray", *chunks: MLAContextChunk) -> MLAPrefillMetadata:
    """Return the metadata of requests whose rows begin at `query_start_loc` [n + 1]; `mirror` is its copy on the host."""
    return MLAPrefillMetadata(query_start_loc, mirror, len(mirror) - 1, int(np.diff(mirror).max(initial=0)), chunks)


class Span(NamedTuple):
    """The tokens [begin, end) of all requests' contexts in a line, which are of requests first..last, last excluded."""

    first: int
    last: int
    begin: int
    end: int


def context_spans(context_lens: "IntArray", workspace: int) -> list[Span]:
    """Divide the contexts of requests, `context_lens` [R] tokens each, into spans of at most `workspace` tokens.

    A context is divided at multiples of `workspace`: one that fits is in a single span, and its bounds do not depend on the
    other requests. Neighbouring pieces share a span if they fit, so any two spans in a row exceed `workspace`.
    """
    bounds, end = [0], 0
    for length in context_lens.tolist():
        # pieces of one request end where its own multiples of `workspace` do, whatever comes before it
        for low in range(0, length, workspace):
            piece = min(workspace, length - low)
            # a new span begins with this piece
            if end + piece > bounds[-1] + workspace:
                bounds.append(end)
            end += piece
    if not end:
        return []
    begins, ends, starts = bounds, [*bounds[1:], end], _starts(context_lens)
    # "right": of requests without a context that begin at the same token, the last one has it
    first, last = np.searchsorted(starts, begins, "right") - 1, np.searchsorted(starts, ends)
    return [Span(*span) for span in zip(first.tolist(), last.tolist(), begins, ends, strict=True)]


@exportable
@dataclass
class MLACommonMetadata(PagedAttentionMetadata):
    """One batch on the device, in three groups, each None if it has no request: decodes; short prompts over long contexts,
    which are absorbed as decodes are; prefills."""

    decode: MLADecodeMetadata | None = None
    short: MLADecodeMetadata | None = None
    prefill: MLAPrefillBatch | None = None

    #: The longest query of a decode, and `short_rows`, by which `divide` has divided the batch; None if it did not.
    thresholds: tuple[int | None, int] | None = None

    _launched_by: ClassVar = attrgetter(*LAUNCHED_BY, "decode", "short", "prefill")

    def divide(self, threshold: int | None, short_rows: int) -> None:
        """Fill `decode`, `short` and `prefill` from the other fields."""
        self.decode, self.short, self.prefill, self.thresholds = None, None, None, (threshold, short_rows)
        # by the bound alone, so that neither lengths nor a wait for them are needed
        if threshold is None or self.max_query_len <= threshold:
            self.decode = _decode_all(self)
        else:
            _split(self, threshold, short_rows)

    def kept(self) -> Kept:
        before, kept = self.__dict__.get("_kept"), super().kept()
        if before is None or before is kept or self.thresholds is None:
            return kept
        # A field was assigned: the parts are of those before.
        if not all(map(is_, before.fields[: len(LAUNCHED_BY)], kept.fields)):
            self.divide(*self.thresholds)
        return super().kept()


class MLACommonMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builder that splits the batch.

    decode_threshold: the longest query of a decode; None: every request is a decode.
    """

    metadata_cls = MLACommonMetadata
    decode_threshold: int | None = 16

    def short_rows(self) -> int:
        """Return the rows of a prompt that cost as much absorbed as expanded over a much longer context (`is_short`); 0: every
        prompt is expanded, since the decode kernel was not measured with as many rows."""
        return 0

    def extend(self, metadata: MLACommonMetadata, batch: CommonAttentionMetadata, fast_build: bool) -> None:
        # Context parallelism first: every rank has some of each request's keys, whatever the number of new tokens.
        if batch.dcp_local_seq_lens is not None:
            self._share_context(metadata, batch, self._put(batch.dcp_local_seq_lens, torch.int32))
        else:
            metadata.divide(self.decode_threshold, self.short_rows())
            metadata.kept()  # remembers the fields of the division

    @staticmethod
    def _share_context(batch: MLACommonMetadata, common: CommonAttentionMetadata, local: torch.Tensor) -> None:
        """Make every request a decode, for decode context parallelism.

        The keys of a request are strided over ranks, so each row needs its own number of local keys.
        """
        # on the host, which has the lengths of the whole requests
        _, limits = dcp_row_limits(common)
        decode = batch.decode = _decode_all(batch)
        decode.limits = _put(limits, local.device)
        # The mirror was of whole requests: a host that needs this rank's lengths fetches them.
        decode.seq_lens, decode.seq_lens_cpu = local, None


def _decode_all(batch: MLACommonMetadata) -> MLADecodeMetadata:
    """Return the whole batch as decodes, without copying or waiting for the device."""
    starts = batch.query_start_loc_cpu
    # a graph's batch may count rows of padding
    tokens = batch.num_actual_tokens if starts is None else int(starts[-1])
    assert batch.block_size is not None
    return MLADecodeMetadata(
        rows=slice(0, tokens),
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        num_reqs=batch.num_reqs,
        num_tokens=tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_size=batch.block_size,
        query_start_loc_cpu=starts,
        seq_lens_cpu=batch.seq_lens_cpu,
    )


def is_short(rows: "IntArray", context: "IntArray", most: int) -> "npt.NDArray[np.bool_]":
    """Return which prompts of `rows` tokens over `context` earlier ones cost less absorbed, [R] bool.

    Absorbed, a pair of a row and a key costs more operations, by a; expanded, a key of the context costs e first. A prompt of n
    rows over c keys has n c + n n / 2 pairs: it is short if a (n c + n n / 2) <= e c. most: e / a, the rows at which both cost
    the same over a long context. (a = 2 H (2 L + Dr - Dn - Dr - Dv), e = 2 H L (Dn + Dv): 171 rows with DeepSeek's sizes.)
    """
    # doubled, so in integers; without a context (c = 0) no prompt is short
    return rows * (2 * context + rows) <= 2 * most * context


def _split(batch: MLACommonMetadata, threshold: int, short_rows: int) -> None:
    """Fill `decode`, `short` and `prefill` of a batch with queries longer than `threshold`."""
    starts, lens = batch.host_lens()
    q_lens = starts[1:] - starts[:-1]
    device, block_size = batch.seq_lens.device, batch.block_size
    assert block_size is not None
    # fresh: a request without context
    is_decode, fresh = q_lens <= threshold, lens <= q_lens
    # int64: rows times keys of one long prompt exceed 32 bits
    short = ~is_decode & is_short(q_lens.astype(np.int64), (lens - q_lens).clip(min=0).astype(np.int64), short_rows)
    batch.decode = _decodes(batch, np.flatnonzero(is_decode))
    batch.short = _decodes(batch, np.flatnonzero(short))
    long = ~is_decode & ~short
    # those with a context first: see `MLAPrefillBatch`
    prefills = np.concatenate([np.flatnonzero(long & ~fresh), np.flatnonzero(long & fresh)])
    # neighbours up to the end of the batch: rows and tables are then slices of it
    whole = bool((np.diff(prefills) == 1).all()) and not (len(prefills) and prefills[-1] < len(q_lens) - 1)
    if not len(prefills):
        return
    first, rows, total = starts[prefills], q_lens[prefills], lens[prefills]
    skipped = np.maximum(rows - total, 0)  # rows before the start of the sequence
    live = rows - skipped
    num_tokens, num_skipped = int(live.sum()), int(skipped.sum())
    # skipped rows lie between those that are attended
    sliced = whole and not num_skipped
    batch.prefill = MLAPrefillBatch(
        rows=slice(int(first[0]), int(first[0]) + num_tokens) if sliced else _put(_runs(first + skipped, live), device),
        empty=_put(_runs(first, skipped), device) if num_skipped else None,
        block_table=batch.block_table[slice(prefills[0], None) if whole else _put(prefills, device)],
        query_lens=live,
        context_lens=total - live,
        num_tokens=num_tokens,
        block_size=block_size,
    )


def _decodes(batch: MLACommonMetadata, requests: "IntArray") -> MLADecodeMetadata | None:
    """Return some requests of the batch as decodes, or None if they have no token."""
    starts, lens = batch.host_lens()
    q_lens, device = (starts[1:] - starts[:-1])[requests], batch.seq_lens.device
    packed = _starts(q_lens)
    if not packed[-1]:
        return None
    ordered = requests[-1] == len(requests) - 1  # the first of the batch
    chosen = slice(0, len(requests)) if ordered else _put(requests, device)
    assert batch.block_size is not None
    return MLADecodeMetadata(
        rows=slice(0, int(packed[-1])) if ordered else _put(_runs(starts[requests], q_lens), device),
        # the batch's own starts, if nothing comes before these requests
        query_start_loc=batch.query_start_loc[: len(requests) + 1] if ordered else _put(packed, device),
        seq_lens=batch.seq_lens[chosen],
        block_table=batch.block_table[chosen],
        num_reqs=len(requests),
        num_tokens=int(packed[-1]),
        max_query_len=int(q_lens.max()),
        max_seq_len=int(lens[requests].max()),
        block_size=batch.block_size,
        query_start_loc_cpu=packed,
        seq_lens_cpu=lens[requests],
    )


def _packed(sizes: "IntArray", most: int) -> list[tuple[int, int]]:
    """Pack neighbours of `sizes` into runs (first, last + 1) of at most `most` in all; no run begins or ends with a 0."""
    runs: list[tuple[int, int]] = []
    held = 0
    for i, size in enumerate(sizes.tolist()):
        if not size:
            continue
        if runs and held + size <= most:
            runs[-1], held = (runs[-1][0], i + 1), held + size
        else:
            runs.append((i, i + 1))
            held = size
    return runs


def _rows_of(rows: Rows, tokens: slice, device: torch.device) -> torch.Tensor:
    """Return some of `rows` as indices, which gather and scatter: a slice's alignment would depend on its place."""
    if isinstance(rows, slice):
        return torch.arange(rows.start + tokens.start, rows.start + tokens.stop, device=device)
    return rows[tokens]


def _starts(lens: "IntArray") -> "IntArray":
    """Return the exclusive cumulative sum of lengths, and their total: [n + 1] int32."""
    starts = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=starts[1:])
    return starts


def _runs(first: "IntArray", count: "IntArray") -> "IntArray":
    """Return the integers of each run `first[i]`, `first[i] + 1`, ..., of `count[i]`, one run after another, as int64."""
    # what a run's integers are more than their index in the result
    shift = np.repeat(first - (np.cumsum(count) - count), count)
    return np.arange(len(shift), dtype=np.int64) + shift


def _put(array: "IntArray", device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=device.type != "cpu")
