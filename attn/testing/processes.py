"""Run tasks in processes of their own, which may crash, hang or be limited: one process (`Worker`), or several (`spread`).

Workers are spawned, since a process that has used an accelerator must not fork. A worker imports what its task needs, so tasks
are data and the function that runs them is defined at module level.
"""

import contextlib
import functools
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar

from attn.backend_enum import path_of
from attn.imports import resolve_obj_by_qualname

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

#: Variables that limit a worker's threads. Libraries read them at import, so they are set before the worker starts.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Not SIGSEGV, SIGABRT and their like, which the task itself causes. Windows lacks SIGKILL and SIGHUP.
_OUTSIDE = tuple(signal.Signals[name] for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
# The environment belongs to the whole process: workers that threads start at the same time would get each other's variables.
_starting = threading.Lock()


def spread(
    function: Callable[[Task], Outcome],
    tasks: Sequence[Task],
    jobs: int,
    lost: Callable[[str], Outcome],
    program_of: Callable[[Task], Any] = lambda task: None,
) -> Iterator[Outcome]:
    """Yield `function(task)` of every task, in order, computed by `jobs` processes.

    One task of each program, as `program_of` names it, runs first, so that the others find it in the compiler's cache. The
    result of a task whose process dies is `lost(why)`; the other tasks run in a new one.
    """
    seen: set[Any] = set()
    first: list[int] = []
    later: list[int] = []
    for i, task in enumerate(tasks):
        (later if program_of(task) in seen else first).append(i)
        seen.add(program_of(task))
    workers = [Worker(function) for _ in range(min(jobs, len(tasks)))]
    idle = list(workers)  # a thread takes one for each task; there are as many threads

    def run(task: Task) -> Outcome:
        worker = idle.pop()
        try:
            return worker(task)
        except (Lost, Ended) as error:
            return lost(str(error))
        finally:
            idle.append(worker)

    pool = ThreadPoolExecutor(jobs)
    try:
        with shared_cores(jobs):
            futures = {i: pool.submit(run, tasks[i]) for i in first + later}
            # In the order of the tasks, although another one may be done first.
            for i in range(len(tasks)):
                yield futures[i].result()
    finally:
        # First no new task, then the running ones are ended by their processes' death, then their threads can be joined. Also
        # if the caller stops early or an exception ends the loop.
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        pool.shutdown()
        for worker in workers:
            worker.close()


def each(
    function: Callable[[Any, Task], Outcome],
    backend: Any,
    tasks: Sequence[Task],
    jobs: int,
    lost: Callable[[str], Outcome],
    program_of: Callable[[Task], Any] = lambda task: None,
) -> Iterable[Outcome]:
    """Return `function(backend, task)` of every task, in order: here, or by `spread` in several processes, which import the
    backend class by its path."""
    # Here: a debugger and the caches of this process work, and a framework is imported once.
    if jobs == 1:
        return (function(backend, task) for task in tasks)
    return spread(functools.partial(_imported, function, path_of(backend)), tasks, jobs, lost, program_of)


def _imported(function: Callable[[Any, Task], Outcome], path: str, task: Task) -> Outcome:
    return function(resolve_obj_by_qualname(path), task)


class Lost(RuntimeError):
    """The process that ran a task died or exceeded the time limit."""


class Ended(RuntimeError):
    """The process that ran a task was ended by a signal from outside, such as from a user or the out-of-memory killer."""


class Worker:
    """A process that runs `function(task)` for one task after another, and the processes that these start.

    variables: of its environment, beside this process's. quiet: what it prints is shown only as the reason why it died.

    A call raises `Lost` if the task ends the process or exceeds its time limit, and `Ended` if the process was ended from
    outside, for which the task is not to blame.
    """

    def __init__(self, function: Callable[[Any], Any], variables: Mapping[str, str] | None = None, quiet: bool = False) -> None:
        self._function, self._variables = function, variables or {}
        self._log = tempfile.NamedTemporaryFile(prefix="attn-") if quiet else None  # noqa: SIM115  # `close` deletes it
        self._process: Any = None
        self._pipe: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.close()
        if self._log:
            self._log.close()

    def __call__(self, task: Any, limit: float | None = None) -> Any:
        """Return `function(task)`, starting a process if there is none.

        Raises `Lost` if the process dies or needs more than `limit` seconds, and `Ended` if it is ended from outside.
        """
        # The file is shared by all tasks of this worker: only what this one adds is its last words.
        log_size = os.stat(self._log.name).st_size if self._log else 0
        if self._process is None:
            self._start()
        try:
            self._pipe.send(task)
            # A process that dies closes its end, which ends the wait as well: `recv` then raises EOFError.
            if not self._pipe.poll(limit):
                self.kill()
                self.close()
                raise Lost(f"not done within {limit:g} s")
            return self._pipe.recv()
        # ConnectionError: it died before the task was sent.
        except (EOFError, ConnectionError):
            process = self._process
            # The pipe closes before the process has ended and has an exit code, which may take a while.
            process.join(5)
            self.close()
            if -process.exitcode in _OUTSIDE:
                raise Ended(f"its process was ended from outside by {signal.Signals(-process.exitcode).name}") from None
            if self._log is None:
                raise Lost(f"the process that ran it died (exit code {process.exitcode})") from None
            text = Path(self._log.name).read_bytes()[log_size:].decode(errors="replace")
            raise Lost(last_words(text, process.exitcode)) from None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        log = self._log.name if self._log else None
        # A daemon ends with this process, closed or not.
        process = context.Process(target=_serve, args=(self._function, child_pipe, log), daemon=True)
        with _starting, _set(self._variables):
            process.start()
            self._process = process  # once it runs: `kill` and the next call need one that does
        # While this copy is open, the death of the process would not end a wait.
        child_pipe.close()

    def kill(self) -> None:
        """Kill the process and those that it started; a call in another thread raises `Ended`."""
        with _starting:  # not while another thread starts it, which would then run its task
            process = self._process
        if process is not None:
            if hasattr(os, "killpg"):
                # The group does not exist until `_serve` has called setsid, nor once the process has ended. In the first case
                # `process.kill` ends the process.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()

    def close(self) -> None:
        """End the process; the next task starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            self._pipe.close()  # a process that waits for a task ends by itself
            process.join(1)
            process.kill()
            process.join()


def _serve(function: Callable[[Any], Any], pipe: Connection, log: str | None) -> None:
    if hasattr(os, "setsid"):
        os.setsid()  # so that `Worker.kill` reaches what it starts
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    if log is not None:
        to = os.open(log, os.O_WRONLY | os.O_APPEND)
        # What was buffered before belongs to the old file. File descriptors are replaced, since compilers print from C++.
        sys.stdout.flush()
        os.dup2(to, 1)
        os.dup2(to, 2)
    while True:
        try:
            task = pipe.recv()
        # The parent has ended or closed the pipe (with an unread outcome, ConnectionError), or a Ctrl-C has reached the whole
        # group: no traceback of each worker.
        except (EOFError, ConnectionError, KeyboardInterrupt):
            return
        outcome = function(task)
        try:
            pipe.send(outcome)
        except ConnectionError:  # the time limit has passed
            return


def _end_with(parent: Any) -> None:
    """End this process and those that it started when its parent is gone, which could not end a task that hangs."""
    connection.wait([parent.sentinel])
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def last_words(text: str, code: int) -> str:
    """Extract why a process died from its output: a fatal log line, LLVM's, an exception, or its last line."""
    # Most specific first: absl's fatal lines (libtpu), LLVM's, Python's. The last match, since a traceback names causes before
    # the error that they led to.
    for pattern in (r"^F\d{4} [^\]]*\] (.*)$", r"^(LLVM ERROR: .*)$", r"^(\w*(?:Error|Exception)\b.*)$"):
        if matches := re.findall(pattern, text, re.MULTILINE):
            return one_line(matches[-1])
    lines = [line for line in text.splitlines() if line.strip()]
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return one_line(f"{ended}: {lines[-1]}" if lines else ended)


def one_line(text: str) -> str:
    """Collapse white space in `text`, and elide its middle beyond 400 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 400 else f"{text[:300]} ... {text[-100:]}"


@contextlib.contextmanager
def shared_cores(jobs: int) -> Iterator[None]:
    """Limit the threads of `jobs` processes, so that together they use each core once, unless the variables are set already."""
    share = str(max(1, (os.cpu_count() or 1) // jobs))
    # A number of threads that the user has set is a choice.
    with _set({name: share for name in _THREADS if name not in os.environ}):
        yield


@contextlib.contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment while the context is open."""
    # Restored one by one: other variables may have changed meanwhile.
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
