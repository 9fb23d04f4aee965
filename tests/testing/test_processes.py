"""Cases in several processes: in order, each once, and a process that dies fails one case only. About 12 s."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn.testing import processes, run_conformance
from attn.testing.processes import Ended, Worker, spread
from attn.tools.conform import main

ROOT = Path(__file__).parents[2]


def halved(task: int) -> int:
    if task < 0:
        os._exit(3)
    time.sleep(0.05 * (task % 3))
    return task // 2


def test_results_are_in_the_order_of_the_tasks() -> None:
    assert list(spread(halved, range(8), 2, lambda why: -1, lambda task: task % 2)) == [n // 2 for n in range(8)]
    assert list(spread(halved, [], 2, lambda why: -1)) == []


def test_a_process_that_dies_costs_its_own_task() -> None:
    told: list[str] = []
    assert list(spread(halved, [6, -1, 8], 2, lambda why: len(told.append(why) or []) - 1)) == [3, -1, 4]
    assert len(told) == 1 and "the process that ran it died" in told[0]


def test_a_process_that_cannot_start_is_no_process() -> None:
    with Worker(lambda task: task) as worker:  # a function that cannot be sent
        for _ in range(2):
            with pytest.raises((AttributeError, pickle.PicklingError)):
                worker(1, 5.0)
        worker.kill()


def test_a_process_that_is_about_to_start_is_killed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    starting, ended = threading.Event(), list[BaseException]()

    @contextlib.contextmanager
    def slow(variables: Any) -> Iterator[None]:
        starting.set()
        time.sleep(0.5)
        yield

    def call() -> None:
        try:
            worker(1_000_000, 60.0)
        except Ended as error:
            ended.append(error)

    monkeypatch.setattr(processes, "_set", slow)
    with Worker(time.sleep) as worker:
        thread = threading.Thread(target=call)
        thread.start()
        starting.wait()
        worker.kill()
        thread.join(30)
        assert not thread.is_alive() and len(ended) == 1


def test_a_run_in_processes_is_the_same_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert main(["CPU_ATTN", "--only", "page boundaries", "--jobs", "2", "--json"]) == 0
    (there,) = json.loads(capsys.readouterr().out)["backends"]
    (here,) = run_conformance(["CPU_ATTN"], only="page boundaries").to_dict()["backends"]
    assert {**there, "seconds": 0} == {**here, "seconds": 0} and there["cases"] == 3
    assert "OMP_NUM_THREADS" not in os.environ
    with pytest.raises(ValueError, match="jobs=0 must be at least 1"):
        run_conformance(["CPU_ATTN"], jobs=0)


def test_parts_are_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    counts = [run_conformance(["CPU_ATTN"], only="no ", part=part).backends[0].cases for part in ((1, 1), (1, 2), (2, 2))]
    assert counts[0] == counts[1] + counts[2] > 2
    assert main(["CPU_ATTN", "--only", "no ", "--part", "2/2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backends"][0]["cases"] == counts[2]
    with pytest.raises(ValueError, match="part=3/2 must be one of 1/2 to 2/2"):
        run_conformance(["CPU_ATTN"], part=(3, 2))
    with pytest.raises(ValueError, match="whole suite, not part 1 of 2"):
        run_conformance(["CPU_ATTN"], part=(1, 2), record=True)


def test_a_worker_whose_outcome_is_not_awaited_ends_without_a_traceback() -> None:
    """After Ctrl-C: what is unread in a pipe that is closed resets the connection of its other end."""
    worker = Worker(abs)
    worker._start()
    process = worker._process
    worker._pipe.send(-1)
    assert worker._pipe.poll(60)
    worker._pipe.close()
    process.join(60)
    assert process.exitcode == 0


ORPHAN = """
import os
from attn.testing.processes import Worker
from tests.testing.test_processes import waits

if __name__ == "__main__":
    Worker(waits)(os.getpid())
"""


def waits(parent: int) -> None:
    print(os.getpid(), flush=True)
    os.kill(parent, signal.SIGKILL)
    time.sleep(600)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
def test_a_worker_ends_with_its_parent_though_its_task_does_not(tmp_path: Path) -> None:
    (script := tmp_path / "orphan.py").write_text(ORPHAN)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    # Until the worker ends, it has the other end of this pipe, and `communicate` waits.
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, env=env, timeout=120, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL and int(done.stdout)
