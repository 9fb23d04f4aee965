"""Shared memory by architecture, and what it forbids: facts that capability records need where Triton is not installed."""

#: Shared memory that one program may use, in bytes (NVIDIA: opt-in limit a block; AMD: LDS a workgroup).
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
UNKNOWN = 65536  #: what an architecture that is not listed is taken to have: the least of those that are
_TILES = 3072  #: bytes that the smallest tiles of keys and weights take beside the queries (by the compiler's reports)


def largest_group(arch: str, head_size: int, itemsize: int, most: int) -> int:
    """Query heads a kv head, up to `most`, whose rows one program can hold: NVIDIA's tensor cores read them from shared
    memory, float32 ones three times (as the tf32 parts that stand for them). AMD's read registers."""
    if not arch.startswith("sm_"):
        return most
    row = (1 << (head_size - 1).bit_length()) * (3 * itemsize if itemsize == 4 else itemsize)
    while most > 16 and most * row + _TILES > SHARED_MEMORY.get(arch, UNKNOWN):
        most //= 2
    return most


def holds_float32_latents(arch: str, head_size: int) -> bool:
    """Whether one program can hold 16 rows of float32 latents beside 16 queries: both whole, and the latents once more for the
    weights' product (NVIDIA; 106,496 bytes for 512 + 64 by the compiler's report). AMD's read registers."""
    if not arch.startswith("sm_"):
        return True
    latent = 1 << (head_size - 1).bit_length() - 1
    rope = max(64, 1 << (head_size - latent - 1).bit_length())
    return 16 * 4 * (3 * latent + 2 * rope) <= SHARED_MEMORY.get(arch, UNKNOWN)
