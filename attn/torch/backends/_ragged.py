"""Paged attention one request at a time, in plain torch operators; the base of TORCH_SDPA and CPU_ATTN.

For each request, the keys are gathered from its pages (from the first page that its window reaches), cut at its length,
and attended. `attend` implements the definition, in float32 (float64 for float64), for every feature and any device. An
implementation overrides `_attend_one` for the cases that it computes faster. The loop needs the lengths on the host:
metadata with host copies avoids a wait for the device.

Each operator sees one request only, so results do not depend on the rest of the batch if its inputs' alignment does not
either: a layer that requests `batch_invariant` copies a request's rows to memory of their own (`_rows_of`). Libraries may
choose instructions by the alignment of their operands.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attn.arguments import fold_sign
from attn.backends.abstract import AttentionLayer
from attn.backends.paged import PagedCall
from attn.capabilities import PAGED_FEATURES, Feature
from attn.dtypes import PER_TOKEN_HEAD
from attn.errors import MetadataError
from attn.torch import kv_cache as caches
from attn.torch.alignment import aligned
from attn.torch.backends._paged import PagedAttentionImpl, check_replays
from attn.visibility import BatchMask, LayerMask, Visibility

if TYPE_CHECKING:
    from attn.backends.metadata import IntArray

DTYPES = ("float32", "float16", "bfloat16", "float64")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8")
FEATURES = PAGED_FEATURES | {Feature.PER_HEAD_SCALES, Feature.NAN_SAFE, Feature.BATCH_INVARIANT}

_SCORES_AT_ONCE = 1 << 23  #: elements of a score matrix in memory at once, all heads together: 32 MiB in fp32


def all_finite(x: torch.Tensor) -> bool:
    """Whether x contains neither NaN nor infinity; waits for the device.

    Checks the minimum and maximum, which propagate NaN: `isfinite` is 40 times slower for bfloat16 on a CPU.
    """
    if x.numel() == 0:
        return True
    low, high = x.aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())


def fold(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Fold [n, H, D] to [K, G * n, D]: the heads of a group become rows, head by head."""
    n, num_heads, head_size = query.shape
    # query head h reads kv head h // G, so the heads of a group are neighbours
    by_group = query.view(n, num_kv_heads, num_heads // num_kv_heads, head_size)
    return by_group.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_size)


def unfold(result: torch.Tensor, n: int) -> torch.Tensor:
    """Invert `fold`: [K, G * n, D] to [n, H, D]."""
    num_kv_heads, rows, head_size = result.shape
    return result.view(num_kv_heads, rows // n, n, head_size).permute(2, 0, 1, 3).reshape(n, -1, head_size)


@dataclass(frozen=True)
class Work:
    """Query rows of one request, and keys that include every key they see.

    query: [n, H, D], row i at position `position` + i (negative if there are more queries than keys); key, value:
    [K, m, D], key j at position `first_key` + j, of any dtype and strides; output: [n, H, D] and lse: [H, n] (or None) are
    to be filled.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    position: int
    first_key: int
    output: torch.Tensor
    lse: torch.Tensor | None

    @property
    def last(self) -> int:
        """The last row's position."""
        return self.position + self.query.shape[0] - 1

    @property
    def end(self) -> int:
        """One past the last key."""
        return self.first_key + self.key.shape[1]

    def narrow(self, start: int, stop: int, low: int, high: int) -> "Work":
        """Return rows start..stop over keys low..high (counted from key 0 of the request)."""
        # views, so that filling the tile fills the whole
        keys = slice(low - self.first_key, high - self.first_key)
        return Work(
            self.query[start:stop],
            self.key[:, keys],
            self.value[:, keys],
            self.position + start,
            low,
            self.output[start:stop],
            None if self.lse is None else self.lse[:, start:stop],
        )

    def as_type(self, dtype: torch.dtype) -> "Work":
        """Return this work with keys and values in `dtype`."""
        return self if dtype == self.key.dtype else replace(self, key=self.key.to(dtype), value=self.value.to(dtype))

    def fill(self, result: torch.Tensor | float, log: torch.Tensor | float | None) -> None:
        """Write the result [n, H, D] and, if requested, the lse [H, n]."""
        self.output[...] = result
        if self.lse is not None:
            assert log is not None
            self.lse[...] = log

    def finite(self) -> bool:
        """Whether query, key and value contain neither NaN nor infinity; waits for the device."""
        return all_finite(self.query) and all_finite(self.key) and all_finite(self.value)


@dataclass(frozen=True)
class RequestParams:
    """The softmax rules of one request: from dot products to weights, and from weights to an output.

    mask: what the request's rows see, the tree on the device, other arrays on the host; its rows are at positions from
    `context` on. slopes, sinks: [H]; ALiBi is -slope * |p - j|.
    k_scale: [K, 1], or None if it is part of `scale`; v_scale: [K, 1], a float or None.
    """

    scale: float
    mask: Visibility = Visibility(LayerMask())
    context: int = 0
    soft_cap: float | None = None
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | float | None = None

    def plain(self) -> bool:
        """Whether nothing but bounds changes the scores before the softmax, so a fused kernel computes the same ones.

        False as well if a row before the sequence, which may see no key, is not dropped.
        """
        batch = self.mask.batch
        # Spans and prefixes may show keys to a row before the sequence; without them `drop_empty_rows` takes such rows away.
        undropped = batch.has_ranges and self.context < 0
        return not undropped and all(extra is None for extra in (self.soft_cap, self.slopes, batch.tree, self.k_scale))

    def is_causal(self) -> bool:
        """Whether rows see exactly the keys up to their own position."""
        return self.mask.batch.is_plain and self.mask.window == (None, 0) and self.mask.layer.chunk_size is None

    def reach(self, first: int, last: int, end: int) -> tuple[int, int]:
        """Return [low, high) of the keys below `end` that any row at positions first..last sees; high >= low."""
        (tree, spans, prefix, _), reach = self.mask.batch, None
        if spans is not None:
            ranges = spans[first - self.context : last + 1 - self.context]
            # (-1, -1) is no span
            ranges = ranges[ranges[:, 1] >= 0]
            reach = (int(ranges[:, 0].min()), int(ranges[:, 1].max())) if len(ranges) else None
        ordered = self.mask.layer.causal and tree is None
        return self.mask.bounds(first, last, end, reach, None if prefix is None else int(prefix[0]), ordered)

    def see_all(self, work: Work) -> bool:
        """Whether every row sees every key."""
        return self.sees(work.position, work.last, work.first_key, work.end)

    def sees(self, first: int, last: int, low: int, high: int) -> bool:
        """Whether rows at positions first..last see all the keys low..high."""
        begin, end = self.mask.common(first, last, high)
        return self.mask.batch.tree is None and begin <= low and high <= end

    def seen(self, work: Work) -> torch.Tensor | None:
        """Return [n, m] bool, True where a row sees a key; None if every row sees every key."""
        if self.see_all(work):
            return None
        device = work.query.device
        key = torch.arange(work.first_key, work.end, device=device, dtype=torch.int32)
        # [n, 1] beside keys [m]: the formula broadcasts to [n, m]
        position = torch.arange(work.position, work.last + 1, device=device, dtype=torch.int32)[:, None]
        here = Visibility(self.mask.layer, self.mask.batch.map(lambda array: torch.as_tensor(array, device=device)))
        return here.allowed(position, key, 0, position - self.context, self.context)

    def split(self, work: Work, step: int) -> Iterator[Work]:
        """Split `work` into tiles of at most `step` rows, each with only the keys that its rows reach."""
        for start in range(0, work.query.shape[0], step):
            stop = min(start + step, work.query.shape[0])
            low, high = self.reach(work.position + start, work.position + stop - 1, work.end)
            yield work.narrow(start, stop, low, high)

    def drop_empty_rows(self, work: Work) -> Work:
        """Fill the leading rows that see no key, and return the other rows, each of which sees a key."""
        n, m = work.query.shape[0], work.key.shape[1]
        if self.mask.batch.has_ranges:  # then rows at any position may see a key
            return work
        right = self.mask.window[1]
        # A row at p sees keys up to p + right, none if that is before the first key. Such rows lead, since positions ascend.
        empty = n if m == 0 else 0 if right is None else min(n, max(0, work.first_key - right - work.position))
        if empty == 0:
            return work
        work.narrow(0, empty, work.first_key, work.first_key).fill(0, -math.inf)
        return work.narrow(empty, n, work.first_key, work.end)


def attend(work: Work, rules: RequestParams) -> None:
    """Compute one request's attention by definition (docs/semantics.md §1), a slice of its rows at a time.

    Masked scores are replaced by -inf, never multiplied, so NaN in masked keys has no effect. A row that sees no key is 0,
    and its lse is -inf.
    """
    # float64 stays, narrower dtypes are widened once for both products
    exact = torch.promote_types(work.query.dtype, torch.float32)
    work = work.as_type(exact)
    # only masked values matter, and the check costs a pass over the values
    nonfinite = not rules.see_all(work) and not all_finite(work.value)
    for tile in rules.split(work, max(1, _SCORES_AT_ONCE // max(1, work.query.shape[1] * work.key.shape[1]))):
        if tile.key.shape[1] == 0:
            tile.fill(0, -math.inf)
            continue
        seen = rules.seen(tile)
        scores = _scores(tile, rules, exact)
        if seen is not None:
            scores = torch.where(seen, scores, -torch.inf)
        row_max = scores.amax(-1, keepdim=True)
        # a row without a key: -inf minus -inf would be NaN, where exp(-inf - 0) is 0
        row_max = torch.where(row_max == -torch.inf, 0, row_max)
        weights = torch.exp(scores - row_max)
        norm = weights.sum(-1, keepdim=True)
        result = torch.where(norm == 0, 0, _weighted_sum(weights, tile.value, seen if nonfinite else None) / norm)
        n = tile.query.shape[0]
        log = (row_max + torch.log(norm)).view(-1, n)
        tile.fill(weigh(rules, unfold(result.flatten(1, 2), n), log), log)


def _scores(work: Work, rules: RequestParams, exact: torch.dtype) -> torch.Tensor:
    """Return the scores [K, G, n, m] in dtype `exact`, unmasked."""
    n, num_kv_heads = work.query.shape[0], work.key.shape[0]
    # scale, cap, bias, mask: the order of docs/semantics.md §2
    scores = torch.bmm(fold(work.query, num_kv_heads).to(exact), work.key.transpose(1, 2)).unflatten(1, (-1, n)) * rules.scale
    if rules.k_scale is not None:
        scores = scores * rules.k_scale.view(-1, 1, 1, 1)
    if rules.soft_cap is not None:
        scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
    if rules.slopes is not None:
        keys = torch.arange(work.first_key, work.end, device=scores.device)
        distance = (keys - torch.arange(work.position, work.last + 1, device=scores.device)[:, None]).to(exact)
        slopes = rules.slopes.to(exact).view(num_kv_heads, -1, 1, 1)
        scores = scores - slopes * distance.abs()
    return scores


def _weighted_sum(weights: torch.Tensor, value: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """Return weights [K, G, n, m] times value [K, m, D]: [K, G, n, D].

    Pass `seen` [n, m] if a value may be NaN or infinite: such values then reach only the rows that see them.
    """
    n = weights.shape[2]
    if seen is None:
        return torch.bmm(weights.flatten(1, 2), value).unflatten(1, (-1, n))
    finite = value.isfinite()
    summed = torch.bmm(weights.flatten(1, 2), torch.where(finite, value, 0)).unflatten(1, (-1, n))
    # One key at a time: they are few, and the product of all would bring 0 * NaN to rows that do not see them.
    for j in (~finite).any(-1).any(0).nonzero().flatten().tolist():
        alone = weights[..., j, None] * torch.where(finite[:, j], 0, value[:, j])[:, None, None]
        summed = summed + torch.where(seen[:, j, None], alone, 0)
    return summed


def weigh(rules: RequestParams, result: torch.Tensor, log: torch.Tensor | None) -> torch.Tensor:
    """Apply v_scale and sinks to a result [n, H, D]; `log`, its lse [H, n], is needed for sinks only."""
    if isinstance(rules.v_scale, torch.Tensor):
        result = result * rules.v_scale.repeat_interleave(result.shape[1] // rules.v_scale.shape[0], 0)
    elif rules.v_scale is not None:
        result = result * rules.v_scale
    if rules.sinks is not None:
        assert log is not None
        # once, after all keys: docs/semantics.md §7
        factor = torch.sigmoid(log - rules.sinks[:, None]).T[..., None]
        result = torch.where(log.T[..., None] == -torch.inf, 0, result * factor)
    return result


class RaggedAttentionImpl(PagedAttentionImpl):
    """Base that loops over requests. A subclass names its backend and may override `_attend_one` and `_gather`."""

    can_return_lse_for_decode = True
    attends_keys = True

    def _attend(self, call: PagedCall) -> None:
        rules = self._scaled(self._rules(call.mask), call.layer, call.kv_cache)
        self._attend_each(range(call.meta.num_reqs), call, rules)

    def _attend_each(self, requests: Iterable[int], call: PagedCall, rules: RequestParams) -> None:
        """Attend the given requests of a call."""
        key_cache, value_cache, scales = self._caches(call.kv_cache)
        block_size = key_cache.shape[1]
        check_replays(self.backend.get_name(), call.query)
        starts, lengths = call.meta.host_lens()
        mask = Visibility(call.mask.layer, call.meta.host_mask())
        for r in requests:
            start, stop, total = int(starts[r]), int(starts[r + 1]), int(lengths[r])
            if start == stop:
                continue
            position = total - (stop - start)
            request_rules = rules if mask.batch.is_plain else _of_request(rules, mask, r, slice(start, stop), position)
            # Pages in front of a window are not gathered; the engine may have given them to another request.
            low, _ = request_rules.reach(position, total - 1, total)
            # no row may reach a key: then no page is gathered either
            low = min(low, total)
            blocks = call.meta.block_table[r, low // block_size : -(-total // block_size)]
            tokens = slice(low % block_size, low % block_size + total - low)
            key, value = self._gather(key_cache, value_cache, blocks)
            if scales is not None:
                key, value = (
                    codes.to(torch.float32) * caches.gather(of_codes[..., None], blocks)
                    for codes, of_codes in zip((key, value), scales, strict=True)
                )
            rows, logs = slice(start, stop), None if call.lse is None else call.lse[:, start:stop]
            query = self._rows_of(call.query, rows)
            work = Work(query, key[:, tokens], value[:, tokens], position, low, call.output[rows], logs)
            self._attend_one(work, request_rules)

    def attend_keys(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, spans: "IntArray | None" = None
    ) -> torch.Tensor:
        """Attend requests of equal lengths over keys that are in no cache, where they are.

        query: [B, n, H, D], the last n tokens of each request; key, value: [B, m, K, D], in the query's dtype and on its
        device; causal: whether no row sees a later key; spans: [B, n, 2] int32 on the host, or None. Keys are not copied if
        they are a view of an array [B, K, m', D].
        Returns [B, n, H, D]. Gradients are not computed.
        """
        batch, n, num_heads, head_size = query.shape
        if batch == 0:  # its heads become those of one request, and torch's kernel for CPUs ends the process without any
            return torch.empty_like(query)
        if batch > 1 and (self.batch_invariant or spans is not None):  # spans differ between requests
            one = (slice(b, b + 1) for b in range(batch))
            return torch.cat(
                [self.attend_keys(query[b], key[b], value[b], causal, None if spans is None else spans[b]) for b in one]
            )
        mask = Visibility(self.mask._replace(causal=causal), BatchMask(spans=None if spans is None else spans[0]))
        rules = self._rules(mask)
        # [B * H], request by request, as the heads below
        slopes, sinks = (None if x is None else x.repeat(batch) for x in (rules.slopes, rules.sinks))
        m = key.shape[1]
        rules = replace(rules, slopes=slopes, sinks=sinks, context=m - n)
        low = min(m, rules.reach(m - n, m - 1, m)[0])
        # the heads of all requests are the heads of one
        query = fold_sign(query.transpose(0, 1).flatten(1, 2), self.signed_scale)
        key, value = (x[:, low:].transpose(1, 2).flatten(0, 1) for x in (key, value))
        query, key, value = (aligned(self._rows_of(x, slice(None))) for x in (query, key, value))
        output = torch.empty_like(query)
        self._attend_one(Work(query, key, value, m - n, low, output, None), rules)
        return output.view(n, batch, num_heads, head_size).transpose(0, 1)

    def _attend_ragged(self, call: PagedCall) -> None:
        rules = self._rules(call.mask)
        check_replays(self.backend.get_name(), call.query)
        starts, _ = call.meta.host_lens()
        for r in range(call.meta.num_reqs):
            rows = slice(int(starts[r]), int(starts[r + 1]))
            if rows.start == rows.stop:
                continue
            query, key, value = (self._rows_of(x, rows) for x in (call.query, call.key, call.value))
            logs = None if call.lse is None else call.lse[:, rows]
            self._attend_one(Work(query, key.transpose(0, 1), value.transpose(0, 1), 0, 0, call.output[rows], logs), rules)

    def _rows_of(self, tensor: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return a request's rows: a view, or a copy if they must not depend on their place in the batch."""
        return tensor[rows].clone(memory_format=torch.contiguous_format) if self.batch_invariant else tensor[rows]

    def _attend_one(self, work: Work, rules: RequestParams) -> None:
        """Compute the same result as `attend`."""
        attend(work, rules)

    def _gather(
        self, key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of some blocks, like `caches.gather`; the next call may overwrite them."""
        return caches.gather(key_cache, blocks), caches.gather(value_cache, blocks)

    def _rules(self, mask: Visibility) -> RequestParams:
        return RequestParams(
            scale=self.scale,
            mask=mask,
            soft_cap=self.logits_soft_cap,
            slopes=None if self.alibi_slopes is None else self.alibi_slopes.detach(),
            sinks=None if self.sinks is None else self.sinks.detach(),
        )

    def _scaled(self, rules: RequestParams, layer: AttentionLayer, kv_cache: torch.Tensor) -> RequestParams:
        """Add the scales of a quantised cache: a scalar k_scale on the host folds exactly into the softmax scale."""
        if not caches.is_quantised(kv_cache.dtype) or self.kv_cache_dtype in PER_TOKEN_HEAD:
            return rules
        k_scale, v_scale = (self._by_kv_head(scale, kv_cache.device) for scale in (layer._k_scale, layer._v_scale))
        # a factor of all scores, before the soft cap as the scale is
        if isinstance(k_scale, float):
            return replace(rules, scale=rules.scale * k_scale, v_scale=v_scale)
        return replace(rules, k_scale=k_scale, v_scale=v_scale)

    def _by_kv_head(self, scale: torch.Tensor | float, device: torch.device) -> torch.Tensor | float:
        """Return a scalar scale on the host as a float, any other as [K, 1], without waiting for the device."""
        scale = scale.detach() if isinstance(scale, torch.Tensor) else torch.tensor(scale, device="cpu")
        if scale.ndim == 0 and scale.device.type == "cpu":
            return float(scale)
        return caches.per_head(scale, device).expand(self.num_kv_heads, 1)


def _of_request(rules: RequestParams, mask: Visibility, request: int, rows: slice, position: int) -> RequestParams:
    """Return the rules of one request of a batch, whose first row is at `position`."""
    request_mask = mask.select(request, rows)
    if request_mask.batch.tree is not None and position < 0:
        n = rows.stop - rows.start
        # a tree's nodes are in the cache when their rows attend, or their ancestors would be missing
        raise MetadataError("seq_lens", request, position + n, f"at least {n}, the tokens of its tree")
    if request_mask.batch.prefix is not None and not request_mask.batch.prefix[0]:
        # a prefix of 0 is none: without it fused kernels may serve the request (`plain`)
        request_mask = request_mask._replace(batch=request_mask.batch._replace(prefix=None))
    return replace(rules, mask=request_mask, context=position)
