"""The trainer's model agrees with transformers', and the trainer writes a complete checkpoint."""

import functools
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attn.tools.demo.checkpoint import load_config, load_weights  # noqa: E402
from attn.tools.demo.engine import SHIPPED_MODEL as SHIPPED  # noqa: E402
from examples.demo_model import train  # noqa: E402
from examples.demo_model.corpus import Document  # noqa: E402
from tests.levels import FULL  # noqa: E402

FEW = [Document(f"text {i}", f"The {i}th text of a small corpus, which says very little.\n" * 4) for i in range(60)]


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 64 tokens, with one iteration of Muon's instead of five, which take seconds."""
    monkeypatch.setattr(torch.optim, "Muon", functools.partial(torch.optim.Muon, ns_steps=1))
    monkeypatch.setattr(train, "STEP_TOKENS", 64)
    monkeypatch.setattr(train, "SHAPES", {(1, 64): 1.0})


def shipped_model() -> train.Llama:
    model = train.Llama()
    weights = load_weights(SHIPPED, load_config(SHIPPED))
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return model


def test_the_model_is_the_llama_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    tokens = torch.tensor([[train.BOS, *b"Return the number of items in a container. " * 8]])
    with torch.no_grad():
        ours, theirs = shipped_model()(tokens), reference(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_shipped_model_has_learned_the_manner_of_its_corpus() -> None:
    text = b'def close(self):\n    """Close the file.\n\n    A closed file cannot be used for further operations.\n'
    loss = train.validation_loss(shipped_model(), [np.array([train.BOS, *text], np.uint16)])
    assert loss < 1.5  # a bigram model is at 2.7, a uniform one at 5.5


def test_a_short_training_writes_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], short_steps: None
) -> None:
    monkeypatch.setattr(train, "documents", lambda: FEW)
    monkeypatch.setattr(train, "_SAVE_SECONDS", 0)
    assert any(d.held_out for d in FEW) and not all(d.held_out for d in FEW)
    out = tmp_path / "new" / "model"
    assert train.main(["--out", str(out), "--tokens", "100", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "128 tokens" in printed and "nats/byte, saved" in printed
    config = load_config(out)
    assert load_weights(out, config)["model.norm.weight"].shape == (config.hidden_size,)
    assert "--tokens 100 --seed 0" in (out / "README.md").read_text()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((out / name).read_text()) == json.loads((SHIPPED / name).read_text())


def test_a_training_that_is_asked_to_end_saves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_steps: None
) -> None:
    def batches_and_a_signal(texts: list[np.ndarray], seed: int) -> Iterator[torch.Tensor]:
        signal.raise_signal(signal.SIGTERM)
        yield from real(texts, seed)

    real, before = train.batches, signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(train, "documents", lambda: FEW)
    monkeypatch.setattr(train, "batches", batches_and_a_signal)
    assert train.main(["--out", str(tmp_path), "--tokens", "1000000", "--threads", "1"]) == 0
    assert "| training | 64 tokens" in (tmp_path / "README.md").read_text()
    assert signal.getsignal(signal.SIGTERM) is before


def test_every_shape_of_batch_holds_the_tokens_of_a_step() -> None:
    assert all(rows * window == train.STEP_TOKENS for rows, window in train.SHAPES)
    assert sum(train.SHAPES.values()) == pytest.approx(1)
    texts = [train.encode(d) for d in FEW]
    for batch, again in zip(train.batches(texts, 3), train.batches(texts, 3), strict=False):
        assert batch.shape[0] * (batch.shape[1] - 1) == train.STEP_TOKENS
        assert torch.equal(batch, again)
        assert torch.equal(batch[:-1, -1], batch[1:, 0])  # each row goes on where the last one ended
        if batch.shape[1] > 1024:
            break


@pytest.mark.parametrize("arguments", [[], ["--tokens", "0"], ["--threads", "0"], ["--seed", "-1"]])
def test_wrong_arguments(tmp_path: Path, arguments: list[str]) -> None:
    place = ["--out", str(tmp_path)] if arguments else ["--out", __file__]
    with pytest.raises(SystemExit, match="2"):
        train.main(place + arguments)


def test_a_place_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train, "train", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
    assert train.main(["--out", "anywhere"]) == 1
    assert capsys.readouterr().err == "error: no\n"


@FULL
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the shipped corpus is that of Python 3.11")
def test_the_corpus_is_sorted_without_repetitions() -> None:
    from examples.demo_model.corpus import documents

    found = documents()
    assert 2_000_000 < sum(d.size for d in found) < 3_000_000
    assert 0.02 < sum(d.size for d in found if d.held_out) / sum(d.size for d in found) < 0.08
    assert len({d.text for d in found}) > 0.99 * len(found)
    assert found[0].name == "topics.assert"
