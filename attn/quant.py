"""Descriptions of quantised data: what an output-quantisation pass asks an implementation about."""

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantKey:
    """A quantised tensor's format.

    `dtype` is the stored element type by canonical name, `granularity` one of `per_tensor`, `per_head`,
    `per_token_head`, `per_block`, `static` whether the scale is known beforehand, `symmetric` whether zero maps to
    zero.
    """

    dtype: str
    granularity: str = "per_tensor"
    static: bool = True
    symmetric: bool = True


kFp8StaticTensorSym = QuantKey("float8_e4m3fn")
