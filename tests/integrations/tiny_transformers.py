"""Tiny random models of transformers in which attention matters, and padded batches for them.

Random tiny models barely depend on what attention does; with query and key projections multiplied by `SHARP`, a dropped cap,
sink, window or scale moves logits by tenths, so that equality with eager means something.
"""

import inspect
from typing import Any

import torch
import transformers

SHARP = 12.0
VOCABULARY = 64
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
}
#: Decoders by name: (configuration, what it says beside `SMALL`). Windows are 6: shorter than every prompt.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 16}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 40},
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 40}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 6}),
    "phi3": ("Phi3Config", {}),
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
}
_PROJECTIONS = (
    "q_proj",
    "k_proj",
    "qkv_proj",
    "q_b_proj",
    "kv_b_proj",
    "query.",
    "key.",
    ".q.",
    ".k.",
)


def sharpened(model: Any) -> Any:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in _PROJECTIONS):
                weight.mul_(SHARP)
            if name.endswith("sinks"):
                weight.normal_()
    return model.eval()


def decoder(kind: str) -> Any:
    name, extra = DECODERS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SMALL, **extra})
    return sharpened(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def encoder() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return sharpened(transformers.AutoModel.from_config(config, attn_implementation="eager"))


def encoder_decoder(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "bart":
        config = transformers.BartConfig(
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
            forced_eos_token_id=None,
            decoder_start_token_id=1,
        )
    else:
        config = transformers.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            decoder_start_token_id=1,
            pad_token_id=0,
            eos_token_id=None,
        )
    return sharpened(transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager"))


def model_of(kind: str) -> Any:
    """The model of any kind that this module makes."""
    if kind == "bert":
        return encoder()
    return decoder(kind) if kind in DECODERS else encoder_decoder(kind)


def batch(padding: str, rows: int = 17) -> dict[str, torch.Tensor]:
    """Two prompts of `rows` tokens, one of them padded by 5 or 6: "none", "left" or "right"."""
    torch.manual_seed(1)
    ids, mask = torch.randint(2, VOCABULARY, (2, rows)), torch.ones(2, rows, dtype=torch.long)
    if padding == "left":
        mask[0, :5] = 0
    if padding == "right":
        mask[1, rows - 6 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def batching() -> Any:
    """A small continuous batching: chunked prompts, more requests than fit at once, pages of 16 tokens."""
    from transformers.generation import ContinuousBatchingConfig

    known = inspect.signature(ContinuousBatchingConfig).parameters
    page = "page_size" if "page_size" in known else "block_size"
    more = {"auto_switch_to_flash": False} if "auto_switch_to_flash" in known else {}
    return ContinuousBatchingConfig(**{page: 16, "num_blocks": 24, "max_batch_tokens": 16, **more})
