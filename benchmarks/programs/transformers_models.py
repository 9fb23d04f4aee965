"""The models of `transformers_generate`, with random weights, and their implementations of attention."""

import contextlib
import functools
import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from attn.integrations import transformers as attn_transformers
from benchmarks.programs.transformers_table import OURS, PAGED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 131072, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "vocab_size": 32000}
#: Models by name: configuration, its options, and heads (query, kv, size) of the large one. Every other layer of gemma2 and
#: gpt_oss has a window; gemma2 has soft caps, low enough for random scores; gpt_oss has sinks, and experts that all compute
#: every token: a choice of some changes with roundings.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "llama": ("LlamaConfig", {}, (32, 8, 64)),
    "qwen3": ("Qwen3Config", {}, (16, 8, 128)),
    "gemma2": ("Gemma2Config", {"sliding_window": 1024, "attn_logit_softcapping": 2.0}, (8, 4, 256)),
    "gpt_oss": ("GptOssConfig", {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 4}, (64, 8, 64)),
}
#: Deviation of the elements of queries and keys. As initialised, all keys have almost the same weight in small models; from 2.0
#: on, sixteen layers make unrelated logits of bfloat16's roundings.
SHARP = 1.0
PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def config_of(name: str) -> Any:
    """Return a model's configuration: about a billion weights on a CUDA device, few on a CPU."""
    kind, options, heads = MODELS[name]
    shape = SMALL | options
    if DEVICE == "cuda":
        shape |= LARGE | dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))
        shape |= {"intermediate_size": 1024} if name == "gpt_oss" else {}  # of each expert
    if name == "gemma2":
        shape["query_pre_attn_scalar"] = shape["head_dim"]
    return getattr(transformers, kind)(**shape)


@functools.lru_cache(1)
def model_of(name: str, dtype: torch.dtype) -> tuple[Any, str]:
    """Return a model, and the name of the implementation that others are compared with: transformers' default, but eager for
    soft caps, which sdpa ignores."""
    config = config_of(name)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if parameter.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(SHARP)
            elif parameter.endswith(("q_proj.weight", "k_proj.weight")):
                weight.normal_(std=SHARP * config.hidden_size**-0.5)
    few = torch.ones(1, 8, dtype=torch.long, device=DEVICE)
    model.generate(input_ids=few, attention_mask=few, max_new_tokens=2)  # loads libraries, before the first call is timed
    soft_cap = getattr(config, "attn_logit_softcapping", None)
    return model, "eager" if soft_cap else model.config._attn_implementation


@contextlib.contextmanager
def using(model: Any, name: str, cache: str) -> Iterator[None]:
    """Let a model use an implementation. Raises an error if there is none, or if transformers silently takes another."""
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        raise ImportError(f"{PACKAGES[name]} is not installed; PyPI has no wheel of it")
    if cache == PAGED and name.startswith(OURS):
        with attn_transformers.paged(model, name.partition(":")[2] or None):
            yield
        return
    if cache == PAGED and (name == "eager" or "paged|sdpa" in transformers.AttentionInterface()):
        name = f"paged|{name}"
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"transformers takes {model.config._attn_implementation} instead")
    yield


def clock() -> float:
    """Return milliseconds, once the device has finished its work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() * 1e3
