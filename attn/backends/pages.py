"""Checks for pages loaded into a paged cache from elsewhere (a file, another machine, another pool).

Pages are whole blocks in the logical layout [n, P, ...], independent of the backend's layout. Their elements are values, which
the cache's write casts or quantises, or codes of the cache's element type, which are stored bit for bit.
"""

from typing import TYPE_CHECKING, Any

from attn.arguments import as_int
from attn.dtypes import PER_TOKEN_HEAD, dtype_name, kv_cache_element
from attn.errors import DTypeError, MetadataError, ShapeError, UnsupportedError

if TYPE_CHECKING:
    from attn.backends.metadata import IntArray

_NUMBERS = ("float64", "float32", "float16", "bfloat16")
#: Cache dtypes whose rows include their scales: codes alone are not complete.
_OWN_SCALES = PER_TOKEN_HEAD | {"fp8_ds_mla"}


def page_slots(block_ids: Any, num_blocks: int, block_size: int) -> "IntArray":
    """Return the [n * P] slots of the pages `block_ids` [n]. Raises `MetadataError` unless they are n distinct blocks."""
    import numpy as np

    # One by one, so that the message has the entry: a float or a bool is a mistake, and -1 would be the last page.
    ids = [as_int(entry) for entry in block_ids]
    for i, number in enumerate(ids):
        if number is None or not 0 <= number < num_blocks:
            raise MetadataError("block_ids", i, block_ids[i], f"between 0 and {num_blocks - 1}")
        if number in ids[:i]:
            raise MetadataError("block_ids", i, number, "listed once")
    # int64, as every slot mapping: the slots of a large cache of few heads may exceed int32.
    return (np.array(ids, np.int64)[:, None] * block_size + np.arange(block_size)).ravel()


def check_pages(name: str, pages: Any, want: tuple[int, ...], kv_cache_dtype: str, dtype: str) -> bool:
    """Return whether `pages` hold codes of a quantised cache, to be stored bit for bit.

    want: their shape. dtype: the layer's. Raises `ShapeError`, `DTypeError` for dtypes that are neither values nor codes,
    and `UnsupportedError` for codes of a cache that stores scales with them.
    """
    if tuple(pages.shape) != want:
        raise ShapeError(f"{name} has shape {list(pages.shape)}: must be {list(want)}, [blocks, block_size, ...]")
    page_dtype, element = dtype_name(pages.dtype), kv_cache_element(kv_cache_dtype, dtype)
    # Floats are values even for a float cache: the cache's write casts them as it casts new tokens.
    if page_dtype in _NUMBERS:
        return False
    if kv_cache_dtype in _OWN_SCALES:
        raise UnsupportedError(f"{name} has dtype {page_dtype}: {kv_cache_dtype} stores scales too, so pages must be floats")
    if page_dtype != element:
        raise DTypeError(
            f"{name} has dtype {page_dtype}: must be a float dtype (values) or {element} (codes, stored bit for bit)"
        )
    return True
