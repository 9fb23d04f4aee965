"""A BERT sentence encoder under JAX, over `attn.jax.Attention` of encoder type: MiniLM and similar models.

    encoder = Encoder("all-MiniLM-L6-v2")                      # config.json, model.safetensors, tokenizer.json
    encoder.embed(["A cat sits on the mat.", "A kitten ..."])  # [2, hidden_size], of length 1

Sentences are packed, without padding between them, and every token sees its own sentence. The embedding is that of
sentence-transformers: the mean over a sentence's tokens, normalised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from attn.backends.abstract import AttentionType
from attn.backends.metadata import CommonAttentionMetadata
from attn.fields import Fields, read_json
from attn.jax import Attention
from attn.tools.demo.checkpoint import load_tokenizer, read_tensors
from attn.tools.demo.config import CONFIG_FILE, checkpoint_directory
from attn.tools.demo.jax_llama import Linear

Weights = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class BertConfig:
    """The configuration of an encoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def load(cls, directory: str | Path) -> "BertConfig":
        """Load `config.json`. Raises `CheckpointError` for an unsupported architecture."""
        path = checkpoint_directory(directory) / CONFIG_FILE
        fields = Fields(read_json(path), str(path))
        fixed = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
        for name, only in fixed.items():
            if fields.values.get(name, only if name == "position_embedding_type" else None) != only:
                raise fields.wrong(name, f'"{only}"')
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "max_position_embeddings", "type_vocab_size")  # fmt: skip
        return cls(*map(fields.integer, sizes), fields.number("layer_norm_eps", 1e-12))  # type: ignore[call-arg]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor; matrices are [out, in]."""
        hidden, wide = self.hidden_size, self.intermediate_size
        matrices = {
            **{f"attention.self.{name}": (hidden, hidden) for name in ("query", "key", "value")},
            "attention.output.dense": (hidden, hidden),
            "intermediate.dense": (wide, hidden),
            "output.dense": (hidden, wide),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (self.vocab_size, hidden),
            "embeddings.position_embeddings.weight": (self.max_position_embeddings, hidden),
            "embeddings.token_type_embeddings.weight": (self.type_vocab_size, hidden),
        }
        norms = ["embeddings.LayerNorm"]
        for layer in (f"encoder.layer.{i}" for i in range(self.num_layers)):
            norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
            for name, shape in matrices.items():
                shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
        return shapes | {f"{norm}.{part}": (hidden,) for norm in norms for part in ("weight", "bias")}


class Bert(nnx.Module):
    """Embeddings and layers, created from the weights by their names in the checkpoint."""

    def __init__(self, config: BertConfig, weights: Weights, *, dtype: Any, backend: str | None = None) -> None:
        tables = ("word", "position", "token_type")
        self.word, self.position, self.token_type = (
            nnx.Param(jnp.asarray(weights[f"embeddings.{name}_embeddings.weight"], dtype)) for name in tables
        )
        self.norm = LayerNorm(config, weights, "embeddings.LayerNorm", dtype)
        self.layers = nnx.List(
            Layer(config, weights, f"encoder.layer.{i}", dtype=dtype, backend=backend) for i in range(config.num_layers)
        )

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attn_metadata: Any) -> jax.Array:
        """Encode token_ids, positions: [T]. Returns [T, hidden_size]; all tokens are of type 0."""
        hidden = self.norm(self.word[...][token_ids] + self.position[...][positions] + self.token_type[...][0])
        for layer in self.layers:
            hidden = layer(hidden, attn_metadata)
        return hidden


class Layer(nnx.Module):
    """Attention, then the feed-forward network, each added to its input and normalised afterwards."""

    def __init__(self, config: BertConfig, weights: Weights, name: str, *, dtype: Any, backend: str | None) -> None:
        self.heads = (-1, config.num_heads, config.hidden_size // config.num_heads)
        self.query, self.key, self.value, self.merge = (
            Linear(weights, f"{name}.attention.{which}", dtype)
            for which in ("self.query", "self.key", "self.value", "output.dense")
        )
        self.attn = Attention(*self.heads[1:], attn_type=AttentionType.ENCODER_ONLY, dtype=dtype, backend=backend)
        self.attention_norm = LayerNorm(config, weights, f"{name}.attention.output.LayerNorm", dtype)
        self.up, self.down = (Linear(weights, f"{name}.{which}.dense", dtype) for which in ("intermediate", "output"))
        self.norm = LayerNorm(config, weights, f"{name}.output.LayerNorm", dtype)

    def __call__(self, hidden: jax.Array, attn_metadata: Any) -> jax.Array:
        query, key, value = (project(hidden).reshape(self.heads) for project in (self.query, self.key, self.value))
        attended, _ = self.attn(query, key, value, None, attn_metadata)
        hidden = self.attention_norm(hidden + self.merge(attended.reshape(hidden.shape)))
        return self.norm(hidden + self.down(jax.nn.gelu(self.up(hidden), approximate=False)))


class LayerNorm(nnx.Module):
    """(x - mean) / deviation, computed in float32, times a weight, plus a bias."""

    def __init__(self, config: BertConfig, weights: Weights, name: str, dtype: Any) -> None:
        self.eps = config.layer_norm_eps
        self.weight, self.bias = (nnx.Param(jnp.asarray(weights[f"{name}.{part}"], dtype)) for part in ("weight", "bias"))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        scaled = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + self.eps)
        return scaled.astype(x.dtype) * self.weight[...] + self.bias[...]


class Encoder:
    """An encoder and its tokenizer from a directory. Batches are padded to powers of two, so that few programs are compiled.

    backend: of every layer, by name, used or rejected; `selection` is the first layer's choice with all its reasons.
    """

    def __init__(self, directory: str | Path, *, dtype: str = "float32", backend: str | None = None) -> None:
        self.config = BertConfig.load(directory)
        self.tokenizer = load_tokenizer(directory)
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.config.max_position_embeddings)
        shapes = self.config.weight_shapes()
        ignored = (".position_ids", "pooler.dense.weight", "pooler.dense.bias")
        weights = read_tensors(directory, shapes, ignored=ignored, architecture="BertModel")
        model = Bert(self.config, weights, dtype=jnp.dtype(dtype), backend=backend)
        first = model.layers[0].attn
        self.selection = first.selection
        self.builder = first.builder()
        graph, self.state = nnx.split(model)

        @partial(jax.jit, static_argnames="count")
        def run(state: Any, token_ids: Any, positions: Any, owner: Any, attn_metadata: Any, count: int) -> jax.Array:
            hidden = nnx.merge(graph, state)(token_ids, positions, attn_metadata).astype(jnp.float32)
            # padding rows belong to the last segment, which is not read; a normalised sum equals a normalised mean
            summed = jax.ops.segment_sum(hidden, owner, count + 1)[:count]
            return summed / jnp.maximum(jnp.linalg.norm(summed, axis=-1, keepdims=True), 1e-12)

        self.run = run

    def embed(self, sentences: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return embeddings [len(sentences), hidden_size] float32, each of norm 1."""
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        if not ids:
            return np.zeros((0, self.config.hidden_size), np.float32)
        lens = [len(tokens) for tokens in ids]
        size = self.builder.kv_cache_spec.block_size
        ends = np.cumsum([-(-n // size) for n in lens])
        blocks = [
            range(end - -(-n // size), end) for end, n in zip(ends, lens, strict=True)
        ]  # an encoder uses no cache blocks: any table is valid
        built = self.builder.build(0, CommonAttentionMetadata.from_lens(lens, lens, blocks, size, causal=False))
        rows, count = built.slot_mapping.shape[0], built.seq_lens.shape[0]
        token_ids, positions = (np.pad(np.concatenate(x), (0, rows - sum(lens))) for x in (ids, [np.arange(n) for n in lens]))
        owner = np.pad(np.repeat(np.arange(len(lens)), lens), (0, rows - sum(lens)), constant_values=count)
        return np.asarray(self.run(self.state, token_ids, positions, owner, built, count))[: len(lens)]
