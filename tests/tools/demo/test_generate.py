"""`attn generate` and `attn demo`: what they print and return, and mistakes are reported in one line."""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attn.errors import AttnError, BackendLoadError
from attn.serving import GenerationRequest
from attn.tools.demo import dense, engine, generate, show
from attn.tools.demo.checkpoint import load_config, load_tokenizer, load_weights

pytest.importorskip("tokenizers")
pytestmark = [pytest.mark.usefixtures("jax_compiles_fast"), pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")]
MODEL = engine.SHIPPED_MODEL


def call(module: ModuleType, *words: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args(words))


def request_of(prompt: Sequence[int], output: Sequence[int] = (), request_id: int = 0) -> GenerationRequest:
    return GenerationRequest(request_id, [*prompt, *output], len(prompt), 99)


# ---- the text


def test_a_character_is_held_back_until_it_is_whole() -> None:
    request = request_of([256, *b"a"])
    stream, pieces = engine.TextStream(load_tokenizer(MODEL), request), []
    for byte in "bé→c".encode():
        request.tokens.append(byte)
        pieces.append(stream.read())
    assert pieces == ["b", "", "é", "", "", "→", "c"] and stream.text == "bé→c"


def test_what_never_becomes_a_character_comes_at_the_end() -> None:
    request = request_of([256, *b"a"], b"b\xe2\x86")
    stream = engine.TextStream(load_tokenizer(MODEL), request)
    assert stream.read() == "b"
    request.finish_reason = "length"
    assert stream.read() == "\ufffd" and stream.text == "b\ufffd"


# ---- the choice


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    assert engine.sampler(0.0, 3) is engine.greedy
    assert engine.greedy(np.array([0, 2, 2, 1], np.float32), request_of([1])) == 1


def test_draws_follow_softmax_and_the_seed() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.7], np.float32)) * 2
    choose = engine.sampler(2.0, 7)
    drawn = [choose(logits, request_of([1], request_id=i)) for i in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn) / 4000, [0.1, 0.2, 0.7], atol=0.03)
    assert drawn[:50] == [engine.sampler(2.0, 7)(logits, request_of([1], request_id=i)) for i in range(50)]
    assert drawn[:50] != [engine.sampler(2.0, 8)(logits, request_of([1], request_id=i)) for i in range(50)]
    assert len({choose(logits, request_of([1], [0] * n)) for n in range(30)}) == 3, "each token draws anew"


def test_the_smallest_temperatures_are_greedy() -> None:
    """The quotient of a logit and such a temperature is no number of float64."""
    logits = np.array([3, -90, 10, 9], np.float32)
    assert {engine.sampler(temperature, 1)(logits, request_of([1])) for temperature in (1e-3, 1e-300, 5e-324)} == {2}


# ---- attn generate


@pytest.mark.parametrize("framework", engine.FRAMEWORKS)
def test_texts_come_out_in_order(capsys: pytest.CaptureFixture[str], framework: str) -> None:
    pytest.importorskip("flax" if framework == "jax" else framework)
    prompts = ["def read(self", "", "import "]
    words = ["--framework", framework, "--max-new-tokens", "12", *prompts]
    assert call(generate, *words, "--verbose") == 0
    out, err = capsys.readouterr()
    assert call(generate, *words, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert out == "\n\n".join(r["prompt"] + r["text"] for r in figures["results"]) + "\n"
    assert [r["prompt"] for r in figures["results"]] == prompts
    assert [len(r["tokens"]) for r in figures["results"]] == [12] * 3 and figures["stats"]["generated_tokens"] == 36
    backend = figures["selection"]["backend"]
    assert figures["framework"] == framework and f"-> {backend}" in err and "36 tokens in " in err


def test_a_sample_depends_on_the_seed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    words = ["--framework", "torch", "--max-new-tokens", "20", "--temperature", "1", "--json", "Return a "]
    texts = []
    for more in ([], ["another prompt"], ["--seed", "1"]):
        assert call(generate, *words, *more) == 0
        texts.append(json.loads(capsys.readouterr().out)["results"][0]["text"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "/no/such"], "'/no/such' does not exist"),
        (["--backend", "FLASH"], "Unknown attention backend: 'FLASH'"),
        (["--backend", "XLA_ATTN"], "no attention backend serves this model under torch: XLA_ATTN: framework=torch"),
        (["--temperature", "-1"], "temperature=-1.0 must be at least 0"),
        (["--temperature", "1", "--seed", "-1"], "seed=-1 must be"),
        (["--block-size", "0"], "block_size=0 must be a positive int"),
        (["--num-blocks", "0"], "num_blocks=0 must be a positive int"),
        (["--num-blocks", "2"], "need 5 blocks: the whole pool has 2 blocks of 16"),
        (["--max-new-tokens", "0"], "max_new_tokens=0: must be an int of at least 1"),
        (["--max-new-tokens", "2047"], "make 2049: must be at most max_model_len=2048"),
    ],
)
def test_mistakes_are_reported_in_one_line(words: list[str], message: str) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ValueError) as caught:
        call(generate, "--framework", "torch", *words, "x")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(AttnError, match="GPT2LMHeadModel.*LlamaForCausalLM") as caught:
        call(generate, "--model", str(tmp_path), "x")
    assert "\n" not in str(caught.value)


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "installed", lambda package: package != "flax")
    with pytest.raises(BackendLoadError, match=r"^flax not installed: pip install 'jax>=0.10.1' 'flax>=0.12.8'$"):
        call(generate, "--framework", "jax", "x")


# ---- attn demo

FEW = ("--num-requests", "6", "--max-new-tokens", "6")


def test_the_demo_agrees_and_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert call(show, "--frameworks", "torch", *FEW) == 0
    out = capsys.readouterr().out
    judge = out.splitlines()[-1].partition(" = ")[2].partition(":")[0]
    assert out.endswith(f"\ntorch = {judge}: 6 of 6 texts are equal, token by token\n") and judge in (
        "transformers",
        "reference",
    )
    assert "-> " in out and out.count("waited at once") == 1 and "36/36" in out
    assert len(re.findall(r"^ +\d+: \.\.\..* -> ", out, re.MULTILINE)) == 3, "some of the texts"


def test_figures_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("torch", "flax"):
        pytest.importorskip(package)
    assert call(show, "--json", "--num-blocks", "60", *FEW) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [one["framework"] for one in figures["served"]] == ["torch", "jax"]
    assert figures["agreeing"] == figures["requests"] == 6 and figures["divergences"] == []
    assert all(one["generated_tokens"] == 36 and one["peak_blocks"] <= 60 for one in figures["served"])


def test_a_token_that_differs_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")

    def contrary(directory: Path, config: Any, weights: Any) -> tuple[str, dense.Dense]:
        forward = dense.by_reference(config, weights)

        def judge(tokens: Sequence[int], count: int) -> dense.Floats:
            logits = forward(tokens, count)
            if len(tokens) == 1 + len("    Example:") + 5:  # that prompt alone, one token before its end
                logits[3, 66] = logits[3].max() + 0.25
            return logits

        return "contrary", judge

    prompts = ["def read(", "    Example:", "import sys"]
    monkeypatch.setattr(show, "dense_forward", contrary)
    monkeypatch.setattr(show, "PROMPTS", prompts)
    assert call(show, "--frameworks", "torch", "--max-new-tokens", "6") == 1
    *_, score, verdict = capsys.readouterr().out.splitlines()
    assert score == "torch = contrary: 2 of 3 texts are equal, token by token"
    assert verdict.startswith("request 1, generated token 3: torch chose ")
    assert verdict.endswith("contrary 66 'B', whose logit is higher by 0.25")


def test_without_transformers_the_reference_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "installed", lambda package: False)
    config = load_config(MODEL)
    name, forward = dense.dense_forward(MODEL, config, load_weights(MODEL, config))
    assert name == "reference" and forward([256, 100, 101], 2).shape == (2, config.vocab_size)


def test_prompts_come_from_a_file_and_repeat(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("one\n\ntwo\n")
    assert show._prompts(path, 5) == ["one", "two", "one", "two", "one"]
    assert len(show._prompts(None, None)) == 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--frameworks", "torch,numpy"], "frameworks='torch,numpy': must be some of torch, jax, each once"),
        (["--frameworks", "torch,torch"], "each once"),
        (["--num-requests", "0"], "num_requests=0 must be at least 1"),
        (["--threads", "0"], "threads=0 must be at least 1"),
        (["--num-blocks", "3"], "the whole pool has 3 blocks of 16"),
    ],
)
def test_mistakes_in_the_demo(words: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call(show, *words)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "message"), [(b"\n\n", "contains no prompts"), (b"\xff\xfe\xff", "not a text")])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(content)
    with pytest.raises(AttnError, match=message):
        call(show, "--prompts", str(path))


def test_a_missing_framework_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "installed", lambda package: False)
    with pytest.raises(AttnError, match="no framework is installed"):
        call(show)
