"""Loggers under the name `attn`: silent until the application configures logging, and each notice once.

`warning_once` and `info_once` remember (message, arguments), so that an ordinary choice made ten thousand times is
one line in the log.
"""

import logging
import threading

from attn.forks import renew_after_fork

_seen: set[tuple[object, ...]] = set()
_lock = threading.RLock()
renew_after_fork(globals(), "_lock")


class AttnLogger(logging.LoggerAdapter[logging.Logger]):
    """A `logging` logger that can also say a thing only once per process."""

    def _once(self, level: int, message: str, *args: object) -> None:
        with _lock:
            key = (self.logger.name, level, message, args)
            if key in _seen:
                return
            _seen.add(key)
        self.log(level, message, *args, stacklevel=3)  # the line that called info_once or warning_once

    def info_once(self, message: str, *args: object) -> None:
        self._once(logging.INFO, message, *args)

    def warning_once(self, message: str, *args: object) -> None:
        self._once(logging.WARNING, message, *args)


def init_logger(name: str) -> AttnLogger:
    """The logger of module `name`; the library adds no handler but the null one."""
    root = logging.getLogger("attn")
    if not root.handlers:
        root.addHandler(logging.NullHandler())
    return AttnLogger(logging.getLogger(name), {})


def forget_notices() -> None:
    """Let every once-only notice be said again (tests)."""
    with _lock:
        _seen.clear()
