"""Locks and `os.fork`: a child must find free what another thread of its parent held.

Only the forking thread lives on in the child, so nobody there would ever release the lock of another one.
"""

import os
import threading
from typing import Any


def renew_after_fork(module: dict[str, Any], name: str) -> None:
    """Make the lock called `name` in `module` (its `globals()`) a new one in every forked child.

    A block that forks while it holds the lock still releases the one that it took.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: module.update({name: threading.RLock()}))
