"""What each member of a group that shares a sequence computes: its heads and features, and unsupported combinations."""

from collections.abc import Collection

from attn.arguments import check_flag, check_heads, list_of_names
from attn.capabilities import Feature
from attn.errors import ShapeError, UnsupportedError

STRATEGIES = ("ulysses", "ring")


def share_heads(
    num_heads: int, num_kv_heads: int | None, head_size: int, *, strategy: str, causal: bool, size: int, members: str
) -> tuple[int, int, int]:
    """Return (num_heads, num_kv_heads, head_size) of the layer on each of `size` members ("ranks", "devices").

    Raises ValueError for an unknown strategy, `ShapeError` for heads not divisible by `size`, `UnsupportedError` for causal
    rings, and the exceptions of `check_heads`.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is unknown; known: {', '.join(STRATEGIES)}")
    num_heads, num_kv_heads, head_size = check_heads(num_heads, num_kv_heads, head_size)
    if strategy == "ring":
        if check_flag("causal", causal):
            raise UnsupportedError(f"ring: a causal layer is not supported ({members} would wait for each other): use ulysses")
        return num_heads, num_kv_heads, head_size
    for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if heads % size:
            raise ShapeError(f"{name}={heads} over {size} {members}: Ulysses needs a multiple (ring does not)")
    return num_heads // size, num_kv_heads // size, head_size


def wanted_features(strategy: str, features: Collection[str]) -> tuple[str, ...]:
    """Return the features that each member's layer requires: for a ring also `lse`, for merging partial results."""
    return (*list_of_names("features", features), *((Feature.LSE.value,) if strategy == "ring" else ()))
