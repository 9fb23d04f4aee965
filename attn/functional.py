"""`attn.attention(q, k, v)`: exact dense attention for notebooks and tests, on arrays of torch, jax or NumPy.

The formula is written once over array operations that each framework provides (`attn.torch.ops.Ops`, `attn.jax.ops.Ops`):
explicit computation in float32 (float64 for float64 arrays), differentiable; jitted under jax.
NumPy arrays go to the float64 oracle. It is meant to be correct and short, not fast; `backend=` runs the same call on a
backend over a temporary paged cache, to compare the two.
"""

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from attn import arrays, selector
from attn.arguments import (
    Window,
    check_flag,
    check_heads,
    check_per_head,
    check_scale,
    check_soft_cap,
    positive_int,
    window_pair,
)
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import AttentionType, Feature, check_known, supports_size
from attn.dtypes import DTYPES, dtype_name
from attn.errors import DTypeError, ShapeError, UnsupportedError
from attn.imports import resolve_obj_by_qualname
from attn.visibility import BatchMask, LayerMask, Visibility

Array = Any

LAYOUTS = ("BSHD", "BHSD")
_MOST_HEADS = 128  #: the most that models have (DeepSeek)


@dataclass(frozen=True)
class DenseParams:
    """A call's arguments other than arrays; hashable, a key for compiled programs."""

    causal: bool
    scale: float
    window: Window
    cap: float | None


class OptionalArrays(NamedTuple):
    """A call's optional arrays: slopes, sinks [H]; mask, broadcastable to [B, H, n, m]."""

    slopes: Any
    sinks: Any
    mask: Any


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | Window | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    mask: Any = None,
    spans: Any = None,
    prefix: Any = None,
    chunk_size: int | None = None,
    span_window: bool | None = None,
    return_lse: bool = False,
    layout: str | None = None,
    backend: AttentionBackendEnum | str | None = None,
) -> Any:
    """Compute attention of dense arrays, with the semantics of `attn.reference.attention`.

    q: [B, n, H, D]; k: [B, m, K, D]; v: [B, m, K, Dv], or all three without B; one framework, one float dtype.
    Query head h reads kv head h // (H / K), and row i is at position i + (m - n): causal masking is bottom-right.

    scale: multiplies the scores; 1 / sqrt(D) when None.
    window: an inclusive (left, right) pair, None for unbounded, or an int W for W keys.
    logits_soft_cap: cap * tanh(score / cap), before the ALiBi bias.
    alibi_slopes, sinks: [H]. Lists and NumPy arrays are checked: slopes must be finite and sinks not NaN.
    mask: bool, True = attend, broadcastable to [B, H, n, m] ([H, n, m] without B), ANDed with the rest.
    spans, prefix, chunk_size, span_window: further masks (docs/semantics.md §18). spans: [B, n, 2] ([n, 2] without B)
        ints, the first and last key of each row's span, (-1, -1) for none; prefix: an int, or [B] ints. They are read on the
        host. span_window must be stated if there are spans and a window.
    layout: "BSHD", as above, or "BHSD": q [B, H, n, D], k [B, K, m, D], v [B, K, m, Dv] and out [B, H, n, Dv], as
        `torch.nn.functional.scaled_dot_product_attention` and the models of transformers use. None is "BSHD", with a warning
        if only the other layout explains the shapes.
    backend: None computes the formula. A registry member or name runs that backend, of either framework, over a paged cache;
        it is used or rejected. It rejects a mask, and gradients unless the backend declares them.

    Returns out [B, n, H, Dv] in the dtype and framework of q, or (out, lse [B, H, n]) with the natural-log LSE, sink
    excluded, in float32 (float64 for float64 arrays). A row without keys is 0 and its LSE -inf. Masked values have no effect,
    even NaN; a NaN in a visible key or value reaches exactly the rows that see it. Raises TypeError for arguments that are not
    arrays, `ShapeError`, `DTypeError`, ValueError for invalid arguments and `UnsupportedError` with a backend's reasons.
    """
    causal, return_lse = check_flag("causal", causal), check_flag("return_lse", return_lse)
    framework = _framework(q, k, v)
    if layout is not None:
        check_known("layout", layout, LAYOUTS)
    batched = _check_shapes(q, k, v, layout)
    if layout == "BHSD":
        # Only the output is swapped back: the log-sum-exp has heads first in both layouts.
        q, k, v = (x.swapaxes(-3, -2) for x in (q, k, v))
    rules = DenseParams(
        causal=causal,
        scale=check_scale(scale, q.shape[-1]),
        # docs/semantics.md §4: an int W is W keys to the left of a causal row, and W in each direction without causality
        window=window_pair(window, AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY, "window"),
        cap=check_soft_cap(logits_soft_cap),
    )
    check_per_head("alibi_slopes", alibi_slopes)
    check_per_head("sinks", sinks)
    extras = OptionalArrays(alibi_slopes, sinks, mask)
    q, k, v = (q, k, v) if batched else (q[None], k[None], v[None])
    reach = _reach(q, k, rules, spans, prefix, chunk_size, span_window)
    if backend is not None:
        result = _through_backend(backend, framework, (q, k, v), rules, extras, reach, return_lse)
    elif framework == "numpy":
        # `reach` is None where causality and the window say everything: no mask of [B, 1, n, m] is made then.
        result = _oracle(q, k, v, *_seen(rules, extras, reach and _mask(reach, q, k)))
    else:
        xp = arrays.ops_of(framework)
        # before the formula is compiled: to jax a list is a tree of numbers, to torch an array is on another device than q
        extras = OptionalArrays(*(x if x is None else xp.asarray(_numbers(x, q), like=q) for x in extras))
        rules, extras = _seen(rules, extras, reach and xp.asarray(_mask(reach, q, k), like=q))
        result = xp.compiled(_dense)(xp, rules, q, k, v, extras)
    out: Any
    out, lse = result if batched else (x if x is None else x[0] for x in result)
    if layout == "BHSD":
        out = out.swapaxes(-3, -2)
    return (out, lse) if return_lse else out


def _reach(
    q: Array, k: Array, rules: DenseParams, spans: Any, prefix: Any, chunk_size: int | None, span_window: bool | None
) -> Visibility | None:
    """Return the mask, with spans [B, n, 2] or None and prefixes [B] or None on the host; None if causality and the window
    are all of it. Raises ValueError and `ShapeError`."""
    import numpy as np

    if span_window is not None:
        span_window = check_flag("span_window", span_window)
    # span_window alone has nothing to cut, and is checked above all the same.
    if spans is None and prefix is None and chunk_size is None:
        return None
    batch, n, m = q.shape[0], q.shape[1], k.shape[1]
    if spans is not None:
        # `np.asarray` cannot read a tensor on a GPU.
        array = arrays.to_framework(spans, "numpy") if hasattr(spans, "dtype") else np.asarray(spans)
        spans = array[None] if array.ndim == 2 else array
        if spans.shape != (batch, n, 2) or spans.dtype.kind not in "iu":
            raise ShapeError(f"spans has shape {list(array.shape)}, dtype {array.dtype}: must be integers [{batch}, {n}, 2]")
        first, last = spans[..., 0], spans[..., 1]
        # As `CommonAttentionMetadata.validate`: a span beyond the keys would be cut silently, and (-1, 3) is no span at all.
        bad = ((first < 0) | (last < first) | (last >= m)) & ((first != -1) | (last != -1))
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(f"spans{list(at)} = {spans[at].tolist()}: must be 0 <= first <= last < {m}, or (-1, -1) for none")
        if (rules.window[0] is not None or rules.window[1]) and span_window is None:
            raise ValueError("spans with a window: pass span_window=True if the window cuts spans too, or False")
    passed = 0 if prefix is None else prefix
    numbers = arrays.to_framework(passed, "numpy") if hasattr(passed, "dtype") else np.asarray(passed)
    if numbers.dtype.kind not in "iu" or numbers.shape not in ((), (batch,)) or (numbers < 0).any() or (numbers > m).any():
        raise ValueError(f"prefix={prefix!r} must be integers between 0 and {m}, one or {batch}")
    prefixes = np.broadcast_to(numbers, (batch,))
    size = None if chunk_size is None else positive_int("chunk_size", chunk_size)
    mask = LayerMask(rules.causal, rules.window, size, span_window)
    # A prefix of 0 keys is no prefix, so that a backend without the feature serves it.
    return Visibility(mask, BatchMask(spans=spans, prefix=prefixes if prefixes.any() else None))


def _mask(seen: Visibility, q: Array, k: Array) -> Any:
    """Return the visible keys of rows, bool [B, 1, n, m], for NumPy."""
    import numpy as np

    batch, n, m = q.shape[0], q.shape[1], k.shape[1]
    position, request = np.arange(m - n, m)[:, None], np.arange(batch)[:, None, None]
    if seen.batch.spans is not None:
        # [B, n, 1, 2]: `allowed` takes spans[..., 0] and compares [B, n, 1] with the keys [m].
        seen = seen._replace(batch=seen.batch._replace(spans=seen.batch.spans[:, :, None]))
    # position [n, 1], keys [m], requests [B, 1, 1] -> [B, n, m], or fewer dimensions if no array of the batch takes part.
    allowed = seen.allowed(position, np.arange(m), request, ...)
    return np.broadcast_to(allowed, (batch, n, m))[:, None].copy()  # torch warns of arrays that cannot be written


def _numbers(x: Any, q: Array) -> Any:
    """Return a list as float64 for a query of float64, where a framework would make float32 of it; all else unchanged."""
    import numpy as np

    is_list = isinstance(x, list | tuple) and dtype_name(q.dtype) == "float64"
    return np.asarray(x, np.float64) if is_list and np.asarray(x).dtype.kind in "iuf" else x


def _seen(rules: DenseParams, extras: OptionalArrays, seen: Any) -> tuple[DenseParams, OptionalArrays]:
    """Replace causality and the window by the mask `seen`, ANDed with the call's; unchanged if it is None."""
    if seen is None:
        return rules, extras
    _check_mask(extras.mask)
    mask = seen if extras.mask is None else seen & extras.mask
    # The mask has causality and the window in it, since a span adds keys that ANDing with them again would take away.
    return replace(rules, causal=False, window=(None, None)), extras._replace(mask=mask)


def _framework(*qkv: Array) -> str:
    frameworks = [arrays.framework_of(x) for x in qkv]
    if len(set(frameworks)) > 1:
        raise TypeError(f"q, k, v belong to {', '.join(frameworks)}: must be one framework (see attn.arrays.to_framework)")
    names = [dtype_name(x.dtype) for x in qkv]
    if len(set(names)) > 1 or DTYPES[names[0]].kind != "float":
        raise DTypeError(f"q, k, v have dtypes {', '.join(names)}: must be one float dtype")
    return frameworks[0]


def _check_shapes(q: Array, k: Array, v: Array, layout: str | None) -> bool:
    """Whether there is a batch dimension. Raises `ShapeError`, or ValueError for head counts that do not divide."""
    shapes = [tuple(x.shape) for x in (q, k, v)]
    ranks = {len(s) for s in shapes}
    if ranks not in ({3}, {4}):
        order = "[B, heads, S, head_size]" if layout == "BHSD" else "[B, S, heads, head_size]"
        raise ShapeError(f"q, k, v have shapes {_words(shapes)}: must be {order}, or all without B")
    # [B, heads, S, D] -> [B, S, heads, D], so that the comparisons below are written once; the message shows the
    # caller's shapes.
    sq, sk, sv = ((*s[:-3], s[-2], s[-3], s[-1]) for s in shapes) if layout == "BHSD" else shapes
    if sq[:-3] != sk[:-3] or sk[:-1] != sv[:-1] or sq[-1] != sk[-1]:
        raise ShapeError(
            f"q, k, v have shapes {_words(shapes)}: batches must agree, k and v in keys and heads, q and k in head_size"
        )
    if layout is None:
        _check_layout(sq, sk, shapes[:2])
    check_heads(sq[-2], sk[-2], sq[-1])
    return len(sq) == 4


def _check_layout(sq: tuple[int, ...], sk: tuple[int, ...], shapes: list[tuple[int, ...]]) -> None:
    """Warn about shapes that only [B, heads, S, head_size] explains; raise ValueError with that layout if no other is possible.

    The signs: as many key heads as query heads, more heads than rows, and more rows than keys, as grouped heads look in the
    other layout; or more heads than models have. A decode, one row of many heads, shows neither.
    """
    (n, heads), (m, kv_heads) = sq[-3:-1], sk[-3:-1]
    advice = 'pass layout="BHSD" for [B, heads, S, head_size]'
    if kv_heads and heads % kv_heads and m and n % m == 0:
        raise ValueError(f"num_heads={heads} is not a multiple of num_kv_heads={kv_heads} (shapes {_words(shapes)}: {advice})")
    # Read as [B, S, heads, D], a tensor [B, H, S, D] has n = H rows of S heads: fewer rows than heads, and as many key
    # heads as query heads in self attention.
    if not 1 < n < heads == kv_heads:
        return
    if (n > m > 0 and n % m == 0) or (n == m and heads > _MOST_HEADS):
        warnings.warn(
            f'q, k have shapes {_words(shapes)}, which look like [B, heads, S, head_size]: pass layout="BHSD" if they are, and '
            f'layout="BSHD" if these are {n} rows of {heads} heads',
            # `attention` <- `_check_shapes` <- `_check_layout`: the line of the caller.
            stacklevel=4,
        )


def _words(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(str(list(s)) for s in shapes)


def _oracle(q: Array, k: Array, v: Array, rules: DenseParams, extras: OptionalArrays) -> tuple[Array, Array]:
    """Compute NumPy arrays by `attn.reference.attention` in float64, one sequence at a time, rounded once at the end."""
    import numpy as np

    from attn import reference

    batch, n, num_heads, _ = q.shape
    mask = None if extras.mask is None else np.asarray(extras.mask)
    if mask is not None:
        # The oracle takes one sequence at a time, so a mask without B, or with 1, has to have all B entries.
        mask = np.broadcast_to(mask, _mask_shape(mask.shape, q, k))
    out = np.zeros((batch, n, num_heads, v.shape[-1]))
    lse = np.zeros((batch, num_heads, n))
    options: dict[str, Any] = {"causal": rules.causal, "scale": rules.scale, "window": rules.window}
    options |= {"logits_soft_cap": rules.cap, "alibi_slopes": extras.slopes, "sinks": extras.sinks}
    for b in range(batch):
        entry_mask = None if mask is None else mask[b]
        out[b], lse[b] = reference.attention(q[b], k[b], v[b], mask=entry_mask, **options)
    return out.astype(q.dtype), lse.astype(np.float64 if q.dtype == np.float64 else np.float32)


def _check_mask(mask: Any) -> None:
    """Raise `DTypeError` unless a mask is None or bool; the oracle checks lists."""
    # The one spelling that holds for torch.bool, jnp.bool_ and NumPy's.
    if hasattr(mask, "dtype") and "bool" not in str(mask.dtype):
        raise DTypeError(f"mask has dtype {mask.dtype}: must be bool, True = attend")


def _mask_shape(shape: tuple[int, ...], q: Array, k: Array) -> tuple[int, int, int, int]:
    """Return [B, H, n, m] if a mask of `shape` broadcasts to it. Raises `ShapeError` otherwise."""
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if len(shape) > 4 or any(have not in (1, want) for have, want in zip(shape[::-1], full[::-1], strict=False)):
        raise ShapeError(f"mask has shape {list(shape)}: must broadcast to [B, H, n, m] = {list(full)}")
    return full


def _dense(xp: Any, rules: DenseParams, q: Array, k: Array, v: Array, extras: OptionalArrays) -> tuple[Array, Array]:
    """Compute (out [B, n, H, Dv], lse [B, H, n]) on arrays of one framework, a slice of rows at a time."""
    batch, n, num_heads, _ = q.shape
    m = k.shape[1]
    query, extras = by_group(xp, q, k, extras)
    key, value, mask = xp.wide(k), xp.wide(v), extras.mask
    # Under torch at most 2^25 scores exist at once (128 MiB of float32); under jax all rows, because a Python loop
    # would be unrolled into the program.
    step = xp.rows_at_once(n, batch * num_heads * m)
    results = []
    # At least one pass, so that a call without rows still gives arrays of the right dtype and device to concatenate.
    for start in (0,) if step >= n else range(0, n, step):
        rows = slice(start, min(start + step, n))
        position = xp.arange(rows.start, rows.stop, q) + (m - n)
        of_rows = extras._replace(mask=None if mask is None else mask[..., rows, :])
        results.append(attend_rows(xp, rules, query[:, rows], key, value, position, of_rows))
    # [B, n, K, G, Dv] -> [B, n, H, Dv]: head h is (h // G, h % G), as `by_group` split them.
    out = xp.concat([result[0] for result in results], 1).reshape(batch, n, num_heads, v.shape[-1])
    lse = xp.concat([result[1] for result in results], 3).reshape(batch, num_heads, n)
    return xp.cast(out, like=q), lse


def by_group(xp: Any, q: Array, k: Array, extras: OptionalArrays) -> tuple[Array, OptionalArrays]:
    """Return q [B, n, H, D] and a call's extras by kv head, in float32: q [B, n, K, G, D]; see `attend_rows`.

    Raises `DTypeError` and `ShapeError` for extras.
    """
    (batch, n, num_heads, head_size), (m, num_kv_heads) = q.shape, k.shape[1:3]
    grouped = (num_kv_heads, num_heads // num_kv_heads)
    mask = extras.mask
    if mask is not None:
        _check_mask(mask)
        mask = xp.broadcast_to(mask, _mask_shape(tuple(mask.shape), q, k)).reshape(batch, *grouped, n, m)
    for name, array in (("alibi_slopes", extras.slopes), ("sinks", extras.sinks)):
        if array is not None and tuple(array.shape) != (num_heads,):
            raise ShapeError(f"{name} has shape {list(array.shape)}: must be [{num_heads}], one per query head")
    query = xp.wide(q.reshape(batch, n, *grouped, head_size))
    # In the query's dtype: NumPy's own arrays are float64, and would make scores of float32 products wider than the values.
    slopes, sinks = (x if x is None else xp.cast(x, like=query).reshape(grouped) for x in (extras.slopes, extras.sinks))
    return query, OptionalArrays(slopes, sinks, mask)


def attend_rows(
    xp: Any, rules: DenseParams, q: Array, k: Array, v: Array, position: Array, extras: OptionalArrays
) -> tuple[Array, Array]:
    """q: [B, r, K, G, D] at `position` [r]; k: [B, m, K, D]; v: [B, m, K, Dv] -> [B, r, K, G, Dv], lse [B, K, G, r].

    Slopes and sinks are [K, G], the mask is [B, K, G, r, m]. Keys that no row sees are replaced by zeros before any product,
    so that their contents affect neither the result nor the gradients; keys that only some rows see are selected out for the
    others.
    """
    weights, factor, empty, lse, allowed = softmax(xp, rules, q, k, position, extras)
    # [B or 1, K or 1, m] -> [B or 1, m, K or 1, 1]: whether any row of any head of the group sees a key.
    attended = xp.any(allowed, (2, 3)).swapaxes(1, 2)[..., None]
    v = xp.where(attended, v, 0.0)
    finite = xp.isfinite(v)
    # A weight of 0 times an infinite or NaN value is NaN, in rows that do not see the value: the product has finite
    # values only, and `_non_finite` adds the others to the rows that see them. `add_if` computes that product only if there
    # are any: under jax by `lax.cond`, under torch by reading one bool.
    summed = xp.einsum("bkgrm,bmkd->brkgd", weights, xp.where(finite, v, 0.0))
    summed = xp.add_if(~finite.all(), summed, lambda: _non_finite(xp, xp.broadcast_to(allowed, weights.shape), v))
    per_row = [xp.where(empty, 0.0, factor), empty]  # [B, K, G, r] -> [B, r, K, G, 1]
    factor, none = (xp.moveaxis(x, 3, 1)[..., None] for x in per_row)
    # `where`, not a product with 0: its gradient is 0 for an empty row, whatever the arguments hold.
    return xp.where(none, 0.0, summed * factor), xp.where(empty, -math.inf, lse)


def softmax(xp: Any, rules: DenseParams, q: Array, k: Array, position: Array, extras: OptionalArrays) -> tuple[Array, ...]:
    """Return (weights [B, K, G, r, m] before normalisation, their factor, whether a row is empty, lse, the allowed mask).

    Arguments are those of `attend_rows`; factor, emptiness and lse are [B, K, G, r]. The factor includes the sink's share.
    """
    key, row = xp.arange(0, k.shape[1], q)[None, None, None, None], position[None, None, None, :, None]
    allowed = Visibility(LayerMask(rules.causal, rules.window)).allowed(row, key)
    if extras.mask is not None:
        allowed = allowed & extras.mask
    # The gradient of `where` below multiplies a masked score's gradient, 0, by the key; an infinite or NaN key would
    # make it NaN.
    k = xp.where(xp.any(allowed, (2, 3)).swapaxes(1, 2)[..., None], k, 0.0)
    scores = xp.einsum("brkgd,bmkd->bkgrm", q, k) * rules.scale
    if rules.cap is not None:
        scores = rules.cap * xp.tanh(scores / rules.cap)
    if extras.slopes is not None:
        ahead = key - row
        # -slope * |p - j| (docs/semantics.md §8); under causality no visible key is ahead, so key - row is -|p - j|
        # without `abs`.
        scores = scores + extras.slopes[None, :, :, None, None] * (ahead if rules.causal else -abs(ahead))
    scores = xp.where(allowed, scores, -math.inf)
    # The maximum only keeps `exp` from overflowing and cancels out of the result, so it takes no part in the gradient.
    # A row without keys has a maximum of -inf, and -inf - -inf would be NaN.
    row_max = xp.fixed_max(scores)
    row_max = xp.where(row_max == -math.inf, 0.0, row_max)
    weights = xp.exp(scores - row_max[..., None])
    total = weights.sum(-1)
    empty = total == 0
    # Before the logarithm: the gradient of log(0) is infinite even where the result is not taken.
    total = xp.where(empty, 1.0, total)
    lse = row_max + xp.log(total)
    # exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink), which does not overflow (docs/semantics.md §7).
    factor = 1.0 / total if extras.sinks is None else xp.sigmoid(lse - extras.sinks[None, :, :, None]) / total
    return weights, factor, empty, lse, allowed


def _non_finite(xp: Any, allowed: Array, v: Array) -> Array:
    """Return the effect of infinite and NaN values on the rows that see them: inf, -inf or NaN, else 0; [B, r, K, G, Dv]."""
    total: Array = 0.0
    # Counts of the special values that a row sees. In order, so that a row that sees both infinities adds inf and -inf
    # to NaN, as the sum of its weighted values would be.
    for special, equal in ((math.inf, v == math.inf), (-math.inf, v == -math.inf), (math.nan, v != v)):
        hits = xp.einsum("bkgrm,bmkd->brkgd", xp.cast(allowed, like=v), xp.cast(equal, like=v)) > 0
        total = total + xp.where(hits, special, 0.0)
    return total


def _through_backend(
    backend: AttentionBackendEnum | str,
    framework: str,
    qkv: tuple[Array, Array, Array],
    rules: DenseParams,
    extras: OptionalArrays,
    reach: Visibility | None,
    return_lse: bool,
) -> tuple[Array, Array | None]:
    """Run the call as one batch over a new paged cache in the backend's layout and framework."""
    q, k, v = qkv
    # Only to learn the backend's framework, layout and block sizes; the layer below makes the real request, with all
    # features.
    selection = selector.select(selector.make_request(q.shape[-1], q.dtype), backend=backend)
    cls: Any = selection.require()
    for feature, used in ((Feature.MASK, extras.mask is not None), (Feature.HEAD_SIZE_V, v.shape[-1] != q.shape[-1])):
        if used:  # paged backends support neither
            raise UnsupportedError(f"{selection.name}: {feature.value} not supported over a paged cache, which backend= uses")
    target = cls.get_impl_cls().framework
    allowed = cls.get_supported_kernel_block_size()
    # The smallest usual size wastes the least of a sequence's last page. 16 if none fits: the backend then says what it
    # supports.
    block_size = next((size for size in (16, 32, 64, 128, 256) if supports_size(size, allowed)), 16)
    batch, n, num_heads, head_size = q.shape
    m, num_kv_heads = k.shape[1], k.shape[2]
    blocks_each = -(-m // block_size)
    # Sequence b has blocks of its own, in order: its keys are contiguous in the new cache.
    table = [range(b * blocks_each, (b + 1) * blocks_each) for b in range(batch)]
    describe = CommonAttentionMetadata.from_lens
    seen = Visibility(LayerMask(rules.causal, rules.window)) if reach is None else reach
    spans, prefix = seen.batch.spans, seen.batch.prefix
    more = {"spans": None if spans is None else spans.reshape(-1, 2), "prefix": prefix}
    # Two batches over one table: `context` says where the m keys are written, `queries` that the last n of them are
    # rows. strict=False, because more rows than keys are defined here (docs/semantics.md §3).
    queries = describe([n] * batch, [m] * batch, table, block_size, causal=rules.causal, strict=False, **more)
    context = describe([m] * batch, [m] * batch, table, block_size)
    tokens = [
        arrays.to_framework(x.reshape(-1, heads, head_size), target)
        for x, heads in ((q, num_heads), (k, num_kv_heads), (v, num_kv_heads))
    ]
    ops = arrays.ops_of(target)
    layer = resolve_obj_by_qualname(f"attn.{target}.Attention")(
        *(num_heads, head_size, rules.scale, num_kv_heads),
        alibi_slopes=extras.slopes,
        sliding_window=rules.window,
        logits_soft_cap=rules.cap,
        sinks=extras.sinks,
        block_size=block_size,
        backend=backend,
        dtype=tokens[0].dtype,
        # gradients are rejected unless declared, never dropped silently
        features=[Feature.NON_CAUSAL] * (not rules.causal) + [Feature.BACKWARD] * ops.needs_gradients(*tokens),
        return_lse=return_lse,
        chunk_size=seen.layer.chunk_size,
        span_window=seen.layer.span_window,
    )
    # At least one block: a cache of none is an error, and a call without keys is not.
    result = ops.attend_once(layer, *tokens, context.slot_mapping, queries, max(1, batch * blocks_each))
    out, lse = result if return_lse else (result, None)
    out = arrays.to_framework(out, framework, like=q).reshape(q.shape)
    if lse is not None:
        lse = arrays.to_framework(lse, framework).reshape(num_heads, batch, n).swapaxes(0, 1)
    return out, lse
