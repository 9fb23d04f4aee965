"""Models of quantised attention in NumPy, the source of the errors that approximate dense backends declare.

A model rounds what the kernels round, in the same groups, and is exact elsewhere; `measured` compares it with plain attention
over inputs of many kinds. A backend declares the worst of them (`DiffusionAttentionBackend.error`), held to it by tests: the
relative RMS error grows with the spread of the scores and with the tails of queries and keys, and shrinks with whatever the
values have in common. Values here have nothing in common.

Formats and groups, as in the sources of 2026-11: SageAttention 1.0.6 (`quant_per_block.py`), ours
(`attn/torch/kernels/int8_attention.py`), SageAttention 3 (`api.py`, `softmax_fused.h`, `fp4_quantization_4d.cu`; its order of
keys within a tile, which only says which sixteen share a scale, is left out).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from attn.testing import bits

F64 = npt.NDArray[np.float64]
Model = Callable[[F64, F64, F64], F64]


def rounded(x: Any, dtype: str) -> F64:
    """`x` as numbers of a dtype."""
    return np.asarray(bits.decode(bits.encode(np.asarray(x, np.float32), dtype), dtype), np.float64)


def exact(query: F64, key: F64, value: F64) -> F64:
    """Attention of one head, all [S, D], D a power of two, scale 1 / sqrt(D)."""
    return _weighed(query @ key.T, value)


def _weighed(scores: F64, value: F64, dtype: str = "") -> F64:
    p = np.exp((scores - scores.max(-1, keepdims=True)) / np.sqrt(value.shape[1]))
    return np.asarray((rounded(p, dtype) if dtype else p) @ value / p.sum(-1, keepdims=True))


def int8(x: F64, rows: int) -> F64:
    """[S, D] in 255 steps, one scale for so many rows."""
    out = np.zeros_like(x)
    for i in range(0, len(x), rows):
        if step := np.abs(x[i : i + rows]).max() / 127:
            out[i : i + rows] = np.rint(x[i : i + rows] / step) * step
    return out


def int8_scores(query_rows: int, key_rows: int, dtype: str, smooth: bool = True) -> Model:
    """8-bit queries and keys, a scale for so many rows of each; weights in a 16-bit dtype. `smooth`: keys less their mean."""

    def model(query: F64, key: F64, value: F64) -> F64:
        key = key - key.mean(0) if smooth else key
        return _weighed(int8(query, query_rows) @ int8(key, key_rows).T, value, dtype)

    return model


def e2m1(x: F64) -> F64:
    """4-bit floats: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, nearest, ties to even, beyond 6 it is 6."""
    size = np.abs(x)
    step = np.where(size < 2, 0.5, np.where(size < 4, 1.0, 2.0))
    return np.asarray(np.sign(x) * np.minimum(np.rint(size / step) * step, 6))


def nvfp4(x: F64) -> F64:
    """e2m1 along the last dimension, every sixteen with an e4m3 scale: their largest over 6."""
    groups = x.reshape(*x.shape[:-1], -1, 16)
    scale = rounded(np.abs(groups).max(-1, keepdims=True) / 6, "float8_e4m3fn")
    return np.asarray((e2m1(groups / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape))


def sage3(query: F64, key: F64, value: F64) -> F64:
    """Everything in 4 bits: queries less the mean of 128 of them (whose scores are added exactly), keys less their mean,
    values in groups along the sequence, weights brought to 0..448 * 6 row by row."""
    key = key - key.mean(0)
    middle = np.repeat(query.reshape(-1, 128, query.shape[1]).mean(1), 128, 0)
    scores = nvfp4(query - middle) @ nvfp4(key).T + middle @ key.T
    p = np.exp((scores - scores.max(-1, keepdims=True)) / np.sqrt(query.shape[1]))
    groups = (p * 448 * 6).reshape(len(p), -1, 16)
    scale = np.maximum(groups.max(-1, keepdims=True) / 6, 1e-30)  # weights are divided before it is rounded
    codes = (e2m1(groups / scale) * rounded(scale, "float8_e4m3fn")).reshape(p.shape)
    return np.asarray(codes @ nvfp4(value.T).T / (448 * 6 * p.sum(-1, keepdims=True)))


#: The backends' arithmetic by their names.
MODELS: dict[str, Model] = {
    "SAGE_ATTN": int8_scores(128, 64, "float16"),
    "SAGE_ATTN_3": sage3,
    "TRITON_INT8_ATTN": int8_scores(1, 128, "bfloat16"),
}
#: Kinds of input: normal numbers; four channels of the keys far from 0; Student's t of 5; queries twice and three times as
#: large; queries and keys about sixteen centres; keys that drift along the sequence; four channels of the queries four times
#: as large.
KINDS = ("normal", "key channels", "heavy tails", "sharp", "sharper", "clusters", "drift", "query channels")


def inputs(kind: str, rows: int, head_size: int, seed: int = 0) -> tuple[F64, F64, F64]:
    """Queries, keys and values [rows, head_size] of one of `KINDS`, numbers of bfloat16."""
    rng = np.random.default_rng((seed, rows, head_size))
    q, k, v = rng.standard_normal((3, rows, head_size))
    if kind == "key channels":
        k[:, :: head_size // 4] += 12 * np.sign(rng.standard_normal(4))
    elif kind == "heavy tails":
        q, k = rng.standard_t(5, (2, rows, head_size)) / np.sqrt(5 / 3)
    elif kind in ("sharp", "sharper"):
        q = q * (2 if kind == "sharp" else 3)
    elif kind == "clusters":
        centres, which = rng.standard_normal((16, head_size)), rng.integers(0, 16, (2, rows))
        q, k = (1.2 * centres[which[i]] + 0.5 * x for i, x in enumerate((q, k)))
    elif kind == "drift":
        k = k + np.linspace(-3, 3, rows)[:, None] * rng.standard_normal(head_size)
    elif kind == "query channels":
        q[:, :: head_size // 4] *= 4
    elif kind != "normal":
        raise ValueError(f"kind={kind!r} is unknown; known: {', '.join(KINDS)}")
    return rounded(q, "bfloat16"), rounded(k, "bfloat16"), rounded(v, "bfloat16")


def relative(got: Any, want: Any) -> float:
    """Relative RMS."""
    return float(np.sqrt(np.square(np.asarray(got) - want).sum() / np.square(want).sum()))


def measured(model: Model, rows: int = 512, head_size: int = 128, seed: int = 0) -> dict[str, float]:
    """{kind of input: relative RMS error of the model}."""
    found = {}
    for kind in KINDS:
        arrays = inputs(kind, rows, head_size, seed)
        found[kind] = relative(model(*arrays), exact(*arrays))
    return found
