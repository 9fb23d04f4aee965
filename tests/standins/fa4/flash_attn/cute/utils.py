"""FlashAttention 4's `flash_attn/cute/utils.py` at 4.0.0b36: the part that the adapter's `mask_mod` calls."""

from typing import Any


def scalar_to_ssa(a: Any, dtype: type) -> tuple[Any]:
    """A vector of one number."""
    return (a,)
