"""`attn.explain_model`: choices, bytes, operations and times of a model's layers (about 3 s)."""

import json
from pathlib import Path

import pytest

import attn
from attn.reports.machines import ATTAINED, CEILINGS, device_named
from attn.tables import WIDTH
from tests.reports import test_model_config

pytest.importorskip("torch")

GEMMA2 = {**test_model_config.GEMMA2, "torch_dtype": "bfloat16"}
DEEPSEEK_V3 = {  # deepseek-ai/DeepSeek-V3
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
LLAMA4 = {  # meta-llama/Llama-4-Scout-17B-16E
    "model_type": "llama4_text",
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
JAMBA = {  # ai21labs/Jamba-v0.1
    "model_type": "jamba",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
T5 = {"model_type": "t5", "d_kv": 64, "num_heads": 8, "num_layers": 6}  # google-t5/t5-small
BERT = {"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}  # bert-base-uncased


def test_bytes_and_times_of_windows():
    report = attn.explain_model(GEMMA2, device="H200", context=8192, requests=2)
    sliding, full = report.rows
    token = 21 * 2 * 8 * 256 * 2  # layers, keys and values, kv heads, head size, bytes of an element
    assert sliding.token_bytes == full.token_bytes == token and report.total("token_bytes") == 2 * token
    assert sliding.cache_bytes == full.cache_bytes == token * 8192 * 2
    assert (sliding.decode_bytes, full.decode_bytes) == (token * 4096 * 2, token * 8192 * 2)
    visible = sum(min(i + 1, 4096) for i in range(8192))
    assert sliding.prompt_flops == 4 * 16 * 256 * visible * 21 * 2
    copy, gemm, *_ = CEILINGS["NVIDIA H200"]
    assert report.decode_ms(full.decode_bytes) == pytest.approx(full.decode_bytes / (copy * 1e9) * 1e3)
    assert report.prompt_ms(full.prompt_flops) == pytest.approx(full.prompt_flops / (gemm * 1e12) * 1e3)
    assert report.served and sliding.backend == "TRITON_ATTN"
    assert "sliding_window" in sliding.selection.request.features and "soft_cap" in full.selection.request.features


def test_blocks_are_whole():
    report = attn.explain_model(GEMMA2, device="H200", context=100, block_size=64)
    assert report.total("cache_bytes") == report.total("token_bytes") * 128
    assert report.to_dict()["total"]["block_bytes"] == report.total("token_bytes") * 64


@pytest.mark.parametrize(("kv_cache_dtype", "row"), [(None, 576 * 2), ("fp8", 576), ("fp8_ds_mla", 656)])
def test_a_latent_is_cached_once(kv_cache_dtype, row):
    report = attn.explain_model(DEEPSEEK_V3, device="H200", kv_cache_dtype=kv_cache_dtype)
    assert report.total("token_bytes") == 61 * row
    (kind,) = report.rows
    assert kind.selection.request.head_size == 576 and "mla" in kind.selection.request.features
    assert kind.prompt_flops == 2 * 128 * (128 + 64 + 128) * (4096 * 4097 // 2) * 61
    assert kind.prefill.request.head_size == 192 and kind.prefill.name in str(report)


def test_scales_per_token_and_head_are_counted():
    report = attn.explain_model(JAMBA, device="H200", kv_cache_dtype="int8_per_token_head")
    assert report.total("token_bytes") == 4 * 2 * 8 * (128 + 4)


def test_chunks():
    report = attn.explain_model(LLAMA4, device="H200", context=8192 + 100)
    chunked, full = report.rows
    assert chunked.decode_bytes == chunked.token_bytes * 100
    assert chunked.prompt_flops == 4 * 40 * 128 * (8192 * 8193 // 2 + 100 * 101 // 2) * 36
    assert full.decode_bytes == full.token_bytes * 8292
    assert any("with each chunk as a request of its own" in note for note in report.notes)


def test_layers_that_are_not_attention():
    report = attn.explain_model(JAMBA, device="H200")
    mamba, full = report.rows
    assert mamba.selection is None and mamba.token_bytes == mamba.prompt_flops == 0 and report.served
    assert "mamba" in str(report) and "not attention" in str(report)
    bare = attn.explain_model({"model_type": "mamba", "num_hidden_layers": 24}, device="H200")
    assert bare.served and bare.device.name == "NVIDIA H200"


def test_encoders_have_no_cache():
    report = attn.explain_model(BERT, dtype="bfloat16", device="H200", context=512)
    (row,) = report.rows
    assert row.token_bytes == 0 and report.decode_ms(row.decode_bytes) is None
    assert row.prompt_flops == 4 * 12 * 64 * 512 * 512 * 12
    assert row.selection.request.block_size is None and row.selection.request.attn_type == "encoder_only"


def test_a_learned_bias_has_no_backend():
    report = attn.explain_model(T5, device="H200", dtype="bfloat16")
    encoder, decoder, cross = report.rows
    assert not report.served and encoder.backend is None and decoder.backend is None
    assert cross.selection.request.attn_type == "encoder_decoder" and "learned position bias" in str(report)


def test_times_of_devices_without_a_record_are_left_out():
    report = attn.explain_model(GEMMA2, device="V100", dtype="float16")
    assert report.ceilings is None and report.decode_ms(10**9) is None and report.prompt_ms(10**12) is None
    assert "times: not recorded: there are no rates of NVIDIA V100 (recorded: NVIDIA H200, " in " ".join(str(report).split())


def test_times_at_a_datasheets_peaks_say_so():
    report = attn.explain_model(GEMMA2, device="H100")
    assert not report.to_dict()["ceilings"]["measured"]
    assert report.decode_ms(3350 * 10**6) == pytest.approx(1) and report.prompt_ms(989 * 10**9) == pytest.approx(1)
    assert "at 989 TFLOP/s (peaks, not measured: datasheet of H100 SXM)" in " ".join(str(report).split())
    assert "(measured: attn bench --peers all, 2026-11-22)" in " ".join(str(attn.explain_model(GEMMA2, device="H200")).split())


#: Device -> the record of its measured rates, of the day that `source` names.
RECORDS = {"NVIDIA H200": Path(attn.__file__).parents[1] / "benchmarks/results/every_peer_h200_2026-11-22.json"}


@pytest.mark.parametrize("name", CEILINGS)
def test_rates_belong_to_known_devices(name):
    assert device_named(name).name == name


def test_products_of_other_dtypes_are_not_recorded():
    report = attn.explain_model(GEMMA2, device="H200", dtype="float16")
    assert report.prompt_ms(10**12) is None and report.decode_ms(10**9) and "prompt: bfloat16 only" in str(report)


def test_rates_are_those_of_the_recorded_run():
    for name, rates in CEILINGS.items():
        if not rates.measured:
            continue
        record = json.loads(RECORDS[name].read_text())
        assert rates.source.partition(", ")[2] in RECORDS[name].stem
        about = record.get("torch_run", record)
        assert about["device"] == name
        assert (about["copy_gb_per_s"], about["gemm_tflop_per_s"]) == (rates.copy_gb_per_s, rates.gemm_tflop_per_s)


def test_measured_shares_are_those_of_the_recorded_run():
    rows = {}
    for name, rates in CEILINGS.items():
        if rates.measured:
            for row in json.loads(RECORDS[name].read_text())["rows"]:
                if not row.get("peer") and row.get("right") and row["kv_cache_dtype"] == "auto" and row["block_size"] == 16:
                    rows[name, row["backend"], row["head_size"], row["batch"]] = row
    for (name, backend, size), (copy, gemm) in ATTAINED.items():
        assert copy == round(rows[name, backend, size, "64q1s4k"]["of_copy"], 3)
        if gemm:
            assert gemm == round(rows[name, backend, size, "4q4k"]["of_gemm"], 3)


def test_times_of_measured_backends():
    llama = {  # meta-llama/Llama-3.1-8B
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    }
    report = attn.explain_model(llama, device="H200")
    (row,) = report.rows
    copy, gemm = report.measured(row)
    text = " ".join(str(report).split())
    assert f"decodes 0.97 of the copy's ({report.decode_ms(row.decode_bytes) / copy:.3g} ms at that rate)" in text
    assert f"product's ({report.prompt_ms(row.prompt_flops) / gemm:.3g} ms)" in text and "at that rate" in report._repr_html_()
    assert report.to_dict()["kinds"][0]["measured"] == {"copy": copy, "gemm": gemm}
    for other in (
        attn.explain_model(llama, device="H100"),
        attn.explain_model(llama, device="H200", kv_cache_dtype="fp8"),
        attn.explain_model(llama, device="H200", block_size=64),
        attn.explain_model(llama, device="H200", backend="TORCH_SDPA"),
        attn.explain_model(GEMMA2, device="H200"),
    ):
        assert all(other.measured(row) is None for row in other.rows) and "at that rate" not in str(other)


def test_packages_are_assumed_and_hints_are_shown():
    report = attn.explain_model(GEMMA2, device="A100", assume=["flashinfer"])
    assert str(report).count("assumed to be installed: torch, triton, flashinfer") == 1
    wanted = attn.explain(256, "bfloat16", device="A100", features=["soft_cap"], assume=["flashinfer"])
    assert report.rows[1].backend == wanted.name
    assert all(" ".join(note.split()) in " ".join(str(report).split()) for note in wanted.notes)


def test_a_backend_by_name():
    report = attn.explain_model(GEMMA2, device="H100", backend="TORCH_SDPA")
    assert [row.backend for row in report.rows] == ["TORCH_SDPA", "TORCH_SDPA"]


def test_a_backend_per_kind(monkeypatch):
    monkeypatch.setenv("ATTN_BACKEND_PER_KIND", "full=FLEX_ATTENTION,sliding=TRITON_MLA")
    sliding, full = (report := attn.explain_model(GEMMA2, device="H100")).rows
    assert full.backend == "FLEX_ATTENTION" and sliding.backend is None and not report.served
    assert str(report).count("requested by ATTN_BACKEND_PER_KIND[") == 2 and "sliding_window not supported" in str(report)
    assert full.selection.to_dict()["source"] == "ATTN_BACKEND_PER_KIND['full']"


def test_this_machine_is_the_default():
    assert attn.explain_model(GEMMA2, framework="torch").device == attn.explain(64, "float32", framework="torch").device


@pytest.mark.parametrize("config", [GEMMA2, DEEPSEEK_V3, LLAMA4, JAMBA, T5, BERT], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("device", ["H200", "MI300X", "v6e"])
def test_text_fits(config, device):
    pytest.importorskip("jax")
    text = str(attn.explain_model(config, device=device, context=131072, requests=256))
    assert max(map(len, text.splitlines())) <= WIDTH


def test_html_and_json():
    report = attn.explain_model(GEMMA2, device="H200")
    html = report._repr_html_()
    assert html.count("<details>") == 2 and "TRITON_ATTN" in html and html.count("<div>") == html.count("</div>")
    data = json.loads(json.dumps(report.to_dict()))
    assert [kind["backend"] for kind in data["kinds"]] == ["TRITON_ATTN"] * 2
    assert data["kinds"][0]["window"] == 4096 and data["total"]["decode_ms"] > 0 and data["kinds"][0]["selection"]["trace"]
    json.dumps(attn.explain_model(DEEPSEEK_V3, device="H200").to_dict())


@pytest.mark.parametrize("name", ["context", "requests", "block_size"])
def test_arguments_are_checked(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be a positive int"):
        attn.explain_model(GEMMA2, **{name: 0})
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        attn.explain_model(BERT, kv_cache_dtype="fp7")
    with pytest.raises(ValueError, match="Unknown device: 'H1000'"):
        attn.explain_model(GEMMA2, device="H1000")
