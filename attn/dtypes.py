"""Canonical dtype names for the dtype objects of every framework.

The core represents dtypes as strings (`"bfloat16"`), since it imports no framework. A `torch.dtype`, a NumPy or ml_dtypes
dtype, a `jax.numpy` scalar type and the string itself share one name, and the object's type determines the caller's
framework.
"""

from dataclasses import dataclass
from typing import Any

from attn.errors import DTypeError


@dataclass(frozen=True)
class DTypeInfo:
    """Properties of a dtype: its name, bytes per element, and kind (`float`, `int`, `bool`)."""

    name: str
    itemsize: int
    kind: str
    max: float


_INFOS = (
    DTypeInfo("float64", 8, "float", 1.7976931348623157e308),
    DTypeInfo("float32", 4, "float", 3.4028234663852886e38),
    DTypeInfo("float16", 2, "float", 65504.0),
    DTypeInfo("bfloat16", 2, "float", 3.3895313892515355e38),
    DTypeInfo("float8_e4m3fn", 1, "float", 448.0),
    DTypeInfo("float8_e5m2", 1, "float", 57344.0),
    DTypeInfo("float8_e4m3fnuz", 1, "float", 240.0),
    DTypeInfo("int64", 8, "int", 2.0**63 - 1),
    DTypeInfo("int32", 4, "int", 2.0**31 - 1),
    DTypeInfo("int16", 2, "int", 32767),
    DTypeInfo("int8", 1, "int", 127),
    DTypeInfo("uint8", 1, "int", 255),
    DTypeInfo("bool", 1, "bool", 1),
)
DTYPES = {info.name: info for info in _INFOS}
# Names that torch and users have for the same dtypes; NumPy's `half`, `single` and `double` reach `dtype_name` as dtype
# objects, which have canonical names.
_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}

#: `kv_cache_dtype` strings (vLLM's) and the element type each stores; "auto" is the model's dtype.
# vLLM's "fp8" is e4m3; the fnuz format is a device's (AMD's MI300), not a name of a cache.
KV_CACHE_DTYPES = {
    "auto": None,
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
    "int4_per_token_head": "uint8",
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "float8_e4m3fn",
    "fp8_ds_mla": "uint8",
}
#: Caches with a float32 scale per token and kv head, stored in the same blocks (docs/semantics.md §10).
PER_TOKEN_HEAD = frozenset({"int4_per_token_head", "int8_per_token_head", "fp8_per_token_head"})


def needs_scales(kv_cache_dtype: str | None) -> bool:
    """Whether values that are cached with a scale of 1 lose most of their precision: int8 without scales of its own."""
    # fp8 codes are floats: without a scale they saturate at their largest value, but keep their precision.
    return KV_CACHE_DTYPES.get(kv_cache_dtype or "auto") == "int8" and kv_cache_dtype not in PER_TOKEN_HEAD


def dtype_name(dtype: Any) -> str:
    """Return the canonical name of `dtype`, from any framework. Raises `DTypeError` for an unknown dtype."""
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        # Strings only: a Python `float` is no dtype here, since torch's default and NumPy's differ.
        name = _ALIASES.get(name, name)
    elif type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
    else:
        inner = getattr(dtype, "dtype", None)  # jnp.float32 is a scalar type with a dtype attribute
        named = getattr(dtype, "name", None) or getattr(inner, "name", None) or getattr(dtype, "__name__", "")
        name = str(named).rstrip("_")  # np.bool_ before NumPy 2
    if name not in DTYPES:
        raise DTypeError(f"dtype {dtype!r} is unknown; known: {', '.join(DTYPES)}")
    return name


def framework_of_dtype(dtype: Any) -> str | None:
    """Return "torch" or "jax" by the type of `dtype`; None for a string, which belongs to neither."""
    if isinstance(dtype, str):
        return None
    return "torch" if type(dtype).__module__ == "torch" else "jax"


def kv_cache_row(kv_cache_dtype: str | None, head_size: int) -> int:
    """Return the number of elements that one head of one token takes in a cache: `head_size`, or half of it where two codes
    share a byte, plus four bytes if it has its own scale; 656 bytes for `fp8_ds_mla` of any size."""
    # 512 codes, four float32 scales and 64 bfloat16 numbers (docs/semantics.md §9), whatever the sizes of the model:
    # layers of other sizes are refused.
    if kv_cache_dtype == "fp8_ds_mla":
        return 656
    # Elements are one byte wide in these formats, so a float32 scale takes four of them.
    codes = head_size // 2 if kv_cache_dtype == "int4_per_token_head" else head_size
    return codes + 4 * (kv_cache_dtype in PER_TOKEN_HEAD)


def kv_cache_element(kv_cache_dtype: str | None, dtype: str) -> str:
    """Return the element type that a cache of `kv_cache_dtype` stores for a model of `dtype`. Raises `DTypeError`."""
    key = kv_cache_dtype or "auto"
    if key not in KV_CACHE_DTYPES:
        raise DTypeError(f"kv_cache_dtype {key!r} is unknown; known: {', '.join(KV_CACHE_DTYPES)}")
    return KV_CACHE_DTYPES[key] or dtype


@dataclass(frozen=True)
class QuantKey:
    """A quantised tensor's format, for which an output-quantisation pass queries an implementation.

    `dtype` is the stored element type by canonical name, `granularity` one of `per_tensor`, `per_head`,
    `per_token_head`, `per_block`, `static` whether the scale is known beforehand, `symmetric` whether zero maps to
    zero.
    """

    dtype: str
    granularity: str = "per_tensor"
    static: bool = True
    symmetric: bool = True


kFp8StaticTensorSym = QuantKey("float8_e4m3fn")
