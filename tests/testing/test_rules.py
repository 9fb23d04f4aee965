"""Each rule on its own, at its limits, on results that are correct except in one place (about a second)."""

from collections.abc import Callable

import numpy as np
import pytest

from attn.testing import Case, Result, Violation, compare, draw, expect
from attn.testing.bits import rounded
from attn.testing.expected import _eager, specified_cache
from attn.testing.properties import same
from attn.testing.rules import BUDGETS, Score, check_cache

CASE = Case("mixed", (1, 6, 18), (33, 9, 18), padding=2, lse=True)


def perfect(case: Case = CASE) -> Result:
    """The oracle's own answer, rounded."""
    call = draw(case)
    want = expect(call)
    caches = (None, None) if case.is_encoder else tuple(c.copy() for c in specified_cache(call))
    return Result(rounded(want.out, case.dtype), want.lse.astype(np.float32), *caches, case.dtype)


def judged(change: Callable[[Result], None], case: Case = CASE) -> list[Violation]:
    result, call = perfect(case), draw(case)
    change(result)
    return list(check_cache(call, result)) + compare(case, result, expect(call, result))


def rules(violations: list[Violation]) -> set[str]:
    return {v.rule for v in violations}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_oracle_passes(dtype: str) -> None:
    assert judged(lambda result: None, CASE.replace(dtype=dtype)) == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rule_b_is_a_limit_on_each_row(dtype: str) -> None:
    case = CASE.replace(dtype=dtype)
    row = 7

    def scaled(factor: float) -> Callable[[Result], None]:
        def change(result: Result) -> None:
            result.output[row, 1] *= 1 + factor

        return change

    hard = BUDGETS[dtype].hard
    assert "B" not in rules(judged(scaled(0.7 * hard), case))
    (violation,) = (v for v in judged(scaled(1.5 * hard), case) if v.rule == "B")
    assert (violation.row, violation.head) == (row, 1)


def test_rule_c_sees_one_element_that_a_row_hides() -> None:
    case = CASE.replace(dtype="bfloat16", head_size=256)

    result, call = perfect(case), draw(case)
    want = expect(call)
    assert want.slack is not None
    result.output[:, :, 5] += 1.5 * want.slack
    assert "C" in rules(compare(case, result, want))
    assert expect(draw(CASE)).slack is None  # float32: a correct kernel may be noisier than an eager one


BATCH = {"query_lens": (1, 6, 18, 0, 3), "seq_lens": (33, 9, 18, 5, 0)}
PATTERN = (16, 1, 4, 1, 0)
BASELINES = {
    "plain": {},
    "window and cap": {"sliding_window": (7, 2), "causal": False, "logits_soft_cap": 2.0},
    "sinks and slopes": {"sinks": "log_length", "alibi": True},
    "tree": {"tree": 6, "query_lens": (6, 4, 18), "seq_lens": (20, 4, 18)},
    "spans cut by a window": {"spans": 4, "prefix": 9, "sliding_window": 5, "span_window": True, "causal": "mixed"},
    "chunks": {"chunk_size": 10},
    "scales": {"kv_cache_dtype": "fp8", "k_scale": (0.037, 0.02), "v_scale": (0.02, 0.5)},
    "encoder": {"attn_type": "encoder", "causal": False, "query_lens": (5, 18), "seq_lens": (5, 18)},
    "block-sparse, with a prefix": {"sparse": PATTERN, "prefix": 20},
    "infinities": {"inputs": "nonfinite", "data_seed": 2},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", BASELINES)
def test_rule_c_compares_with_a_kernel_that_computes_the_same(name: str, dtype: str) -> None:
    case = CASE.replace(**{"num_heads": 4, "num_kv_heads": 2, "dtype": dtype, "padding": 0, **BATCH, **BASELINES[name]})
    call, want = draw(case), expect(draw(case)).out
    with np.errstate(all="ignore"):
        got = _eager(call)
    finite = np.isfinite(want)
    assert np.isfinite(got[finite]).all() and finite.any()
    # A few roundings: a wrong mask, scale or sink is off by as much as the values.
    assert np.abs(got - want)[finite].max() < 32 * {"float16": 2**-11, "bfloat16": 2**-8}[dtype]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rule_c_leaves_a_unit_in_the_last_place_where_an_eager_kernel_is_exact(dtype: str) -> None:
    """Over values that are all 1.625, another kernel's sums of rounded weights may round to the next number."""
    case = CASE.replace(dtype=dtype, query_lens=(1,), seq_lens=(1,), inputs="constant")
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    for units, broken in ((1, False), (2, True)):
        result, call = perfect(case), draw(case)
        result.output[:, :, 5] += units * unit
        assert ("C" in rules(compare(case, result, expect(call)))) == broken


def test_rule_d_is_a_limit_on_the_lse() -> None:
    def off(amount: float) -> Callable[[Result], None]:
        def change(result: Result) -> None:
            result.lse[2, 9] += amount

        return change

    assert judged(off(8e-5)) == []
    (violation,) = judged(off(4e-4))
    assert (violation.rule, violation.row, violation.head) == ("D", 9, 2)


def test_a_missing_lse_is_a_violation_only_where_it_was_asked_for() -> None:
    def change(result: Result) -> None:
        result.lse = None

    assert rules(judged(change)) == {"D"}
    assert judged(change, CASE.replace(lse=False)) == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rule_a_wants_finite_output(value: float) -> None:
    def change(result: Result) -> None:
        result.output[3, 0, 5] = value

    assert "A" in rules(judged(change))


def test_rule_a_wants_empty_rows_exactly_zero() -> None:
    case = Case("no key", (2, 3), (0, 3), lse=True)

    def change(result: Result) -> None:
        result.output[0, 0, 0] = 1e-9

    assert rules(judged(change, case)) == {"A"}


@pytest.mark.parametrize("value", [np.inf, np.nan, -1e30])
def test_rule_a_wants_minus_infinity_where_there_is_no_key(value: float) -> None:
    def change(result: Result) -> None:
        result.lse[0, 0] = value

    assert rules(judged(change, Case("no key", (2, 3), (0, 3), lse=True))) == {"A"}


def test_rule_a_wants_padding_rows_as_they_were() -> None:
    def change(result: Result) -> None:
        result.output[-1] = 0

    (violation,) = judged(change)
    assert violation.rule == "A" and "padding" in str(violation)

    def zeros(result: Result) -> None:
        result.output[25:], result.padding = 0, 0.0

    assert judged(zeros) == []

    def spilled(result: Result) -> None:
        result.spilled = True

    assert rules(judged(spilled)) == {"A"}


def test_another_shape_or_dtype_is_a_violation() -> None:
    def shape(result: Result) -> None:
        result.output = result.output[:-1]

    def dtype(result: Result) -> None:
        result.dtype = "float16"

    assert rules(judged(shape)) == rules(judged(dtype)) == {"A"}


def test_an_lse_of_another_shape_is_a_violation() -> None:
    """NumPy would broadcast the LSE of one head, or of one row, to all."""
    one_head, one_row = CASE.replace(num_heads=1, num_kv_heads=1), Case("a row", (1,), (5,), lse=True)

    def more_heads(result: Result) -> None:
        assert result.lse is not None
        result.lse = np.repeat(result.lse, 3, 0)

    def more_rows(result: Result) -> None:
        assert result.lse is not None
        result.lse = result.lse[0]

    assert rules(judged(more_heads, one_head)) == rules(judged(more_rows, one_row)) == {"D"}


def test_rule_w_sees_one_byte() -> None:
    call = draw(CASE)
    slot = int(call.batch.slot_mapping[3])

    def wrong(result: Result) -> None:
        result.key_cache.reshape(-1, 2, 64)[slot, 1, 5] += np.float32(1e-6)

    def elsewhere(result: Result) -> None:
        free = next(s for s in range(10**6) if s not in call.batch.slot_mapping)
        result.value_cache.reshape(-1, 2, 64)[free, 0, 0] = 1.0

    assert "written slot" in str(judged(wrong)[0]) and judged(wrong)[0].rule == "W"
    assert "not in slot_mapping" in str(judged(elsewhere)[0])


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "fp8_e5m2"])
def test_a_tie_may_fall_either_way_and_the_reader_is_held_to_what_was_stored(kv_cache_dtype: str) -> None:
    case = CASE.replace(kv_cache_dtype=kv_cache_dtype, k_scale=1.0, v_scale=1.0)
    call = draw(case)
    # a value exactly between two codes: 2.5 for int8, 1.0625 for e4m3, 1.125 for e5m2
    middle = {"int8": 2.5, "fp8": 1.0625, "fp8_e5m2": 1.125}[kv_cache_dtype]
    key = np.array(call.key)
    key[0, 0, 0] = middle
    tied = call.but(key=key)
    stored = [c.copy() for c in specified_cache(tied)]
    slot = int(call.batch.slot_mapping[0])
    one = stored[0].reshape(-1, 2, 64)[slot, 0]

    def result(code: int) -> Result:
        one[0] = code
        want = expect(tied, Result(perfect(case).output, None, stored[0], stored[1], "float32"))
        return Result(want.out.astype(np.float32), want.lse.astype(np.float32), stored[0].copy(), stored[1], "float32")

    nearest = int(one[0])
    answers = [result(nearest), result(nearest + 1), result(nearest - 1)]
    allowed = [not list(check_cache(tied, answer)) for answer in answers]
    assert allowed[0] and sorted(allowed[1:]) == [False, True]
    other = answers[1 if allowed[1] else 2]
    assert not np.array_equal(other.output[0], answers[0].output[0])
    assert compare(case, other, expect(tied, other)) == []


def test_the_score_is_how_near_the_limits_a_result_came() -> None:
    result, score = perfect(CASE.replace(dtype="bfloat16")), Score()
    case = CASE.replace(dtype="bfloat16")
    compare(case, result, expect(draw(case)), score)
    assert 2**-11 < score.row < BUDGETS["bfloat16"].target and score.lse < 0.1


def test_a_violation_states_its_place_and_how_to_repeat_it() -> None:
    def change(result: Result) -> None:
        result.output[8, 3] = 0

    text = str(judged(change)[0])
    assert "row 8 (request 2, token 1 of 18, 18 keys), head 3" in text
    assert "--repro" in text and '"seq_lens":[33,9,18]' in text


def test_equal_bits_are_not_close_numbers() -> None:
    one, other = perfect(), perfect()
    assert list(same(CASE, "again", one, other)) == []
    other.output[7, 1, 3] = np.nextafter(other.output[7, 1, 3], np.float32(np.inf))
    (violation,) = same(CASE, "again", one, other)
    assert (violation.rule, violation.row, violation.head) == ("X", 7, 1)
