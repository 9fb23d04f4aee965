"""Mutation tests of the suite: correct kernels broken in one place, each of which the quick suite must detect.

Each mutant overrides one step of `SimulatedKernel` with a mistake that a real kernel has made or could make. A suite that
lets one live is missing a case or a rule; the table (`python -m tests.testing.mutants`) says which rules and cases killed
which. `--write` notes the first case of each in killers.json, so that tests can begin with it.
"""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from attn.capabilities import ATTN_TYPES, Capabilities, Feature
from attn.testing.bits import SELF_SCALED, Array, rounded
from attn.testing.case import Case
from attn.testing.draw import Call, Result, scale_array
from attn.testing.properties import run_check
from attn.testing.rules import Violation
from attn.testing.subject import Subject
from attn.testing.suite import cases_of
from tests.testing.simulated import Piece, SimulatedKernel

#: The unmutated kernel as a subject: everything that the suite can ask of a paged backend.
SUBJECT = Subject(
    "SIMULATED",
    Capabilities(
        framework="torch",
        platforms=("cpu",),
        dtypes=("float32", "float16", "bfloat16"),
        kv_cache_dtypes=("auto", "float16", "bfloat16", "fp8", "fp8_e5m2", "int8", "int8_per_token_head"),
        attn_types=ATTN_TYPES,
        features=frozenset(
            {
                Feature.NON_CAUSAL, Feature.SLIDING_WINDOW, Feature.TWO_SIDED_WINDOW, Feature.SOFT_CAP, Feature.ALIBI,
                Feature.SINKS, Feature.TREE_MASK, Feature.KV_SHARING, Feature.PER_HEAD_SCALES, Feature.BATCH_INVARIANT,
                Feature.OUTPUT_SCALE, Feature.NAN_SAFE, Feature.SPANS, Feature.MIXED_CAUSAL, Feature.CHUNK_SIZE,
            }
        ),
    ),
)  # fmt: skip

MUTANTS: dict[str, type[SimulatedKernel]] = {}
NOTED = Path(__file__).with_name("killers.json")


class Mutant(SimulatedKernel):
    """A kernel with one mistake; a subclass is on the list under its own name."""

    def __init_subclass__(cls) -> None:
        MUTANTS[cls.__name__] = cls


# masks


class CausalOneTooMany(Mutant):
    """Row p sees key p + 1."""

    def is_past(self, p: Array, j: Array) -> Array:
        return j <= p + 1


class CausalOneTooFew(Mutant):
    """Row p does not see its own key."""

    def is_past(self, p: Array, j: Array) -> Array:
        return j < p


class CausalTopLeft(Mutant):
    """Causality counted from the first key, as torch's is_causal does."""

    def positions(self, n: int, m: int) -> Array:
        return np.arange(n)


class NonCausalIgnored(Mutant):
    """Every batch is causal."""

    def is_causal(self, r: int) -> bool:
        return True


class WindowLeftOneMore(Mutant):
    """W + 1 keys instead of W."""

    def window(self) -> tuple[int | None, int | None]:
        left, right = self.case.window
        return (None if left is None else left + 1), right


class WindowLeftOneLess(Mutant):
    """W - 1 keys instead of W."""

    def window(self) -> tuple[int | None, int | None]:
        left, right = self.case.window
        return (None if left is None else left - 1), right


class WindowRightOneMore(Mutant):
    """The right bound is one too far."""

    def window(self) -> tuple[int | None, int | None]:
        left, right = self.case.window
        return left, (None if right is None else right + 1)


class WindowRightOneLess(Mutant):
    """The right bound is one too near."""

    def window(self) -> tuple[int | None, int | None]:
        left, right = self.case.window
        return left, (right - 1 if right else right)


class WindowInPrefillOnly(Mutant):
    """Decodes see everything (vllm#23969)."""

    def in_window(self, p: Array, j: Array) -> Array:
        return super().in_window(p, j) if len(p) > 1 else np.ones(np.broadcast_shapes(p.shape, j.shape), np.bool_)


class WindowIgnored(Mutant):
    """The layer's window never reaches the kernel (sglang#31501)."""

    def window(self) -> tuple[int | None, int | None]:
        return None, None


class EncoderWindowOneSided(Mutant):
    """An encoder's window of W keys looks back only."""

    def window(self) -> tuple[int | None, int | None]:
        left, right = self.case.window
        return (left, 0) if self.case.is_encoder and right else (left, right)


class FirstKeyDropped(Mutant):
    """Key 0 is never seen."""

    def in_window(self, p: Array, j: Array) -> Array:
        return super().in_window(p, j) & (j > 0)


class LastKeyDropped(Mutant):
    """The loop over keys ends one early, except for the shortest."""

    def allowed(self, r: int, p: Array, j: Array, m: int) -> Array:
        return super().allowed(r, p, j, m) & ((j < m - 1) | (m < 3))


class ExtraKey(Mutant):
    """One slot past the end is read, where there is one."""

    def length(self, r: int) -> int:
        m = super().length(r)
        return m + 1 if m % self.case.block_size else m


class StaleTailRead(Mutant):
    """Whole pages are read, the last one's unused slots included (vllm#47305); causality hides them from prefills."""

    def length(self, r: int) -> int:
        return -(-super().length(r) // self.case.block_size) * self.case.block_size

    def sequence(self, r: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        self.shift = len(key) - int(self.call.batch.seq_lens[r])
        return super().sequence(r, query, key, value)

    def positions(self, n: int, m: int) -> Array:
        return super().positions(n, m - (self.shift if n > 1 else 0))


class LastPartialPageSkipped(Mutant):
    """Only full pages are read."""

    def allowed(self, r: int, p: Array, j: Array, m: int) -> Array:
        whole = m // self.case.block_size * self.case.block_size
        return super().allowed(r, p, j, m) & ((j < whole) | (whole == 0))


class TreeIgnored(Mutant):
    """A tree is taken for a chain."""

    def tree(self, r: int) -> Array | None:
        return None


class TreeTransposed(Mutant):
    """Nodes see their descendants."""

    def tree(self, r: int) -> Array | None:
        tree = super().tree(r)
        return None if tree is None else tree.T


class TreeOfFirstRequest(Mutant):
    """All requests use request 0's tree."""

    def tree(self, r: int) -> Array | None:
        return super().tree(0)


class TreeHidesContext(Mutant):
    """Tree tokens do not see the last token of the context."""

    def in_tree(self, tree: Array, p: Array, j: Array, m: int) -> Array:
        return super().in_tree(tree, p, j, m) & (j != m - len(p) - 1)


class SpansIgnored(Mutant):
    """Image tokens are causal."""

    def in_span(self, spans: Array, p: Array, j: Array) -> Array:
        return np.zeros_like(j < spans[:, :1])


class SpanEndsEarly(Mutant):
    """A span's last key is taken for the end of a range that excludes it."""

    def in_span(self, spans: Array, p: Array, j: Array) -> Array:
        return super().in_span(spans, p, j) & (j != spans[:, 1:])


class SpansOfFirstRows(Mutant):
    """Rows of later requests read the spans of the batch's first rows."""

    def in_span(self, spans: Array, p: Array, j: Array) -> Array:
        assert self.call.batch.spans is not None
        return super().in_span(self.call.batch.spans[: len(spans)], p, j)


class SpanAlwaysInWindow(Mutant):
    """The window cuts spans whatever the layer says."""

    def in_span(self, spans: Array, p: Array, j: Array) -> Array:
        left, _ = self.window()
        inside = super().in_span(spans, p, j)
        return inside if left is None else inside & (j >= p - left)


class SpanNeverInWindow(Mutant):
    """The window never cuts spans."""

    def in_span(self, spans: Array, p: Array, j: Array) -> Array:
        return (j >= spans[:, :1]) & (j <= spans[:, 1:])


class PrefixInclusive(Mutant):
    """One key more than the prefix is seen."""

    def in_prefix(self, prefix: int, j: Array) -> Array:
        return j <= prefix


class PrefixWithinWindow(Mutant):
    """The loop over keys starts at the window and misses the prefix."""

    def in_prefix(self, prefix: int, j: Array) -> Array:
        return super().in_prefix(prefix, j) & (self.window()[0] is None)


class ChunkOfLastRow(Mutant):
    """All rows of a tile use the chunk of its last row."""

    def in_chunk(self, p: Array, j: Array) -> Array:
        return super().in_chunk(p[-1:], j) & (p == p)


class ChunkAsWindow(Mutant):
    """A chunk is taken for a window of as many keys."""

    def in_chunk(self, p: Array, j: Array) -> Array:
        return j > p - self.case.chunk_size


class CausalityOfFirstRequest(Mutant):
    """The first request's causality is taken for all."""

    def is_causal(self, r: int) -> bool:
        return super().is_causal(0)


class SentinelMinusTenThousand(Mutant):
    """-1e4 for masked scores: true scores below it lose, and rows without keys average what they must not see."""

    sentinel = -1e4


class SentinelFiniteMin(Mutant):
    """finfo.min for masked scores: a row without keys becomes the mean of V."""

    sentinel = float(np.finfo(np.float32).min)


class MaskedValueMultiplied(Mutant):
    """Weights of 0 meet masked values: 0 * NaN (FA #1745)."""

    def weigh(self, weights: Array, allowed: Array, v: Array) -> Array:
        return weights @ v


class HiddenValueMultiplied(Mutant):
    """As above, but only for values that some row of the tile sees: 0 * NaN for the rows that do not."""

    def weigh(self, weights: Array, allowed: Array, v: Array) -> Array:
        return weights @ np.where(allowed.any(1)[..., None], v, 0)


class AdditiveMask(Mutant):
    """Masking by adding -inf, which a NaN key survives."""

    def masked(self, scores: Array, allowed: Array) -> Array:
        return scores + np.where(allowed, np.float32(0), np.float32(-np.inf))


class LongQueryUnmasked(Mutant):
    """Rows before the sequence begins (q_len > kv_len) see its first key."""

    def positions(self, n: int, m: int) -> Array:
        return np.maximum(super().positions(n, m), 0 if m else -1)


# pages, slots, the cache


class WrongSecondPage(Mutant):
    """The second page of a sequence is its first again."""

    def page(self, r: int, index: Array) -> Array:
        return super().page(r, np.where(index == 1, 0, index))


class PagesOfNeighbour(Mutant):
    """Pages after the first come from the table row above."""

    def page(self, r: int, index: Array) -> Array:
        return np.where(index == 0, super().page(r, index), super().page(max(r - 1, 0), index))


class PhysicalPagesAssumedUnique(Mutant):
    """A page that two requests share belongs to the first of them (vllm#30915)."""

    def page(self, r: int, index: Array) -> Array:
        own = super().page(r, index)
        taken = np.isin(own, self.call.batch.block_table[:r, 0]) & (index == 0)
        return np.where(taken, (own + 1) % len(self.call.key_cache if self.call.key_cache is not None else own), own)


class PadWritesLastSlot(Mutant):
    """Slot -1 is an index (vllm#43810)."""

    def is_written(self, slots: Array) -> Array:
        return slots >= -1


class WriteOneSlotOff(Mutant):
    """New tokens land one slot late."""

    def slots(self, slot_mapping: Array) -> Array:
        total = self.call.key_cache.shape[0] * self.case.block_size if self.call.key_cache is not None else 1
        return np.where(slot_mapping >= 0, (slot_mapping + 1) % total, slot_mapping)


class LastTokenNotWritten(Mutant):
    """The write kernel's grid is one short."""

    def is_written(self, slots: Array) -> Array:
        live = slots >= 0
        live[self.call.num_tokens - 1 :] = False
        return live


class SharedCacheWritten(Mutant):
    """A layer that shares another's cache writes to it."""

    def writes(self) -> bool:
        return True


class KeysWrittenAsValues(Mutant):
    """Both halves of the cache get the keys."""

    def write(self, call: Call) -> tuple[Array, Array]:
        return super().write(call.but(value=call.key))


class HeadZeroWritten(Mutant):
    """All kv heads are written with head 0's values."""

    def encode(self, values: Array, scale: Array) -> Array:
        return super().encode(np.repeat(values[:, :1], values.shape[1], 1), scale)


class KScaleDropped(Mutant):
    """Scores are computed from raw codes (vllm#42580)."""

    def scores(self, q: Array, k: Array, p: Array, j: Array) -> Array:
        return super().scores(q, k / self.per_query_head(self.k_scale()), p, j)


class VScaleDropped(Mutant):
    """The output is in codes."""

    def close(self, piece: Piece) -> tuple[Array, Array]:
        out, lse = super().close(piece)
        return out / self.per_query_head(self.v_scale()), lse


class ScalesSwapped(Mutant):
    """k_scale and v_scale change places, in writing and in reading."""

    def k_scale(self) -> Array:
        return scale_array(self.case.v_scale)

    def v_scale(self) -> Array:
        return scale_array(self.case.k_scale)


class ScaleOfWrongHead(Mutant):
    """Per-head scales are indexed by query head modulo kv heads."""

    def per_query_head(self, scale: Array) -> Array:
        return np.resize(np.broadcast_to(scale, (self.case.num_kv_heads,)), self.case.num_heads)[:, None, None]


class FirstScaleForAllHeads(Mutant):
    """A scale per head is taken for one scale."""

    def per_query_head(self, scale: Array) -> Array:
        return np.full((self.case.num_heads, 1, 1), scale.reshape(-1)[0], np.float32)


class WrittenUnscaled(Mutant):
    """Codes are stored without dividing by the scale."""

    def encode(self, values: Array, scale: Array) -> Array:
        return super().encode(values, np.ones_like(scale))


class Int8ZeroPoint(Mutant):
    """int8 codes are read with a zero point of 1."""

    def decode(self, stored: Array) -> Array:
        return super().decode(stored) + np.float32(self.case.element == "int8")


class Int8Truncated(Mutant):
    """int8 codes are cut off towards zero and not rounded."""

    def encode(self, values: Array, scale: Array) -> Array:
        if self.case.element != "int8":
            return super().encode(values, scale)
        return np.clip(np.trunc(values / (scale[:, None] if scale.ndim else scale)), -127, 127).astype(np.int8)


class Fp8OverflowsToNan(Mutant):
    """What is beyond an fp8's range becomes NaN and does not saturate."""

    def encode(self, values: Array, scale: Array) -> Array:
        codes = super().encode(values, scale)
        if self.case.element != "float8_e4m3fn":
            return codes
        return np.where(np.abs(values / (scale[:, None] if scale.ndim else scale)) > 464, np.uint8(0x7F), codes)


class OwnScaleOfTheFirstHead(Mutant):
    """Where each token and head has a scale of its own, all heads are read with the first one's."""

    def decode(self, stored: Array) -> Array:
        if self.case.element in SELF_SCALED:
            stored = np.concatenate([stored[..., :-4], np.broadcast_to(stored[:, :1, -4:], (*stored.shape[:2], 4))], -1)
        return super().decode(stored)


class OutputScaleMultiplied(Mutant):
    """An fp8 output is multiplied by its scale and not divided."""

    def output_codes(self, output: Array, scale: float) -> Array:
        return super().output_codes(output, 1 / scale)


class OutputWraps(Mutant):
    """What is beyond an fp8 output's range becomes NaN and does not saturate."""

    def output_codes(self, output: Array, scale: float) -> Array:
        codes = super().output_codes(output, scale)
        return np.where(np.abs(output / scale) > 464, np.uint8(0x7F), codes)


class PaddingRowsWritten(Mutant):
    """Rows past the last token are zeroed."""

    def store(self, output: Array) -> Array:
        output = super().store(output)
        output[self.call.num_tokens :] = 0
        return output


# heads and scores


class HeadsModulo(Mutant):
    """Head h reads kv head h % K."""

    def kv_head(self) -> Array:
        return np.arange(self.case.num_heads) % self.case.num_kv_heads


class ValueHeadsModulo(Mutant):
    """The same for the values alone."""

    def value_head(self) -> Array:
        return np.arange(self.case.num_heads) % self.case.num_kv_heads


class ScaleMissing(Mutant):
    """Scores are not scaled."""

    def scale(self) -> float:
        return 1.0


class ScaleOfPaddedHead(Mutant):
    """The default scale is that of the head size padded to a power of two."""

    def scale(self) -> float:
        return self.case.scale or (1 << (self.case.head_size - 1).bit_length()) ** -0.5


class ScaleAlwaysDefault(Mutant):
    """The layer's own scale is not used."""

    def scale(self) -> float:
        return self.case.head_size**-0.5


class CapBeforeScale(Mutant):
    """cap * tanh(dot / cap) * scale."""

    def scores(self, q: Array, k: Array, p: Array, j: Array) -> Array:
        self.now = np.float32(self.scale()) * self.per_query_head(self.k_scale())
        return super().scores(q, k, p, j)

    def cap(self, s: Array, cap: np.float32) -> Array:
        return super().cap(s / self.now, cap) * self.now


class CapMissing(Mutant):
    """The soft cap is dropped (vllm#8660)."""

    def capped(self, s: Array) -> Array:
        return s


class CapAfterBias(Mutant):
    """ALiBi goes under the cap, as in FlashInfer."""

    def scores(self, q: Array, k: Array, p: Array, j: Array) -> Array:
        if self.call.alibi_slopes is None:
            return super().scores(q, k, p, j)
        s = self.dots(q, k) * (np.float32(self.scale()) * self.per_query_head(self.k_scale()))
        return self.capped(s + self.slopes()[:, None, None] * self.distance(p[:, None], j[None, :]))


class CapByExponential(Mutant):
    """tanh from exp(x) and exp(-x): NaN once a score is 89 caps away."""

    def cap(self, s: Array, cap: np.float32) -> Array:
        up, down = np.exp(s / cap), np.exp(-s / cap)
        return cap * (up - down) / (up + down)


class CapLinear(Mutant):
    """Scores are clipped at the cap and not bent."""

    def cap(self, s: Array, cap: np.float32) -> Array:
        return np.clip(s, -cap, cap)


class AlibiSign(Mutant):
    """Far keys are favoured."""

    def distance(self, p: Array, j: Array) -> Array:
        return -super().distance(p, j)


class AlibiShifted(Mutant):
    """Distance from the row's index in its batch: same output, shifted lse."""

    def distance(self, p: Array, j: Array) -> Array:
        return super().distance(p, j) if not self.call.batch.causal else (j - np.arange(len(p))[:, None]).astype(np.float32)


class AlibiNotAbsolute(Mutant):
    """Without causality, keys to the right are favoured."""

    def distance(self, p: Array, j: Array) -> Array:
        return (j - p).astype(np.float32)


class AlibiOfNextHead(Mutant):
    """Slopes are off by one head."""

    def slopes(self) -> Array:
        return np.roll(super().slopes(), 1)


class AlibiRecomputed(Mutant):
    """Slopes are computed in the kernel and not taken from the layer (flashinfer#5101)."""

    def slopes(self) -> Array:
        return (2.0 ** (-8.0 * np.arange(1, self.case.num_heads + 1) / self.case.num_heads)).astype(np.float32)


# sinks


class SinkScaled(Mutant):
    """The sink is multiplied by the softmax scale."""

    def sink(self, out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
        return super().sink(out, lse, sinks * self.scale())


class SinkCapped(Mutant):
    """The sink goes under the soft cap."""

    def sink(self, out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
        return super().sink(out, lse, self.capped(sinks))


class SinkPerSplit(Mutant):
    """Every split of the keys gets the sink."""

    def merge(self, states: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        if self.call.sinks is None:
            return super().merge(states)
        sinks = self.call.sinks[:, None]
        return super().merge([(SimulatedKernel.sink(self, out, lse, sinks)[0], lse) for out, lse in states])

    def sink(self, out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
        return out, lse


class SinkIgnored(Mutant):
    """Sinks are accepted and dropped (vllm#28561)."""

    def sink(self, out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
        return out, lse


class SinkInLse(Mutant):
    """The lse includes the sink, as FA4's does."""

    def sink(self, out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
        return super().sink(out, lse, sinks)[0], np.logaddexp(lse, sinks)


class SinkOfKvHead(Mutant):
    """Sinks are indexed by kv head."""

    def sink(self, out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
        return super().sink(out, lse, sinks[self.kv_head()])


class SinkInEmptyRow(Mutant):
    """A row without keys divides by zero."""

    def sink(self, out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
        return out / (1 + np.exp(sinks - lse))[..., None] + (lse - lse)[..., None], lse


# softmax and merging


class LseBaseTwo(Mutant):
    """The lse is a log2 (sglang#40903)."""

    def sequence(self, r: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        out, lse = super().sequence(r, query, key, value)
        return out, lse / np.float32(np.log(2))


class LseWithoutMaximum(Mutant):
    """The lse is the log of the rescaled sum alone."""

    def sequence(self, r: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        out, lse = super().sequence(r, query, key, value)
        return out, np.where(np.isneginf(lse), lse, lse - self.top)

    def merge(self, states: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        self.top = self.guard(np.stack([state[1] for state in states]).max(0))
        return super().merge(states)


class LsePositiveInfinity(Mutant):
    """A row without keys has an lse of +inf, as FlashMLA's and FA2's (vllm#15492)."""

    def sequence(self, r: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        out, lse = super().sequence(r, query, key, value)
        return out, np.where(np.isneginf(lse), np.inf, lse)


class LseInHalf(Mutant):
    """The lse is kept in bfloat16."""

    def sequence(self, r: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        out, lse = super().sequence(r, query, key, value)
        return out, rounded(lse, "bfloat16")


class MergeUnweighted(Mutant):
    """Splits are averaged."""

    def merge(self, states: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        return np.mean([state[0] for state in states], 0), super().merge(states)[1]


class MergeOfEmptyParts(Mutant):
    """exp(-inf - -inf) when all splits are empty (vllm#27491)."""

    def merge(self, states: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        lse = np.stack([state[1] for state in states])
        weights = np.exp(lse - lse.max(0))
        summed = sum(w[..., None] * state[0] for w, state in zip(weights, states, strict=True))
        return summed / weights.sum(0)[..., None], lse.max(0) + np.log(weights.sum(0))


class MergeInBaseTwo(Mutant):
    """Natural lses are merged by powers of two."""

    def merge(self, states: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        factor = np.float32(np.log(2))
        out, lse = super().merge([(out, lse * factor) for out, lse in states])
        return out, super().merge(states)[1]


class LastSplitLost(Mutant):
    """The last split is not merged, unless it is the only one with keys."""

    def merge(self, states: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        return super().merge(states[:-1] if np.isfinite(states[0][1]).all() else states)


class NotRescaled(Mutant):
    """The accumulator is not rescaled when a new maximum comes."""

    def accumulate(self, piece: Piece, scores: Array, allowed: Array, v: Array) -> None:
        top = piece.top
        super().accumulate(piece, scores, allowed, v)
        grown = np.where(np.isneginf(top), 1, np.exp(self.guard(piece.top) - self.guard(top)))
        piece.acc = np.where(piece.acc == 0, 0, piece.acc * np.minimum(grown, 1e6)[..., None])


class SoftmaxWithoutMaximum(Mutant):
    """exp of the raw scores."""

    def guard(self, top: Array) -> Array:
        return np.zeros_like(top)

    def close(self, piece: Piece) -> tuple[Array, Array]:
        piece.top = np.zeros_like(piece.top)
        return super().close(piece)


class NotNormalised(Mutant):
    """The sum of weights is not divided by."""

    def close(self, piece: Piece) -> tuple[Array, Array]:
        out, lse = super().close(piece)
        return out * piece.total[..., None], lse


class AccumulatedInHalf(Mutant):
    """The output accumulator is kept in the inputs' 16 bits."""

    tile = 4

    def keep(self, acc: Array) -> Array:
        return rounded(acc, self.case.dtype)


class ScoresInHalf(Mutant):
    """Scores are rounded to the inputs' 16 bits: what rule C alone would let pass."""

    def scores(self, q: Array, k: Array, p: Array, j: Array) -> Array:
        return rounded(super().scores(q, k, p, j), self.case.dtype)


class RowsSwapped(Mutant):
    """Two rows of a long enough query change places."""

    def sequence(self, r: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        out, lse = super().sequence(r, query, key, value)
        if len(out) > 2:
            out[[0, 1]] = out[[1, 0]]
        return out, lse


class HeadsSwapped(Mutant):
    """The output's first two heads change places."""

    def store(self, output: Array) -> Array:
        output = super().store(output)
        if output.shape[1] > 1:
            output[:, [0, 1]] = output[:, [1, 0]]
        return output


class DependsOnNeighbours(Mutant):
    """The split count depends on the batch: correct, but not batch invariant although it is declared."""

    def sequence(self, r: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        self.splits = 1 + self.call.batch.num_reqs % 3
        return super().sequence(r, query, key, value)


class DependsOnLongestQuery(Mutant):
    """A decode is split only in a batch of decodes."""

    def sequence(self, r: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        self.splits = 2 if self.call.batch.max_query_len == 1 else 1
        return super().sequence(r, query, key, value)


class DependsOnLongestContext(Mutant):
    """The number of splits follows the batch's bound on the length, which a captured graph keeps larger."""

    def sequence(self, r: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        self.splits = 1 + self.call.batch.max_seq_len // 512
        return super().sequence(r, query, key, value)


class DependsOnPlace(Mutant):
    """The last requests of a large batch are computed by smaller tiles."""

    def sequence(self, r: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        self.tile = 4 if r >= 8 else 16
        return super().sequence(r, query, key, value)


class DependsOnNumberOfDecodes(Mutant):
    """Many decodes at once are computed without splits, as they fill the device."""

    def sequence(self, r: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        self.splits = 1 if len(query) == 1 and sum(n == 1 for n in self.case.query_lens) > 3 else 2
        return super().sequence(r, query, key, value)


class VectorsOfAnotherLayer(Mutant):
    """Layers that share a batch use the slopes and sinks of the one that ran first."""

    def metadata(self, call: Call) -> dict[str, Any]:
        return {}

    def open(self, call: Call) -> Callable[..., Result]:
        def step(call: Call, kept: dict[str, Any] | None = None) -> Result:
            own = {name: getattr(call, name) for name in ("alibi_slopes", "sinks")}
            return self(call if kept is None else call.but(**{name: kept.setdefault(name, x) for name, x in own.items()}))

        return step


# running them


def positive_cases() -> list[Case]:
    """The quick suite for the simulated kernel, refusals left out (it has no constructor that could refuse)."""
    return [case for case in cases_of(SUBJECT) if not case.check.startswith("refusal")]


def killers(kernel: SimulatedKernel, cases: Iterable[Case], enough: int | None = None) -> list[tuple[Case, list[Violation]]]:
    """The cases that `kernel` fails, with how; the search ends after `enough` of them.

    A mutant that raises counts as failing: nothing of a wrong index or shape needs to be numbers.
    """
    found: list[tuple[Case, list[Violation]]] = []
    for case in cases:
        try:
            violations = run_check(case, kernel)
        except (IndexError, ValueError, AssertionError) as error:
            violations = [Violation("raised", str(error), case)]
        if violations:
            found.append((case, violations))
            if enough is not None and len(found) >= enough:
                break
    return found


@dataclass(frozen=True)
class Kill:
    """One row of the mutation table."""

    mutant: str
    cases: int
    rules: tuple[str, ...]
    first: str


def mutation_table(enough: int | None = None, names: Iterable[str] = ()) -> list[Kill]:
    """Mutants (all, or those named) against the quick suite: how many cases failed each, by which rules, the first case."""
    cases = positive_cases()
    table = []
    for name in names or MUTANTS:
        killed = killers(MUTANTS[name](), cases, enough)
        rules = tuple(sorted({violation.rule for _, violations in killed for violation in violations}))
        table.append(Kill(name, len(killed), rules, killed[0][0].name if killed else ""))
    return table


def format_table(table: Iterable[Kill]) -> str:
    """The table as text."""
    lines = [f"{'mutant':<28} {'cases':>5}  {'rules':<12} first"]
    lines += [f"{k.mutant:<28} {k.cases or 'ALIVE':>5}  {' '.join(k.rules):<12} {k.first}" for k in table]
    return "\n".join(lines)


@cache
def noted() -> dict[str, str]:
    """The name of the case that killed each mutant when `--write` last ran."""
    return dict(json.loads(NOTED.read_text()))


def likeliest_first(name: str, cases: Iterable[Case]) -> list[Case]:
    """The cases, the one that is noted for a mutant first: a stale note costs time only."""
    return sorted(cases, key=lambda case: case.name != noted().get(name))


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        NOTED.write_text(json.dumps({kill.mutant: kill.first for kill in mutation_table(enough=1)}, indent=1) + "\n")
    else:
        print(format_table(mutation_table()))
