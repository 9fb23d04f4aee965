"""What cases of test_fuzz.py do to the process that runs them. Each process imports this module, which imports no framework."""

import os
import signal
import time

from attn.testing.case import Case
from attn.tools.fuzz.campaign import CaseOutcome


def fate(task: tuple[str, str]) -> CaseOutcome:
    """A case of one head ends the process that runs it; a case of two heads never ends."""
    heads = Case.from_json(task[1]).num_kv_heads
    if heads == 1:
        os._exit(11)
    if heads == 5:
        os.kill(os.getpid(), signal.SIGSEGV)
    if heads == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    if heads == 2:
        time.sleep(600)
    return CaseOutcome()
