"""A decoder's configuration, read from the `config.json` of a Hugging Face directory and checked field by field.

Four architectures that differ in data only: which projections have a bias, whether queries and keys are
normalised, and the defaults of absent fields; `attn.reports.model_config` reads the attention layers. A field
that is missing, of the wrong type or of an unsupported kind raises a `CheckpointError` of one line with the
file, the value and what is allowed; nothing is guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from attn.fields import CheckpointError, Fields, read_json
from attn.reports.model_config import read_layers
from attn.tools.demo.rope import LAYER_TYPES, RopeScaling, read_rope

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"


class _Architecture(NamedTuple):
    """Properties of an architecture, and its defaults for optional fields."""

    model_type: str
    attention_bias: str  # "none", "qkv", or "field": attention_bias decides, for the output projection too
    mlp_bias: bool  # whether the field mlp_bias applies
    qk_norm: bool
    bos_token_id: int | None = None
    eos_token_id: int | None = None


ARCHITECTURES: Mapping[str, _Architecture] = {
    "LlamaForCausalLM": _Architecture("llama", "field", True, False, bos_token_id=1, eos_token_id=2),
    "MistralForCausalLM": _Architecture("mistral", "none", False, False, bos_token_id=1, eos_token_id=2),
    "Qwen2ForCausalLM": _Architecture("qwen2", "qkv", False, False),
    "Qwen3ForCausalLM": _Architecture("qwen3", "field", False, True),
}


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a decoder.

    `sliding_window[i]` is how many keys a query of layer i sees, including its own; None means all before it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool  # of the query, key and value projections
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over head_size on queries and keys, before the rotation
    sliding_window: tuple[int | None, ...]
    rope_theta: float
    rope_scaling: RopeScaling | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def load_config(directory: str | Path) -> ModelConfig:
    """Load the configuration in `directory`, with the token ids of `generation_config.json` if it has any."""
    root = checkpoint_directory(directory)
    fields = Fields(read_json(root / CONFIG_FILE), str(root / CONFIG_FILE))
    name, architecture = _architecture(fields)
    # Their tensors would be read as other numbers than they are.
    if fields.has("quantization_config"):
        method = fields.section("quantization_config").values.get("quant_method", "unnamed")
        allowed = "must be float32, float16 or bfloat16"
        raise CheckpointError(f"{fields.source}: quantization_config: weights are quantised by {method}: {allowed}")
    if fields.values.get("hidden_act", "silu") != "silu":
        raise fields.wrong("hidden_act", "'silu'")
    # The architecture decides the type: a file may name another, or none.
    layers = read_layers(Fields({**fields.values, "model_type": architecture.model_type}, fields.source)).layers
    first, num_layers = layers[0], len(layers)
    # `attn.reports` knows more kinds of layers (chunks, latent attention) than this decoder computes.
    if any(layer.name not in ("full", "sliding") for layer in layers):
        raise fields.wrong("layer_types", f"a list of {num_layers} of {', '.join(LAYER_TYPES)}")
    if first.head_size % 2:
        raise CheckpointError(f"{fields.source}: the head size {first.head_size} is odd: rotary positions need an even one")
    length = fields.integer("max_position_embeddings")
    theta, scaling = read_rope(fields, length)
    # Qwen2 has a bias on queries, keys and values whatever the field says, and none on the output.
    full_bias = architecture.attention_bias == "field" and fields.boolean("attention_bias", False)
    beginning, end = _special_ids(root, fields, architecture)
    return ModelConfig(
        architecture=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_size=first.head_size,
        max_position_embeddings=length,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=full_bias or architecture.attention_bias == "qkv",
        output_bias=full_bias,
        mlp_bias=architecture.mlp_bias and fields.boolean("mlp_bias", False),
        qk_norm=architecture.qk_norm,
        sliding_window=tuple(layer.window for layer in layers),
        rope_theta=theta,
        rope_scaling=scaling,
        bos_token_id=beginning,
        eos_token_ids=end,
    )


def checkpoint_directory(directory: str | Path) -> Path:
    """Return `directory` as a path. Raises `CheckpointError` unless it is a directory with a `config.json`."""
    root = Path(directory)
    expected = "expected a local directory with config.json, model.safetensors and tokenizer.json"
    if not root.exists():
        raise CheckpointError(f"{str(directory)!r} does not exist: {expected}")
    if not root.is_dir():
        raise CheckpointError(f"{str(directory)!r} is not a directory: {expected}")
    if not (root / CONFIG_FILE).is_file():
        raise CheckpointError(f"{str(directory)!r} has no {CONFIG_FILE}: {expected}")
    return root


def _architecture(fields: Fields) -> tuple[str, _Architecture]:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(ARCHITECTURES):
        raise fields.wrong("architectures", f"a list with one of {', '.join(sorted(ARCHITECTURES))}")
    return names[0], ARCHITECTURES[names[0]]


def _special_ids(root: Path, fields: Fields, architecture: _Architecture) -> tuple[int | None, tuple[int, ...]]:
    """Return the beginning-of-text id and the end-of-text ids."""
    defaults = {"bos_token_id": architecture.bos_token_id, "eos_token_id": architecture.eos_token_id}
    sources = [Fields({**defaults, **fields.values}, fields.source)]
    if (root / GENERATION_FILE).is_file():
        # First, as for transformers' `generate`; chat models name further ids of the end there.
        sources.insert(0, Fields(read_json(root / GENERATION_FILE), str(root / GENERATION_FILE)))
    beginning, end = (
        next((ids for source in sources if (ids := source.ids(name))), ()) for name in ("bos_token_id", "eos_token_id")
    )
    return beginning[0] if beginning else None, end
