"""Check and normalise a layer's constructor arguments, and derive the features that they require.

Shared by the templates of both frameworks, so that the same invalid argument raises the same message everywhere.
"""

import math
import operator
from collections.abc import Collection
from typing import Any

from attn.capabilities import ATTN_TYPES, ENCODER_TYPES, AttentionType, Feature, Request, check_known
from attn.errors import UnsupportedError
from attn.visibility import BatchMask

Window = tuple[int | None, int | None]


def as_int(value: Any) -> int | None:
    """Return `value` as an int, including NumPy's integers; None for anything else, including bools and floats."""
    try:
        # True is an int in Python: num_heads=True would be a layer of one head. `operator.index` takes NumPy's integers
        # and 0-d integer arrays, and rejects 8.0, which `int()` would accept. In a graph of torch 2.11 it fails on a pair.
        return None if isinstance(value, bool | tuple | list) else operator.index(value)
    except TypeError:
        return None


def as_flag(value: Any) -> bool | None:
    """Return `value` as a bool, including NumPy's; None for anything else (not by truth value: "no" and [False] are true)."""
    import numpy as np

    return bool(value) if isinstance(value, bool | np.bool_) else None


def check_flag(name: str, value: Any) -> bool:
    """Return `value` as a bool. Raises ValueError unless it is one."""
    flag = value if isinstance(value, bool) else as_flag(value)
    if flag is None:
        raise ValueError(f"{name}={value!r} must be True or False")
    return flag


def positive_int(name: str, value: Any) -> int:
    """Return `value` as an int. Raises ValueError unless it is an int of at least 1."""
    number = as_int(value)
    if number is None or number < 1:
        raise ValueError(f"{name}={value!r} must be a positive int")
    return number


def natural_int(name: str, value: Any) -> int:
    """Return `value` as an int. Raises ValueError unless it is an int of at least 0."""
    number = as_int(value)
    if number is None or number < 0:
        raise ValueError(f"{name}={value!r} must be an int of at least 0")
    return number


def list_of_names(name: str, value: Collection[str]) -> tuple[str, ...]:
    """Return `value` as a tuple. Raises ValueError for a string, which would be split into letters."""
    # A string is a collection too: features="lse" would be the features l, s and e.
    if isinstance(value, str):
        raise ValueError(f"{name}={str(value)!r} must be a list of names, such as [{str(value)!r}]")
    if not isinstance(value, Collection):
        raise ValueError(f"{name}={value!r} must be a list of names")
    return tuple(value)


def rank_of_numbers(name: str, value: Any) -> int:
    """Return the rank of a number (0), an array of any framework or a list. Raises ValueError for anything else.

    The values of an array are checked by the framework that computes with it: reading them could copy it from a device.
    """
    import numpy as np

    # `np.asarray` of a tensor on a device would copy it to the host and wait for all earlier work.
    if hasattr(value, "dtype"):
        return int(value.ndim)
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = None
    if array is None or array.dtype.kind not in "iuf":
        raise ValueError(f"{name}={value!r} must be a number, a list of numbers or an array")
    return array.ndim


def check_per_head(name: str, values: Any) -> None:
    """Raise ValueError for non-finite `alibi_slopes` or NaN `sinks` (-inf means no sink), if the values are a list or a NumPy
    array.

    A framework's array is not inspected on any device: it may be a parameter whose weights are loaded later, and values on
    a device would block. NaN in one propagates to the outputs of its head, as any NaN does.
    """
    import numpy as np

    if values is not None and isinstance(values, list | tuple | str | np.ndarray):
        _check_numbers(name, values)


def _check_numbers(name: str, values: Any) -> None:
    import numpy as np

    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={values!r} must be numbers, one per head") from error
    # A sink of -inf is a head without a sink and one of +inf takes all weight (`attn.reference.apply_sinks`): both are
    # defined. An infinite slope times the distance 0 of a row to its own key is NaN.
    bad = np.isnan(numbers) if name == "sinks" else ~np.isfinite(numbers)
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        allowed = "a number, or -inf for a head without a sink" if name == "sinks" else "finite"
        raise ValueError(f"{name}{list(index)} = {numbers[index]}: must be {allowed}")


# `attn.arrays.ops_of` says what the mark is for.
_check_numbers._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _number(name: str, value: Any) -> float:
    """Return `value` as a float; bools and strings are rejected."""
    try:
        # `float` accepts both: scale="0.125" from a configuration file is a mistake of the reader, and True would be 1.0.
        if isinstance(value, bool | str):
            raise TypeError(f"{type(value).__name__} is not a number")
        return float(value)
    except TypeError as error:
        raise ValueError(f"{name}={value!r} must be a number") from error


def positive_number(name: str, value: Any) -> float:
    """Return `value` as a float. Raises ValueError unless it is finite and above 0."""
    number = _number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number above 0")
    return number


def check_heads(num_heads: int, num_kv_heads: int | None, head_size: int) -> tuple[int, int, int]:
    """Return (num_heads, num_kv_heads, head_size) as ints; num_kv_heads defaults to num_heads. Raises ValueError."""
    num_heads = positive_int("num_heads", num_heads)
    num_kv_heads = num_heads if num_kv_heads is None else positive_int("num_kv_heads", num_kv_heads)
    head_size = positive_int("head_size", head_size)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    return num_heads, num_kv_heads, head_size


def check_scale(scale: float | None, head_size: int) -> float:
    """Return the softmax scale as a float; None means 1 / sqrt(head_size). Raises ValueError unless finite and not zero."""
    if scale is None:
        return 1.0 / math.sqrt(head_size)
    number = _number("scale", scale)
    # A scale of 0 makes all scores equal, whatever the query, so it is taken for one that was never set; a negative one
    # is defined (`fold_sign`).
    if not math.isfinite(number) or number == 0:
        raise ValueError(f"scale={scale!r} must be finite and not zero")
    return number


def fold_sign(query: Any, scale: float) -> Any:
    """Return the query to pass to a kernel with `abs(scale)` to get the scores of `scale`: negated if scale is negative.

    Many fused kernels need a positive scale: they mask scores with -inf, or take their maximum, before scaling.
    """
    return -query if scale < 0 else query


def check_soft_cap(logits_soft_cap: float | None) -> float | None:
    """Return the soft cap, None when off (None or 0). Raises ValueError unless finite and not negative."""
    if logits_soft_cap is None:
        return None
    number = _number("logits_soft_cap", logits_soft_cap)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"logits_soft_cap={logits_soft_cap!r} must be finite and at least 0 (0 or None: off)")
    # Libraries spell "off" as 0 (FlashAttention) or None (vLLM, FlashInfer); with one spelling, features and cache keys
    # of equal layers are equal.
    return number or None


def check_attn_type(attn_type: str) -> str:
    """Return `attn_type` if it is one of the four. Raises ValueError otherwise."""
    return check_known("attn_type", attn_type, ATTN_TYPES)


def window_pair(sliding_window: int | Window | None, attn_type: str, name: str = "sliding_window") -> Window:
    """Return the window as (left, right), inclusive key distances, None for unbounded.

    An int W is vLLM's window of W keys: (W - 1, 0) for decoders, (W - 1, W - 1) for encoders. A pair is used as is. Raises
    ValueError, with the argument's `name`, for any negative value and for W = 0: adapters translate conventions in which -1
    has a meaning.
    """
    if sliding_window is None:
        return (None, None)
    width = as_int(sliding_window)
    if width is not None:
        if width < 1:
            raise ValueError(f"{name}={width} must be at least 1 (a window of W keys), or None")
        return (width - 1, width - 1 if attn_type in ENCODER_TYPES else 0)
    try:
        # A pair is unpacked before its elements are checked, so lists, tuples and arrays of two are all accepted.
        left, right = sliding_window  # type: ignore[misc]  # anything but a pair raises below
    except (TypeError, ValueError):
        raise ValueError(f"{name}={sliding_window!r} must be an int, a (left, right) pair, or None") from None
    for side, distance in (("left", left), ("right", right)):
        number = as_int(distance)
        if distance is not None and (number is None or number < 0):
            raise ValueError(f"{name}={sliding_window!r}: {side}={distance!r} must be an int of at least 0, or None (no bound)")
    return (as_int(left), as_int(right))


def layer_features(
    window: Window,
    logits_soft_cap: float | None,
    alibi_slopes: Any,
    sinks: Any,
    kv_sharing_target_layer_name: str | None,
    chunk_size: int | None = None,
) -> frozenset[str]:
    """Return the features that a layer with these (normalised) arguments requires of its backend.

    A right bound of 0 is causality and needs no feature; a finite right bound above 0 is two-sided. Raises ValueError for a
    `kv_sharing_target_layer_name` that is not a name: False would enable sharing, and so write nothing.
    """
    if kv_sharing_target_layer_name is not None and not isinstance(kv_sharing_target_layer_name, str):
        raise ValueError(f"kv_sharing_target_layer_name={kv_sharing_target_layer_name!r} must be the name of a layer, or None")
    requested = {
        Feature.SLIDING_WINDOW: window[0] is not None,
        # None is unbounded and 0 is causality, which every decoder has; only a right bound above 0 needs a kernel for it.
        Feature.TWO_SIDED_WINDOW: bool(window[1]),
        Feature.SOFT_CAP: logits_soft_cap is not None,
        Feature.ALIBI: alibi_slopes is not None,
        Feature.SINKS: sinks is not None,
        Feature.KV_SHARING: kv_sharing_target_layer_name is not None,
        Feature.CHUNK_SIZE: chunk_size is not None,
    }
    return frozenset(feature.value for feature, needed in requested.items() if needed)


def batch_features(mask: BatchMask) -> frozenset[str]:
    """Return the features that a batch with this mask requires of its backend."""
    requested = {
        Feature.TREE_MASK: mask.tree is not None,
        Feature.MIXED_CAUSAL: mask.is_causal is not None,
        Feature.SPANS: mask.has_ranges,
    }
    return frozenset(feature.value for feature, needed in requested.items() if needed)


def check_reach(impl: Any, attn_metadata: Any) -> None:
    """Raise `UnsupportedError` unless an implementation supports a batch's spans, prefixes and mixed causality."""
    name, record = impl.backend.get_name(), impl.backend.capabilities
    mask = attn_metadata.mask
    # Trees are left out because `check_masks` checks them with conditions of their own; sorted, so that the same batch
    # always raises the same one of several errors.
    for feature in sorted(batch_features(mask) - {Feature.TREE_MASK}):
        if feature not in record.features:
            raise UnsupportedError(f"{name}: {record.not_supported(feature)}")
        if impl.attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"{name}: {feature} not supported with {impl.attn_type} attention")
    # A right bound of 0 cuts no span: it is causality, which spans are there to lift (docs/semantics.md §18).
    if mask.spans is not None and (impl.window[0] is not None or impl.window[1]) and impl.mask.span_window is None:
        raise UnsupportedError(
            f"{name}: the batch has spans and the layer a window, and models differ in whether a window cuts a span: pass "
            "span_window=True or False to the layer"
        )


def request_of(impl: Any, features: Collection[str]) -> Request:
    """Return the request of an implementation's layer, except the dtype, which is known from the arrays of a call."""
    named = ("head_size", "kv_cache_dtype", "attn_type", "num_heads", "num_kv_heads")
    # The group is a property of the process, not of the layer's arguments, so the feature is added here: a backend
    # without it would return the attention over this rank's keys as if they were all.
    required = frozenset(features) | ({Feature.DCP} if impl.dcp_world_size > 1 else set())
    arguments: dict[str, Any] = {name: getattr(impl, name) for name in named}
    # Any served dtype, so that the dtype is no reason here: each call checks its own arrays.
    return Request(dtype=impl.backend.capabilities.dtypes[0], features=required, **arguments)


def refuse(backend: Any, request: Request) -> None:
    """Raise `UnsupportedError` with the reasons of backend class `backend` for rejecting `request`, if any."""
    reasons = backend.why_not(request)
    if reasons:
        raise UnsupportedError(f"{backend.get_name()} does not serve {request}: {'; '.join(reasons)}", reasons)
