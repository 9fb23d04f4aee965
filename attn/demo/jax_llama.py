"""A decoder of the Llama family under JAX, over `attn.jax.Attention`: Llama, Mistral, Qwen2 and Qwen3.

The batch is packed: T tokens of several requests in rows, padded at the end only, and logits only for the sampled rows. A
step is a pure function, jitted with its caches donated. `attn.demo.torch_llama` is the same model under torch; classes and
methods have the same names.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.lax import Precision

from attn.backends.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attn.demo.batcher import Batcher, Plan
from attn.demo.checkpoint import ModelConfig, rope_frequencies
from attn.jax import Attention
from attn.verdicts import Selection

Weights = Mapping[str, npt.NDArray[np.float32]]
Rotation = tuple[jax.Array, jax.Array]


class Llama(nnx.Module):
    """Embedding, layers, norm and head, created from the weights by their names in the checkpoint."""

    def __init__(
        self, config: ModelConfig, weights: Weights, *, dtype: Any, block_size: int, backend: str | None = None
    ) -> None:
        self.config = config
        self.embed_tokens = nnx.Param(jnp.asarray(weights["model.embed_tokens.weight"], dtype))
        self.layers = nnx.List(
            Layer(config, weights, index, dtype=dtype, block_size=block_size, backend=backend)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config, weights, "model.norm", dtype)
        self.lm_head = None if config.tie_word_embeddings else Linear(weights, "lm_head", dtype)

    @property
    def attentions(self) -> list[Attention]:
        return [layer.self_attn.attn for layer in self.layers]

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv_caches: Sequence[jax.Array],
        attn_metadata: Sequence[Any],
        sample_rows: jax.Array,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Run one step. token_ids, positions: [T]; a cache and metadata per layer; sample_rows: [S].

        Returns logits [S, vocab_size] in the model's dtype, and the new caches.
        """
        hidden = self.embed_tokens[...][token_ids]
        rotation = self.rotation(positions)
        after = []
        for layer, kv_cache, metadata in zip(self.layers, kv_caches, attn_metadata, strict=True):
            hidden, kv_cache = layer(hidden, rotation, kv_cache, metadata)
            after.append(kv_cache)
        hidden = self.norm(hidden[sample_rows])
        if self.lm_head is None:
            return jnp.matmul(hidden, self.embed_tokens[...].T, precision=Precision.HIGHEST), after
        return self.lm_head(hidden), after

    def rotation(self, positions: jax.Array) -> Rotation:
        """Return the cosine and sine of every pair's angle at `positions` [T]; each [T, 1, D / 2] float32."""
        inv_freq, scaling = rope_frequencies(self.config)
        angles = positions[:, None, None].astype(jnp.float32) * inv_freq
        return jnp.cos(angles) * scaling, jnp.sin(angles) * scaling


class Layer(nnx.Module):
    """Attention, then the gated feed-forward network, each normalised before and added to its input."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int, *, dtype: Any, **choice: Any) -> None:
        name = f"model.layers.{index}"
        self.input_layernorm = RMSNorm(config, weights, f"{name}.input_layernorm", dtype)
        self.self_attn = SelfAttention(config, weights, index, dtype=dtype, **choice)
        self.post_attention_layernorm = RMSNorm(config, weights, f"{name}.post_attention_layernorm", dtype)
        self.mlp = MLP(weights, f"{name}.mlp", dtype)

    def __call__(
        self, hidden: jax.Array, rotation: Rotation, kv_cache: jax.Array, attn_metadata: Any
    ) -> tuple[jax.Array, jax.Array]:
        attended, kv_cache = self.self_attn(self.input_layernorm(hidden), rotation, kv_cache, attn_metadata)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), kv_cache


class SelfAttention(nnx.Module):
    """Projections and rotation around one `attn.jax.Attention`."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int, *, dtype: Any, **choice: Any) -> None:
        name = f"model.layers.{index}.self_attn"
        self.head_size = config.head_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            Linear(weights, f"{name}.{which}_proj", dtype) for which in "qkvo"
        )
        self.q_norm = RMSNorm(config, weights, f"{name}.q_norm", dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config, weights, f"{name}.k_norm", dtype) if config.qk_norm else None
        self.attn = Attention(
            config.num_heads,
            config.head_size,
            num_kv_heads=config.num_kv_heads,
            sliding_window=config.sliding_window[index],
            dtype=dtype,
            **choice,
        )

    def __call__(
        self, hidden: jax.Array, rotation: Rotation, kv_cache: jax.Array, attn_metadata: Any
    ) -> tuple[jax.Array, jax.Array]:
        heads = (hidden.shape[0], -1, self.head_size)
        query, key, value = (project(hidden).reshape(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        attended, kv_cache = self.attn(rotate(query, rotation), rotate(key, rotation), value, kv_cache, attn_metadata)
        return self.o_proj(attended.reshape(hidden.shape[0], -1)), kv_cache


class MLP(nnx.Module):
    """The gated feed-forward network (SwiGLU)."""

    def __init__(self, weights: Weights, name: str, dtype: Any) -> None:
        self.gate_proj, self.up_proj, self.down_proj = (
            Linear(weights, f"{name}.{which}_proj", dtype) for which in ("gate", "up", "down")
        )

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Linear(nnx.Module):
    """x W + b, the matrix transposed once to [in, out]; with a bias if the checkpoint has one."""

    def __init__(self, weights: Weights, name: str, dtype: Any) -> None:
        bias = weights.get(f"{name}.bias")
        self.weight = nnx.Param(jnp.asarray(weights[f"{name}.weight"].T, dtype))
        self.bias = None if bias is None else nnx.Param(jnp.asarray(bias, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        # HIGHEST: a TPU would otherwise multiply float32 in bfloat16 passes, a GPU in TF32
        y = jnp.matmul(x, self.weight[...], precision=Precision.HIGHEST)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """x over its root mean square, computed in float32, times a weight."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str, dtype: Any) -> None:
        self.eps = config.rms_norm_eps
        self.weight = nnx.Param(jnp.asarray(weights[f"{name}.weight"], dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return scaled.astype(x.dtype) * self.weight[...]


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate the pairs of elements i and i + D / 2 of x [T, heads, D], computed in float32."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class Runner:
    """The model with its weights and one cache per layer: runs the batches of `batcher`.

    Batches are padded to two shapes, so that two programs are compiled: one row for each request that may run at once, and the
    token budget. `selection` is the choice of attention backend of the first layer, with all its reasons.
    """

    framework = "jax"

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        batcher: Batcher,
        *,
        dtype: str = "float32",
        backend: str | None = None,
    ) -> None:
        num_blocks, block_size = batcher.pool.num_blocks, batcher.block_size
        self.num_reqs, self.token_budget, self.block_size = batcher.max_num_reqs, batcher.token_budget, block_size
        self.columns = min(num_blocks, -(-config.max_position_embeddings // block_size))
        model = Llama(config, weights, dtype=jnp.dtype(dtype), block_size=block_size, backend=backend)
        attentions = model.attentions
        self.selection: Selection = attentions[0].selection
        self.kv_caches = [attention.new_kv_cache(num_blocks) for attention in attentions]
        self.kinds = [(attention.backend, attention.kv_cache_spec) for attention in attentions]
        self.builders = {
            (backend, spec): backend.get_builder_cls()(dataclasses.replace(spec, num_blocks=num_blocks))
            for backend, spec in self.kinds
        }
        graph, self.state = nnx.split(model)

        def step(state: Any, kv_caches: list[jax.Array], *batch: Any) -> tuple[jax.Array, list[jax.Array]]:
            token_ids, positions, built, sample_rows = batch
            metadata = [built[list(self.builders).index(kind)] for kind in self.kinds]
            return nnx.merge(graph, state)(token_ids, positions, kv_caches, metadata, sample_rows)

        self.step = jax.jit(step, donate_argnames="kv_caches")

    def run(self, plan: Plan) -> npt.NDArray[np.float32]:
        """Return the logits [S, vocab_size] of the rows that `plan` samples, on the host."""
        common = self.padded(plan.attn_metadata)
        built = [builder.build(0, common) for builder in self.builders.values()]
        num_rows, num_sampled = built[0].slot_mapping.shape[0], len(plan.sample_rows)
        token_ids, positions = (np.pad(x, (0, num_rows - len(x))) for x in (plan.token_ids, plan.positions))
        sample_rows = np.pad(plan.sample_rows, (0, self.num_reqs - num_sampled))
        logits, self.kv_caches = self.step(self.state, self.kv_caches, token_ids, positions, built, sample_rows)
        return np.asarray(logits[:num_sampled], np.float32)

    def padded(self, batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Pad `batch` with empty requests and tokens without a slot to the shape of one of the two programs."""
        alone = batch.max_query_len == 1
        num_rows = self.num_reqs if alone else self.token_budget
        more = self.num_reqs - batch.num_reqs
        start, seq_lens = np.pad(batch.query_start_loc, (0, more), "edge"), np.pad(batch.seq_lens, (0, more))
        return batch.replace(
            query_start_loc=start,
            query_start_loc_cpu=start,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            block_table=np.pad(batch.block_table, ((0, more), (0, self.columns - batch.block_table.shape[1]))),
            slot_mapping=np.pad(batch.slot_mapping, (0, num_rows - batch.num_actual_tokens), constant_values=PAD_SLOT_ID),
            num_reqs=self.num_reqs,
            max_query_len=1 if alone else self.token_budget,
            max_seq_len=self.columns * self.block_size,
        )
