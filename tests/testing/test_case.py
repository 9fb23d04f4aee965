"""Cases as data: JSON and back, the request they make, the command that repeats them (under a second)."""

import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn.testing import Case
from attn.testing.dense import DenseCase
from attn.testing.properties import run_check
from tests.testing.mutants import SUBJECT, positive_cases
from tests.testing.simulated import SimulatedKernel

LENS = st.lists(st.integers(0, 40), max_size=5).map(tuple)
SCALES = st.one_of(st.floats(1e-3, 10), st.tuples(st.floats(1e-3, 10), st.floats(1e-3, 10)))


@settings(max_examples=50, deadline=None)
@given(
    q=LENS,
    k_scale=SCALES,
    window=st.one_of(st.none(), st.integers(1, 9), st.tuples(st.none(), st.integers(0, 9))),
    seed=st.integers(),
)
def test_json_round_trip(q: tuple[int, ...], k_scale: float, window: int | None, seed: int) -> None:
    case = Case("any 'name'", q, q, k_scale=k_scale, sliding_window=window, geometry_seed=seed)
    assert Case.from_json(case.json()) == case
    assert Case.from_json(shlex.split(case.repro("NAME"))[-1]) == case


def test_every_case_of_the_suite_survives_json() -> None:
    for case in positive_cases():
        assert Case.from_json(case.json()) == case


def test_a_case_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match="colour"):
        Case.from_json('{"name": "x", "query_lens": [1], "seq_lens": [1], "colour": 1}')
    with pytest.raises(ValueError, match="'{\"name\": ' is not a case: Expecting value"):
        Case.from_json('{"name": ')
    with pytest.raises(ValueError, match="seq_lens"):
        Case.from_json('{"name": "x", "query_lens": [1]}')
    with pytest.raises(ValueError, match="query_lens=1 and seq_lens=.* must be lists of equally many natural numbers"):
        Case.from_json('{"name": "x", "query_lens": 1, "seq_lens": [1]}')
    with pytest.raises(ValueError, match="object"):
        Case.from_json("[1]")


def test_the_request_names_what_the_case_needs() -> None:
    case = Case(
        "all", (4,), (4,), sliding_window=(3, 2), causal=False, alibi=True, sinks="randn", logits_soft_cap=2.0, kv_sharing=True,
        lse=True, kv_cache_dtype="int8", k_scale=(0.1, 0.2),
    )  # fmt: skip
    assert case.request().features == {
        "sliding_window",
        "two_sided_window",
        "non_causal",
        "alibi",
        "sinks",
        "soft_cap",
        "kv_sharing",
        "lse",
        "per_head_scales",
        "nan_safe",
    }
    assert Case("plain", (1,), (1,)).request().features == {"nan_safe"}
    assert Case("finite", (1,), (1,), poison="huge").request().features == frozenset()
    assert Case("no cache", (1,), (1,), attn_type="encoder", causal=False).request().features == frozenset()


def test_an_encoder_reads_no_cache_and_looks_both_ways() -> None:
    case = Case("encoder", (4,), (4,), attn_type="encoder", causal=False, sliding_window=3)
    assert case.is_encoder and case.window == (2, 2)
    assert "non_causal" not in case.request().features


def test_names_are_unique() -> None:
    names = [case.name for case in positive_cases()]
    assert len(set(names)) == len(names), SUBJECT.name


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ('"inputs":"needles"', "inputs='needles' must be one of randn, needle, "),
        ('"layout":"odd"', "layout='odd' must be one of heads, flat, fused, heads_first"),
        ('"poison":"none"', "poison='none' must be one of mixed, huge, zero"),
        ('"sinks":"yes"', "sinks='yes' must be one of , randn, log_length, infinite"),
        ('"causal":"maybe"', "causal='maybe' must be one of True, False, mixed"),
        ('"seq_lens":[-1]', "must be lists of equally many natural numbers"),
    ],
)
def test_a_word_that_names_nothing_is_refused(field: str, said: str) -> None:
    """Drawn as ordinary numbers, such a case would pass."""
    with pytest.raises(ValueError, match=re.escape(said)):
        Case.from_json(f'{{"name":"x","query_lens":[1],"seq_lens":[5],{field}}}')


def test_a_dense_case_has_words_too() -> None:
    with pytest.raises(ValueError, match="layout='flat' must be one of heads, heads_first, fused"):
        DenseCase.from_json('{"name":"x","layout":"flat"}')


def test_an_unknown_property_is_refused() -> None:
    with pytest.raises(ValueError, match="check='nope' must be one of oracle, "):
        run_check(Case("x", (1,), (5,), check="nope"), SimulatedKernel())
