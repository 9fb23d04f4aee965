"""A decoder of the Llama family under JAX, over `attn.jax.Attention`: Llama, Mistral, Qwen2 and Qwen3.

The batch is packed: T tokens of several requests in rows, padded at the end only, and logits only for the sampled rows. A
step is a pure function, jitted with its caches donated. `attn.tools.demo.torch_llama` is the same model under torch; classes
and methods have the same names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.lax import Precision

from attn.backends.metadata import next_power_of_two
from attn.jax import Attention, ServingStep
from attn.selection.verdicts import Selection
from attn.serving import Buckets, Scheduler, Step
from attn.tools.demo.checkpoint import ModelConfig, rope_frequencies

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
        # Before the head, whose product over the vocabulary is the largest of a step.
        hidden = self.norm(hidden[sample_rows])
        if self.lm_head is None:
            return jnp.matmul(hidden, self.embed_tokens[...].T, precision=Precision.HIGHEST), after
        return self.lm_head(hidden), after

    def rotation(self, positions: jax.Array) -> Rotation:
        """Return the cosine and sine of every pair's angle at `positions` [T]; each [T, 1, D / 2] float32."""
        # At trace time: constants of the program.
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
            Linear(weights, f"{name}.{projection}_proj", dtype) for projection in "qkvo"
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
            # Over each head, before the rotation, as in Qwen3.
            query, key = self.q_norm(query), self.k_norm(key)
        attended, kv_cache = self.attn(rotate(query, rotation), rotate(key, rotation), value, kv_cache, attn_metadata)
        return self.o_proj(attended.reshape(hidden.shape[0], -1)), kv_cache


class MLP(nnx.Module):
    """The gated feed-forward network (SwiGLU)."""

    def __init__(self, weights: Weights, name: str, dtype: Any) -> None:
        self.gate_proj, self.up_proj, self.down_proj = (
            Linear(weights, f"{name}.{projection}_proj", dtype) for projection in ("gate", "up", "down")
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
        # Rounded before it is multiplied, as transformers does: the order is visible in 16 bits.
        return scaled.astype(x.dtype) * self.weight[...]


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate the pairs of elements i and i + D / 2 of x [T, heads, D], computed in float32."""
    cos, sin = rotation
    # Halves, not neighbours: checkpoints of Hugging Face have their weights permuted for this.
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class LlamaRunner:
    """The model with its weights and one cache per layer: runs the batches of `scheduler`.

    Batches are padded to two shapes: one row for each request that may run at once, and the token budget. Both programs are
    compiled here. `selection` is the choice of attention backend of the first layer, with all its reasons.
    """

    framework = "jax"

    def __init__(
        self, config: ModelConfig, weights: Weights, scheduler: Scheduler, *, dtype: str = "float32", backend: str | None = None
    ) -> None:
        num_blocks, block_size = scheduler.pool.num_blocks, scheduler.block_size
        self.buckets = Buckets(scheduler, [next_power_of_two(scheduler.token_budget)])
        model = Llama(config, weights, dtype=jnp.dtype(dtype), block_size=block_size, backend=backend)
        attentions = model.attentions
        self.selection: Selection = attentions[0].selection
        self.kv_caches = [attention.new_kv_cache(num_blocks) for attention in attentions]
        # Layers that differ only in their weights share one batch's metadata; a window makes another kind.
        self.kinds = [(attention.backend, attention.kv_cache_spec) for attention in attentions]
        self.builders = {key: layer.builder() for key, layer in zip(self.kinds, attentions, strict=True)}
        # The structure is a constant of the jitted step, the weights are an argument: as constants they would be copied into
        # the program.
        graph, self.state = nnx.split(model)

        def step(state: Any, kv_caches: list[jax.Array], *batch: Any) -> tuple[jax.Array, list[jax.Array]]:
            token_ids, positions, built, sample_rows = batch
            # At trace time: the layers' positions in the list are fixed.
            metadata = [built[list(self.builders).index(key)] for key in self.kinds]
            return nnx.merge(graph, state)(token_ids, positions, kv_caches, metadata, sample_rows)

        # Donated: a step writes a few rows, and would otherwise copy every cache.
        self.step = ServingStep(jax.jit(step, donate_argnames="kv_caches"))
        # Compiled from the arguments' shapes: nothing runs, and no cache is donated yet.
        self.step.warmup((self.state, self.kv_caches, *self.inputs(empty)) for empty in self.buckets.empty_steps())

    def inputs(self, padded: Step) -> tuple[Any, ...]:
        """Return the arguments of a padded step that follow the weights and the caches."""
        built = [builder.build(0, padded.attn_metadata) for builder in self.builders.values()]
        return padded.token_ids, padded.positions, built, padded.sample_rows

    def run(self, step: Step) -> npt.NDArray[np.float32]:
        """Return the logits [S, vocab_size] of the rows that `step` samples, on the host."""
        # The caches that went in are donated and must not be used again.
        logits, self.kv_caches = self.step(self.state, self.kv_caches, *self.inputs(self.buckets.pad(step)))
        # Waits for the device. Rows beyond are padding.
        return np.asarray(logits[: len(step.sampled)], np.float32)
