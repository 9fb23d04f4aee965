"""Launches that layers share outlive a test: each starts without those of others, which may have decided them otherwise."""

import pytest


@pytest.fixture(autouse=True)
def nothing_launched() -> None:
    pytest.importorskip("torch")
    from attn.integrations.transformers import dispatch

    dispatch.plain_launches.clear()
    dispatch.runs.clear()
