"""Pages that come from elsewhere (a file, another machine, another pool) and go into a paged cache: what is checked of them.

Pages are whole blocks in the logical layout [n, P, ...], whatever a backend's own is. Their elements are numbers, which the
cache's own write casts or quantises, or codes of the cache's element type, which are stored bit for bit.
"""

from typing import TYPE_CHECKING, Any

from attn.backends.arguments import as_int
from attn.dtypes import PER_TOKEN_HEAD, dtype_name, kv_cache_element
from attn.errors import DTypeError, MetadataError, ShapeError, UnsupportedError

if TYPE_CHECKING:
    from attn.backends.metadata import IntArray

_NUMBERS = ("float64", "float32", "float16", "bfloat16")
#: Rows that carry their scales with them: codes alone are not all of what is stored.
_OWN_SCALES = PER_TOKEN_HEAD | {"fp8_ds_mla"}


def page_slots(block_ids: Any, num_blocks: int, block_size: int) -> "IntArray":
    """[n * P] slots of the pages `block_ids` [n] of a cache. Raises `MetadataError` for ids that are not n different blocks."""
    import numpy as np

    ids = [as_int(entry) for entry in block_ids]
    for i, number in enumerate(ids):
        if number is None or not 0 <= number < num_blocks:
            raise MetadataError("block_ids", i, block_ids[i], f"between 0 and {num_blocks - 1}")
        if number in ids[:i]:
            raise MetadataError("block_ids", i, number, "named once")
    return (np.array(ids, np.int64)[:, None] * block_size + np.arange(block_size)).ravel()


def check_pages(name: str, pages: Any, want: tuple[int, ...], kv_cache_dtype: str, dtype: str) -> bool:
    """Whether `pages` hold codes of a quantised cache, to be stored as they are.

    want: their shape. dtype: the layer's. Raises `ShapeError`, `DTypeError` for what is neither numbers nor codes, and
    `UnsupportedError` for codes of a cache that keeps scales beside them.
    """
    if tuple(pages.shape) != want:
        raise ShapeError(f"{name} has shape {list(pages.shape)}: must be {list(want)}, [blocks, block_size, ...]")
    found, element = dtype_name(pages.dtype), kv_cache_element(kv_cache_dtype, dtype)
    if found in _NUMBERS:
        return False
    if kv_cache_dtype in _OWN_SCALES:
        raise UnsupportedError(f"{name} has dtype {found}: {kv_cache_dtype} keeps its own scales, so pages must be numbers")
    if found != element:
        raise DTypeError(
            f"{name} has dtype {found}: must be a float dtype (numbers), or {element} (elements as they are stored)"
        )
    return True
