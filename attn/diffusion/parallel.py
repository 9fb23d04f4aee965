"""What each member of a group runs when the group shares a sequence: its heads and features, and what is refused."""

from collections.abc import Collection

from attn.backends.arguments import check_flag, check_heads, list_of_names
from attn.capabilities import Feature
from attn.errors import ShapeError, UnsupportedError

STRATEGIES = ("ulysses", "ring")


def share_heads(
    num_heads: int, num_kv_heads: int | None, head_size: int, *, strategy: str, causal: bool, size: int, members: str
) -> tuple[int, int, int]:
    """(num_heads, num_kv_heads, head_size) of the layer that each of `size` members ("ranks", "devices") runs.

    Raises ValueError for an unknown strategy, `ShapeError` for heads that the members do not divide, `UnsupportedError` for
    causal rings, and what `check_heads` raises.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is unknown; known: {', '.join(STRATEGIES)}")
    num_heads, num_kv_heads, head_size = check_heads(num_heads, num_kv_heads, head_size)
    if strategy == "ring":
        if check_flag("causal", causal):
            raise UnsupportedError(f"ring: a causal layer is not supported ({members} would wait for each other): take ulysses")
        return num_heads, num_kv_heads, head_size
    for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if heads % size:
            raise ShapeError(f"{name}={heads} over {size} {members}: Ulysses needs a multiple (ring does not)")
    return num_heads // size, num_kv_heads // size, head_size


def wanted_features(strategy: str, features: Collection[str]) -> tuple[str, ...]:
    """What the layer that each member runs must serve: for a ring the log-sum-exp, by which partial results are merged."""
    return (*list_of_names("features", features), *((Feature.LSE.value,) if strategy == "ring" else ()))
