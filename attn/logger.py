"""Loggers under the name `attn`: silent until the application configures logging; some notices are logged once only.

`warning_once` and `info_once` remember (message, arguments), so that an ordinary choice made ten thousand times is one line
in the log. The lock for this, as every lock of the library, is replaced in a forked child.
"""

import logging
import os
import threading
from collections.abc import Callable


def fork_safe_lock() -> Callable[[], threading.RLock]:
    """A reentrant lock, as a function that returns it: `with lock():`. A forked child has a new one.

    Only the forking thread exists in the child: a lock held by another thread would never be released there. A block that
    forks while it holds the lock still releases the lock that it acquired.
    """
    # Reentrant, because registering a backend within `registered` and a plugin that selects while it loads come back to
    # their lock.
    locks = [threading.RLock()]
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: locks.__setitem__(0, threading.RLock()))
    return lambda: locks[0]


_seen: set[tuple[object, ...]] = set()
_lock = fork_safe_lock()


class AttnLogger(logging.LoggerAdapter[logging.Logger]):
    """A `logging` logger that can also log a message only once per process."""

    def _once(self, level: int, message: str, *args: object) -> None:
        with _lock():
            # The format and its arguments, not the text: a repeated notice is then recognised without being formatted.
            key = (self.logger.name, level, message, args)
            if key in _seen:
                return
            _seen.add(key)
        # Outside the lock: a handler of the application may log, or wait for another thread, that comes back here.
        self.log(level, message, *args, stacklevel=3)  # the line that called info_once or warning_once

    def info_once(self, message: str, *args: object) -> None:
        self._once(logging.INFO, message, *args)

    def warning_once(self, message: str, *args: object) -> None:
        self._once(logging.WARNING, message, *args)


def init_logger(name: str) -> AttnLogger:
    """Return the logger of module `name`; the library adds the null handler only."""
    root = logging.getLogger("attn")
    # Without any handler, Python prints warnings of a library to stderr itself (logging's handler of last resort).
    if not root.handlers:
        root.addHandler(logging.NullHandler())
    return AttnLogger(logging.getLogger(name), {})
