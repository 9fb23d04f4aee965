"""Which rows are run, and a run of small ones in which one implementation is not installed."""

import json
import math
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from benchmarks.programs import transformers_generate as program  # noqa: E402
from benchmarks.programs.transformers_table import Row  # noqa: E402

LATER = time.monotonic() + 1e6


def rows(arguments: str) -> list[str]:
    return [str(row) for row in program.rows_of(program.parsed(arguments.split()))]


def test_rows_are_selected_by_what_they_have_or_one_by_one() -> None:
    assert len(rows("")) == 4 * (3 * 3 * 3 + 1)
    chosen = "--models qwen3 --batches 1 2 --prompts 8 --caches static --batching 3"
    assert rows(chosen) == ["qwen3:1x8:static", "qwen3:2x8:static", "qwen3:3x1024:paged"]
    assert rows("--models llama --caches --batching 2") == ["llama:2x1024:paged"]
    assert rows("--rows gemma2:1x8:paged llama:2x8:static") == ["gemma2:1x8:paged", "llama:2x8:static"]


@pytest.mark.parametrize("row", ["bert:1x8:static", "llama:1x8:ring", "llama:8:static"])
def test_an_unknown_row_is_refused(row: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.parsed(["--rows", row])
    assert row in capsys.readouterr().err


def test_an_unknown_implementation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rows("--implementations sdpa attn:NOPE attn:TORCH_SDPA")
    assert "--implementations attn:NOPE: known are attn, attn:" in capsys.readouterr().err


def test_rows_are_left_out_when_the_budget_is_used_up_or_memory_is_too_small() -> None:
    options = program.parsed(["--budget", "5", "--tokens", "31", "--dtype", "float32"])
    row, paged = Row("llama", 2, 1024, "dynamic"), Row("llama", 2, 1024, "paged")
    config = program.config_of("llama")
    keys = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * (1024 + 32) * config.head_dim * 4
    assert program.why_not(row, options, 1 << 50, LATER) == ""
    assert program.why_not(row, options, keys, LATER).startswith("needs ")
    assert program.why_not(paged, options, keys, LATER) == ""
    assert program.why_not(row, options, 1 << 50, time.monotonic()) == "the budget of 5 s is used up"


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    if program.DEVICE == "cuda":
        pytest.skip("models are large there")
    monkeypatch.setattr(transformers.logging, "set_verbosity_error", lambda: None)


@pytest.mark.usefixtures("quiet")
def test_a_run_prints_and_writes_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.programs.transformers_models.PACKAGES", {"flash_attention_2": "no_such_package"})
    file = tmp_path / "found.json"
    rows = ["llama:2x16:dynamic", "llama:2x16:static", "llama:1000000x16:dynamic"]
    names = ["sdpa", "eager", "flash_attention_2", "attn"]
    arguments = ["--rows", *rows, "--implementations", *names, "--tokens", "2", "--repeats", "2", "--json", str(file)]
    assert program.main([*arguments, "--dtype", "float32"]) == 0
    printed, found = capsys.readouterr().out, json.loads(file.read_text(encoding="utf-8"))
    assert [(line["cache"], line["what"]) for line in found["rows"]] == [
        (cache, what) for cache in ("dynamic", "static") for what in ("prefill ms", "ms per token", "first call ms")
    ]
    for line in found["rows"]:
        assert set(line["times"]) == {"sdpa", "eager", "attn"} and line["best"] in ("sdpa", "eager")
        assert line["notes"] == {"flash_attention_2": "ImportError: no_such_package is not installed; PyPI has no wheel of it"}
        assert line["ratio"] == pytest.approx(line["times"][line["best"]] / line["times"]["attn"])
        assert line["differences"]["attn"] <= program.LIMITS["float32"] and line["equal_tokens"]["attn"] == 1.0
    assert list(found["left_out"]) == rows[2:]
    assert printed.count("| llama | 2 | 16 |") == 6 and printed.count("| [1] ImportError: no_such_package") == 1
    assert f"| {rows[2]} | left out: needs " in printed


@pytest.mark.usefixtures("quiet")
def test_what_the_budget_leaves_no_time_for_has_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An implementation that began keeps what it has measured."""
    clock, generate = [0.0], program.Generation.generate
    monkeypatch.setattr(program.time, "monotonic", lambda: clock[0])

    def counted(self: program.Generation, prompt: int, tokens: int, **more: object) -> object:
        clock[0] += self.model.config._attn_implementation == "eager"
        return generate(self, prompt, tokens, **more)

    monkeypatch.setattr(program.Generation, "generate", counted)
    arguments = "--rows llama:1x8:dynamic llama:1x9:dynamic --implementations sdpa eager attn --tokens 1 --dtype float32"
    assert program.main([*arguments.split(), "--repeats", "3", "--budget", "3"]) == 1
    first, *_, last = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert first.startswith("| llama | 1 | 8 | dynamic | prefill ms |") and "| [1] |" in first
    assert last == "| llama:1x9:dynamic | left out: the budget of 3 s is used up |"


@pytest.mark.parametrize(("cache", "few"), [("dynamic", 1), ("compiled", 4)])
def test_a_token_is_the_difference_of_calls_that_record_alike(cache: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled step is recorded in each `generate` that has one, so the calls that are compared both have."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    work = program.Generation(None, Row("llama", 1, 8, cache), 32, 2)
    record = 1000.0 if cache == "compiled" else 0.0
    monkeypatch.setattr(work, "generate", lambda prompt, new: (7.0 + (new > 1) * record + 2.0 * (new - 1), None))
    times = work.times()
    assert set(times) == {"1", str(few), "33"}
    assert work.figures(times) == {"prefill ms": 7.0, "ms per token": 2.0}


@pytest.mark.usefixtures("quiet")
def test_kernels_of_a_token_are_those_that_more_tokens_add(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = "--rows llama:1x8:static --implementations attn --tokens 3 --repeats 1 --dtype float32 --profile 2 --json"
    assert program.main([*arguments.split(), str(file)]) == 0
    found = {entry["what"]: entry["kernels"] for entry in json.loads(file.read_text(encoding="utf-8"))["kernels"]}
    layers = program.config_of("llama").num_hidden_layers
    attended = [name for name in found["token"] if "scaled_dot_product" in name]
    assert attended and all(found[what][name][0] == layers for what in ("prompt", "token") for name in attended)
    assert "| llama:1x8:static attn, token | " in capsys.readouterr().out


@pytest.mark.usefixtures("quiet")
def test_outputs_of_another_computation_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program.Generation, "compare", lambda *_: (math.nan, 0.0))
    arguments = "--rows llama:1x8:dynamic --implementations sdpa attn --tokens 1 --repeats 1 --dtype float32"
    assert program.main(arguments.split()) == 1
    assert "[1] outputs differ by nan deviations" in capsys.readouterr().out


def test_differences_count_until_tokens_differ() -> None:
    tokens, logits = torch.tensor([[1, 2, 3, 4]]), torch.randn(1, 4, 9)
    others, changed = torch.tensor([[1, 2, 0, 4]]), logits.clone()
    changed[0, 3] += 100  # after another token
    compare = program.Generation.compare
    assert compare(None, (others, changed), (tokens, logits)) == (0.0, 0.5)
    changed[0, 2, 5] += logits.std()
    assert compare(None, (others, changed), (tokens, logits))[0] == pytest.approx(1.0, rel=1e-4)
    assert compare(None, (others, changed), None) == (None, None)
