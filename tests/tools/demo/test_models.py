"""The torch and jax models, paged and batched in a small pool, generate the tokens of dense, unbatched transformers."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from attn.serving import Scheduler, Stats
from attn.tools.demo.checkpoint import ModelConfig, load_config, load_tokenizer, load_weights
from attn.tools.demo.dense import Dense, by_reference, by_transformers, dense_forward
from attn.tools.demo.engine import SHIPPED_MODEL, load_runner, serve
from attn.tools.demo.prompts import PROMPTS
from tests.levels import sampled, some

pytestmark = [
    pytest.mark.usefixtures("jax_compiles_fast"),
    pytest.mark.filterwarnings("ignore"),  # transformers has opinions on many a configuration
]
FRAMEWORKS = ("torch", "jax")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
STRETCH = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **STRETCH}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama with llama3 rope": ("LlamaForCausalLM", {"rope_scaling": LLAMA3, "num_key_value_heads": 1}),
    "llama with yarn and biases": (
        "LlamaForCausalLM",
        {"rope_scaling": {"rope_type": "yarn", **STRETCH}, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral with windows": ("MistralForCausalLM", {"sliding_window": 6, "num_key_value_heads": 4}),
    "qwen2 with late windows": ("Qwen2ForCausalLM", {**WINDOWS, "max_window_layers": 1, "head_dim": 8}),
    "qwen3 with typed windows": (
        "Qwen3ForCausalLM",
        {**WINDOWS, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


class Checkpoint(NamedTuple):
    config: ModelConfig
    weights: dict[str, np.ndarray]
    dense: Dense


@functools.cache
def random_checkpoint(root: Path, name: str) -> Checkpoint:
    """A small model of random weights, every bias and norm included, and attention sharp enough to tell keys apart."""
    import torch
    import transformers

    architecture, fields = MODELS[name]
    made = getattr(transformers, architecture)
    model = made(made.config_class(**{**SIZES, **fields}, bos_token_id=1, eos_token_id=2))
    random = torch.Generator().manual_seed(sorted(MODELS).index(name))
    for key, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=random)
        sharp = 8 if key.endswith(("q_proj.weight", "k_proj.weight")) else 1
        norm = key.endswith("norm.weight")
        parameter.data = 1 + 0.3 * drawn if norm else sharp * drawn * (0.3 if "bias" in key else SIZES["hidden_size"] ** -0.5)
    directory = root / name
    model.save_pretrained(directory)
    config = load_config(directory)
    return Checkpoint(config, load_weights(directory, config), by_transformers(directory))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tmp_path_factory.mktemp("checkpoints")


def workload(vocab_size: int) -> list[list[int]]:
    """Prompts of 1 to 50 tokens, several beginning alike."""
    random = np.random.default_rng(5)
    shared = random.integers(3, vocab_size, 30)
    lengths = [1, 37, 3, 50, 9, 22, 31]
    prompts = [random.integers(3, vocab_size, length) for length in lengths]
    return [p.tolist() for p in prompts] + [[*shared, *p[:5]] for p in prompts]


def tight_scheduler(config: ModelConfig, num_blocks: int = 24, block_size: int = 4) -> Scheduler:
    return Scheduler(
        num_blocks,
        block_size,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=config.eos_token_ids,
        token_budget=32,
        max_num_reqs=8,
    )


def paged(
    framework: str, config: ModelConfig, weights: dict[str, np.ndarray], prompts: Sequence[Sequence[int]], count: int
) -> tuple[list[list[int]], Stats]:
    pytest.importorskip("flax" if framework == "jax" else framework)
    scheduler = tight_scheduler(config)
    runner = load_runner(framework, config, weights, scheduler)
    requests = [scheduler.submit(prompt, count) for prompt in prompts]
    for _ in serve(runner, scheduler):
        pass
    return [request.output for request in requests], scheduler.stats


def dense_greedy(model: Checkpoint, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1] not in model.config.eos_token_ids:
        tokens.append(int(model.dense(tokens, 1)[0].argmax()))
    return tokens[len(prompt) :]


@functools.cache
def expected(root: Path, name: str) -> list[list[int]]:
    model = random_checkpoint(root, name)
    return [dense_greedy(model, prompt, 10) for prompt in workload(model.config.vocab_size)]


@pytest.mark.parametrize(
    ("name", "framework"),
    sampled(
        [pytest.param(*pair) for pair in itertools.product(MODELS, FRAMEWORKS)], 2, "models", lambda p: p.values[1] == "torch"
    ),
)
def test_paged_is_dense_token_for_token(root: Path, name: str, framework: str) -> None:
    model = random_checkpoint(root, name)
    outputs, stats = paged(framework, model.config, model.weights, workload(model.config.vocab_size), 10)
    assert outputs == expected(root, name)
    assert stats.preemptions > 1 and stats.prefix_hit_tokens > 50 and stats.peak_blocks == 24
    assert len({tuple(output) for output in outputs}) > 8, "the texts differ, so the test can fail"


#: A model's configuration with one thing forgotten.
FORGOTTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama with llama3 rope", {"rope_scaling": None}),
    "yarn": ("llama with yarn and biases", {"rope_scaling": None}),
    "windows": ("mistral with windows", {"sliding_window": (None, None)}),
    "which layers have windows": ("qwen3 with typed windows", {"sliding_window": (None, 6)}),
    "one key of the window": ("qwen2 with late windows", {"sliding_window": (None, 7)}),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_is_forgotten_shows(root: Path, what: str) -> None:
    name, change = FORGOTTEN[what]
    model = random_checkpoint(root, name)
    prompts = workload(model.config.vocab_size)
    outputs, _ = paged("torch", dataclasses.replace(model.config, **change), model.weights, prompts, 10)
    assert outputs != expected(root, name)


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_judges_as_transformers_does(root: Path, name: str) -> None:
    model = random_checkpoint(root, name)
    forward = by_reference(model.config, model.weights)
    for prompt in workload(model.config.vocab_size)[-3:]:
        # both are float32, and attention this sharp lifts a rounded angle to 2.3e-4 of a logit on some processors
        np.testing.assert_allclose(forward(prompt, 4), model.dense(prompt, 4), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bfloat16_is_near_float32(root: Path, framework: str) -> None:
    pytest.importorskip("flax" if framework == "jax" else framework)
    config = load_config(SHIPPED_MODEL)
    weights = load_weights(SHIPPED_MODEL, config)
    logits = []
    for dtype in ("float32", "bfloat16"):
        scheduler = tight_scheduler(config)
        runner = load_runner(framework, config, weights, scheduler, dtype=dtype)
        scheduler.submit(b"def read(self):", 1)
        step = scheduler.schedule()
        assert step is not None
        logits.append(runner.run(step))
    assert logits[1].dtype == np.float32
    assert 0 < np.abs(logits[1] - logits[0]).max() < 0.05 * np.abs(logits[0]).max()


def test_the_shipped_model_agrees_on_every_prompt() -> None:
    """The main job: forty prompts (below `--full` a dozen of them) through a pool too small for them, torch = jax = dense,
    token for token."""
    for package in ("torch", "flax", "tokenizers"):
        pytest.importorskip(package)
    config, tokenizer = load_config(SHIPPED_MODEL), load_tokenizer(SHIPPED_MODEL)
    weights = load_weights(SHIPPED_MODEL, config)
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    assert len(prompts) >= 32 and min(map(len, prompts)) <= 2 and max(map(len, prompts)) > 600
    ends = (min(map(len, prompts)), *sorted(map(len, prompts))[-2:])
    prompts = some(prompts, 8, "prompts of the demo", lambda prompt: len(prompt) in ends)
    outputs = {}
    for framework in FRAMEWORKS:
        scheduler = Scheduler(
            64,
            16,
            vocab_size=config.vocab_size,
            max_model_len=config.max_position_embeddings,
            eos_token_ids=config.eos_token_ids,
            token_budget=128,
            max_num_reqs=16,
        )
        runner = load_runner(framework, config, weights, scheduler)
        requests = [scheduler.submit(prompt, 16) for prompt in prompts]
        for _ in serve(runner, scheduler):
            pass
        outputs[framework] = [request.output for request in requests]
        assert scheduler.stats.preemptions > 0 and scheduler.stats.prefix_hit_tokens > 0
    assert outputs["torch"] == outputs["jax"]
    _, dense = dense_forward(SHIPPED_MODEL, config, weights)
    for prompt, output in zip(prompts, outputs["torch"], strict=True):
        assert dense([*prompt, *output][:-1], len(output)).argmax(-1).tolist() == output
