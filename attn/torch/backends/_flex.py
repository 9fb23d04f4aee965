"""FlexAttention over a paged cache without a gather: which pages each block of rows visits, and the mods that mask them.

The batch is one sequence of query rows, in which every request starts a new block of `block` rows. The cache is one long
sequence of keys, page after page. A block's list of pages (`FlexPlan`) comes directly from the block table, so only a request's
own pages are read; pages that every row of the block sees completely are listed separately and not masked. A mod receives a
key's index in the cache, not its position: `places`, one row per request, maps a page's number to its index in that request.
So requests may share a page, even at different positions. A page that a block table lists more than once is at the last of
these indices (entries left of a window may list a page that has since been reallocated).

`places` takes 4 bytes per request and page of the cache, and indices into it are 64-bit. Everything is computed on the
device, without waiting for it, once per batch and group of layers with equal masks.
"""

import functools
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attn.torch.metadata import PagedAttentionMetadata
from attn.visibility import LayerMask, Visibility


class MaskKey(NamedTuple):
    """The rules that decide which keys are seen; layers with equal masks share a plan.

    layer: the constants. tree, mixed, ranges: whether the batch has a tree, requests of both causalities, and spans or
    prefixes.
    """

    layer: LayerMask
    tree: bool = False
    mixed: bool = False
    ranges: bool = False

    @classmethod
    def of(cls, mask: Visibility) -> "MaskKey":
        batch, layer = mask.batch, mask.layer
        ranges = batch.has_ranges
        return cls(
            # Only spans are cut by it, so layers that differ in it share a plan of batches without any.
            layer._replace(span_window=ranges and bool(layer.span_window)),
            batch.tree is not None,
            batch.is_causal is not None,
            ranges,
        )


class FlexRules(NamedTuple):
    """The constants of a program, apart from the shapes that it is compiled for.

    alibi: whether scores have -slope * |p - j| added.
    """

    masks: MaskKey
    scale: float
    soft_cap: float | None
    alibi: bool
    lse: bool
    block: int
    page: int


class ProgramShape(NamedTuple):
    """The shapes that a program is compiled for.

    device: the device type. flash: whether FlashAttention's kernel is requested.
    """

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    device: str
    flash: bool = False


@dataclass(frozen=True)
class FlexPlan:
    """A batch laid out in blocks of rows. Tensors are int64 unless stated otherwise, since they are used as indices.

    source: [blocks * block], the token of each row; back: [T], the row of each token.
    rows: [blocks, block, 5 to 9], per row: the start of its request in `places`, its position, its request's length, the
    position of the first new token, the start of its row of a tree mask in `places` (-1: none); with `MaskKey.mixed` or
    `MaskKey.ranges` also whether its request is causal, its span (from, to; to < from: none), and its prefix.
    lists: int32; how many pages a block visits [blocks] and which [blocks, columns]: first the masked pages, then those that
    all of its rows see completely.
    places: [R * N + 1] int32; element r * N + n is the index of page n within request r, or -1 if the page is not in it. The
    tree masks follow, because a separate tensor would be one size too many for the compiler's CPU kernels.
    unseeing: [T] bool, tokens that see no key.
    """

    source: torch.Tensor
    back: torch.Tensor
    rows: torch.Tensor
    lists: tuple[torch.Tensor, ...]
    places: torch.Tensor
    unseeing: torch.Tensor

    def split(self, step: int) -> Iterator[tuple[slice, torch.Tensor, tuple[torch.Tensor, ...]]]:
        """Yield (blocks, their rows, their lists) for at most `step` blocks at a time."""
        for begin in range(0, len(self.rows), step):
            blocks = slice(begin, begin + step)
            yield blocks, self.rows[blocks], tuple(x[blocks] for x in self.lists)


def block_rows(tokens: int, requests: int) -> int:
    """Return the rows per block: more if requests are long enough to fill them, since a block has rows of one request."""
    # blocks of 64 are at least half full from 32 rows a request on; rows of padding are computed like any others
    return 64 if tokens >= 32 * requests else 16


def extent(tokens: int, requests: int, block: int) -> int:
    """Return an upper bound on the blocks of a batch of these tokens and requests, without reading from the device.

    At least 128 rows, because for fewer another kernel would be compiled.
    """
    return max(128 // block, -(-(tokens + requests * (block - 1)) // block))


def lay_out(
    meta: PagedAttentionMetadata, table: torch.Tensor, lens: torch.Tensor, num_pages: int, page: int, block: int, masks: MaskKey
) -> FlexPlan:
    """Return the plan of a batch over a cache of `num_pages` pages. table: [R, B], the pages of each request; lens: [R]."""
    device, starts = table.device, meta.query_start_loc
    new = starts[1:] - starts[:-1]
    blocks = -(-new // block)
    ends = blocks.cumsum(0)
    # Blocks of all requests in a line, by an upper bound: how many there are is known on the device only.
    number = torch.arange(extent(meta.num_actual_tokens, meta.num_reqs, block), device=device)
    # `right`: a request without rows has no block, and is passed over. Blocks past the last one are of the last request, not
    # live.
    owner = torch.searchsorted(ends, number, right=True).clamp(max=meta.num_reqs - 1)
    # [blocks, block], counted within the request; from its own number of rows on they are padding
    token = (number - (ends - blocks)[owner])[:, None] * block + torch.arange(block, device=device)
    live = token < new[owner][:, None]
    context, total = (lens - new)[owner], lens[owner]
    position = token + context[:, None]

    places, width = _places(table, lens, num_pages, page), 0
    # A node of a tree is found at trees_from + (request * width + row) * width + column.
    trees_from = places.shape[0]
    if masks.tree:
        width = meta.mask.tree.shape[1]
        places = torch.cat((places, meta.mask.tree.flatten().to(torch.int32)))
    # longer requests have no tree and are causal (docs/semantics.md §11)
    branches = (new <= width)[owner]
    facts: tuple[torch.Tensor, ...] = (
        (owner * num_pages)[:, None],
        position,
        # a length of 0: padding sees no key
        torch.where(live, total[:, None], 0),
        context[:, None],
        torch.where(branches[:, None] & live, trees_from + (owner[:, None] * width + token) * width, -1),
    )
    visible, ordered = Visibility(masks.layer), torch.full_like(total, masks.layer.causal, dtype=torch.bool)
    if meta.mask.is_causal is not None:
        ordered = meta.mask.is_causal[owner]
    spans = prefix = None
    if masks.mixed or masks.ranges:
        span_from, span_to, prefix = _ranges(meta, masks, owner, token, position, live)
        facts = (*facts, ordered[:, None], span_from, span_to, prefix[:, None])
        seeing = span_from <= span_to
        # the least and the largest key of the spans of a block's rows; beyond the cache, and -1, where it has none
        spans = (torch.where(seeing, span_from, num_pages * page).amin(1), torch.where(seeing, span_to, -1).amax(1))
    rows = torch.stack([x.expand_as(token) for x in facts], 2).to(torch.int64)

    # the block's last position, padding excluded
    first, last = position[:, 0], torch.minimum(position[:, -1], total - 1)
    # Keys that some row of the block sees, and below, those that all of them see: pages within the latter need no mask.
    begin, reach = visible.bounds(first, last, total, spans, prefix, ordered & ~branches, torch)
    common, shared = visible.common(first, last, total, ordered & ~branches, torch)
    # nodes of a tree see each other by its mask; the context all of them see
    shared = torch.where(branches, torch.minimum(shared, context), shared)
    low = begin // page
    # a block without rows visits no page
    high = torch.where(live[:, 0], torch.maximum(-(-reach // page), low), low)
    # Pages low..whole and until..high are masked, whole..until are seen completely.
    whole = torch.minimum(torch.maximum(-(-common // page), low), high)
    until = torch.minimum(torch.maximum(shared // page, whole), high)

    back = torch.arange(meta.num_actual_tokens, device=device)
    request = torch.searchsorted(starts[1:], back, right=True, out_int32=True)
    back = (ends - blocks)[request] * block + back - starts[request]
    # padding reads the batch's first token, whose result is dropped
    source = torch.where(live, starts[owner][:, None] + token, 0).flatten()
    index, length = rows.flatten(0, 1)[back, 1:3].T
    unseeing = length == 0
    right, bounds = visible.window[1], rows.flatten(0, 1)[back]
    if right is not None:
        unseeing |= index + right < 0
    if masks.mixed:
        unseeing |= (bounds[:, 5] == 1) & (index < 0)
    if masks.ranges:
        unseeing &= (bounds[:, 6] > bounds[:, 7]) & (bounds[:, 8] == 0)
    columns = _columns(table, num_pages)
    # both masked runs in one list
    masked = _named(table, owner, whole - low + high - until, low, whole - low, until, columns)
    full = _named(table, owner, until - whole, whole, until - whole, until, columns)
    return FlexPlan(source, back, rows, (*masked, *full), places, unseeing)


def _ranges(
    meta: PagedAttentionMetadata,
    masks: MaskKey,
    owner: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    live: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the spans of the rows of each block, (from, to) [blocks, block], to < from for none, and its prefix [blocks]."""
    none = torch.full_like(token, -1)
    span_from, span_to, prefix = none + 1, none, torch.zeros_like(owner)
    spans, (left, right) = meta.mask.spans, masks.layer.window
    if meta.mask.prefix is not None:
        prefix = meta.mask.prefix.to(torch.int64)[owner]
    if spans is not None:
        index = (meta.query_start_loc[owner][:, None] + token).clamp(max=spans.shape[0] - 1)
        start, end = spans.to(torch.int64)[index].unbind(2)
        used = live & (start >= 0)
        if masks.layer.span_window and left is not None:
            start = torch.maximum(start, position - left)
        if masks.layer.span_window and right:  # a bound of 0 is causality, which does not cut spans
            end = torch.minimum(end, position + right)
        span_from, span_to = torch.where(used, start.clamp(min=0), span_from), torch.where(used, end, span_to)
    return span_from, span_to, prefix


def _columns(table: torch.Tensor, num_pages: int) -> int:
    """Return the width of a page list. CPU kernels require each list to be as long as the cache has pages."""
    return max(2, table.shape[1], num_pages if table.device.type == "cpu" else 0)


def _named(
    table: torch.Tensor,
    owner: torch.Tensor,
    count: torch.Tensor,
    start: torch.Tensor,
    run: torch.Tensor,
    then: torch.Tensor,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (count, pages [blocks, columns]): `run` entries of the table from `start` on, then those from `then` on."""
    column = torch.arange(columns, device=table.device)
    # column c is entry start + c of the first run, or then + c - run of the second
    entry = torch.where(column < run[:, None], start[:, None] + column, (then - run)[:, None] + column)
    pages = table[owner[:, None], entry.clamp(0, table.shape[1] - 1)]
    return count.to(torch.int32), torch.where(column < count[:, None], pages, 0).to(torch.int32)


def _places(table: torch.Tensor, lens: torch.Tensor, num_pages: int, page: int) -> torch.Tensor:
    """Return the first part of `FlexPlan.places`. For a page listed twice, the last place is kept."""
    requests, columns = table.shape
    index = torch.arange(columns, device=table.device, dtype=torch.int32).expand(requests, columns)
    used = index < -(-lens[:, None] // page)
    first = torch.arange(requests, device=table.device)[:, None] * num_pages
    # Table entries past a request's tokens are undefined: they go to an extra last element that is never read.
    target = torch.where(used, first + table, requests * num_pages)
    places = torch.full((requests * num_pages + 1,), -1, dtype=torch.int32, device=table.device)
    # the maximum, because the order in which a scatter writes to one element is not defined
    return places.scatter_reduce_(0, target.flatten(), index.flatten(), "amax")


def _mods(
    rules: FlexRules, facts: torch.Tensor, places: torch.Tensor, slopes: torch.Tensor
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Return (mask_mod, score_mod or None) for a plan's rows, `facts` [blocks * block, 5 to 9]."""
    masks, page, (left, right) = rules.masks, rules.page, rules.masks.layer.window

    def key_of(q: Any, kv: Any) -> tuple[Any, Any]:
        # -1 for a page of another request: then j is negative, and `inside` is false
        index = places[facts[q, 0] + kv // page]
        return index, index * page + kv % page

    def by_order(q: Any, j: Any, inside: Any) -> Any:
        """Whether causality, or a tree, and the window allow a key."""
        # positive for later keys
        distance = j - facts[q, 1]
        seen = inside
        if left is not None:
            seen = seen & (distance >= -left)
        if right is not None:
            seen = seen & (distance <= right)
        if masks.mixed:
            return seen & ((distance <= 0) | (facts[q, 5] == 0))
        if not masks.layer.causal:
            return seen
        if not masks.tree:
            return seen & (distance <= 0)
        new, branch = j - facts[q, 3], facts[q, 4]
        among = (new >= 0) & inside & (branch >= 0)
        # index 0 where there is no node: a mod is computed for every key, and must read within the array
        related = places[torch.where(among, branch + new, 0)] == 1
        return seen & torch.where(branch >= 0, (new < 0) | (among & related), distance <= 0)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        index, j = key_of(q, kv)
        inside = (index >= 0) & (j < facts[q, 2])
        seen = by_order(q, j, inside)
        if masks.ranges:
            seen = seen | (inside & (((j >= facts[q, 6]) & (j <= facts[q, 7])) | (j < facts[q, 8])))
        if (chunk := masks.layer.chunk_size) is not None:
            seen = seen & (j >= facts[q, 1] // chunk * chunk)
        return seen

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        if rules.soft_cap is not None:
            score = rules.soft_cap * torch.tanh(score / rules.soft_cap)
        if rules.alibi:
            distance = (key_of(q, kv)[1] - facts[q, 1]).to(torch.float32)
            score = score - slopes[h] * distance.abs()
        return score

    return mask_mod, score_mod if rules.soft_cap is not None or rules.alibi else None


@functools.cache
def program(rules: FlexRules, shape: ProgramShape, backend: str) -> Callable[..., Any]:
    """Return the function for one set of rules and shape, which `backend` compiles at its first call."""
    options = kernel_options(rules, shape)

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: torch.Tensor,
        lists: tuple[torch.Tensor, ...],
        places: torch.Tensor,
        slopes: torch.Tensor,
    ) -> Any:
        """Attend. query: [blocks, block, H, D]; key, value: [N, P, K, D]; slopes: [H] float32; the rest as in `FlexPlan`."""
        from torch.nn.attention import flex_attention as flex

        for x in (query, *lists):  # keep the number of symbolic sizes small: CPU kernels confuse the eleventh with another
            torch._check(x.shape[0] == rows.shape[0])
        torch._check(lists[1].shape[1] == lists[3].shape[1])
        torch._check(key.shape[0] == value.shape[0])
        facts = rows.flatten(0, 1)
        query = query.flatten(0, 1).transpose(0, 1)[None]
        key, value = (x.flatten(0, 1).transpose(0, 1)[None] for x in (key, value))

        mask_mod, score_mod = _mods(rules, facts, places, slopes)
        masked, masked_pages, whole, whole_pages = (x[None, None] for x in lists)
        block_mask = flex.BlockMask.from_kv_blocks(
            masked, masked_pages, whole, whole_pages, (rules.block, rules.page), mask_mod, (query.shape[2], key.shape[2]), False
        )
        attend: Any = flex.flex_attention  # its overloads would require a separate call for each value of return_aux
        return attend(
            query,
            key,
            value,
            score_mod,
            block_mask,
            rules.scale,
            query.shape[1] != key.shape[1],
            kernel_options=options,
            return_aux=flex.AuxRequest(lse=True) if rules.lse else None,
        )

    # The compiler limits the programs per code object, and treats a number that changes between calls of one name as a
    # variable. So each set of rules has its own code object and name.
    # the same in every process, unlike `hash` of strings
    name = f"flex_{zlib.crc32(repr((rules, shape, backend)).encode()):08x}"
    renamed = types.FunctionType(run.__code__.replace(co_name=name), run.__globals__, name, None, run.__closure__)
    return torch.compile(renamed, backend=backend, fullgraph=True)


def vary(dim: int, *tensors: torch.Tensor) -> None:
    """Mark a dimension of a program's arguments as dynamic.

    All other dimensions stay constant; `dynamic=True` would make every number in the rules a variable as well.
    """
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def kernel_options(rules: FlexRules, shape: ProgramShape) -> dict[str, Any] | None:
    """Return the compiler's kernel options: which kernel to use, and its tiles."""
    if shape.device == "cpu":
        return None
    # FlashAttention's kernel has tiles of its own
    return {"BACKEND": "FLASH"} if shape.flash else dict(tiles(rules, shape.head_size * shape.dtype.itemsize))


_SHARED_MEMORY = 96 << 10  #: limit in bytes for a tile of queries and two of keys and values: the shared memory of an Ada GPU


def tiles(rules: FlexRules, row: int) -> dict[str, int]:
    """Return the kernel's tiles on a GPU for heads of `row` bytes: they divide a block and a page, and fit shared memory."""
    rows = rules.block if row <= 512 else min(rules.block, 32)
    # two stages of keys and of values, beside the queries
    room = (_SHARED_MEMORY - rows * row) // (4 * row)
    keys = next(n for n in (64, 32, 16) if rules.page % n == 0 and (n <= room or n == 16))
    return {"BLOCK_M": rows, "BLOCK_N": keys, "num_stages": 2, "num_warps": 4}
