"""Which tests run at which level.

`make check`: files that take less than `FAST` seconds, and those that test what changed since main (`pytest --changed main`).
`make test`: everything but the cases marked `full`. `sampled` marks all but a few cases of a list, drawn by the day's date, so
    that a month of runs covers most of a grid. SUITE_SEED=<date> repeats the draw of a day.
`make test-full`: everything (`pytest --full`).
"""

import ast
import functools
import json
import os
import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
#: Seconds that each file of a second and more takes in `make test`, on one core; written by `pytest --write-seconds`.
SECONDS = TESTS / "seconds.json"
FAST = 4.0  #: a file of `make check` takes less than this
LEVEL = "SUITE_LEVEL"  #: tests/conftest.py sets it to `full` under `--full`
SEED = "SUITE_SEED"  #: tests/conftest.py sets it to the date, for all processes of a run
FULL = pytest.mark.full


def seed() -> str:
    """Return the seed of this run's samples."""
    return os.environ[SEED]


def sampled(cases: Sequence[Any], count: int, key: str, always: Callable[[Any], bool] = lambda case: False) -> list[Any]:
    """Return all cases as parameters of a test, with all but `count` of them marked `full`.

    cases: values, or results of `pytest.param`.
    key: a name of this list of cases; lists with different names are drawn independently.
    always: cases that are not drawn but run at every level, besides the `count`.
    """
    kept = _kept(cases, count, key, always)
    return [case if i in kept else full(case) for i, case in enumerate(cases)]


def some(cases: Sequence[Any], count: int, key: str, always: Callable[[Any], bool] = lambda case: False) -> list[Any]:
    """As `sampled`, for cases that one test runs: return those of this run's level."""
    kept = range(len(cases)) if os.environ.get(LEVEL) == "full" else _kept(cases, count, key, always)
    return [case for i, case in enumerate(cases) if i in kept]


def _kept(cases: Sequence[Any], count: int, key: str, always: Callable[[Any], bool]) -> set[int]:
    drawable = [i for i, case in enumerate(cases) if not always(case)]
    drawn = random.Random(f"{seed()} {key}").sample(drawable, min(count, len(drawable)))
    return set(range(len(cases))) - set(drawable) | set(drawn)


def full(case: Any) -> Any:
    """Return a case as a parameter that runs under `--full` only."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, FULL])
    return pytest.param(case, marks=FULL)


@functools.cache
def seconds() -> dict[str, float]:
    """Return the seconds of each file, by its path below `tests`."""
    return dict(json.loads(SECONDS.read_text()))


def write_seconds(measured: dict[str, float]) -> None:
    """Update the seconds of the files that ran; drop files that no longer exist."""
    known = {**seconds(), **{file.removeprefix("tests/"): round(taken, 1) for file, taken in measured.items()}}
    kept = {file: taken for file, taken in known.items() if taken >= 1 and (TESTS / file).is_file()}
    SECONDS.write_text(json.dumps(dict(sorted(kept.items(), key=lambda row: (-row[1], row[0]))), indent=1) + "\n")


def changed_files(base: str) -> set[str]:
    """Return the files that differ from the last commit shared with `base`, new ones included, by their path in the repository.

    Raises pytest.UsageError if git does not know `base`.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise pytest.UsageError(f"--changed {base}: git {words[0]}: {done.stderr.strip()}")
        return done.stdout

    common = git("merge-base", base, "HEAD").strip()
    return {*git("diff", "--name-only", common).split(), *git("ls-files", "--others", "--exclude-standard").split()}


def tests_what(file: Path, changed: set[str]) -> bool:
    """Whether a test file changed, or imports a changed module or helper, or is at the path of one (tests/test_mirror.py)."""
    path = file.relative_to(ROOT)
    mirrored = Path("attn", *path.parts[1:-1])
    stem = path.stem.removeprefix("test_")
    own = {str(path), *(str(mirrored / name) for name in (f"{stem}.py", f"_{stem}.py"))}
    if own & changed or any(name.startswith(f"{mirrored / stem}/") for name in changed):
        return True
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in changed if name.endswith(".py")}
    return bool(modules & _imports(file))


def _imports(file: Path) -> set[str]:
    """Return the modules that a file names in its import statements; `from a import b` names a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return found
