"""Which cases of the conformance suite `make test` runs on a backend whose cases are expensive: interpreted or compiled ones.

The kept cases together detect every planted bug that all cases detect (tests/testing/mutants.py, on the simulated kernel), and
have every fact of all cases: dtypes, features, kinds of batches (`facts`). They need few compiled programs. The other
cases run under `--full`, and a few of them, drawn daily, in `make test`.

`python -m tests.testing.covering --write` chooses them again (minutes) and writes tests/testing/kept.json.
"""

import json
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from attn.backends.registry import AttentionBackendEnum
from attn.testing.case import Case
from attn.testing.conformance import device_for
from attn.testing.subject import subject_of
from attn.testing.suite import cases_of, program_of
from tests.testing.mutants import MUTANTS, killers

KEPT = Path(__file__).with_name("kept.json")
#: The backends, and how their kernels execute where `make test` runs.
BACKENDS = {"PALLAS": "interpreted", "XLA_ATTN": "ran", "TRITON_ATTN": "interpreted"}
#: What compiling a program costs, in runs of a case. Triton's interpreter compiles nothing.
COMPILING = {"PALLAS": 5.0, "XLA_ATTN": 10.0, "TRITON_ATTN": 0.0}
#: Properties that need more of a kernel than the simulated one has.
UNSIMULATED = ("captured",)

_VALUES = ("dtype", "element", "attn_type", "inputs", "new", "through", "arrays", "layout", "alibi", "causal")  # a fact a value
_USED = ("padding", "loose", "shared_prefix", "scale", "prefix", "chunk_size", "span_window")  # a fact if not the default


def facts(case: Case) -> Iterator[Hashable]:
    """Yield what a case requests and is made of, beside the property that it checks."""
    yield from (("feature", feature) for feature in case.request().features)
    yield from ((name, getattr(case, name)) for name in _VALUES)
    yield from ((name, "used") for name in _USED if getattr(case, name) != Case.__dataclass_fields__[name].default)
    yield "tree", (case.tree > 0) - (case.tree < 0)
    yield "spans", (case.spans > 0) - (case.spans < 0)
    yield "sides", tuple(bound is None for bound in case.window)
    yield "heads", (case.num_heads == case.num_kv_heads, case.num_kv_heads == 1)
    yield "decodes only", all(n <= 1 for n in case.query_lens)
    if case.check.startswith(UNSIMULATED):
        yield "check", case.check


def positive_cases(name: str) -> list[Case]:
    """Return a backend's quick suite without refusals, which are cheap."""
    backend = AttentionBackendEnum[name].get_class()
    subject = subject_of(backend, device=None if BACKENDS[name] == "interpreted" else device_for(backend))
    return [case for case in cases_of(subject) if not case.check.startswith("refusal")]


def kills(case: Case) -> set[str]:
    """Return the planted bugs of the simulated kernel that a case detects."""
    if case.check.startswith(UNSIMULATED):
        return set()
    return {name for name, kernel in MUTANTS.items() if killers(kernel(), [case])}


def cover(cases: Sequence[Case], killed: Mapping[Case, set[str]], compiling: float) -> list[Case]:
    """Return few cases, in order, that have every fact and detect every bug that all do: a greedy set cover, by cost."""
    left: dict[Case, set[Hashable]] = {case: {*facts(case), *killed[case]} for case in cases}
    missing: set[Hashable] = set().union(*left.values())
    chosen: set[Case] = set()
    programs: set[Hashable] = set()

    def gain(case: Case) -> float:
        return len(left[case] & missing) / (1 if program_of(case) in programs else 1 + compiling)

    while missing:
        best = max(left, key=gain)
        programs.add(program_of(best))
        chosen.add(best)
        missing -= left.pop(best)
    return [case for case in cases if case in chosen]


@cache
def kept() -> dict[str, dict[str, list[str]]]:
    """Return for each backend the names of the kept `cases`, and the planted bugs that are `alive`: no case detects them, as
    they need features that the backend lacks."""
    return dict(json.loads(KEPT.read_text()))


def is_kept(name: str, case: Case) -> bool:
    """Whether `make test` always runs this case of the backend. Refusals are cheap, and always run."""
    return case.check.startswith("refusal") or case.name in kept()[name]["cases"]


def main() -> None:
    chosen = {}
    for name in BACKENDS:
        cases = positive_cases(name)
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
            killed = dict(zip(cases, processes.map(kills, cases), strict=True))
        few = cover(cases, killed, COMPILING[name])
        alive = sorted(MUTANTS.keys() - set().union(*killed.values()))
        print(f"{name}: {len(few)} of {len(cases)} cases, of {len({program_of(case) for case in few})} programs")
        chosen[name] = {"cases": [case.name for case in few], "alive": alive}
    if "--write" in sys.argv[1:]:
        KEPT.write_text(json.dumps(chosen, indent=1) + "\n")


if __name__ == "__main__":
    main()
