"""What the backends on our TPU kernels share: a limit of the compiler that an interpreter does not know."""

import jax.numpy as jnp

from attn.capabilities import Device, Request
from attn.dtypes import kv_cache_element

_TILE_BYTES = 32  #: of a native tile's column: 8 rows of 4-byte elements, 16 of 2 bytes, 32 of one


def why_not_tiles(request: Request, device: Device | None) -> list[str]:
    """The reason against pages that are no whole tiles, which Mosaic cannot address ("unproven memory access alignment")."""
    if device is None or device.platform != "tpu" or request.block_size is None:
        return []
    rows = _TILE_BYTES // jnp.dtype(kv_cache_element(request.kv_cache_dtype, request.dtype)).itemsize
    if request.block_size % rows == 0:
        return []
    asked = f"block_size={request.block_size} with kv_cache_dtype={request.kv_cache_dtype} on a TPU"
    return [f"{asked} (supports multiples of {rows})"]
