"""A decoder of the Llama family under torch, over `attn.torch.Attention`: Llama, Mistral, Qwen2 and Qwen3.

The batch is packed: T tokens of several requests in rows, no padding between them, and logits only for the sampled rows.
`attn.tools.demo.jax_llama` is the same model under JAX; classes and methods have the same names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from attn.selection.verdicts import Selection
from attn.serving import Scheduler, Step
from attn.tools.demo.checkpoint import ModelConfig, rope_frequencies
from attn.torch import Attention
from attn.torch.platforms import platform

Rotation = tuple[torch.Tensor, torch.Tensor]


class Llama(nn.Module):
    """Embedding, layers, norm and head; parameters are named as in the checkpoint, without the leading `model.`."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, block_size: int, backend: str | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(
            Layer(config, window, dtype=dtype, block_size=block_size, backend=backend) for window in config.sliding_window
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

    @property
    def attentions(self) -> list[Attention]:
        return [layer.self_attn.attn for layer in self.layers]  # type: ignore[union-attr, misc]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        attn_metadata: Sequence[Any],
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Run one step. token_ids, positions: [T]; a cache, changed in place, and metadata per layer; sample_rows: [S].

        Returns logits [S, vocab_size] in the model's dtype.
        """
        hidden = self.embed_tokens(token_ids)
        rotation = self.rotation(positions)
        for layer, kv_cache, metadata in zip(self.layers, kv_caches, attn_metadata, strict=True):
            hidden = layer(hidden, rotation, kv_cache, metadata)
        # Before the head, whose product over the vocabulary is the largest of a step.
        hidden = self.norm(hidden[sample_rows])
        return F.linear(hidden, (self.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Return the cosine and sine of every pair's angle at `positions` [T]; each [T, 1, D / 2] float32."""
        inv_freq, scaling = rope_frequencies(self.config)
        angles = positions[:, None, None].float() * torch.from_numpy(inv_freq).to(positions.device)
        return angles.cos() * scaling, angles.sin() * scaling


class Layer(nn.Module):
    """Attention, then the gated feed-forward network, each normalised before and added to its input."""

    def __init__(self, config: ModelConfig, sliding_window: int | None, *, dtype: torch.dtype, **choice: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = SelfAttention(config, sliding_window, dtype=dtype, **choice)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, kv_cache: torch.Tensor, attn_metadata: Any) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, kv_cache, attn_metadata)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class SelfAttention(nn.Module):
    """Projections and rotation around one `attn.torch.Attention`."""

    def __init__(self, config: ModelConfig, sliding_window: int | None, *, dtype: torch.dtype, **choice: Any) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_size
        query, kv = config.num_heads * size, config.num_kv_heads * size
        self.head_size = size
        self.q_proj = nn.Linear(hidden, query, config.attention_bias, dtype=dtype)
        self.k_proj = nn.Linear(hidden, kv, config.attention_bias, dtype=dtype)
        self.v_proj = nn.Linear(hidden, kv, config.attention_bias, dtype=dtype)
        self.o_proj = nn.Linear(query, hidden, config.output_bias, dtype=dtype)
        self.q_norm = nn.RMSNorm(size, config.rms_norm_eps, dtype=dtype) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(size, config.rms_norm_eps, dtype=dtype) if config.qk_norm else nn.Identity()
        self.attn = Attention(
            config.num_heads, size, num_kv_heads=config.num_kv_heads, sliding_window=sliding_window, dtype=dtype, **choice
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation, kv_cache: torch.Tensor, attn_metadata: Any) -> torch.Tensor:
        heads = (hidden.shape[0], -1, self.head_size)
        query = rotate(self.q_norm(self.q_proj(hidden).view(heads)), rotation)
        key = rotate(self.k_norm(self.k_proj(hidden).view(heads)), rotation)
        value = self.v_proj(hidden).view(heads)
        return self.o_proj(self.attn(query, key, value, kv_cache, attn_metadata).flatten(1))


class MLP(nn.Module):
    """The gated feed-forward network (SwiGLU)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, wide, bias, dtype=dtype)
        self.up_proj = nn.Linear(hidden, wide, bias, dtype=dtype)
        self.down_proj = nn.Linear(wide, hidden, bias, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the pairs of elements i and i + D / 2 of x [T, heads, D], computed in float32."""
    cos, sin = rotation
    # Halves, not neighbours: checkpoints of Hugging Face have their weights permuted for this.
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class LlamaRunner:
    """The model with its weights and one cache per layer: runs the batches of `scheduler`.

    `selection` is the choice of attention backend of the first layer, with all its reasons.
    """

    framework = "torch"

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, npt.NDArray[np.float32]],
        scheduler: Scheduler,
        *,
        dtype: str = "float32",
        backend: str | None = None,
    ) -> None:
        num_blocks, block_size = scheduler.pool.num_blocks, scheduler.block_size
        name = platform().name
        # ROCm's torch calls its devices cuda.
        self.device = torch.device("cuda" if name == "rocm" else name)
        element: torch.dtype = getattr(torch, dtype)
        with torch.device("meta"):  # the weights come from the checkpoint: skip initialisation
            self.model = Llama(config, dtype=element, block_size=block_size, backend=backend)
        tensors = {name.removeprefix("model."): torch.from_numpy(array).to(element) for name, array in weights.items()}
        # `assign`: a parameter on the meta device has no memory to copy into.
        self.model.load_state_dict(tensors, assign=True)
        self.model.requires_grad_(False).to(self.device)
        attentions = self.model.attentions
        self.selection: Selection = attentions[0].selection
        self.kv_caches = [attention.new_kv_cache(num_blocks, self.device) for attention in attentions]
        # Layers that differ only in their weights share one batch's metadata; a window makes another kind.
        self.kinds = [(attention.backend, attention.kv_cache_spec) for attention in attentions]
        self.builders = {key: layer.builder(self.device) for key, layer in zip(self.kinds, attentions, strict=True)}

    @torch.inference_mode()
    def run(self, step: Step) -> npt.NDArray[np.float32]:
        """Return the logits [S, vocab_size] of the rows that `step` samples, on the host."""
        # Once a step, for all layers of a kind.
        built = {key: builder.build(0, step.attn_metadata) for key, builder in self.builders.items()}
        token_ids, positions, sample_rows = (
            torch.from_numpy(array).to(self.device) for array in (step.token_ids, step.positions, step.sample_rows)
        )
        metadata = [built[key] for key in self.kinds]
        logits = self.model(token_ids, positions, self.kv_caches, metadata, sample_rows)
        # NumPy has no bfloat16; `cpu` waits for the device.
        return logits.float().cpu().numpy()
