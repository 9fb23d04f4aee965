"""Notices, and locks after a fork."""

import logging
import os

import pytest

from attn import logger
from attn.logger import init_logger

# notices


def test_a_notice_is_logged_once_per_text_with_its_line(caplog):
    logger = init_logger("attn.something")
    with caplog.at_level(logging.INFO, logger="attn"):
        for number in (1, 1, 2, 1):
            logger.warning_once("number %d", number)
            logger.info_once("number %d", number)
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert said == [("WARNING", "number 1"), ("INFO", "number 1"), ("WARNING", "number 2"), ("INFO", "number 2")]
    assert {(r.funcName, r.filename) for r in caplog.records} == {
        ("test_a_notice_is_logged_once_per_text_with_its_line", os.path.basename(__file__))
    }


def test_the_library_has_no_handler_but_the_null_one():
    init_logger("attn.a"), init_logger("attn.b")
    assert [type(handler) for handler in logging.getLogger("attn").handlers] == [logging.NullHandler]
    assert logging.getLogger("attn").level == logging.NOTSET


# locks and forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_block_that_forks_while_it_holds_the_lock_still_leaves_it():
    lock = logger.fork_safe_lock()
    before = lock()
    with lock():
        child = os.fork()
        if child == 0:
            os._exit(0 if lock() is not before and lock().acquire(blocking=False) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lock() is before
