"""Reference for the demo: the same weights without paging, batching or cache, one dense forward pass over a whole text.

Computed by transformers if it is installed (with torch), else by a NumPy decoder around the float64 reference attention.
Either returns the logits from which a text's last tokens were chosen. If the likeliest token equals the generated one at
every position, then decoding without a cache, token by token, generates the same text: each choice sees the same tokens
before it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attn import reference
from attn.imports import installed
from attn.tools.demo.checkpoint import ModelConfig, rope_frequencies

Floats = npt.NDArray[np.float32]
Dense = Callable[[Sequence[int], int], Floats]


def dense_forward(directory: Path, config: ModelConfig, weights: Mapping[str, Floats]) -> tuple[str, Dense]:
    """Return the name of the reference ("transformers" or "reference") and `forward(tokens, count)`: float32 logits
    [count, vocab_size] that follow each of the last `count` tokens."""
    if installed("transformers") and installed("torch"):
        return "transformers", by_transformers(directory)
    return "reference", by_reference(config, weights)


def by_transformers(directory: Path) -> Dense:
    """Return the forward pass of transformers: eager attention, float32, no cache."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        # Another implementation than any backend here, in the precision of both runners.
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
    )

    @torch.inference_mode()
    def forward(tokens: Sequence[int], count: int) -> Floats:
        output = model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=count)
        return output.logits[0].numpy()

    return forward


def by_reference(config: ModelConfig, weights: Mapping[str, Floats]) -> Dense:
    """Return the forward pass of a NumPy decoder, float32 except for `attn.reference.attention`."""
    inv_freq, scaling = rope_frequencies(config)
    embedding = weights["model.embed_tokens.weight"]

    def linear(name: str, x: Floats) -> Floats:
        bias = weights.get(f"{name}.bias")
        return x @ weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(name: str, x: Floats) -> Floats:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + np.float32(config.rms_norm_eps)) * weights[f"{name}.weight"]

    def attend(name: str, x: Floats, window: int | None) -> Floats:
        query, key, value = (linear(f"{name}.{proj}_proj", x).reshape(len(x), -1, config.head_size) for proj in "qkv")
        if config.qk_norm:
            query, key = norm(f"{name}.q_norm", query), norm(f"{name}.k_norm", key)
        # A window counts the query's own key (docs/semantics.md §4); causality bounds the other side.
        pair = (None if window is None else window - 1, None)
        out, _ = reference.attention(rotate(query), rotate(key), value, causal=True, window=pair)
        return linear(f"{name}.o_proj", out.reshape(len(x), -1).astype(np.float32))

    def rotate(x: Floats) -> Floats:
        # [m, 1, D / 2]: positions from 0, as there is no cache.
        angles = np.arange(len(x), dtype=np.float32)[:, None, None] * inv_freq
        cos, sin = np.cos(angles) * np.float32(scaling), np.sin(angles) * np.float32(scaling)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(tokens: Sequence[int], count: int) -> Floats:
        hidden = embedding[np.asarray(tokens)]
        for index, window in enumerate(config.sliding_window):
            name = f"model.layers.{index}"
            hidden = hidden + attend(f"{name}.self_attn", norm(f"{name}.input_layernorm", hidden), window)
            x = norm(f"{name}.post_attention_layernorm", hidden)
            gate = linear(f"{name}.mlp.gate_proj", x)
            with np.errstate(over="ignore"):  # exp(-gate) is inf where the gate is closed
                gate = gate / (1 + np.exp(-gate))
            hidden = hidden + linear(f"{name}.mlp.down_proj", gate * linear(f"{name}.mlp.up_proj", x))
        # The logits after each of the last `count` tokens.
        last = norm("model.norm", hidden[-count:])
        return last @ (embedding if config.tie_word_embeddings else weights["lm_head.weight"]).T

    return forward
