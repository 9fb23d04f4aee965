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


def test_prompts_keep_their_lists_for_one_stream_and_from_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's memory has its values when the graph is replayed, and another stream may read them before they are written."""
    pytest.importorskip("triton")
    from attn.torch.kernels import hopper_prefill

    planned, stream, capturing = list[int](), [0], [False]
    monkeypatch.setattr(hopper_prefill, "stream_of", lambda device: stream[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    prompts = hopper_prefill.EqualPrompts(0.5, True)
    monkeypatch.setattr(prompts, "_planned", lambda query, key, value, stream: planned.append(stream))
    query = torch.zeros(1, 2, 3, 64)

    def streams(of: int, captured: bool) -> list[int]:
        stream[0], capturing[0] = of, captured
        planned.clear()
        for _ in range(2):
            assert prompts(query, query, query) is None
        return list(planned)

    assert streams(0, False) == [0] and streams(7, False) == [7]
    assert streams(7, True) == [], "what is there before a capture serves it"
    assert streams(8, True) == [8, 8] and streams(7, False) == [], "and what a capture makes is forgotten"
