"""Defects planted in the library's sources, one at a time, each of which the tests must notice.

`tests.testing.mutants` breaks a simulated kernel, which shows what the conformance suite sees. Here the library itself is
broken, in a copy, by each change of defects.txt: `python -m tests.testing.planted` says which test file and which test
noticed each defect. What survives shows a missing test. `--full` runs the expensive cases too: a defect that only they notice
is one that `make test` misses.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
TIMEOUT = 900.0  #: seconds that a test file may take; whatever takes longer has noticed


@dataclass(frozen=True)
class Defect:
    """One small mistake."""

    name: str
    file: str  #: a path under attn
    old: str  #: text that the file has exactly once
    new: str  #: what replaces it
    tests: tuple[str, ...]  #: files under tests that could notice, the one most likely to first
    why: str  #: what is wrong, in a sentence

    def planted(self, text: str) -> str:
        """Return the file's text with the defect.

        Raises ValueError if the text does not have `old` exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: attn/{self.file} has {count} times what the defect replaces: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What the test files made of a defect; `killer` is "" if none noticed."""

    name: str
    killer: str = ""  #: the test file that noticed
    test: str = ""  #: its test, or how it noticed without one: see `run_file`
    seconds: float = 0.0
    files: dict[str, str] = field(default_factory=dict)  #: of each file that ran, what noticed: "" for nothing


def read(text: str) -> Iterator[Defect]:
    """Yield the defects of a list: after a line `[FILE] TEST ...`, `NAME: WHY` with the lines removed (-) and added (+)."""
    for part in text.split("\n\n"):
        lines = part.rstrip("\n").split("\n")
        if lines[0].startswith("["):
            file, *tests = lines[0].split()
            continue
        name, _, why = " ".join(line for line in lines if line[0] not in "-+").partition(": ")
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        yield Defect(name, file[1:-1], old, new, tuple(tests), why)


DEFECTS = tuple(read(Path(__file__).with_name("defects.txt").read_text(encoding="utf-8")))


def copy_tree(folder: Path) -> None:
    """Copy what git lists of this checkout, changes and new files included, with the compiled modules of attn."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for cached in (ROOT / "attn").rglob("__pycache__"):
        if (target := folder / cached.relative_to(ROOT)).parent.is_dir():
            shutil.copytree(cached, target, dirs_exist_ok=True)


def plant(defect: Defect, folder: Path) -> None:
    """Change a copy of the checkout."""
    path = folder / "attn" / defect.file
    path.write_text(defect.planted(path.read_text(encoding="utf-8")), encoding="utf-8")
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of the tests' processes: one thread, and attn from the copy, in their child processes too."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = [str(folder), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
    flags = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    return {**kept, **threads, **hidden, **flags, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


@contextlib.contextmanager
def checkout(defect: Defect | None) -> Iterator[Path]:
    """A copy of this checkout with a defect, or without one."""
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        copy_tree(folder)
        check = [sys.executable, "-c", "import attn; print(attn.__file__)"]
        found = subprocess.run(check, cwd=folder.parent, env=environment(folder), capture_output=True, text=True).stdout.strip()
        if found != str(folder / "attn" / "__init__.py"):
            raise RuntimeError(f"the tests of the copy in {folder} would import {found or 'no attn'}")
        if defect is not None:
            plant(defect, folder)
        yield folder


class NothingRan(Exception):
    """A test file of which no test ran."""


def run_file(folder: Path, file: str, full: bool = False, words: Sequence[str] = ()) -> str:
    """Run a test file in a copy; return the test that failed, or "" if all passed.

    Returns "collection" if the file cannot be imported, "timeout", or "signal N" if a signal ended the process.
    Raises `NothingRan` if no test ran, as where all are skipped.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", f"tests/{file}"]
    command += ["--full"] * full + list(words)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what the tests started too
        process.wait()
    if process.returncode == pytest_code("NO_TESTS_COLLECTED"):
        raise NothingRan(output.strip().splitlines()[-1])
    if process.returncode == pytest_code("OK"):
        return ""
    if process.returncode == pytest_code("USAGE_ERROR") and "conftest" not in output:
        raise RuntimeError(output.strip())
    for line in output.splitlines():
        head, _, rest = line.partition(" ")
        if head in ("FAILED", "ERROR") and (test := rest.partition("::")[2]):
            return test.partition(" - ")[0]
    return f"signal {-process.returncode}" if process.returncode < 0 else "collection"


def pytest_code(name: str) -> int:
    """Return the number of one of pytest's exit codes."""
    import pytest

    return int(pytest.ExitCode[name])


def hunt(defect: Defect, full: bool = False, all_files: bool = False, words: Sequence[str] = ()) -> Outcome:
    """Run a defect's test files until one notices, or all of them."""
    start, found = time.monotonic(), dict[str, str]()
    with checkout(defect) as folder:
        for file in defect.tests:
            try:
                found[file] = run_file(folder, file, full, words)
            except NothingRan:
                found[file] = ""
            if found[file] and not all_files:
                break
    killer = next((file for file, test in found.items() if test), "")
    return Outcome(defect.name, killer, found.get(killer, ""), round(time.monotonic() - start, 1), found)


def baseline(files: Sequence[str], full: bool = False, words: Sequence[str] = ()) -> Iterator[tuple[str, str, float]]:
    """Run test files without a defect: yield each, with the test that fails ("" for none) and its seconds."""
    with checkout(None) as folder:
        for file in files:
            start = time.monotonic()
            try:
                failed = run_file(folder, file, full, words)
            except NothingRan as reason:
                failed = f"nothing ran: {reason}"
            yield file, failed, round(time.monotonic() - start, 1)


def row(outcome: Outcome) -> str:
    """Return an outcome as a line."""
    by = f"{outcome.killer} {outcome.test}" if outcome.killer else "SURVIVES " + " ".join(outcome.files)
    return f"{outcome.name:<36} {outcome.seconds:6.1f} s  {by}"


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = lambda line: print(line, flush=True)) -> int:
    """Run the command; return its exit status."""
    global TIMEOUT
    parser = argparse.ArgumentParser(prog="python -m tests.testing.planted", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="defects; all if none is given")
    parser.add_argument("--full", action="store_true", help="run every case, also those marked `full`")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="defects at a time")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the outcomes to FILE too")
    parser.add_argument("--all-files", action="store_true", help="run all of a defect's files, also after one noticed")
    parser.add_argument("--baseline", action="store_true", help="run the test files without any defect: all must pass")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, metavar="SECONDS", help="of a test file (default: %(default)g)"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="run only tests that match, as pytest does")
    chosen = parser.parse_args(arguments)
    TIMEOUT = chosen.timeout
    known = {defect.name: defect for defect in DEFECTS}
    if unknown := sorted(set(chosen.names) - known.keys()):
        parser.error(f"no defect is named {', '.join(unknown)}")
    defects = [known[name] for name in chosen.names] or list(DEFECTS)
    words = ["-k", chosen.k] if chosen.k else []
    if chosen.baseline:
        failed = False
        for file, test, seconds in baseline(list(dict.fromkeys(f for d in defects for f in d.tests)), chosen.full, words):
            failed = failed or bool(test)
            show(f"{file:<60} {seconds:6.1f} s  {'FAILS ' + test if test else 'passes'}")
        return int(failed)
    outcomes, alive = [], []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for outcome in pool.map(lambda defect: hunt(defect, chosen.full, chosen.all_files, words), defects):
            outcomes.append(outcome)
            if outcome.killer:
                show(row(outcome))
            else:
                alive.append(outcome)
    for outcome in alive:
        show(row(outcome))
    late = sum(outcome.test == "timeout" for outcome in outcomes)
    show(f"{len(outcomes) - len(alive)} of {len(outcomes)} defects were noticed" + f", {late} by a timeout alone" * bool(late))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
