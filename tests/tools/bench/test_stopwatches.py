"""The frameworks' stopwatches: wrong outputs are detected, and clocks are read if the driver reports them."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attn.tools.bench import LIMITS, BenchCase

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for the driver's tool")
@pytest.mark.parametrize(
    ("script", "reported"), [('[ "$1" = --id=GPU-7f1c-02 ] && echo "1980 MHz, 3201 MHz"', "1980 MHz, 3201 MHz"), ("exit 9", "")]
)
def test_clocks_are_reported_if_the_driver_reports_them(
    script: str, reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = pytest.importorskip("attn.tools.bench.on_torch")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench.clocks_now("7f1c-02") == ""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert bench.clocks_now("7f1c-02") == reported
    assert bench.clocks_now("7f1c-01") == ""  # another GPU's


@pytest.mark.parametrize(
    ("runs", "on_gpu", "returned"),
    [
        ([[14, 14, 14, 15, 20], [1] * 5], True, 0),  # one slow call of five is no wait of the host
        ([[14, 100, 138, 200, 202], [13, 14, 14, 14, 14]], True, 1),
        ([[14, 15, 16, 30, 40], [14, 20, 30, 30, 30]], True, 0),  # the second run is no better
        ([[14, 100, 138, 200, 202], [13] * 5], False, 0),
    ],
)
def test_times_that_vary_by_half_are_measured_twice_on_a_gpu(
    runs: list[list[float]], on_gpu: bool, returned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = pytest.importorskip("attn.tools.bench.on_torch")
    watch, left = bench.TorchBench(bench.torch.device("cpu")), iter(runs)
    monkeypatch.setattr(watch, "on_gpu", on_gpu)
    monkeypatch.setattr(watch, "times", lambda *args: next(left))
    assert watch._steady(lambda: None, 5) is runs[returned]


@pytest.mark.parametrize(("framework", "backend"), [("torch", "TORCH_SDPA"), ("jax", "XLA_ATTN")])
def test_the_judge_detects_a_kernel_that_computes_something_else(
    framework: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is right for its case, and wrong for one with another window, without sinks, or with another scale."""
    bench = pytest.importorskip(f"attn.tools.bench.on_{framework}")
    place = [bench.torch.device("cpu")] if framework == "torch" else []
    case = BenchCase("2q3s40", "4/2", 32, dtype="float32", window=7, sinks=True, kv_cache_dtype="int8")
    work = bench.Workload(case, backend, *place)
    work.forward()
    assert work.error() < LIMITS["float32"]
    scale = "_k_scale" if framework == "torch" else "scale"
    for name, value in (("case", replace(case, window=8)), ("sinks", None), (scale, 2 * getattr(work, scale))):
        with monkeypatch.context() as other:
            other.setattr(work, name, value)
            assert work.error() > LIMITS["float32"], name
    assert work.error() < LIMITS["float32"]


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
    bench, on_torch = pytest.importorskip(f"attn.tools.bench.on_{framework}"), framework == "torch"
    place = [bench.torch.device("cpu")] if on_torch else []
    case = BenchCase.latent(batch, heads="2", dtype="float32", kv_cache_dtype=stored)
    work = bench.MLAWorkload(case, "TORCH_MLA" if on_torch else "XLA_MLA", *place)
    if on_torch:
        with monkeypatch.context() as other:
            # writes nothing, but copies the queries' rotary part
            other.setattr(work.impl, "do_kv_cache_update", lambda *call: work.impl._copy_rotary(*call[-1]))
            work.forward()
            assert work.error() > LIMITS["float32"]
        with monkeypatch.context() as other:
            other.setattr(work.impl, "scale", 576**-0.5)
            work.forward()
            assert work.error() > LIMITS["float32"]
    work.forward()
    assert work.error() < LIMITS["float32"]
    wrong = {"softmax_scale": 576**-0.5, "weights": 1.01 * work.weights}
    if stored == "fp8":
        wrong["_k_scale" if on_torch else "scale"] = bench.torch.tensor(1.0) if on_torch else 1.0
    for name, value in wrong.items():
        with monkeypatch.context() as other:
            other.setattr(work, name, value)
            assert work.error() > LIMITS["float32"], name
