"""The host time of a layer's call: `in_model` reports prompts, first layers, others and masks apart, and restores the
functions that it replaces."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attn.integrations import transformers as integration  # noqa: E402
from benchmarks.programs import transformers_overhead as program  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="models are large there")
def test_calls_within_a_model_are_timed_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.register()
    took = iter(range(10**6))
    monkeypatch.setattr(program.time, "perf_counter_ns", lambda: next(took) ** 2 * 1000)  # each call takes longer than the last
    before = {name: program.ALL_ATTENTION_FUNCTIONS[name] for name in program.IN_MODEL}
    rows = program.in_model("llama", "1x8", rounds=1, tokens=3)
    kinds = ["prompt, a layer", "token, first layer", "token, other layers", "token, masks"]
    assert [row["kind"] for row in rows] == [f"llama 1x8: {kind}" for kind in kinds]
    prompt, first, others, _ = rows
    for name in program.IN_MODEL:
        assert prompt[name] < first[name] < others[name]
        assert program.ALL_ATTENTION_FUNCTIONS[name] is before[name]


def test_a_quartile_is_one_of_the_values() -> None:
    assert program.quartile([9.0, 1.0, 5.0, 3.0]) == 3.0
