"""benchmarks/results/pallas.json is complete and reaches the goals, and pallas.md is its table."""

import json
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

from attn.errors import BackendLoadError
from attn.tools.aot.command import compiler_path
from attn.tools.aot.libtpu import PallasProgram
from benchmarks import pallas
from benchmarks.estimates import launches, programs, table


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    return dict(json.loads(pallas.RESULTS.read_text())["rows"])


def test_no_row_is_missing(rows: dict[str, Any]) -> None:
    missing = [key for job in launches.wanted(True) if (key := launches.key_of(*job)) not in rows]
    assert not missing, "measure them: python -m benchmarks.pallas --peers FOLDER"


def test_every_goal_is_met(rows: dict[str, Any]) -> None:
    for row in launches.ROWS:
        for (chip, page), goal in row.goals.items():
            assert rows[launches.key_of(row, chip, page, launches.OURS)]["us"] <= goal, row.name


def test_the_table(rows: dict[str, Any]) -> None:
    assert pallas.TABLE.read_text() == table.table(rows) + "\n", "write it: python -m benchmarks.pallas --table"


MISTAKES = {
    "--only nonsense": "no row's key contains this; the first key is 'decode 64 x 4k | v6e | 128 | attn'",
    "--peers /nowhere": "contains no tpu_inference; unzip the file of",
    "--again --compilers /nowhere": "contains no libtpu; `make compilers` installs it",
    "--jobs 0": "--jobs 0: at least 1",
    "--random 0": "--random 0: at least 1",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_mistakes_measure_and_write_nothing(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(pallas, "RESULTS", tmp_path / "pallas.json")
    monkeypatch.setattr(pallas, "TABLE", tmp_path / "pallas.md")
    monkeypatch.setattr(sys, "argv", ["pallas", *given.split()])
    with pytest.raises(SystemExit) as ended:
        pallas.main()
    assert ended.value.code == 2
    assert MISTAKES[given] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_rows_drawn_at_random_are_those_of_their_seed() -> None:
    rows = [list(launches.drawn(6, seed, True)) for seed in (3, 3, 4)]
    assert rows[0] == rows[1] != rows[2]
    drawn = [job[0] for job in rows[0] if job[1] == "v6e" and job[3] == launches.OURS]
    assert {(row.kind, row.stored) for row in drawn} == {
        (kind, stored) for kind in ("paged", "latent") for stored in ("bfloat16", "float8_e4m3fn")
    }


def test_a_row_drawn_at_random_is_estimated_and_not_stored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        compilers = compiler_path("tpu-v6e") or next(path for path in sys.path if Path(path, "libtpu").is_dir())
    except BackendLoadError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(pallas, "RESULTS", tmp_path / "pallas.json")
    monkeypatch.setattr(pallas, "TABLE", tmp_path / "pallas.md")
    monkeypatch.setattr(launches, "DRAWN", replace(launches.DRAWN, requests=2, length=256, chunk=32, new_tokens=64))
    command = ["pallas", "--random", "1", "--seed", "2", "--only", "v6e", "--compilers", compilers]
    monkeypatch.setattr(sys, "argv", command)
    pallas.main()
    (line,) = capsys.readouterr().out.splitlines()
    (row,) = (job[0] for job in launches.drawn(1, 2, False) if job[1] == "v6e")
    found = re.fullmatch(re.escape(row.name) + r" \| v6e \| \d+ \| attn: (\d+)( \(sim \d+\))? us \(.* s\)", line)
    assert found and int(found[1]) >= programs.floors(row, "v6e", row.pages[0])["hbm_us"] - 0.5, line
    assert not list(tmp_path.iterdir())


def _program(add: int, at: int = 0) -> PallasProgram:
    """A kernel that adds `add` to the block of a matrix in row `at`."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    def kernel(_: Any, source: Any, target: Any) -> None:
        target[...] = source[...] + add

    def call(array: Any, scalars: Any) -> Any:
        block, out = pl.BlockSpec((1, 128), lambda i: (i + at, 0)), jax.ShapeDtypeStruct((2, 128), jnp.int32)
        scalar = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(kernel, grid=(2,), in_specs=[scalar, block], out_specs=block, out_shape=out, name="add")(
            scalars, array
        )

    array = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    return PallasProgram(call, [array], [np.arange(3, dtype=np.int32)], (), 0.0, 0.0, "int32")


def test_a_digest_is_that_of_the_traced_program() -> None:
    plain = _program(1)
    other_batch = plain._replace(batch=[np.arange(4, dtype=np.int32)])
    others = [_program(2), _program(1, at=1), other_batch]
    assert programs.program_digest(_program(1)) == programs.program_digest(plain)
    assert len({programs.program_digest(x) for x in (plain, *others)}) == 4


@pytest.mark.parametrize(("is_same", "failed"), [(True, False), (False, False), (True, True)])
def test_a_program_that_is_the_same_is_not_measured_again(
    is_same: bool, failed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An error is: it may have been that of a limit."""
    key, outcome = "decode 64 x 4k | v6e | 128 | attn", {"error": "out of memory"} if failed else {"us": 700.0}
    before = {**outcome, "source": "before", "program": "abc", "date": "then"}
    monkeypatch.setattr(pallas, "ours", lambda *_: _program(1))
    monkeypatch.setattr(pallas, "program_digest", lambda _: "abc" if is_same else "def")
    monkeypatch.setattr(pallas, "measure", lambda *_: {"us": 650.0})

    def run_one(row: Any, chip: str, page: int, kernel: str, known: str | None, args: Any) -> dict[str, Any]:
        pallas.work(repr((row._asdict(), chip, page, kernel, "", "", 100.0, known)))
        return {**json.loads(capsys.readouterr().out.split("RESULT ")[1]), "seconds": 1.0}

    monkeypatch.setattr(pallas, "run_one", run_one)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(pallas, "RESULTS", tmp_path / "pallas.json")
    monkeypatch.setattr(pallas, "TABLE", tmp_path / "pallas.md")
    monkeypatch.setattr(pallas, "table", lambda _: "")
    pallas.RESULTS.write_text(json.dumps({"rows": {key: before}}))
    (tmp_path / "libtpu").mkdir()
    monkeypatch.setattr(sys, "argv", ["pallas", "--only", key, "--compilers", str(tmp_path)])
    pallas.main()
    made = json.loads(pallas.RESULTS.read_text())["rows"][key]
    assert made["source"] == programs.source("paged")
    kept, program = is_same and not failed, "abc" if is_same else "def"
    assert (made["us"], made["program"], made["date"] == "then") == (700.0 if kept else 650.0, program, kept)


def test_peers_receive_decodes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt before the last decode took them the time of one row."""
    monkeypatch.setattr(programs, "_vmem", lambda chip: 1 << 27)  # libtpu answers it
    row = launches.Row("", "q30s40_q1s50_q20_q1s60", (8, 1, 128), (launches.JAX,))
    program = programs.peer(row, "v6e", 128, launches.JAX, "")
    seq_lens, _, starts, _ = program.batch
    assert seq_lens.tolist() == [50, 60, 40, 20]
    assert starts.tolist() == [0, 1, 2, 32, 52]


@pytest.mark.parametrize(("us", "text"), [(99.4, "100 (sim 99)"), (100.0, "100"), (250.6, "251")])
def test_no_figure_is_below_the_floor_of_hbm(us: float, text: str) -> None:
    assert table.bounded(us, {"hbm_us": 100.0}) == text


def test_parts_stand_for_a_whole_and_are_as_old_as_their_kernel() -> None:
    (row,) = (row for row in launches.ROWS if row.name == "prefill 2k at 8k")
    ((part, times),) = row.parts
    whole, apart = (launches.key_of(r, "v7x", 128, launches.OURS) for r in (row, row._replace(name=part)))
    failed = {whole: {"error": "did not end", "source": "before"}}
    made = {"us": 100.0, "copies": False, "spills": 0, "source": programs.source(row.kind)}
    assert f"| {times * 100} (a, c) |" in table.table({**failed, apart: made})
    old = table.table({**failed, apart: made | {"source": "before"}})
    assert f"| {times * 100} (a, c) (d) |" in old
    assert "| 100 (a) (d) |" in old
    assert "| none: did not end (d) |" in table.table(failed)
