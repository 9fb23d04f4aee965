"""Mutation tests of the suite: it passes a correct kernel and detects every planted bug (about 15 s).

What each mutant gets wrong is in its docstring; `python -m tests.testing.mutants` prints which rules and cases see it.
"""

from dataclasses import replace

import pytest

from attn.testing.properties import CHECKS
from attn.testing.suite import cases_of
from tests.levels import sampled, some
from tests.testing import covering
from tests.testing.mutants import MUTANTS, SUBJECT, killers, likeliest_first, mutation_table, positive_cases
from tests.testing.simulated import SimulatedKernel

CASES = positive_cases()


def test_the_unmutated_kernel_passes_everything() -> None:
    assert killers(SimulatedKernel(), some(CASES, 120, "unmutated")) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_killed(name: str) -> None:
    found = killers(MUTANTS[name](), likeliest_first(name, CASES), enough=1)
    assert found, f"no case of the quick suite notices {name}: {MUTANTS[name].__doc__}"


@pytest.mark.parametrize("name", sampled(list(covering.BACKENDS), 1, "kept cases"))
def test_the_cases_that_make_test_keeps_kill_what_all_cases_kill(name: str) -> None:
    cases = {case.name: case for case in covering.positive_cases(name)}
    assert set(covering.kept()[name]["cases"]) <= cases.keys(), "choose again: python -m tests.testing.covering --write"
    kept = (cases[case] for case in covering.kept()[name]["cases"])
    few = [case for case in kept if not case.check.startswith(covering.UNSIMULATED)]
    alive = [name for name, mutant in MUTANTS.items() if not killers(mutant(), likeliest_first(name, few), enough=1)]
    assert sorted(alive) == covering.kept()[name]["alive"]


@pytest.mark.full
@pytest.mark.parametrize("name", covering.BACKENDS)
def test_what_the_kept_cases_let_live_no_case_kills(name: str) -> None:
    cases = [case for case in covering.positive_cases(name) if not case.check.startswith(covering.UNSIMULATED)]
    assert [mutant for mutant in covering.kept()[name]["alive"] if killers(MUTANTS[mutant](), cases, enough=1)] == []


def test_there_are_enough_mutants_and_each_has_a_docstring() -> None:
    assert len(MUTANTS) >= 40
    assert all(cls.__doc__ for cls in MUTANTS.values())


def test_every_property_is_used() -> None:
    used = {case.check.partition("=")[0] for case in CASES}
    assert used == CHECKS.keys() - {"captured", "too_large", "wrong"}  # of compiled backends, on a GPU, of layers alone


def test_the_table_shows_rules_and_the_first_case() -> None:
    names = ("LseBaseTwo", "PadWritesLastSlot", "CapByExponential")
    rows = {kill.mutant: kill for kill in mutation_table(enough=1, names=names)}
    assert rows["LseBaseTwo"].rules and "D" in rows["LseBaseTwo"].rules
    assert rows["PadWritesLastSlot"].rules == ("W",)
    assert rows["CapByExponential"].first == "scores of 1e4 under a cap"


def test_the_full_suite_holds_more() -> None:
    assert len(cases_of(SUBJECT, "full")) > len(cases_of(SUBJECT)) + 80


FINITE = replace(SUBJECT, capabilities=replace(SUBJECT.capabilities, features=SUBJECT.capabilities.features - {"nan_safe"}))
FINITE_CASES = [case for case in cases_of(FINITE) if not case.check.startswith("refusal")]


def test_a_kernel_that_multiplies_by_zero_conforms_where_it_promises_nothing_else() -> None:
    assert killers(MUTANTS["MaskedValueMultiplied"](), some(FINITE_CASES, 120, "finite")) == []


@pytest.mark.parametrize(
    "name", ["CausalOneTooMany", "WindowLeftOneMore", "ExtraKey", "StaleTailRead", "TreeIgnored", "AdditiveMask"]
)
def test_large_numbers_show_a_wrong_mask_too(name: str) -> None:
    assert killers(MUTANTS[name](), likeliest_first(name, FINITE_CASES), enough=1)
