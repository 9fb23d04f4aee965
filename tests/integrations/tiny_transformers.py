"""Tiny random models of transformers in which attention matters, and padded batches for them.

Random tiny models barely depend on what attention does; with query and key projections multiplied by `SHARP`, a dropped cap,
sink, window or scale moves logits by tenths, so that equality with eager means something.
"""

import inspect
from typing import Any

import torch
import transformers

#: The name of a model's argument, and of a field of its output, for the cache of keys and values: another before 5.24.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
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
#: The last two of four layers use the keys of those before them.
_SHARED_KEYS = {
    "head_dim": 16,
    "sliding_window": 6,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
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
    "deepseek_v32": ("DeepseekV32Config", {**_LATENT, "index_topk": 4}),
    "nemotron": ("NemotronConfig", {}),
    "diffllama": ("DiffLlamaConfig", {}),
    "doge": ("DogeConfig", {"keep_window_size": 8}),  # adds numbers to its mask, of the values
    "phimoe": ("PhimoeConfig", {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "gemma3n": ("Gemma3nTextConfig", {**_SHARED_KEYS, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}),
    "gemma4": ("Gemma4TextConfig", {**_SHARED_KEYS, "global_head_dim": 16, "num_global_key_value_heads": 2}),
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


#: Images and blocks of `image_model`: two of each prompt's 17 tokens, apart.
KINDS = torch.tensor([[0] * 6 + [1] * 3 + [0] * 2 + [1] * 4 + [0] * 2] * 2)
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def _image_config(kind: str) -> tuple[str, dict[str, Any]]:
    """The class of a model with tokens that see each other, and its configuration."""
    text = {**SMALL, "head_dim": 16}
    heads = {"num_key_value_heads": 2, "head_dim": 8}
    if kind == "molmo2":
        adapter = {"vision_feature_layer": [0], "hidden_size": 16, "intermediate_size": 16, "text_hidden_size": 32}
        return "Molmo2ForConditionalGeneration", {
            "text_config": text,
            "vision_config": {**_TOWER, **heads, "image_size": [8, 8]},
            "adapter_config": {**adapter, **heads, "num_attention_heads": 2},
        }
    if kind == "pi0":
        tower = {**_TOWER, "model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False}
        gemma = {**text, "model_type": "gemma"}
        seeing = {"model_type": "paligemma", "text_config": gemma, "vision_config": tower, "projection_dim": 32}
        return "PI0ForConditionalGeneration", {
            "vlm_config": {**seeing, "image_token_index": 63},
            "dit_config": gemma,
            "chunk_size": 5,
            "max_state_dim": 4,
            "max_action_dim": 4,
            "num_inference_steps": 3,
        }
    if kind == "deepseek_ocr2":
        sam = {**_TOWER, "image_size": 64, "patch_size": 16, "output_channels": 8, "downsample_channels": [16, 32]}
        experts = {"n_group": 1, "topk_group": 1, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        return "DeepseekOcr2ForConditionalGeneration", {
            "vision_config": {"sam_config": {**sam, "window_size": 2, "global_attn_indexes": [0]}, "encoder_config": SMALL},
            "text_config": {**SMALL, **experts, "n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
        }
    if kind == "gemma3":
        text |= {"head_dim": 64, "sliding_window": 6, "query_pre_attn_scalar": 40}
        return "Gemma3ForConditionalGeneration", {
            "text_config": {**text, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": _TOWER,
            **{"mm_tokens_per_image": 4, "image_token_index": 63},
        }
    experts = {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 16}
    text |= {**experts, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16}
    return "DiffusionGemmaForBlockDiffusion", {
        "text_config": {**text, "num_global_key_value_heads": 2, "use_bidirectional_attention": "vision"},
        "vision_config": {**_TOWER, **heads, "position_embedding_size": 16},
        **{"boi_token_id": 60, "eoi_token_id": 61, "image_token_id": 63, "canvas_length": 8},
    }


def image_model(kind: str) -> Any:
    """A tiny model of "molmo2", "pi0", "deepseek_ocr2", "gemma3" or "diffusion_gemma"; None if this transformers has none."""
    name, options = _image_config(kind)
    if not hasattr(transformers, name):
        return None
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return sharpened(cls._from_config(cls.config_class(**options), attn_implementation="eager"))
