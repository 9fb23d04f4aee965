"""Time limit for compiling a kernel: some compilers take hours on one."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after `seconds` (0, or outside the main thread: no limit); child processes of compilers are ended
    with it."""
    # Python runs signal handlers in the main thread only, and Windows has no such timer.
    if seconds <= 0 or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        # Raised where the main thread is: `subprocess.run` then kills its compiler. Compilers that run in this process are
        # interrupted when they return to Python.
        raise TimeoutError(f"not ready after {seconds:g} s")

    before, began = signal.signal(signal.SIGALRM, stop), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # The timer first, so that it cannot fire for the handler from before.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        # A process has one such timer: the caller's, such as that of a test's time limit, goes on, if late.
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)
