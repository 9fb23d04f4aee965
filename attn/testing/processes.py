"""Spreading independent tasks over processes: for kernels whose first call compiles, where one process mostly waits.

Workers are spawned, since a process that has touched an accelerator must not fork. Each imports what its task needs, so a
task is data and the function that runs it a module's own. Results come in the order of the tasks, whoever was first.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

#: A worker's share of the cores: libraries read these when they are first imported, so they are set before it starts.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def spread(
    function: Callable[[Task], Outcome],
    tasks: Sequence[Task],
    jobs: int,
    lost: Callable[[str], Outcome],
    kind: Callable[[Task], Any] = lambda task: None,
) -> Iterator[Outcome]:
    """`function(task)` of every task, in order, by `jobs` processes.

    One task of each `kind` goes first: what those compile the others find in the compiler's cache. A worker that dies takes
    its pool with it; the tasks that were not done are tried again one process each, and `lost(why)` stands for what
    ends that one too.
    """
    seen: set[Any] = set()
    first: list[int] = []
    rest: list[int] = []
    for i, task in enumerate(tasks):
        (rest if kind(task) in seen else first).append(i)
        seen.add(kind(task))
    with shared_cores(jobs), _pool(min(jobs, max(len(tasks), 1))) as pool:
        futures: dict[int, Future[Outcome]] = {}
        try:
            for i in first + rest:
                futures[i] = pool.submit(function, tasks[i])
        except BrokenProcessPool:
            pass  # a worker died already: what was not submitted is tried below
        for i, task in enumerate(tasks):
            try:
                yield futures[i].result() if i in futures else _alone(function, task, lost)
            except BrokenProcessPool:
                yield _alone(function, task, lost)


def _alone(function: Callable[[Task], Outcome], task: Task, lost: Callable[[str], Outcome]) -> Outcome:
    with _pool(1) as pool:
        try:
            return pool.submit(function, task).result()
        except BrokenProcessPool as error:
            return lost(f"the process that ran it died: {error}")


class Lost(RuntimeError):
    """The process that ran a task died, or took longer than the task may."""


class Ended(RuntimeError):
    """The process that ran a task was ended by a signal that comes from outside: a person's, or a system's out of memory."""


_OUTSIDE = tuple(signal.Signals[name] for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


class Worker:
    """A process that runs `function(task)` for one task after another. One that ends it, or does not end, is `Lost`; one
    whose process was `Ended` from outside says nothing of the task."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._process: Any = None
        self._pipe: Any = None

    def __call__(self, task: Any, limit: float) -> Any:
        """`function(task)`, started anew where there is no process. Raises `Lost` when it dies or takes more than `limit`
        seconds, and `Ended`."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(self._function, theirs), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send(task)
            if not self._pipe.poll(limit):
                self.close()
                raise Lost(f"no answer within {limit:.0f} s")
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            process = self._process
            process.join(5)
            self.close()
            if -process.exitcode in _OUTSIDE:
                raise Ended(f"its process was ended from outside by {signal.Signals(-process.exitcode).name}") from None
            raise Lost(f"the process that ran it died (exit code {process.exitcode})") from None

    def close(self) -> None:
        """End the process; the next task starts another."""
        process, self._process = self._process, None
        if process is not None:
            self._pipe.close()  # one that waits for a task ends by itself
            process.join(1)
            process.kill()
            process.join()


def _serve(function: Callable[[Any], Any], pipe: Connection) -> None:
    while True:
        try:
            task = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        outcome = function(task)
        try:
            pipe.send(outcome)
        except BrokenPipeError:  # it came too late
            return


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


@contextmanager
def shared_cores(jobs: int) -> Iterator[None]:
    """The caller's own settings are kept; without any, `jobs` processes together use each core once."""
    share = str(max(1, (os.cpu_count() or 1) // jobs))
    ours = [name for name in _THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, share))
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
