"""Workload files are read as cases, or rejected with the line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from attn.cli import main
from attn.tools.bench import BenchCase, workloads

DEFINITION = {
    "name": "gqa_paged_decode_h8_kv2_d64_ps16",
    "op_type": "gqa_paged",
    "axes": {
        "batch_size": {"type": "var"},
        "num_qo_heads": {"type": "const", "value": 8},
        "num_kv_heads": {"type": "const", "value": 2},
        "head_dim": {"type": "const", "value": 64},
        "page_size": {"type": "const", "value": 16},
    },
    "inputs": {"q": {"dtype": "bfloat16"}, "k_cache": {"dtype": "bfloat16"}, "kv_indptr": {"dtype": "int32"}},
}


def dataset(root: Path, workload: dict[str, Any], **changes: Any) -> Path:
    """A data set with one definition, and a file with one workload of it."""
    definition = {**DEFINITION, **changes}
    folder = root / "definitions" / definition["op_type"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{definition['name']}.json").write_text(json.dumps(definition))
    file = root / "workloads" / definition["op_type"] / f"{definition['name']}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    entry = {"definition": definition["name"], "solution": None, "workload": workload, "evaluation": None}
    file.write_text(json.dumps(entry) + "\n\n" + json.dumps(entry) + "\n")
    return file


def values(*numbers: int) -> dict[str, Any]:
    return {"type": "values", "values": numbers}


def test_a_file_of_workloads_is_read_as_cases(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    safetensors = pytest.importorskip("safetensors.numpy")
    blob = {"kv_indptr": np.array([0, 3, 4], np.int32), "kv_last_page_len": np.array([5, 16], np.int32)}
    safetensors.save_file(blob, tmp_path / "one.safetensors")
    inputs = {name: {"type": "safetensors", "path": "./one.safetensors", "tensor_key": name} for name in blob}
    inputs |= {"q": {"type": "random"}, "sm_scale": {"type": "scalar", "value": 0.125}}
    file = dataset(tmp_path, {"uuid": "x", "axes": {"batch_size": 2}, "inputs": inputs})
    assert workloads.load(file) == [BenchCase("q1s37_q1s16", "8/2", 64, 16)], "twice the same workload is one case"
    assert workloads.load(file, block_size=64)[0].block_size == 64
    with pytest.raises(ValueError, match="block_size=0 must be a positive int"):
        workloads.load(file, block_size=0)


def test_prompts_ragged_keys_and_eight_bit_caches(tmp_path: Path) -> None:
    axes = {name: axis for name, axis in DEFINITION["axes"].items() if name != "page_size"}  # type: ignore[attr-defined]
    inputs = {"qo_indptr": values(0, 4, 6), "kv_indptr": values(0, 4, 12)}
    ragged = dataset(tmp_path, {"inputs": inputs}, op_type="gqa_ragged", name="r", axes=axes)
    assert [case.batch for case in workloads.load(ragged)] == ["q4_q2s8"]
    stored = {"q": {"dtype": "bfloat16"}, "k_cache": {"dtype": "float8_e4m3fn"}}
    single = {**axes, "page_size": {"type": "const", "value": 1}}
    paged = dataset(tmp_path, {"inputs": inputs}, name="p", axes=single, inputs=stored)
    assert workloads.load(paged) == [BenchCase("q4_q2s8", "8/2", 64, 1, kv_cache_dtype="fp8_e4m3")]


@pytest.mark.parametrize(
    ("inputs", "changes", "said"),
    [
        ({"kv_indptr": values(0, 3)}, {}, "line 1: pages of 16 tokens need kv_last_page_len"),
        ({"kv_indptr": {"type": "random"}, "kv_last_page_len": values(1)}, {}, "has type 'random' (supports values"),
        ({}, {}, "line 1: 'kv_indptr' is missing"),
        ({}, {"op_type": "mla_paged"}, "is of kind mla_paged (supports gqa_paged, gqa_ragged)"),
        ({"kv_indptr": values(0, 1), "qo_indptr": values(0, 9), "kv_last_page_len": values(4)}, {}, "0 has 9 new tokens"),
        ({"kv_indptr": values(0, 1), "qo_indptr": values(0, 1, 2), "kv_last_page_len": values(4)}, {}, "has 2 requests"),
        ({"kv_indptr": {"type": "safetensors", "path": "gone", "tensor_key": "x"}}, {}, "gone does not exist"),
    ],
)
def test_an_unreadable_case_is_an_error_with_the_reason(
    inputs: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = dataset(tmp_path, {"inputs": inputs}, **changes)
    with pytest.raises(ValueError, match=re.escape(said)):
        workloads.load(file)


def test_a_workload_without_its_definition_or_a_file_without_workloads(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text('{"definition": "gqa_unknown", "workload": {}}')
    with pytest.raises(ValueError, match=r"line 1: definition 'gqa_unknown': no definitions/\*/gqa_unknown.json"):
        workloads.load(tmp_path / "w.jsonl")
    (tmp_path / "w.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no workloads"):
        workloads.load(tmp_path / "w.jsonl")


def test_workloads_are_timed(tmp_path: Path, small_gemm: None) -> None:
    pytest.importorskip("torch")
    file = dataset(tmp_path, {"inputs": {"kv_indptr": values(0, 3, 4), "kv_last_page_len": values(5, 16)}})
    assert main(["bench", "--workloads", str(file), "--backend", "TORCH_SDPA", "--json", str(tmp_path / "rows.json")]) == 0
    [row] = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["batch"] == "q1s37_q1s16" and row["heads"] == "8/2" and row["dtype"] == "bfloat16" and row["right"]
