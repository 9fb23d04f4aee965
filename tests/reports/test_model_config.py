"""Layers read from configurations: dicts with the values of published `config.json` files (about 1 s without transformers)."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from attn.capabilities import LAYER_KINDS, layer_kind
from attn.fields import CheckpointError
from attn.reports import model_config
from attn.reports.model_config import LatentSizes, LayerKind, read_layers

LLAMA = {  # meta-llama/Llama-3.1-8B
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
MISTRAL = {  # mistralai/Mistral-7B-v0.1; in v0.3 sliding_window is null
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
QWEN2 = {  # Qwen/Qwen2.5-7B-Instruct
    "model_type": "qwen2",
    "hidden_size": 3584,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE = {  # Qwen/Qwen3-30B-A3B
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "max_window_layers": 48,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN3_NEXT = {  # Qwen/Qwen3-Next-80B-A3B-Instruct
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
}
GEMMA = {  # google/gemma-7b
    "model_type": "gemma",
    "head_dim": 256,
    "hidden_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
}
GEMMA2 = {  # google/gemma-2-9b
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "head_dim": 256,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "torch_dtype": "float32",
}
GEMMA3_1B = {  # google/gemma-3-1b-it
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "head_dim": 256,
    "hidden_size": 1152,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}
GEMMA3_4B = {  # google/gemma-3-4b-it: its text_config has only what differs from transformers' defaults
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_attention_heads": 16},
}
GPT_OSS = {  # openai/gpt-oss-20b
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
PHI3 = {  # microsoft/Phi-3-mini-4k-instruct
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "sliding_window": 2047,
    "torch_dtype": "bfloat16",
}
LLAMA4 = {  # meta-llama/Llama-4-Scout-17B-16E
    "model_type": "llama4",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
}
DEEPSEEK_V2_LITE = {  # deepseek-ai/DeepSeek-V2-Lite
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
    "rope_scaling": {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "type": "yarn"},
}
DEEPSEEK_V3 = {  # deepseek-ai/DeepSeek-V3
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
    "rope_scaling": {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"},
}
COHERE2 = {  # CohereLabs/c4ai-command-r7b-12-2024
    "model_type": "cohere2",
    "head_dim": 128,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16",
}
GRANITE = {  # ibm-granite/granite-3.1-8b-instruct
    "model_type": "granite",
    "attention_multiplier": 0.0078125,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
FALCON_7B = {  # tiiuae/falcon-7b: one kv head, whatever num_kv_heads says
    "model_type": "falcon",
    "alibi": False,
    "hidden_size": 4544,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "num_kv_heads": 71,
    "torch_dtype": "bfloat16",
}
FALCON_40B = {  # tiiuae/falcon-40b
    "model_type": "falcon",
    "alibi": False,
    "hidden_size": 8192,
    "multi_query": True,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
    "torch_dtype": "bfloat16",
}
FALCON_RW = {  # tiiuae/falcon-rw-1b
    "model_type": "falcon",
    "alibi": True,
    "hidden_size": 2048,
    "multi_query": False,
    "new_decoder_architecture": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "torch_dtype": "bfloat16",
}
BLOOM = {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16}  # bigscience/bloom-560m
MPT = {  # mosaicml/mpt-7b
    "model_type": "mpt",
    "d_model": 4096,
    "n_heads": 32,
    "n_layers": 32,
    "torch_dtype": "bfloat16",
    "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention", "softmax_scale": None},
}
JAMBA = {  # ai21labs/Jamba-v0.1
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
NEMOTRON_H = {  # nvidia/Nemotron-H-8B-Base-8K
    "model_type": "nemotron_h",
    "attention_head_dim": 128,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12}  # openai-community/gpt2
BERT = {  # google-bert/bert-base-uncased
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "position_embedding_type": "absolute",
}
T5 = {  # google/flan-t5-small
    "model_type": "t5",
    "d_kv": 64,
    "d_model": 512,
    "is_encoder_decoder": True,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "num_layers": 8,
}
BART = {  # facebook/bart-large
    "model_type": "bart",
    "d_model": 1024,
    "decoder_attention_heads": 16,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "encoder_layers": 12,
    "is_encoder_decoder": True,
    "num_hidden_layers": 12,
}

FULL = LayerKind("full", 32, 32, 8, 128)


def latent(count: int, heads: int, mscale: float) -> LayerKind:
    scale = (0.1 * mscale * math.log(40) + 1) ** 2 / math.sqrt(192)
    return LayerKind("mla", count, heads, 1, 576, scale=scale, latent=LatentSizes(512, 64, 128, 128))


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (LLAMA, [FULL]),
        (MISTRAL, [LayerKind("sliding", 32, 32, 8, 128, window=4096)]),
        ({**MISTRAL, "sliding_window": None}, [FULL]),
        (QWEN2, [LayerKind("full", 28, 28, 4, 128)]),
        (
            {**QWEN2, "use_sliding_window": True, "max_window_layers": 21},
            [LayerKind("full", 21, 28, 4, 128), LayerKind("sliding", 7, 28, 4, 128, window=131072)],
        ),
        (QWEN3_MOE, [LayerKind("full", 48, 32, 4, 128)]),
        (QWEN3_NEXT, [LayerKind("linear attention", 36), LayerKind("full", 12, 16, 2, 256)]),
        (GEMMA, [LayerKind("full", 28, 16, 16, 256)]),
        (
            GEMMA2,
            [
                LayerKind("sliding", 21, 16, 8, 256, window=4096, soft_cap=50.0, scale=1 / 16),
                LayerKind("full", 21, 16, 8, 256, soft_cap=50.0, scale=1 / 16),
            ],
        ),
        (
            GEMMA3_1B,
            [LayerKind("sliding", 22, 4, 1, 256, window=512, scale=1 / 16), LayerKind("full", 4, 4, 1, 256, scale=1 / 16)],
        ),
        (
            GEMMA3_4B,
            [LayerKind("sliding", 29, 8, 4, 256, window=1024, scale=1 / 16), LayerKind("full", 5, 8, 4, 256, scale=1 / 16)],
        ),
        (
            GPT_OSS,
            [LayerKind("sliding", 12, 64, 8, 64, window=128, sinks=True), LayerKind("full", 12, 64, 8, 64, sinks=True)],
        ),
        (PHI3, [LayerKind("sliding", 32, 32, 32, 96, window=2047)]),
        (LLAMA4, [LayerKind("chunked", 36, 40, 8, 128, chunk=8192), LayerKind("full", 12, 40, 8, 128)]),
        (DEEPSEEK_V2_LITE, [latent(27, 16, 0.707)]),
        (DEEPSEEK_V3, [latent(61, 128, 1.0)]),
        (COHERE2, [LayerKind("sliding", 24, 32, 8, 128, window=4096), LayerKind("full", 8, 32, 8, 128)]),
        (GRANITE, [LayerKind("full", 40, 32, 8, 128, scale=0.0078125)]),
        (FALCON_7B, [LayerKind("full", 32, 71, 1, 64)]),
        (FALCON_40B, [LayerKind("full", 60, 128, 8, 64)]),
        (FALCON_RW, [LayerKind("full", 24, 32, 32, 64, alibi=True)]),
        (BLOOM, [LayerKind("full", 24, 16, 16, 64, alibi=True)]),
        (MPT, [LayerKind("full", 32, 32, 32, 128, alibi=True)]),
        (
            {**MPT, "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 8, "alibi": False}},
            [LayerKind("full", 32, 32, 8, 128)],
        ),
        (JAMBA, [LayerKind("mamba", 28), LayerKind("full", 4, 32, 8, 128)]),
        (
            NEMOTRON_H,
            [LayerKind("mamba", 24), LayerKind("mlp", 24), LayerKind("full", 4, 32, 8, 128)],
        ),
        ({"model_type": "mamba", "num_hidden_layers": 24}, [LayerKind("mamba", 24)]),  # state-spaces/mamba-130m-hf
        (GPT2, [LayerKind("full", 12, 12, 12, 64)]),
        (BERT, [LayerKind("encoder", 12, 12, 12, 64, attn_type="encoder_only")]),
        (
            T5,
            [
                LayerKind("encoder", 8, 6, 6, 64, attn_type="encoder", scale=1.0, position_bias=True),
                LayerKind("full", 8, 6, 6, 64, scale=1.0, position_bias=True),
                LayerKind("cross", 8, 6, 6, 64, attn_type="encoder_decoder", scale=1.0),
            ],
        ),
        (
            BART,
            [
                LayerKind("encoder", 12, 16, 16, 64, attn_type="encoder"),
                LayerKind("full", 12, 16, 16, 64),
                LayerKind("cross", 12, 16, 16, 64, attn_type="encoder_decoder"),
            ],
        ),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_kinds(config, kinds):
    found = read_layers(config).kinds
    assert [kind.name for kind in found] == [kind.name for kind in kinds]
    for kind, expected in zip(found, kinds, strict=True):
        assert (kind.scale is None) == (expected.scale is None)
        assert kind.scale == expected.scale or math.isclose(kind.scale, expected.scale)
        assert {**vars(kind), "scale": None} == {**vars(expected), "scale": None}


@pytest.mark.parametrize("config", [GEMMA2, LLAMA4, DEEPSEEK_V3, {**DEEPSEEK_V3, "index_topk": 2048}, BERT, T5, BART], ids=str)
def test_a_kind_is_named_as_its_backend_is_requested(config):
    for kind in read_layers(config).kinds:
        assert layer_kind(kind.attn_type, kind.features) == kind.name and kind.name in LAYER_KINDS


def test_sparse_latent():
    """deepseek-ai/DeepSeek-V3.2-Exp: the shape of V3 and an indexer."""
    (kind,) = read_layers({**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_topk": 2048}).kinds
    assert kind.topk == 2048 and kind.features == {"sparse_mla"}
    assert read_layers(DEEPSEEK_V3).kinds[0].features == {"mla"}


def test_features():
    sliding, full = read_layers(GEMMA2).kinds
    assert sliding.features == {"sliding_window", "soft_cap"} and full.features == {"soft_cap"}
    assert read_layers(GPT_OSS).kinds[1].features == {"sinks"} and read_layers(BLOOM).kinds[0].features == {"alibi"}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (LLAMA, "bfloat16"),
        (GEMMA2, "float32"),
        (GEMMA3_4B, "bfloat16"),
        (BERT, "float32"),
        ({**LLAMA, "dtype": "float16"}, "float16"),
        ({**LLAMA, "torch_dtype": "torch.float16"}, "float16"),
    ],
)
def test_dtype(config, dtype):
    found = read_layers(config)
    assert found.dtype == dtype
    assert any("transformers' default is float32" in note for note in found.notes) == (config is BERT)


def test_fields_read_are_listed_and_defaults_are_marked():
    fields = read_layers(GEMMA3_4B).fields
    assert "sliding_window=1024" in fields and "num_attention_heads=8 (default)" in fields
    assert "sliding_window_pattern=6 (default)" in fields
    assert "layer_types=[24 entries]" in read_layers(GPT_OSS).fields
    assert "rope_scaling.factor=40" in read_layers(DEEPSEEK_V3).fields


def test_an_unknown_type_is_read_by_the_usual_fields():
    found = read_layers({**LLAMA, "model_type": "newcomer", "layer_types": ["full_attention", "conv"] * 16})
    assert found.notes == ("model_type 'newcomer' is not known here: read by the usual fields, as a decoder",)
    assert found.kinds == (LayerKind("full", 16, 32, 8, 128), LayerKind("convolution", 16))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "config: model_type is missing: must be a string such as llama"),
        ({**LLAMA, "num_hidden_layers": None}, "config: num_hidden_layers = null: must be an integer of at least 1"),
        ({**LLAMA, "num_attention_heads": "32"}, 'config: num_attention_heads = "32": must be an integer'),
        ({**LLAMA, "num_key_value_heads": 5}, "num_key_value_heads = 5: must be a divisor of num_attention_heads = 32"),
        ({**LLAMA, "hidden_size": 4100}, "hidden_size = 4100: must be a multiple of num_attention_heads = 32"),
        ({**LLAMA, "torch_dtype": "int8"}, 'torch_dtype = "int8": must be float32'),
        ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, 'torch_dtype = "float8_e4m3fn": must be float32'),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types = .*: must be a list of 32 of full_attention"),
        ({**LLAMA, "layer_types": ["hyper"] * 32}, "layer_types = .*: must be a list of 32 of full_attention"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "sliding_window is missing: must be an integer"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 28}, "full_attention throughout: use_sliding_window"),
        ({**LLAMA4, "text_config": {**LLAMA4["text_config"], "no_rope_layers": [1]}}, "no_rope_layers = .*a list of 48"),
        ({**LLAMA, "model_type": "new", "sliding_window": 9}, "sliding_window = 9: must be null, unless layer_types"),
        ({**LLAMA, "model_type": "new", "attn_layer_period": 9}, "attn_layer_period = 9: must be null"),
        ({**LLAMA, "model_type": "new", "num_kv_shared_layers": 9}, "num_kv_shared_layers = 9: must be 0"),
        ({**BERT, "model_type": "new"}, "architectures = .*: must be a ...ForCausalLM: model_type 'new' is read as a decoder"),
        ({**LLAMA, "model_type": "new", "is_encoder_decoder": True}, "is_encoder_decoder = true: must be false"),
        ({**BERT, "position_embedding_type": "relative_key"}, "position_embedding_type = .*: must be absolute"),
        ({**GEMMA3_1B, "use_bidirectional_attention": True}, "use_bidirectional_attention = true: must be false"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true: must be false"),
        ({**MPT, "attn_config": {"attn_type": "odd"}}, 'config: attn_config: attn_type = "odd": must be multihead'),
        ({**BART, "d_model": 1000}, "d_model = 1000: must be a multiple of encoder_attention_heads = 16"),
        ({**LLAMA, "model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "hybrid_override_pattern = .*a string of"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(config, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_layers(config)
    assert "\n" not in str(caught.value)


def test_files_and_folders(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    expected = read_layers(LLAMA)
    for path in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        found = read_layers(path)
        assert found.kinds == expected.kinds and found.source == str(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="does not exist: pass a config.json, or a folder with one"):
        read_layers(tmp_path / "other")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        read_layers(tmp_path)


def test_neither_transformers_nor_a_framework_is_imported():
    code = f"import sys; from attn.reports.model_config import read_layers; read_layers({LLAMA!r}); print(*sys.modules)"
    root = Path(model_config.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert not {"torch", "jax", "transformers", "numpy"} & set(done.stdout.split())


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    "config", [MISTRAL, QWEN2, {**QWEN2, "use_sliding_window": True, "max_window_layers": 9}, QWEN3_NEXT, GEMMA2, GEMMA3_1B,
               GEMMA3_4B, GPT_OSS, LLAMA4, COHERE2, {**GPT_OSS, "layer_types": None}, {**COHERE2, "model_type": "olmo3"},
               without(MISTRAL, "sliding_window"), without({**QWEN2, "use_sliding_window": True}, "sliding_window")],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_layer_types_and_sizes_are_transformers(config):
    """transformers' own configuration of the same values, before and after its conversion to a dict."""
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoConfig.for_model(config["model_type"], **without(config, "model_type"))
    text = made.get_text_config()
    windows = {"sliding": "sliding_attention", "full": "full_attention", "chunked": "chunked_attention"}
    windows["linear attention"] = "linear_attention"
    found = read_layers(config)
    counted = {windows[kind.name]: kind.count for kind in found.kinds}
    if config["model_type"] != "mistral":
        assert counted == {word: text.layer_types.count(word) for word in text.layer_types}
    for kind in found.kinds:
        if kind.is_attention:
            heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
            size = getattr(text, "head_dim", None) or text.hidden_size // heads
            assert (kind.num_heads, kind.num_kv_heads, kind.head_size) == (heads, kv_heads, size)
    assert read_layers(made).kinds == found.kinds
