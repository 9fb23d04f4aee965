"""The frequencies of rotary position embeddings, plain or scaled to a longer context.

A head of size D rotates D/2 pairs of elements, i with i + D/2; pair i rotates by `position * inv_freq[i]`
radians. Scaling lowers the frequencies: `linear` all alike (position interpolation), `llama3` and `yarn`
(Peng et al., 2023, arXiv:2309.00071) only those of pairs that do not complete enough turns within the trained
length. Everything is computed in float64 and rounded once at the end.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attn.fields import CheckpointError, Fields

if TYPE_CHECKING:
    from attn.tools.demo.config import ModelConfig

LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies beyond the trained length; `rope_type` determines which fields apply."""

    rope_type: str  # linear, llama3 or yarn
    factor: float
    original_max_position_embeddings: int  # the length before scaling; llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn, as are all that follow
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: from factor and the two below
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def read_rope(fields: Fields, length: int) -> tuple[float, RopeScaling | None]:
    """Return the base of the rotary frequencies and their scaling, from either form of the configuration.

    Older files have `rope_theta` and a `rope_scaling` object, newer ones only `rope_parameters`. If both are given,
    the older object takes precedence; a `rope_theta` inside the object takes precedence over the one outside.
    """
    name = next((name for name in ("rope_scaling", "rope_parameters") if fields.values.get(name)), None)
    rope = fields.section(name) if name else Fields({}, fields.source)
    theta = rope.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    # Frequencies would not fall with the pair's index, and the logarithm below needs a base above 1.
    if theta <= 1:
        raise CheckpointError(f"{rope.source}: rope_theta = {theta}: must be greater than 1")
    if name and any(rope_type in rope.values for rope_type in LAYER_TYPES):
        raise fields.wrong(name, "one object for all layers, not one per layer type")
    for where in (fields, rope):
        if where.number("partial_rotary_factor", default=1.0) != 1:
            raise where.wrong("partial_rotary_factor", "1, as whole heads are rotated")
    # Older files say `type`.
    key = "rope_type" if "rope_type" in rope.values else "type"
    rope_type = rope.values.get(key, "default")
    if rope_type not in _ROPE_TYPES:
        raise rope.wrong(key, f"one of {', '.join(_ROPE_TYPES)}")
    return theta, None if rope_type == "default" else _scaling(rope_type, rope, fields, length)


def _scaling(rope_type: str, rope: Fields, fields: Fields, length: int) -> RopeScaling:
    # Some files state it beside the rope's object.
    outside = "original_max_position_embeddings"
    holder = fields if fields.has(outside) else rope
    original = holder.integer(outside) if holder.has(outside) else length
    if rope_type == "linear":
        return RopeScaling(rope_type, rope.number("factor"), original)
    if rope_type == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not low < high:
            raise rope.wrong("low_freq_factor", f"less than high_freq_factor = {high}")
        return RopeScaling(rope_type, rope.number("factor"), original, low, high)
    # As in transformers: an explicit null stands for the ratio of the lengths, a missing factor is an error.
    by_lengths = length / original if "factor" in rope.values else None  # the meaning of a null factor
    return RopeScaling(
        rope_type,
        rope.number("factor", default=by_lengths),
        original,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def rope_frequencies(config: "ModelConfig") -> tuple[np.ndarray, float]:
    """Return `(inv_freq, attention_scaling)`: float32 [D/2], radians per position; and a factor on cos and sin."""
    size = config.head_size
    # theta ** (-2 i / D) for pair i.
    plain = config.rope_theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    scaling = config.rope_scaling
    if scaling is None:
        return plain.astype(np.float32), 1.0
    if scaling.rope_type == "linear":
        return (plain / scaling.factor).astype(np.float32), 1.0
    if scaling.rope_type == "llama3":
        return _blend(plain, scaling.factor, _llama3_share(plain, scaling)), 1.0
    return _blend(plain, scaling.factor, _yarn_share(config, scaling)), _yarn_attention_scaling(scaling)


def _blend(plain: np.ndarray, factor: float, weight: np.ndarray) -> np.ndarray:
    """Return `plain` where `weight` is 1, `factor` times lower where it is 0, interpolated in between; all [D/2]."""
    return (plain * weight + plain / factor * (1 - weight)).astype(np.float32)


def _llama3_share(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Return how much of each frequency is kept [D/2]: a ramp in the number of turns within the trained length."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Fast pairs (more turns than `high`) keep their frequency, slow ones (fewer than `low`) are interpolated.
    turns: np.ndarray = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    return np.clip((turns - low) / (high - low), 0, 1)


def _yarn_share(config: "ModelConfig", scaling: RopeScaling) -> np.ndarray:
    """Return how much of each frequency is kept [D/2]: a ramp in the pair's index, between two counts of turns."""
    size = config.head_size

    def pair(turns: float) -> float:
        """Return the (fractional) index of the pair that completes `turns` turns within the trained length."""
        trained = scaling.original_max_position_embeddings
        # Solves trained * theta ** (-2 i / D) = 2 pi * turns for i (YaRN, arXiv:2309.00071).
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # size - 1, not size / 2 - 1, as in transformers: the ramp may end beyond the last pair.
    first, last = max(first, 0), min(last, size - 1)
    width = last - first or 0.001  # a width of 0 would divide by zero
    return 1 - np.clip((np.arange(size // 2) - first) / width, 0, 1)


def _yarn_attention_scaling(scaling: RopeScaling) -> float:
    """Return the factor on cos and sin, which sharpens attention over the longer context."""

    def growth(weight: float) -> float:
        # The paper's fit of a temperature: sqrt(1 / t) = 0.1 ln(s) + 1, on queries and keys alike.
        return 0.1 * weight * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return growth(scaling.mscale) / growth(scaling.mscale_all_dim)
    return growth(1.0)
