"""Shared memory by architecture, and the limits it sets: facts that capability records need without Triton installed."""

from typing import Any

#: Shared memory that one program may use, in bytes (NVIDIA: opt-in limit per block; AMD: LDS per workgroup).
SHARED_MEMORY = {
    "sm_75": 65536,
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_103": 232448,
    "sm_120": 101376,
    "gfx90a": 65536,
    "gfx942": 65536,
    "gfx950": 163840,
    "gfx1100": 65536,
    "gfx1201": 65536,
}
UNKNOWN = 65536  #: assumed for unlisted architectures: the least of the listed ones
_LARGEST_GROUP = 256  #: query heads per kv head, which are rows of one tile
_WIDE = 256  #: of wider heads, programs hold fewer rows and dtypes
_LARGEST_GROUP_WIDE = 64  #: 128 rows of 512 and the least keys need 167,940 bytes (sm_80) and 262,144 (sm_90)
_TILES = 3072  #: bytes of the smallest tiles of keys and weights beside the queries (by the compiler's reports)


def largest_group(arch: str, head_size: int, itemsize: int, most: int) -> int:
    """Query heads per kv head, up to `most`, whose rows one program can hold.

    NVIDIA's tensor cores read them from shared memory, float32 ones three times (as the tf32 parts that replace them).
    AMD's read registers.
    """
    if not arch.startswith("sm_"):
        return most
    if head_size > _WIDE:
        most = min(most, _LARGEST_GROUP_WIDE)
    row = (1 << (head_size - 1).bit_length()) * (3 * itemsize if itemsize == 4 else itemsize)
    while most > 16 and most * row + _TILES > SHARED_MEMORY.get(arch, UNKNOWN):
        most //= 2
    return most


def group_reason(arch: str, request: Any) -> str:
    """Why no program of `paged_attention` holds the rows of a `Request`'s kv head on `arch` ("": unknown); "" if one does."""
    # by the compilers' reports: rows of three tf32 parts spill thousands of registers, those of waves of 32 hundreds
    if request.head_size > _WIDE and (arch.startswith("gfx1") or (arch.startswith("sm_") and request.dtype == "float32")):
        return f"head_size={request.head_size} in {request.dtype} on {arch} (supports up to {_WIDE})"
    if not (request.num_heads and request.num_kv_heads):
        return ""
    largest = largest_group(arch, request.head_size, 4 if request.dtype == "float32" else 2, _LARGEST_GROUP)
    if request.num_heads <= largest * request.num_kv_heads:
        return ""
    heads = f"num_heads={request.num_heads} for num_kv_heads={request.num_kv_heads}"
    where = f" at head_size={request.head_size} in {request.dtype} on {arch}" if arch else ""
    return f"{heads} (supports up to {largest} per kv head{where})"


def latent_reason(arch: str, request: Any) -> str:
    """Why no program of `mla_decode` holds the float32 latents of a `Request` on `arch` ("": an unknown one of NVIDIA's); "" if
    one does.

    It holds 16 rows beside 16 queries, both whole, and the latents once more for the product with the weights (NVIDIA; 106,496
    bytes for 512 + 64 by the compiler's report). AMD's matrix cores read registers.
    """
    float32 = request.dtype == "float32" and request.kv_cache_dtype in ("auto", "float32")
    if not float32 or not (arch or "sm_").startswith("sm_"):
        return ""
    latent = 1 << (request.head_size - 1).bit_length() - 1
    rope = max(64, 1 << (request.head_size - latent - 1).bit_length())
    if 16 * 4 * (3 * latent + 2 * rope) <= SHARED_MEMORY.get(arch, UNKNOWN):
        return ""
    cache = f"a float32 cache of head_size={request.head_size} on {arch or 'an unknown arch'}"
    return f"{cache}: its latents exceed the shared memory"
