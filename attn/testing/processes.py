"""Run independent tasks in several processes, for kernels that compile at their first call, when one process mostly waits.

Workers are spawned, since a process that has used an accelerator must not fork. A worker imports what its task needs, so tasks
are data and the function that runs them is defined at module level. Results are in the order of the tasks.
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

#: Variables that limit a worker's threads. Libraries read them at import, so they are set before the worker starts.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def spread(
    function: Callable[[Task], Outcome],
    tasks: Sequence[Task],
    jobs: int,
    lost: Callable[[str], Outcome],
    kind: Callable[[Task], Any] = lambda task: None,
) -> Iterator[Outcome]:
    """Yield `function(task)` of every task, in order, computed by `jobs` processes.

    One task of each `kind` runs first, so that the others find its programs in the compiler's cache. A worker that dies breaks
    its pool; each unfinished task is then run in a process of its own, and if that dies too, its result is `lost(why)`.
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
            pass  # a worker has died: the tasks that were not submitted run below
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
    """The process that ran a task died or exceeded the time limit."""


class Ended(RuntimeError):
    """The process that ran a task was ended by a signal from outside, such as from a user or the out-of-memory killer."""


_OUTSIDE = tuple(signal.Signals[name] for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


class Worker:
    """A process that runs `function(task)` for one task after another.

    A call raises `Lost` if the task ends the process or exceeds its time limit, and `Ended` if the process was ended from
    outside, for which the task is not to blame.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._process: Any = None
        self._pipe: Any = None

    def __call__(self, task: Any, limit: float) -> Any:
        """Return `function(task)`, starting a process if there is none.

        Raises `Lost` if the process dies or needs more than `limit` seconds, and `Ended` if it is ended from outside.
        """
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, child_pipe = context.Pipe()
            self._process = context.Process(target=_serve, args=(self._function, child_pipe), daemon=True)
            self._process.start()
            child_pipe.close()
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
        """End the process; the next task starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            self._pipe.close()  # a process that waits for a task ends by itself
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
        except BrokenPipeError:  # the time limit has passed
            return


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


@contextmanager
def shared_cores(jobs: int) -> Iterator[None]:
    """Limit the threads of `jobs` processes, so that together they use each core once, unless the variables are set already."""
    share = str(max(1, (os.cpu_count() or 1) // jobs))
    added = [name for name in _THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, share))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
