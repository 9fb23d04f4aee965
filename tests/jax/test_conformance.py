"""The conformance suite on PALLAS in TPU interpret mode: races, uninitialised memory and bounds watched.

Compiling the interpreted programs is what takes the time, so a test is cases of one program: those that `make test` keeps
(tests/testing/covering.py), and the others, of which it runs a case of one program a day. The runner of `attn.jax.testing`
says which of the two ways to execute DMAs a case is held to.
"""

import gc
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from attn.jax.backends.pallas import PallasAttentionBackend
from attn.jax.testing import JaxRunner
from attn.testing import Case, cases_for, draw, run_case
from attn.testing.suite import program_of
from tests.levels import sampled, some
from tests.testing import covering


@pytest.fixture(scope="module", autouse=True)
def _unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _frozen(_unfrozen: None) -> Iterator[None]:
    """Compiled programs are millions of objects that stay: looking through them for garbage takes seconds each time."""
    yield
    gc.collect(1)
    gc.freeze()


def _programs() -> list[Any]:
    """The cases, refusals apart, by the program that they need and by whether they are kept."""
    found: dict[tuple[object, bool], list[Case]] = {}
    unlike: dict[Case, Case] = {}  # in more than the name
    for case in cases_for(PallasAttentionBackend):
        unlike.setdefault(case.replace(name=""), case)
    for case in unlike.values():
        key = "refusals" if case.check.startswith("refusal") else program_of(case)
        found.setdefault((key, covering.is_kept("PALLAS", case)), []).append(case)
    few = {key: cases if key[1] else some(cases, 1, str(cases[0])) for key, cases in found.items()}
    params = [pytest.param(few[key], id=f"{cases[0]} and {len(cases) - 1} more") for key, cases in found.items()]
    return sampled(params, 1, "PALLAS", lambda param: covering.is_kept("PALLAS", param.values[0][0]))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a device the kernels run: attn conform PALLAS")
@pytest.mark.parametrize("cases", _programs())
def test_conformance(cases: list[Case]) -> None:
    violations = [violation for case in cases for violation in run_case(PallasAttentionBackend, case)]
    assert not violations, "\n".join(map(str, violations))


def test_both_ways_of_dmas_are_met() -> None:
    """By every kind of cache, and by decoders with and without each rule; the mode changes with each feature more or less."""
    modes: dict[str, set[str]] = {}
    runner = JaxRunner(PallasAttentionBackend)
    for case in cases_for(PallasAttentionBackend):
        if not case.check.startswith("refusal"):
            for word in (case.dtype, case.element, *case.request().features):
                modes.setdefault(word, set()).add(runner.dma_mode(draw(case)))
    assert all(len(met) == 2 for met in modes.values()), modes


def test_the_grid_has_two_variants_of_a_program() -> None:
    """Whether the new tokens are written and LSE returned: both values of either for each, and all four pairs among them."""
    met: dict[object, set[tuple[bool, bool]]] = {}
    for case in cases_for(PallasAttentionBackend):
        if case.name.startswith("grid"):
            met.setdefault(program_of(case), set()).add((case.kv_sharing, case.lse))
    assert all(len(pairs) == 2 for pairs in met.values()), met
    assert len(set.union(*met.values())) == 4
