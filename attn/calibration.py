"""Scales of a quantised cache, from a sample of keys and values."""

from typing import Any

from attn import arrays
from attn.dtypes import DTYPES, KV_CACHE_DTYPES, PER_TOKEN_HEAD, dtype_name
from attn.errors import DTypeError, ShapeError

_SCALED = [
    name
    for name, element in KV_CACHE_DTYPES.items()
    # Caches of 16 bits take no scale, those with a scale per token and head compute their own, and rows of fp8_ds_mla
    # are bytes.
    if element in ("int8", "float8_e4m3fn", "float8_e5m2") and name not in PER_TOKEN_HEAD
]


def kv_cache_scales(keys: Any, values: Any, kv_cache_dtype: str = "int8", *, per_head: bool = False) -> tuple[Any, Any]:
    """Return (k_scale, v_scale) for a layer's quantised cache: the largest absolute value of each over the largest code.

        k_scale, v_scale = attn.kv_cache_scales(keys, values, "int8")
        layer = attn.torch.Attention(..., kv_cache_dtype="int8", k_scale=k_scale, v_scale=v_scale)

    keys, values: [..., K, D] of any framework: what the layer would cache (keys after rotary embedding) for text like the text
    to be served. Larger values met later are clipped. kv_cache_dtype: "int8" or an fp8 format.

    Returns two floats or, with `per_head`, two float32 NumPy arrays [K], for backends with the feature "per_head_scales". A
    scale is 1 where all numbers are 0. Raises `DTypeError` for a cache without scales and for arrays that are not of floats,
    `ShapeError`, ValueError for numbers that are not finite, and TypeError for anything but an array.
    """
    if kv_cache_dtype not in _SCALED:
        raise DTypeError(f"kv_cache_dtype={kv_cache_dtype!r} has no k_scale and v_scale; with scales: {', '.join(_SCALED)}")
    largest = DTYPES[KV_CACHE_DTYPES[kv_cache_dtype] or ""].max
    k_scale, v_scale = (_scale(name, x, largest, per_head) for name, x in (("keys", keys), ("values", values)))
    return k_scale, v_scale


def _scale(name: str, array: Any, largest: float, per_head: bool) -> Any:
    import numpy as np

    framework, shape = arrays.framework_of(array), tuple(array.shape)
    if len(shape) < 2 or 0 in shape:
        raise ShapeError(f"{name} has shape {list(shape)}: must be [..., K, D], with at least one token")
    if dtype_name(array.dtype) not in ("float64", "float32", "float16", "bfloat16"):
        raise DTypeError(f"{name} has dtype {dtype_name(array.dtype)}: must be floats, as they are before quantisation")
    # [..., K, D] -> [tokens, K, D]. The maxima are computed where the array is, and only K numbers are copied to the host.
    tokens = abs(array.reshape(-1, *shape[-2:]))
    maxima = np.asarray((tokens.amax((0, 2)) if framework == "torch" else tokens.max((0, 2))).tolist(), np.float64)
    # The maximum of numbers with a NaN is NaN, with an infinity infinite, so the K maxima say it of all numbers.
    if not np.isfinite(maxima).all():
        raise ValueError(f"{name} has numbers that are not finite, in kv head {int(np.argmin(np.isfinite(maxima)))}")
    maxima = maxima if per_head else maxima.max(keepdims=True)
    limits = np.finfo(np.float32)
    if maxima.max() / largest > limits.max:
        raise ValueError(f"{name} has numbers of up to {maxima.max():g}: their scale exceeds float32")
    # At least the smallest normal number: a share that rounds to 0, or that a GPU flushes to 0, would be divided by.
    scale = np.where(maxima == 0, 1.0, np.maximum(maxima / largest, limits.tiny)).astype(np.float32)
    return scale if per_head else float(scale[0])
