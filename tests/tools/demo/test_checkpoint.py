"""Checkpoints are read as transformers reads them; errors are reported in one line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from attn.tools.demo.checkpoint import (
    CheckpointError,
    load_config,
    load_tokenizer,
    load_weights,
    rope_frequencies,
    weight_shapes,
)
from attn.tools.demo.checkpoint import __file__ as checkpoint_file

SHIPPED = Path(checkpoint_file).parent / "model"

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **SIZES}
WINDOWED = {"use_sliding_window": True, "sliding_window": 8}
STRETCH = {"original_max_position_embeddings": 64, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **STRETCH}


def write_config(directory: Path, fields: dict[str, Any], file: str = "config.json") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / file).write_text(json.dumps(fields))
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A whole float32 checkpoint without the help of torch, for breaking."""
    root = write_config(tmp_path / "checkpoint", LLAMA)
    random = np.random.default_rng(0)
    shapes = weight_shapes(load_config(root))
    save_file({n: random.normal(size=s).astype(np.float32) for n, s in shapes.items()}, root / "model.safetensors")
    return root


def change_weights(root: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Rewrites the weights with some added, replaced or (None) left out."""
    weights = load_weights(root, load_config(root)) | changes
    save_file({n: v for n, v in weights.items() if v is not None}, root / "model.safetensors")


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_safetensors(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


# ---- against transformers

MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama with everything": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}),
    "mistral without a window": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 6}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2 with late windows": ("Qwen2ForCausalLM", {**WINDOWED, "max_window_layers": 3}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    "qwen3 with typed layers": (
        "Qwen3ForCausalLM",
        {**WINDOWED, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_and_config_equal_those_of_transformers(tmp_path: Path, name: str, dtype: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    architecture, fields = MODELS[name]
    made = getattr(transformers, architecture)
    model = made(made.config_class(**SIZES, **fields, eos_token_id=[7, 9], bos_token_id=3))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()

    config = load_config(tmp_path)
    weights = load_weights(tmp_path, config)

    expected = {n: p.detach().float().numpy() for n, p in model.named_parameters()}
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        assert weights[key].dtype == np.float32
        assert np.array_equal(weights[key], value), key
    attention = [layer.self_attn for layer in model.model.layers]
    assert config.architecture == architecture
    assert config.head_size == attention[0].head_dim
    assert config.sliding_window == tuple(
        model.config.sliding_window if architecture.startswith("Mistral") else getattr(a, "sliding_window", None)
        for a in attention
    )
    assert config.attention_bias is (attention[0].k_proj.bias is not None)
    assert config.output_bias is (attention[0].o_proj.bias is not None)
    assert config.mlp_bias is (model.model.layers[0].mlp.up_proj.bias is not None)
    assert config.qk_norm is hasattr(attention[0], "q_norm")
    assert config.tie_word_embeddings is model.config.tie_word_embeddings
    assert config.rms_norm_eps == model.config.rms_norm_eps
    assert (config.bos_token_id, config.eos_token_ids) == (3, (7, 9))


ROPES = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3 of Llama 3.1": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
    "llama3 without a length": {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
    "yarn": {"rope_type": "yarn", **STRETCH},
    "yarn without a length": {"rope_type": "yarn", "factor": 2.0},
    "yarn by the lengths": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    "yarn with ends": {"rope_type": "yarn", **STRETCH, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    "yarn with a factor": {"rope_type": "yarn", **STRETCH, "attention_factor": 1.5},
    "yarn with mscale": {"rope_type": "yarn", **STRETCH, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn without a ramp": {
        "rope_type": "yarn",
        **STRETCH,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spelling", ["rope_scaling", "type", "rope_parameters"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies_equal_those_of_transformers(tmp_path: Path, name: str, spelling: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope, theta = dict(ROPES[name]), 5000.0
    kind = rope.get("rope_type", "default")
    if spelling == "rope_parameters":
        fields: dict[str, Any] = {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **rope}}
    else:
        if spelling == "type" and rope:
            rope["type"] = rope.pop("rope_type")
        fields = {"rope_theta": theta, "rope_scaling": rope or None}
    write_config(tmp_path, {**LLAMA, "head_dim": 64, **fields})

    reference = transformers.AutoConfig.from_pretrained(tmp_path)
    compute = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, expected_scaling = compute(reference)
    frequencies, scaling = rope_frequencies(load_config(tmp_path))

    assert frequencies.dtype == np.float32 and frequencies.shape == (32,)
    np.testing.assert_allclose(frequencies, expected.to(torch.float32).numpy(), rtol=3e-7, atol=0)
    assert scaling == pytest.approx(expected_scaling, rel=1e-12)


# ---- the configuration


def test_absent_fields_have_the_defaults_of_the_architecture(tmp_path: Path) -> None:
    llama = load_config(write_config(tmp_path, LLAMA))
    assert (llama.head_size, llama.rope_theta, llama.rope_scaling) == (8, 10000.0, None)
    assert (llama.bos_token_id, llama.eos_token_ids, llama.tie_word_embeddings) == (1, (2,), False)
    qwen = load_config(write_config(tmp_path, {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}))
    assert (qwen.head_size, qwen.eos_token_ids, qwen.sliding_window) == (128, (), (None,) * 4)
    late = load_config(write_config(tmp_path, {**QWEN2, **WINDOWED, "num_hidden_layers": 30}))
    assert late.sliding_window == (None,) * 28 + (8, 8)
    assert load_config(write_config(tmp_path, {**QWEN2, "num_key_value_heads": None})).num_kv_heads == 4
    mistral = load_config(write_config(tmp_path, {**LLAMA, "architectures": ["MistralForCausalLM"]}))
    assert mistral.sliding_window == (4096,) * 4


@pytest.mark.parametrize(("generation", "expected"), [({"eos_token_id": [4, 5]}, (4, 5)), ({}, (6,))])
def test_the_generation_config_decides_where_to_stop(
    tmp_path: Path, generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    write_config(tmp_path, {**LLAMA, "eos_token_id": 6})
    write_config(tmp_path, generation, "generation_config.json")
    assert load_config(tmp_path).eos_token_ids == expected


def test_an_explicit_null_means_no_end(tmp_path: Path) -> None:
    assert load_config(write_config(tmp_path, {**LLAMA, "eos_token_id": None})).eos_token_ids == ()


BAD_CONFIGS = {
    "architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        r'architectures = \["GPT2LMHeadModel"\].*Qwen3ForCausalLM',
    ),
    "no architecture": ({"architectures": None}, "architectures = null: must be a list with one of"),
    "unhashable architecture": ({"architectures": [{}]}, "architectures = "),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = \"gelu\": must be 'silu'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised by gptq: must be float32"),
    "text for a number": (
        {"num_attention_heads": "4"},
        'num_attention_heads = "4": must be an integer of at least 1',
    ),
    "true for a number": ({"num_hidden_layers": True}, "num_hidden_layers = true: must be an integer"),
    "zero": ({"vocab_size": 0}, "vocab_size = 0: must be an integer of at least 1"),
    "number for a flag": ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: must be true or false"),
    "epsilon": ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06: must be a positive number"),
    "not finite": ({"rope_theta": float("inf")}, "rope_theta = Infinity: must be a positive number"),
    "heads": (
        {"num_key_value_heads": 3},
        "num_key_value_heads = 3: must be a divisor of num_attention_heads = 4",
    ),
    "hidden size": ({"hidden_size": 30}, "hidden_size = 30: must be a multiple of num_attention_heads = 4"),
    "odd head": ({"head_dim": 7}, "head size 7 is odd"),
    "end": (
        {"eos_token_id": "</s>"},
        'eos_token_id = "</s>": must be a token id, a list of token ids, or null',
    ),
    "rope type": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        'rope_type = "dynamic": must be one of',
    ),
    "rope text": ({"rope_scaling": "linear"}, 'rope_scaling = "linear": must be an object'),
    "rope factor": (
        {"rope_scaling": {"type": "linear"}},
        "rope_scaling: factor is missing: must be a positive",
    ),
    "yarn factor": (
        {"rope_scaling": {"type": "yarn"}},
        "rope_scaling: factor is missing: must be a positive",
    ),
    "llama3 order": (
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 4}},
        "low_freq_factor = 4: must be less than",
    ),
    "rope base": ({"rope_theta": 1}, "rope_theta = 1.0: must be greater than 1"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: must be 1"),
    "rope by layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "one object for all layers",
    ),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_bad_field_is_named_with_its_value_and_what_is_allowed(tmp_path: Path, name: str) -> None:
    fields, message = BAD_CONFIGS[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(write_config(tmp_path, LLAMA | fields))
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(SIZES.keys() - {"num_key_value_heads"}) + ["architectures"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    fields = {key: value for key, value in LLAMA.items() if key != name}
    with pytest.raises(CheckpointError, match=f"config.json: {name} is missing: must be"):
        load_config(write_config(tmp_path, fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"]}, "must be a list of 4 of full_attention, sliding_attention"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "attention_chunk_size is missing"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"], "attention_chunk_size": 8}, "must be a list of 4 of"),
        ({"layer_types": ["sliding_attention"] * 4}, "use_sliding_window or sliding_window is off"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window = 0: must be an integer"),
    ],
)
def test_bad_windows(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_config(write_config(tmp_path, QWEN2 | fields))


def test_a_place_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere' does not exist: expected a local directory with config.json"):
        load_config(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file' is not a directory: expected"):
        load_tokenizer(tmp_path / "file")
    with pytest.raises(CheckpointError, match="has no config.json: expected"):
        load_config(str(tmp_path))
    assert issubclass(CheckpointError, ValueError)


@pytest.mark.parametrize(("text", "message"), [("{", "not readable as JSON"), ("[]", "contains a list: must be")])
def test_a_file_that_is_not_a_json_object(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)


# ---- the weights


def test_a_tied_head_may_be_there_and_must_then_be_the_embedding(checkpoint: Path) -> None:
    write_config(checkpoint, {**LLAMA, "tie_word_embeddings": True})
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true, but lm_head.weight differs"):
        load_weights(checkpoint, load_config(checkpoint))
    write_config(checkpoint, LLAMA)
    embedding = load_weights(checkpoint, load_config(checkpoint))["model.embed_tokens.weight"]
    change_weights(checkpoint, {"lm_head.weight": embedding})
    write_config(checkpoint, {**LLAMA, "tie_word_embeddings": True})
    assert "lm_head.weight" not in load_weights(checkpoint, load_config(checkpoint))


def test_frequencies_saved_by_older_programs_are_passed_over(checkpoint: Path) -> None:
    change_weights(checkpoint, {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    config = load_config(checkpoint)
    assert load_weights(checkpoint, config).keys() == weight_shapes(config).keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, "missing model.norm.weight$"),
        ({"model.extra": np.ones(3)}, "unexpected model.extra$"),
        ({"model.norm.weight": None, "model.extra": np.ones(3)}, "missing .*; unexpected model.extra$"),
        (
            {"model.norm.weight": np.ones(31)},
            r"model.norm.weight has shape \[31\]: config.json asks for \[32\]",
        ),
        (
            {"model.layers.0.mlp.down_proj.weight": np.ones((48, 32))},
            r"down_proj.weight has shape \[48, 32\]: config.json asks for \[32, 48\]",
        ),
        ({"model.norm.weight": np.ones(32)}, "is stored as F64: must be one of F32, F16, BF16"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    checkpoint: Path, changes: dict[str, np.ndarray | None], message: str
) -> None:
    change_weights(checkpoint, changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_weights(checkpoint, load_config(checkpoint))
    assert "\n" not in str(caught.value)


def test_another_model_is_recognised_by_a_few_names(checkpoint: Path) -> None:
    config = load_config(write_config(checkpoint, {**LLAMA, "num_hidden_layers": 6}))
    with pytest.raises(CheckpointError, match=r"missing (\S+, ){3}\S+ and 14 more$"):
        load_weights(checkpoint, config)


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    message = r"neither model.safetensors nor .*index.json \(found pytorch_model.bin, which is not supported"
    with pytest.raises(CheckpointError, match=message):
        load_weights(checkpoint, load_config(checkpoint))


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_file_that_was_cut_short(checkpoint: Path, kept: int) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="cut short"):
        load_weights(checkpoint, load_config(checkpoint))


def test_a_pointer_in_place_of_the_file(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="or a pointer to one"):
        load_weights(checkpoint, load_config(checkpoint))


@pytest.mark.parametrize("header", [[], {"x": 1}, {"x": {}}, {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}])
def test_a_header_that_is_none(checkpoint: Path, header: object) -> None:
    write_safetensors(checkpoint / "model.safetensors", header, b"\0" * 8)
    with pytest.raises(CheckpointError, match="the header is not that of a safetensors file"):
        load_weights(checkpoint, load_config(checkpoint))


def test_an_entry_whose_size_is_not_that_of_its_shape(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    header, data = header_of(path)
    header["model.norm.weight"]["data_offsets"][1] -= 4
    write_safetensors(path, header, data)
    with pytest.raises(CheckpointError, match=r"model.norm.weight takes 124 bytes, which is not F32 \[32\]"):
        load_weights(checkpoint, load_config(checkpoint))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "weight_map must be an object"),
        ({"weight_map": {"a": 1}}, "weight_map must be an object"),
        ({"weight_map": {"a": "gone.safetensors"}}, "names the file 'gone.safetensors', which is not in"),
        (
            {"weight_map": {"a": "../part.safetensors"}},
            "names the file '../part.safetensors', which is not in",
        ),
        ({"weight_map": {"a": "part.safetensors"}}, "the index lists a, but the file does not contain it"),
    ],
)
def test_a_bad_index(checkpoint: Path, index: dict[str, Any], message: str) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "part.safetensors")
    shutil.copy(checkpoint / "part.safetensors", checkpoint.parent)
    write_config(checkpoint, index, "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=message):
        load_weights(checkpoint, load_config(checkpoint))


# ---- the tokenizer


def test_no_tokenizer(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer.json is missing"):
        load_tokenizer(checkpoint)
    (checkpoint / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match="tokenizer.json: not a tokenizer"):
        load_tokenizer(checkpoint)


def test_a_tokenizer_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CheckpointError, match="needs the package tokenizers: pip install tokenizers"):
        load_tokenizer(SHIPPED)


# ---- the model that is shipped


def test_the_shipped_model_loads_and_is_small() -> None:
    config = load_config(SHIPPED)
    weights = load_weights(SHIPPED, config)
    assert 1_500_000 < sum(value.size for value in weights.values()) < 2_000_000
    assert (SHIPPED / "model.safetensors").stat().st_size < 4_000_000
    assert all(np.isfinite(value).all() for value in weights.values())
    assert (config.architecture, config.eos_token_ids) == ("LlamaForCausalLM", (257,))
    assert config.max_position_embeddings >= 2048


TEXT = "def naïve(x):\n    return '→ \x00\t🙂'\n"


def test_the_shipped_tokens_are_bytes() -> None:
    tokenizer = load_tokenizer(SHIPPED)
    assert tokenizer.encode(TEXT, add_special_tokens=False).ids == list(TEXT.encode())
    assert tokenizer.encode(TEXT).ids == [256, *TEXT.encode()]
    assert tokenizer.decode([256, *TEXT.encode(), 257]) == TEXT
    every = tokenizer.encode("".join(map(chr, range(0x250))), add_special_tokens=False).ids
    assert bytes(every).decode() == "".join(map(chr, range(0x250)))
    assert tokenizer.get_vocab_size() == 258


def test_the_shipped_tokenizer_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    assert tokenizer(TEXT)["input_ids"] == [256, *TEXT.encode()]
    assert tokenizer.decode([*TEXT.encode(), 257], skip_special_tokens=True) == TEXT
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)


def test_reading_needs_no_framework() -> None:
    code = (
        "import sys; from attn.tools.demo.checkpoint import *\n"
        f"load_weights({str(SHIPPED)!r}, load_config({str(SHIPPED)!r})); load_tokenizer({str(SHIPPED)!r})\n"
        "print(*{'torch', 'jax', 'transformers', 'ml_dtypes'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
