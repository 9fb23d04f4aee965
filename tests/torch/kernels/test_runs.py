"""Numbers that the launches of a step share: made once for a stream, and never kept from a graph that is captured."""

import pytest
import torch

from attn.torch.kernels import runs

HOST = torch.device("cpu")


def test_numbers_are_kept_for_the_stream_that_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kept = runs.numbers(3, 2, 5, HOST, 7)
    assert kept.tolist() == [2, 7, 12] and kept.dtype == torch.int32 and runs.numbers(2, 4, 0, HOST, 7).tolist() == [4, 4]
    assert runs.numbers(3, 2, 5, HOST, 7) is kept and runs.numbers(3, 2, 5, HOST, 8) is not kept
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = runs.numbers(3, 2, 6, HOST, 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert runs.numbers(3, 2, 6, HOST, 7) is not captured
