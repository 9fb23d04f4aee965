"""The rules A-D, and W for the cache, that a result must satisfy, compared with the oracle.

A row is one (token, head). Tolerances depend on the dtype only, never on the backend:

A  finite where the oracle is; NaN and -inf exactly where it has them; empty rows exactly 0; padding rows not written.
B  rms(out - ref) <= R(dtype) * (rms(ref) + 1e-3), row by row; of an fp8 output, each code is that of a number within about R.
C  16-bit only, per case: max|out - ref| <= 2 max|eager - ref| + 2 max|(ref + .3 - .3) - ref|   (3x under a soft cap).
D  |lse - ref| <= 1e-4 + 1e-5 |ref| (1e-7 times that for float64); plus rounding errors for one-byte caches in 16 bits
   (`lse_budget`) and, for 16-bit MLA, of the products of its inputs (`expected._lse_noise`).
W  the cache: written slots contain the specified bytes, all other bytes are unchanged.

B has no slack for eager rounding of scores, which C must allow; D detects errors that do not show in the output (the base of
the logarithm, a shift). A quantised cache is checked in two steps: its bytes by W, then the output against attention over *the
bytes it wrote*.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from attn.testing.bits import FP8, Array, decode, encode
from attn.testing.case import Case
from attn.testing.draw import Call, Result
from attn.testing.expected import ROUNDOFF, Expected, wrong_bytes


@dataclass(frozen=True)
class Budget:
    """Limits of a row's relative RMS error: above `target` is reported, above `hard` fails."""

    target: float
    hard: float


# In 16 bits `hard` is twice `target`: over 150 to 300 random configurations the worst row of a correct flash kernel
# (`attn.testing.simulated`) had 3.8e-4 in float16 and 3.3e-3 in bfloat16 (1.7e-6 in float32), that of an eager kernel ten times
# as much, since it rounds the scores too. That is why B does not compare with an eager kernel.
BUDGETS = {
    "float64": Budget(1e-12, 1e-11),
    "float32": Budget(1e-5, 1e-4),
    "float16": Budget(2.0**-11, 2.0**-10),
    "bfloat16": Budget(2.0**-8, 2.0**-7),
}


@dataclass(frozen=True)
class Violation:
    """A rule that a case breaks, with the worst place."""

    rule: str
    what: str
    case: Case
    row: int | None = None
    head: int | None = None
    got: Any = None
    want: Any = None
    backend: str = ""

    def __str__(self) -> str:
        head = "" if self.head is None else f", head {self.head}"
        where = "" if self.row is None else f" at {_location(self.case, self.row)}{head}"
        values = "" if self.got is None and self.want is None else f": got {_shown(self.got)}, want {_shown(self.want)}"
        return f"rule {self.rule} [{self.case.name}]{where}: {self.what}{values}\n    {self.case.repro(self.backend)}"


@dataclass
class Score:
    """The largest errors of a result: `row`, the relative error of rule B; `lse`, that of rule D relative to its tolerance."""

    row: float = 0.0
    lse: float = 0.0


def lse_budget(case: Case) -> Budget:
    """Return the factor on rule D's tolerance.

    It is smaller for float64, which has a float64 lse, and larger for one-byte caches read in 16 bits: the keys are rounded
    once more, and a kernel may sum the weights rounded for its tensor cores (as FlashInfer's FlashAttention 2 templates
    do), an error of at most half a unit in the last place. MLA's tolerance is computed row by row and needs no factor.
    """
    if case.dtype == "float64":
        return Budget(1e-7, 1e-7)
    if case.mla or not case.is_quantized or case.dtype not in ROUNDOFF:
        # The oracle rounds neither keys nor weights, so an unquantised cache leaves only the errors of float32 sums.
        return Budget(1.0, 1.0)
    # In units of D's absolute tolerance of 1e-4: a relative error u of the sum of weights shifts its logarithm by about u.
    return Budget(1.0, 10.0 + ROUNDOFF[case.dtype] / 1e-4)


def compare(case: Case, result: Result, expected: Expected, score: Score | None = None) -> list[Violation]:
    """Return a violation, at its worst place, for each rule of A-D that `result` breaks. Updates `score` if passed."""
    score = score or Score()
    live = int(sum(case.query_lens))
    # Every other rule compares elementwise and would fail in NumPy, or broadcast, on another shape.
    if result.output.shape != expected.out.shape:
        return [Violation("A", "output has another shape", case, got=result.output.shape, want=expected.out.shape)]
    violations = []
    dtype = case.dtype if case.output_scale is None else FP8
    if result.dtype != dtype:
        violations.append(Violation("A", "output has another dtype than it must have", case, got=result.dtype, want=dtype))
    # Rows from `live` on are padding: the oracle has NaN there, and `_padding` knows what they must hold.
    out, want = result.output[:live].astype(np.float64), expected.out[:live]
    violations += _padding(case, result, live)
    if case.output_scale is not None:
        violations += _codes(case, case.output_scale, out, want, expected.lse[:, :live])
    else:
        violations += _pattern(case, out, want, expected.lse[:, :live])
        violations += _rows(case, out, want, score)
        if expected.slack is not None:
            violations += _worst_element(case, out, want, expected.slack)
    if case.lse:
        if result.lse is None:
            violations.append(Violation("D", "no lse was returned", case))
        # One head's or one row's would be broadcast to all. A backend may leave padding rows out.
        elif result.lse.ndim != 2 or result.lse[:, :live].shape != expected.lse[:, :live].shape:
            violations.append(Violation("D", "lse has another shape", case, got=result.lse.shape, want=expected.lse.shape))
        else:
            noise = 0.0 if expected.noise is None else expected.noise[:, :live]
            violations += _lse(case, result.lse[:, :live].astype(np.float64), expected.lse[:, :live], noise, score)
    return violations


def _padding(case: Case, result: Result, live: int) -> Iterator[Violation]:
    padding = result.output[live:]
    # An output buffer is filled with NaN before the call, and NaN equals nothing, itself included.
    right = np.isnan(padding) if np.isnan(result.padding) else padding == result.padding
    if not right.all():
        row, head, d = (int(i) for i in np.argwhere(~right)[0])
        yield Violation("A", "a padding row was written", case, live + row, head, padding[row, head, d], result.padding)
    if result.spilled:
        yield Violation("A", "memory beside the output was written", case)


def _pattern(case: Case, out: Array, want: Array, lse: Array) -> Iterator[Violation]:
    """Check that NaN, infinities and finite values are where the oracle has them (a live NaN affects exactly the rows that
    attend to it), and that rows without keys are 0."""
    wrong = np.isnan(want) != np.isnan(out)
    # `want != out` holds for a NaN on either side as well, which the line above has judged.
    wrong |= (np.isinf(want) | np.isinf(out)) & (want != out) & ~np.isnan(want)
    yield from _at(case, "A", "not finite where it must be, or the reverse", wrong, out, want)
    # Not B's business: its floor of 1e-3 would let a small number pass where docs/semantics.md §5 requires 0. lse is [H, T].
    nonzero = np.isneginf(lse).T[..., None] & (out != 0) & ~wrong
    yield from _at(case, "A", "a row without keys is not exactly 0", nonzero, out, want)


def _rows(case: Case, out: Array, want: Array, score: Score) -> Iterator[Violation]:
    # Rows with a NaN or an infinity are rule A's; here they would make the maximum NaN, which exceeds no limit.
    good: Array = np.asarray(np.isfinite(out).all(-1) & np.isfinite(want).all(-1))
    out, want = (np.where(good[..., None], x, 0) for x in (out, want))
    error = np.sqrt(np.mean(np.square(out - want), -1))
    # The mean of many random values is near 0, where a relative error of rounding is unbounded: the floor is absolute, which
    # assumes values of about 1, as the inputs are (a kernel's error on tiny values would hide below it).
    size = np.sqrt(np.mean(np.square(want), -1)) + 1e-3
    ratio = error / size
    limit = BUDGETS[case.dtype].hard
    # A batch without rows has no maximum.
    if ratio.size:
        score.row = max(score.row, float(ratio.max()))
        if ratio.max() > limit:
            row, head = (int(i) for i in np.unravel_index(ratio.argmax(), ratio.shape))
            many = int((ratio > limit).sum())
            d = int(np.abs(out[row, head] - want[row, head]).argmax())
            yield Violation(
                "B",
                f"relative row error {ratio.max():.2g} > {limit:.2g} ({many} of {ratio.size} rows)",
                case,
                row,
                head,
                out[row, head, d],
                want[row, head, d],
            )


def _codes(case: Case, scale: float, out: Array, want: Array, lse: Array) -> Iterator[Violation]:
    """Check that an fp8 output is `want` / scale, saturated and rounded to nearest even, for a `want` within its budget."""
    # B bounds the root mean square of a row's errors, and one element of it may have several times that.
    margin = 4 * BUDGETS[case.dtype].hard * (np.sqrt(np.mean(np.square(want), -1, keepdims=True)) + 1e-3)
    margin[np.isneginf(lse).T] = 0.0  # rows without keys are exactly 0
    # Rounding and saturation are monotone, so the code of every number between the two ends lies between their codes.
    low, high = (decode(encode(want + side * margin, FP8, np.float32(scale)), FP8) for side in (-1, 1))
    # Not `(out < low) | (out > high)`: a NaN code would pass that.
    wrong = ~((out >= low) & (out <= high))
    yield from _at(case, "B", f"not the nearest code of a result in units of {scale}", wrong, out, want)


def _worst_element(case: Case, out: Array, want: Array, slack: float) -> Iterator[Violation]:
    # Infinities are replaced before the subtraction, since inf - inf warns and gives NaN.
    error = np.where(np.isfinite(out) & np.isfinite(want), np.abs(out - np.where(np.isfinite(want), want, 0)), 0)
    yield from _at(case, "C", f"error above {slack:.2g}, twice an eager kernel's", error > slack, out, want, error)


def _lse(case: Case, lse: Array, want: Array, noise: Array | float, score: Score) -> Iterator[Violation]:
    # +inf is never right: a score of +inf makes the sum NaN in the oracle.
    wrong = (np.isnan(lse) != np.isnan(want)) | (np.isneginf(lse) != np.isneginf(want)) | np.isposinf(lse)
    yield from _at(case, "A", "lse is NaN or infinite where it must not be, or the reverse", wrong.T, lse.T, want.T)
    good = np.isfinite(lse) & np.isfinite(want)
    tolerance = 1e-4 + 1e-5 * np.abs(np.where(good, want, 0)) + noise
    error = np.where(good, np.abs(np.where(good, lse, 0) - np.where(good, want, 0)) / tolerance, 0)
    score.lse = max(score.lse, float(error.max(initial=0.0)))
    limit = lse_budget(case).hard
    yield from _at(
        case, "D", f"lse error is {error.max(initial=0.0):.2g}x its tolerance", (error > limit).T, lse.T, want.T, error.T
    )


def _at(
    case: Case, rule: str, text: str, wrong: Array, got: Array, want: Array, weight: Array | None = None
) -> Iterator[Violation]:
    """Yield one violation for all places that are `wrong` ([T, H] or [T, H, D]), at that of the largest `weight`."""
    if wrong.any():
        # `wrong` as a factor, so that a right element of a larger weight is not shown as the worst.
        index = tuple(int(i) for i in np.unravel_index((wrong if weight is None else weight * wrong).argmax(), wrong.shape))
        yield Violation(rule, f"{text} ({int(wrong.sum())} places)", case, index[0], index[1], got[index], want[index])


def require(ok: Any, text: str) -> None:
    """Raise AssertionError unless `ok`: an `assert` that `python -O` does not remove."""
    if not ok:
        raise AssertionError(text)


def check_cache(call: Call, result: Result) -> Iterator[Violation]:
    """Check rule W: the contents of the cache after the call."""
    case = call.case
    if case.is_encoder:
        return
    if result.key_cache is None or result.value_cache is None:
        yield Violation("W", "no cache was returned", case)
        return
    for cache, stored, want, wrong in wrong_bytes(call, (result.key_cache, result.value_cache)):
        if wrong.any():
            slot, head, d = (int(i) for i in np.argwhere(wrong)[0])
            is_mapped = slot in call.batch.slot_mapping
            text = "a written slot holds other bytes" if is_mapped else "a slot was written that is not in slot_mapping"
            # The whole row is decoded, since its scale may be among its bytes; d then counts bytes, of which there are more
            # than elements.
            got, right = (decode(x[slot, head], case.element)[min(d, case.head_size - 1)] for x in (stored, want))
            where = f"{cache} cache, slot {slot}, kv head {head}"
            yield Violation("W", f"{where}: {text} ({int(wrong.sum())} elements)", case, got=got, want=right)


def _location(case: Case, row: int) -> str:
    """Format a row's place, such as `row 7 (request 2, token 1 of 3, 19 keys)`."""
    first = 0
    for r, n in enumerate(case.query_lens):
        if row < first + n:
            return f"row {row} (request {r}, token {row - first} of {n}, {case.seq_lens[r]} keys)"
        first += n
    return f"row {row} (padding)"


def _shown(value: Any) -> str:
    return f"{float(value):.6g}" if isinstance(value, np.floating | float) else str(value)
