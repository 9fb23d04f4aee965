"""Dtypes by canonical name, whoever's object they come as.

The core speaks of dtypes as strings (`"bfloat16"`), since it imports no framework. A `torch.dtype`, a NumPy or
ml_dtypes dtype, a `jax.numpy` scalar type and the string itself all have one name here, and the object's kind tells
which framework the caller lives in.
"""

from dataclasses import dataclass
from typing import Any

from attn.errors import DTypeError


@dataclass(frozen=True)
class DTypeInfo:
    """What the core needs to know of a dtype: its name, bytes an element, and kind (`float`, `int`, `bool`)."""

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
_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}

#: `kv_cache_dtype` strings (vLLM's words) and the element type each stores; "auto" is the model's own dtype.
KV_CACHE_DTYPES = {
    "auto": None,
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "float8_e4m3fn",
    "fp8_ds_mla": "uint8",
}
#: Caches whose tokens have a scale of their own for each kv head, a float32 kept in the same blocks (docs/semantics.md §10).
PER_TOKEN_HEAD = frozenset({"int8_per_token_head", "fp8_per_token_head"})


def dtype_name(dtype: Any) -> str:
    """The canonical name of `dtype`, from any framework. Raises `DTypeError` for what is no dtype known here."""
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        name = _ALIASES.get(name, name)
    elif type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
    else:
        inner = getattr(dtype, "dtype", None)  # jnp.float32 is a scalar type that carries its dtype
        named = getattr(dtype, "name", None) or getattr(inner, "name", None) or getattr(dtype, "__name__", "")
        name = str(named).rstrip("_")
    if name not in DTYPES:
        raise DTypeError(f"dtype {dtype!r} is unknown; known: {', '.join(DTYPES)}")
    return name


def framework_of_dtype(dtype: Any) -> str | None:
    """`"torch"` or `"jax"` by the kind of object `dtype` is; None for a bare string, which belongs to nobody."""
    if isinstance(dtype, str):
        return None
    return "torch" if type(dtype).__module__ == "torch" else "jax"


def kv_cache_row(kv_cache_dtype: str | None, head_size: int) -> int:
    """Elements that one head of one token takes in a cache: `head_size`, and four bytes where it has its own scale; 656
    bytes of `fp8_ds_mla`, whatever the size."""
    if kv_cache_dtype == "fp8_ds_mla":
        return 656
    return head_size + 4 * (kv_cache_dtype in PER_TOKEN_HEAD)


def kv_cache_element(kv_cache_dtype: str | None, dtype: str) -> str:
    """The element type that a cache of `kv_cache_dtype` stores for a model of `dtype`. Raises `DTypeError`."""
    key = kv_cache_dtype or "auto"
    if key not in KV_CACHE_DTYPES:
        raise DTypeError(f"kv_cache_dtype {key!r} is unknown; known: {', '.join(KV_CACHE_DTYPES)}")
    return KV_CACHE_DTYPES[key] or dtype


@dataclass(frozen=True)
class QuantKey:
    """A quantised tensor's format: what an output-quantisation pass asks an implementation about.

    `dtype` is the stored element type by canonical name, `granularity` one of `per_tensor`, `per_head`,
    `per_token_head`, `per_block`, `static` whether the scale is known beforehand, `symmetric` whether zero maps to
    zero.
    """

    dtype: str
    granularity: str = "per_tensor"
    static: bool = True
    symmetric: bool = True


kFp8StaticTensorSym = QuantKey("float8_e4m3fn")
