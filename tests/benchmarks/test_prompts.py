"""Prompts drawn at random: the same launches for a seed, every kind of them, and a summary that counts right peers only."""

import sys
from dataclasses import replace

import pytest
import torch

from attn.tools.bench.on_torch import TorchBench
from benchmarks import prompts
from benchmarks.prompts import ON_CPU, Row, Sizes, drawn, summary


def test_a_launch_depends_on_its_number_and_seed_and_stays_within_the_bounds() -> None:
    launches = [drawn(number, 3, Sizes()) for number in range(60)]
    assert launches[7] == drawn(7, 3, Sizes()) != drawn(7, 4, Sizes())
    assert {launch.kind for launch in launches} == set(prompts.PEERS)
    assert all(launch.pairs <= Sizes().pairs and sum(n for n, _ in launch.lens) <= Sizes().rows for launch in launches)
    assert any(n < m for launch in launches for n, m in launch.lens if launch.kind == "paged")
    assert any(launch.window and launch.window[1] for launch in launches) and any(launch.sinks for launch in launches)


@pytest.mark.parametrize("kind", prompts.PEERS)
def test_calls_of_two_backends_agree(kind: str) -> None:
    launch = next(launch for number in range(99) if (launch := drawn(number, 1, ON_CPU)).kind == kind)
    inputs = prompts.Inputs(launch, torch.device("cpu"), torch.float32)
    name, call = inputs.call("TORCH_SDPA")
    want, (_, again) = call(), inputs.call("TORCH_SDPA" if kind == "dense" else "CPU_ATTN", torch.float64)
    assert name == "TORCH_SDPA" and want.shape == (sum(n for n, _ in launch.lens), launch.heads, launch.size)
    torch.testing.assert_close(again().float(), want, rtol=1e-4, atol=1e-5)


def test_a_launch_is_timed_and_checked_on_each_backend() -> None:
    launch = next(launch for number in range(99) if (launch := drawn(number, 1, ON_CPU)).kind == "paged")
    with torch.no_grad():
        rows = list(prompts.measured(launch, ["CPU_ATTN", "FLASH_ATTN"], TorchBench(torch.device("cpu")), torch.float32))
    assert rows[0].cold > 0 < rows[0].warm and rows[0].error < 1e-5 and not rows[0].refused
    assert rows[1].refused.startswith("UnsupportedError: ") and "CPU" in rows[1].refused


def test_a_printed_launch_is_that_launch() -> None:
    equal = [launch for number in range(200) if len({*(launch := drawn(number, 3, Sizes())).lens}) == 1]
    assert {launch.kind for launch in equal} == {"dense", "encoder", "paged"}
    for launch in equal:
        # of launches without pages the size of one is not printed, and not used
        assert prompts.parsed(str(launch)) == (launch if launch.kind == "paged" else replace(launch, page=16))
    for text in ("3x(20..36) 7/1x40 full encoder", "2x914 8/1x128 causal", "2x914 8/1x128 causal dense sinks", "64q1s4k"):
        with pytest.raises(ValueError, match="must be as --list prints it|a dense launch has no"):
            prompts.parsed(text)


def test_a_batch_invariant_layer_is_timed_beside_ours() -> None:
    launch = prompts.parsed("3x1@40 4/2x64 causal p16")
    with torch.no_grad():
        rows = list(
            prompts.measured(
                launch, ["CPU_ATTN", f"CPU_ATTN{prompts.INVARIANT}"], TorchBench(torch.device("cpu")), torch.float32
            )
        )
    assert [row.backend for row in rows] == ["CPU_ATTN", "CPU_ATTN, batch_invariant"]
    assert all(row.error < 1e-5 and not row.refused for row in rows)
    assert summary(rows, "CPU_ATTN", 1e-5) == ""  # itself is no peer


def test_the_summary_counts_right_peers() -> None:
    rows = [
        Row("one", "OURS", 2.0, 1.0, 1e-3),
        Row("one", "FAST", 1.0, 0.5, 1e-3),
        Row("one", "FASTER", 0.1, 0.1, float("nan")),
        Row("two", "OURS", 1.0, 1.0, 1e-3),
        Row("two", "FAST", 2.0, 4.0, 1e-3),
        Row("three", "OURS", 1.0, 1.0, 1e-3),
        Row("three", "FAST", refused="has no window"),
    ]
    lines = summary(rows, "OURS", 1e-2).splitlines()
    assert lines[0] == "cold: geometric mean 1.000 of the best peer over 2 launches; below 0.97: one 0.50"
    assert lines[1] == "warm: geometric mean 1.414 of the best peer over 2 launches; below 0.97: one 0.50"
    assert len(lines) == 3 and lines[2].startswith("WRONG: one     FASTER ")


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prompts, "drawn", lambda number, seed, sizes: drawn(number, seed, ON_CPU))
    monkeypatch.setattr(sys, "argv", ["prompts", "--random", "3", "--seed", "1", "--list"])
    assert prompts.main() == 0 and len(capsys.readouterr().out.splitlines()) == 3
    monkeypatch.setattr(sys, "argv", ["prompts", "--random", "3", "--only", "1,x"])
    with pytest.raises(SystemExit) as ended:
        prompts.main()
    assert ended.value.code == 2 and "numbers from 0 to 2" in capsys.readouterr().err
