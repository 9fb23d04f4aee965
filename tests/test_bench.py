"""attn bench: its grammar, what it counts, runs on the CPU, workload files, and what is made of many rows. 40 seconds."""

import argparse
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attn.bench import (
    CPU_SUITE,
    LIMITS,
    MARGIN,
    MLA_CPU_SUITE,
    MLA_SUITE,
    SUITE,
    Case,
    Refusal,
    Row,
    Timing,
    compare,
    flops,
    grammar,
    judge,
    measured,
    nbytes,
    parse,
    plan,
    ranking,
    show,
    verdicts,
    workloads,
)  # fmt: skip
from attn.cli import main
from attn.errors import UnsupportedError
from attn.selector import make_request


def test_the_grammar() -> None:
    assert parse("q2k") == [(2048, 2048)]
    assert parse("8q1s1k") == [(1, 1024)] * 8
    assert parse("2q2k_3q1s1k") == [(2048, 2048)] * 2 + [(1, 1024)] * 3
    assert parse("1q512s8k") == [(512, 8192)]
    assert all(parse(case.batch) for case in SUITE + CPU_SUITE + MLA_SUITE + MLA_CPU_SUITE)


@pytest.mark.parametrize("case", SUITE + CPU_SUITE + MLA_SUITE + MLA_CPU_SUITE, ids=str)
def test_lengths_have_a_shortest_batch(case: Case) -> None:
    assert parse(grammar(parse(case.batch))) == parse(case.batch) and len(grammar(parse(case.batch))) <= len(case.batch)
    assert grammar([(1, 37), (1, 37), (5, 5), (1, 2048)]) == "2q1s37_q5_q1s2k"


@pytest.mark.parametrize("batch", ["", "q", "s4", "q1s4m", "2q1__q1", "q-1", "0q1x", "q8s4", "q0"])
def test_what_has_no_reading_is_refused(batch: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"batch={batch!r}")):
        parse(batch)


def test_what_is_counted() -> None:
    decode = Case("2q1s100", "8/2", 64)
    assert flops(decode) == 4 * 8 * 64 * 2 * 100
    assert nbytes(decode) == 2 * 2 * 64 * 2 * 200 + 2 * 8 * 64 * 2 * 2
    assert nbytes(Case("2q1s100", "8/2", 64, kv_cache_dtype="int8")) == 2 * 2 * 64 * 200 + 2 * 8 * 64 * 2 * 2
    assert flops(Case("q3", "1/1", 32)) == 4 * 32 * (1 + 2 + 3)


@pytest.mark.parametrize("window", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("batch", ["q1s9", "q4s9", "q9", "2q3s4_q1s30"])
def test_what_a_window_leaves_is_counted_as_a_loop_would(batch: str, window: int) -> None:
    pairs = keys = 0
    for n, m in parse(batch):
        seen = [set(range(max(0, row - window + 1), row + 1)) for row in range(m - n, m)]
        pairs += sum(map(len, seen))
        keys += len(set().union(*seen))
    case = Case(batch, "2/1", 32, dtype="float32", window=window)
    rows = sum(n for n, _ in parse(batch))
    assert flops(case) == 4 * 2 * 32 * pairs and nbytes(case) == 4 * 32 * (2 * keys + 2 * 2 * rows)


def test_what_a_latent_layer_is_counted_as() -> None:
    decode = Case.latent("2q1s100", heads="4")
    assert flops(decode) == 2 * 4 * (576 + 512) * 200, "absorbed"
    assert nbytes(decode) == 2 * (576 * 200 + 4 * (192 + 128) * 2)
    assert nbytes(replace(decode, kv_cache_dtype="fp8")) == 576 * 200 + 2 * 4 * (192 + 128) * 2
    assert nbytes(replace(decode, kv_cache_dtype="fp8_ds_mla")) == 656 * 200 + 2 * 4 * (192 + 128) * 2
    assert flops(Case.latent("q400", heads="4")) == 2 * 4 * (192 + 128) * 400 * 401 // 2, (
        "expanded: a prompt makes its own heads"
    )
    verified = Case.latent("q4s400", heads="4")
    assert flops(verified) == 2 * 4 * (576 + 512) * (397 + 398 + 399 + 400)
    chunk = Case.latent("q300s400", heads="4")
    pairs = sum(range(101, 401))
    assert flops(chunk) == 2 * 4 * ((192 + 128) * pairs + 512 * 256 * 100), "expanded, its context too"
    asked = make_request(576, "bfloat16", "auto", 64, use_mla=True, num_heads=4, num_kv_heads=1)
    assert verified.request() == asked and "mla" in str(verified), "what the layer asks: attn tune's times are kept under it"
    assert Case.of({"batch": "q4"}) == Case("q4"), "rows of older files"


def test_a_shape_that_is_none_is_told() -> None:
    for changes, said in (
        ({"heads": "8/"}, "heads='8/'"), ({"window": 0}, "window=0"), ({"dtype": "int8"}, "dtype='int8'"),
        ({"mla": True}, "heads='32/8' with mla"), ({"mla": True, "heads": "4", "head_size": 64}, "head_size=64 with mla"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            Case("q4", **changes)  # type: ignore[arg-type]


def run(*words: str, code: int = 0) -> None:
    assert main(["bench", *words]) == code


TINY = ("--heads", "4/2", "--head-size", "32", "--dtype", "float32")


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "rows.json"
    run("2q1s40_q20", "--backend", "TORCH_SDPA", *TINY, "--window", "7", "--sinks", "--json", str(file))
    assert "launch us" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert {"device", "torch", "date", "copy_gb_per_s", "gemm_tflop_per_s"} <= report.keys()
    [row] = report["rows"]
    assert row["right"] and row["ms_p20"] <= row["ms"] <= row["ms_p80"] and row["error"] < 1e-5
    assert row["framework"] == "torch" and row["window"] == 7 and row["sinks"] and not row["replayed"]
    assert row["build_us"] > 0 and row["host_us"] >= 0 and row["kernel_ms"] > 0 and row["call_ms"] == row["ms"]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for the driver's tool")
@pytest.mark.parametrize(("script", "told"), [("echo '1980 MHz, 3201 MHz'", "1980 MHz, 3201 MHz"), ("exit 9", "")])
def test_clocks_are_told_where_the_driver_does(script: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wing = pytest.importorskip("attn.torch.bench")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert wing.clocks_now() == ""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert wing.clocks_now() == told


def test_a_backends_name_tells_its_wing() -> None:
    from attn.bench.command import frameworks_of

    def wings(*backends: str, framework: str | None = None) -> dict[str, list[str]]:
        return frameworks_of(argparse.Namespace(backend=list(backends), framework=framework))

    assert wings("TORCH_SDPA", "XLA_ATTN", "PALLAS") == {"torch": ["TORCH_SDPA"], "jax": ["XLA_ATTN", "PALLAS"]}
    assert wings("sdpa", framework="torch") == {"torch": ["sdpa"]}
    assert wings(framework="all") == {"torch": [], "jax": []}


@pytest.mark.parametrize(("framework", "backend"), [("torch", "TORCH_SDPA"), ("jax", "XLA_ATTN")])
def test_the_judge_tells_a_kernel_that_did_something_else(
    framework: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is right for its case, and wrong for one with another window, without sinks, or with another scale."""
    wing = pytest.importorskip(f"attn.{framework}.bench")
    place = [wing.torch.device("cpu")] if framework == "torch" else []
    case = Case("2q3s40", "4/2", 32, dtype="float32", window=7, sinks=True, kv_cache_dtype="int8")
    work = wing.Workload(case, backend, *place)
    out = []
    if framework == "torch":
        work.forward()
    else:
        out = [work.attend(*work.arguments)]
    assert work.error(*out) < LIMITS["float32"]
    scale = "_k_scale" if framework == "torch" else "scale"
    for name, value in (("case", replace(case, window=8)), ("sinks", None), (scale, 2 * getattr(work, scale))):
        with monkeypatch.context() as other:
            other.setattr(work, name, value)
            assert work.error(*out) > LIMITS["float32"], name
    assert work.error(*out) < LIMITS["float32"]


LATENT = ("--mla", "--heads", "2", "--dtype", "float32")


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_latent_layer_is_timed(framework: str, tmp_path: Path) -> None:
    """Decode and speculative decode, by what the selector takes."""
    pytest.importorskip(framework)
    file = tmp_path / "rows.json"
    run("2q1s70_q3s20", "--framework", framework, *LATENT, "--json", str(file))
    [row] = json.loads(file.read_text())["rows"]
    assert row["backend"] == {"torch": "TORCH_MLA", "jax": "XLA_MLA"}[framework] and row["chosen"] and row["mla"]
    assert row["right"] and row["error"] < 1e-5 and row["build_us"] > 0
    assert (row["heads"], row["head_size"], row["block_size"]) == ("2", 576, 64)
    assert Case.of(row) == Case.latent("2q1s70_q3s20", heads="2", dtype="float32")


@pytest.mark.parametrize(
    ("framework", "stored", "batch"),
    [
        ("torch", "auto", "q2s70_q3_q175s200"),  # decodes, and a prompt that is expanded
        ("torch", "fp8", "q2s70_q3_q175s200"),
        ("torch", "fp8_ds_mla", "q2s70_q3_q175s200"),
        ("jax", "fp8", "q2s70_q3"),
    ],
)
def test_the_judge_of_latent_layers(framework: str, stored: str, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right for its layer; wrong for one with another scale, another up-projection, another worth of codes, and where the new
    rows are not written."""
    wing, on_torch = pytest.importorskip(f"attn.{framework}.bench"), framework == "torch"
    place = [wing.torch.device("cpu")] if on_torch else []
    case = Case.latent(batch, heads="2", dtype="float32", kv_cache_dtype=stored)
    work = wing.LatentWorkload(case, "TORCH_MLA" if on_torch else "XLA_MLA", *place)
    out = []
    if on_torch:
        with monkeypatch.context() as other:
            other.setattr(work.impl, "do_kv_cache_update", lambda *_: None)
            work.forward()
            assert work.error() > LIMITS["float32"]
        with monkeypatch.context() as other:
            other.setattr(work.impl, "scale", 576**-0.5)
            work.forward()
            assert work.error() > LIMITS["float32"]
        work.forward()
    else:
        out = [work.program()()]
    assert work.error(*out) < LIMITS["float32"]
    wrong = {"softmax_scale": 576**-0.5, "weights": 1.01 * work.weights}
    if stored == "fp8":
        wrong["_k_scale" if on_torch else "scale"] = wing.torch.tensor(1.0) if on_torch else 1.0
    for name, value in wrong.items():
        with monkeypatch.context() as other:
            other.setattr(work, name, value)
            assert work.error(*out) > LIMITS["float32"], name


def test_both_wings_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.setattr("os.environ", os.environ.copy())
    file = tmp_path / "rows.json"
    run(
        "3q1s20",
        "--framework",
        "all",
        "--heads",
        "4/2",
        "--head-size",
        "64",
        "--dtype",
        "float32",
        "--peers",
        "sdpa,jax-nn,PALLAS",
        "--json",
        str(file),
    )
    report = json.loads(file.read_text())
    assert report["torch"]["torch"] and report["jax"]["jax"] and report["date"]
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false", "they share a device"
    rows = {(row["framework"], row["backend"]): row for row in report["rows"]}
    assert list(rows) == [
        ("torch", "CPU_ATTN"), ("torch", "sdpa"), ("jax", "XLA_ATTN"), ("jax", "PALLAS"), ("jax", "jax-nn"),
    ]  # fmt: skip
    assert "an interpreter runs its kernels here" in rows["jax", "PALLAS"]["refused"]
    assert [verdict["case"].endswith(("(torch)", "(jax)")) for verdict in report["verdicts"]] == [True, True]
    assert all(row["right"] and row["replayed"] for row in (rows["jax", "XLA_ATTN"], rows["jax", "jax-nn"]))
    assert rows["jax", "XLA_ATTN"]["build_us"] > 0 and rows["jax", "XLA_ATTN"]["host_us"] > 0
    capsys.readouterr()
    run("compare", str(file), str(file))
    said = capsys.readouterr().out
    assert said.count("level") == 4 and "4 times in both: 0 worse, 0 faster, 5 in all" in said


def test_mistakes_are_told_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run("q8s4", "--framework", "torch", code=2)
    run("q8", "--framework", "torch", "--backend", "XLA_ATTN", code=2)
    run("compare", "one.json", code=2)
    run("compare", "/nowhere/a.json", "/nowhere/b.json", code=2)
    run("q8", "--workloads", "x.jsonl", "--framework", "torch", code=2)
    run("q8", "--framework", "torch", "--backend", "FLASH_ATTN", code=1)
    run("q8", "--framework", "torch", "--backend", "BLOCKSPARSE", code=2)
    run("q8", "--framework", "torch", "--backend", "TORCH_SDPA", "--mla", "--dtype", "float32", code=1)
    run("q8", "--framework", "torch", "--heads", "8/2", "--mla", code=2)
    run("q8", "--framework", "torch", "--registry", "diffusion", "--mla", code=2)
    said = capsys.readouterr().err
    for words in (
        "8 new of 4 tokens", "XLA_ATTN is a backend of jax, not of torch", "takes two files", "not a file of rows",
        "one of them", "platform=cpu (supports cuda)", "BLOCKSPARSE is not timed here", "TORCH_SDPA  mla not supported",
        "heads='8/2' with mla", "--mla beside --registry diffusion",
    ):  # fmt: skip
        assert words in said


def test_a_table_of_its_own_for_a_cpu() -> None:
    from attn.bench import command

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--head-size", "96"])
    assert [case.head_size for case in command.cases_of(args, True)] == [96] * len(CPU_SUITE)
    assert {case.dtype for case in command.cases_of(args, True)} == {"float32"}
    assert {case.dtype for case in command.cases_of(args, False)} == {"bfloat16"}
    assert command.cases_of(parser.parse_args([]), False) == list(SUITE)
    assert command.cases_of(parser.parse_args(["--mla"]), False) == list(MLA_SUITE)
    assert command.cases_of(parser.parse_args(["--mla"]), True) == list(MLA_CPU_SUITE)
    assert command.cases_of(parser.parse_args(["q4", "--mla", "--block-size", "16"]), False) == [
        Case.latent("q4", block_size=16)
    ]


def test_the_bar_tells_how_long_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    with show.display(5) as plain:
        assert type(plain) is show.Display, "into a pipe go the rows alone"
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with show.display(5) as shown:
        assert isinstance(shown, show.Bar)
        shown.step(2, "q4 CPU_ATTN")
        shown.say("a [row] of 5.0 ms")
        shown._progress.refresh()
    said = "".join(capsys.readouterr())
    assert "2/5" in said and "left:" in said and "q4 CPU_ATTN" in said and "a [row] of 5.0 ms" in said


# workload files

DEFINITION = {
    "name": "gqa_paged_decode_h8_kv2_d64_ps16", "op_type": "gqa_paged",
    "axes": {
        "batch_size": {"type": "var"}, "num_qo_heads": {"type": "const", "value": 8},
        "num_kv_heads": {"type": "const", "value": 2}, "head_dim": {"type": "const", "value": 64},
        "page_size": {"type": "const", "value": 16},
    },
    "inputs": {"q": {"dtype": "bfloat16"}, "k_cache": {"dtype": "bfloat16"}, "kv_indptr": {"dtype": "int32"}},
}  # fmt: skip


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
    assert workloads.load(file) == [Case("q1s37_q1s16", "8/2", 64, 16)], "twice the same workload is one case"
    assert workloads.load(file, block_size=64)[0].block_size == 64


def test_prompts_ragged_keys_and_eight_bit_caches(tmp_path: Path) -> None:
    axes = {name: axis for name, axis in DEFINITION["axes"].items() if name != "page_size"}  # type: ignore[attr-defined]
    inputs = {"qo_indptr": values(0, 4, 6), "kv_indptr": values(0, 4, 12)}
    ragged = dataset(tmp_path, {"inputs": inputs}, op_type="gqa_ragged", name="r", axes=axes)
    assert [case.batch for case in workloads.load(ragged)] == ["q4_q2s8"]
    stored = {"q": {"dtype": "bfloat16"}, "k_cache": {"dtype": "float8_e4m3fn"}}
    single = {**axes, "page_size": {"type": "const", "value": 1}}
    paged = dataset(tmp_path, {"inputs": inputs}, name="p", axes=single, inputs=stored)
    assert workloads.load(paged) == [Case("q4_q2s8", "8/2", 64, 1, kv_cache_dtype="fp8_e4m3")]


@pytest.mark.parametrize(
    ("inputs", "changes", "said"),
    [
        ({"kv_indptr": values(0, 3)}, {}, "line 1: pages of 16 tokens, and no kv_last_page_len"),
        ({"kv_indptr": {"type": "random"}, "kv_last_page_len": values(1)}, {}, "cannot be made up"),
        ({}, {}, "line 1: 'kv_indptr' is missing"),
        ({}, {"op_type": "mla_paged"}, "is of kind mla_paged (read are gqa_paged, gqa_ragged)"),
        ({"kv_indptr": values(0, 1), "qo_indptr": values(0, 9), "kv_last_page_len": values(4)}, {}, "request 0 has 9 new of 4"),
        ({"kv_indptr": values(0, 1), "qo_indptr": values(0, 1, 2), "kv_last_page_len": values(4)}, {}, "of 2 requests"),
        ({"kv_indptr": {"type": "safetensors", "path": "gone", "tensor_key": "x"}}, {}, "gone is not there"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_as_a_case_says_why(
    inputs: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = dataset(tmp_path, {"inputs": inputs}, **changes)
    with pytest.raises(ValueError, match=re.escape(said)):
        workloads.load(file)


def test_a_workload_without_its_definition_or_a_file_without_workloads(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text('{"definition": "nobody", "workload": {}}')
    with pytest.raises(ValueError, match=r"line 1: definition 'nobody': no definitions/\*/nobody.json"):
        workloads.load(tmp_path / "w.jsonl")
    (tmp_path / "w.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no workloads"):
        workloads.load(tmp_path / "w.jsonl")


def test_workloads_are_timed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = dataset(tmp_path, {"inputs": {"kv_indptr": values(0, 3, 4), "kv_last_page_len": values(5, 16)}})
    run("--workloads", str(file), "--backend", "TORCH_SDPA", "--json", str(tmp_path / "rows.json"))
    [row] = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["batch"] == "q1s37_q1s16" and row["heads"] == "8/2" and row["dtype"] == "bfloat16" and row["right"]


# side by side


def test_a_run_beside_the_peers_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "rows.json"
    call = [
        "bench",
        "2q1s20",
        "q8_q4",
        "--framework",
        "torch",
        *TINY,
        "--peers",
        "all",
        "--without",
        "flex,FLEX_ATTENTION",
        "--json",
        str(file),
    ]
    assert main([*call, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    report = json.loads(file.read_text())
    rows = {(row["batch"], row["backend"]): row for row in report["rows"]}
    assert {name for _, name in rows} >= {"CPU_ATTN", "TORCH_SDPA", "IPEX", "sdpa"}
    assert not {name for _, name in rows} & {"flex", "FLEX_ATTENTION", "TORCH_MLA", "XLA_ATTN"}
    assert [name for (_, name), row in rows.items() if row["chosen"]] == ["CPU_ATTN"] * 2
    assert rows["2q1s20", "sdpa"]["peer"] and rows["2q1s20", "sdpa"]["error"] < 1e-5
    assert "one length" in rows["q8_q4", "sdpa"]["refused"] and "ms" not in rows["q8_q4", "sdpa"]
    assert "IPEX" in said and "no row:" in said and all(row["right"] for row in report["rows"])
    assert [verdict["choice"] for verdict in report["verdicts"]] == ["CPU_ATTN"] * 2
    assert main(["bench", "--judge", str(file)]) in (0, 1)  # whether the choice lost here is the machine's affair
    assert re.search(r"CPU_ATTN +2 cases", capsys.readouterr().out)


def test_names_that_nobody_has_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["bench", "q4", "--framework", "torch", *TINY, "--peers", "sdpa,CUDNN"]) == 2
    assert "peer 'CUDNN' is unknown; known: all, " in capsys.readouterr().err
    assert main(["bench", "--judge", "/nowhere/rows.json"]) == 2
    assert "not a file of rows" in capsys.readouterr().err


class Scripted:
    """A stopwatch that was told what it will read: milliseconds, or what is raised."""

    def __init__(self, **script: Any) -> None:
        self.script = script

    def about(self, dtype: str = "bfloat16") -> dict[str, Any]:
        return {}

    def ceilings(self, dtype: str) -> tuple[float, float]:
        return 1.0, 1.0

    def peers(self) -> list[str]:
        return ["sdpa", "FLASH_ATTN:one"]

    def measure(self, case: Case, name: str, limit: float = 0.0) -> Timing:
        outcome = self.script.get(name, UnsupportedError("not asked"))
        if isinstance(outcome, Exception):
            raise outcome
        return Timing(outcome, 0.99 * outcome, 1.01 * outcome, outcome, 1.0, 1.0, self.script.get("error", 1e-7))


def rows_of(asked: str = "all", **script: Any) -> dict[str, Row | Refusal]:
    pytest.importorskip("torch")
    bench = Scripted(**script)
    entries = plan(Case("q4", "4/2", 32, dtype="float32"), "torch", bench.peers(), asked.split(","))
    return {row.backend: row for row in measured(entries, {"torch": bench})}


def test_a_backend_that_breaks_its_word_is_wrong_and_a_peer_or_a_late_one_is_not() -> None:
    rows = rows_of(CPU_ATTN=1.0, TORCH_SDPA=RuntimeError("no kernel"), sdpa=RuntimeError("no image"))
    assert not rows["TORCH_SDPA"].right and "FAILED: RuntimeError: no kernel" in str(rows["TORCH_SDPA"])
    assert rows["sdpa"].right and rows["CPU_ATTN"].right
    late = rows_of(CPU_ATTN=1.0, TORCH_SDPA=TimeoutError("not ready after 3 s"))["TORCH_SDPA"]
    assert late.right and "no row: not ready after 3 s" in str(late)
    assert not rows_of(CPU_ATTN=1.0, error=float("nan"))["CPU_ATTN"].right


def test_the_choice_runs_whoever_is_asked_for() -> None:
    assert list(rows_of("FLASH_ATTN", CPU_ATTN=1.0)) == ["CPU_ATTN", "FLASH_ATTN:one"]
    assert list(rows_of("TORCH_SDPA", CPU_ATTN=1.0, TORCH_SDPA=2.0)) == ["CPU_ATTN", "TORCH_SDPA"]


@pytest.mark.parametrize(
    ("times", "lost", "said"),
    [
        ({"CPU_ATTN": 1.0, "TORCH_SDPA": 1.2}, False, "CPU_ATTN is the fastest"),
        ({"CPU_ATTN": 1.04, "TORCH_SDPA": 1.0}, False, "CPU_ATTN holds: TORCH_SDPA is ahead by 4.0 %"),
        ({"CPU_ATTN": 1.12, "TORCH_SDPA": 1.0}, True, "CPU_ATTN LOSES: TORCH_SDPA is ahead by 12.0 %"),
        ({"CPU_ATTN": 1.0, "sdpa": 0.5}, False, "CPU_ATTN is the fastest; of the rest, sdpa by 100.0 %"),
    ],
)
def test_verdicts(times: dict[str, float], lost: bool, said: str) -> None:
    rows = [row.to_dict() for row in rows_of(**times).values()]
    [verdict] = verdicts(json.loads(json.dumps(rows)))
    assert verdict.lost is lost and said in str(verdict) and said in judge(rows)
    assert MARGIN == 0.05


def test_a_time_whose_spread_overlaps_loses_nothing_and_a_wrong_row_wins_nothing() -> None:
    rows = [row.to_dict() for row in rows_of(CPU_ATTN=1.12, TORCH_SDPA=1.0).values()]
    rows[0]["ms_p20"] = 0.9
    [verdict] = verdicts(rows)
    assert not verdict.lost and "spreads overlap" in str(verdict)
    rows[1]["right"] = False
    assert "is the fastest" in str(verdicts(rows)[0])


def test_a_ranking_puts_who_serves_more_first() -> None:
    rows = [row.to_dict() for row in rows_of(CPU_ATTN=1.0, TORCH_SDPA=2.0).values()]
    more = {**rows[1], "batch": "q8"}
    assert [entry[:2] for entry in ranking([*rows, more])] == [("TORCH_SDPA", 2), ("CPU_ATTN", 1)]
    name, _, mean, worst, where = ranking([*rows, more])[0]
    assert (name, round(mean, 3), worst) == ("TORCH_SDPA", 1.414, 2.0) and where.startswith("q4")


# two runs


def test_what_changed_between_two_runs() -> None:
    before = [row.to_dict() for row in rows_of(CPU_ATTN=1.0, TORCH_SDPA=1.0).values() if isinstance(row, Row)]
    slower = {**before[0], "ms": 1.2, "ms_p20": 1.19, "ms_p80": 1.21}
    noisy = {**before[1], "ms": 1.2, "ms_p20": 0.9, "ms_p80": 1.3}
    first, second = compare(before, [slower, noisy])
    assert first.worse and "SLOWER" in str(first) and "+20.0 %" in str(first)
    assert not second.worse and "level (spreads overlap)" in str(second)
    assert compare([slower], before)[0].better
    lost = compare(before, [{**before[0], "right": False}])
    assert lost[0].worse and "1.0000 ms in the first, wrong in the second" in str(lost[0])
    assert not lost[1].worse and "not run in the second" in str(lost[1])
    assert compare([], before)[0].said == "not run in the first, 1.0000 ms in the second"


def test_dense_shapes_are_compared_too() -> None:
    row = {"shape": "1x8x2x64", "backend": "TORCH_SDPA", "right": True, "refused": "", "ms": 2.0, "ms_p20": 1.9, "ms_p80": 2.1}
    refused = {**row, "backend": "CUDNN_ATTN", "refused": "platform=cpu", "ms": 0.0}
    changes = compare([row, refused], [{**row, "ms": 1.0, "ms_p20": 0.9, "ms_p80": 1.1}, refused])
    assert changes[0].better and changes[0].case == "1x8x2x64" and not changes[1].worse
