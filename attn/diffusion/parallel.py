"""Which heads a member of a group holds, when a group shares a sequence: the rules that both trees refuse by."""

from attn.backends.arguments import check_heads
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
        if causal:
            raise UnsupportedError(f"ring: a causal layer is not supported ({members} would wait for each other): take ulysses")
        return num_heads, num_kv_heads, head_size
    for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if heads % size:
            raise ShapeError(f"{name}={heads} over {size} {members}: Ulysses needs a multiple (ring does not)")
    return num_heads // size, num_kv_heads // size, head_size
