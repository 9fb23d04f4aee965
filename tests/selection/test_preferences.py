"""Measured selection: what changes a choice and what does not, valid and ignored files, and `attn tune`."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attn
from attn import selector
from attn.backends.registry import AttentionBackendEnum, register_backend
from attn.capabilities import Device, Request
from attn.cli import main
from attn.selection import preferences
from attn.selection.preferences import RequestTimes, Time

DEVICE = Device("torch", "cpu", "test CPU", "x86_64")
REQUEST = selector.make_request(64, "float32", None, 16, num_heads=8, num_kv_heads=2)


def times(*ms: float, spread: float = 0.01) -> dict[str, Time]:
    return {f"q{n}": Time(t, (1 - spread) * t, (1 + spread) * t) for n, t in enumerate(ms)}


@pytest.fixture
def backends(platform: Any, make_backend: Callable[..., type]) -> Any:
    """Three backends, A before B before C on the list; C does not serve sinks."""
    for name in "ABC":
        features = frozenset() if name == "C" else frozenset({"sinks", "batch_invariant"})
        register_backend(f"MEASURED_{name}", make_backend(name, features=features))
    platform.names = ("MEASURED_A", "MEASURED_B", "MEASURED_C")
    return platform


@pytest.fixture
def measured(backends: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`measured(A=times(...))` writes a file and turns it on."""
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))

    def write(request: Request = REQUEST, **of: dict[str, Time]) -> None:
        found = {(f"MEASURED_{n}", AttentionBackendEnum[f"MEASURED_{n}"].get_path()): t for n, t in of.items()}
        preferences.record([RequestTimes(request, found)], DEVICE)
        monkeypatch.setenv("ATTN_PREFERENCES", "1")

    return write


def chosen(request: Request = REQUEST, **how: Any) -> str:
    selection = selector.select(request, framework="torch", **how)
    assert selection.backend is AttentionBackendEnum[str(selection.name)].get_class()
    return str(selection.name)[-1]


def said(request: Request = REQUEST, **how: Any) -> str:
    return selector.select(request, framework="torch", **how).measured


# what moves a choice


def test_the_faster_valid_backend_goes_first(measured: Callable[..., None]) -> None:
    measured(A=times(2.0, 4.0), B=times(1.0, 4.4), C=times(0.9, 4.0))
    assert chosen() == "C" and said().startswith("MEASURED_C takes 0.67 of the time of MEASURED_A, the list's first (2 batches")
    selection = selector.select(REQUEST, framework="torch")
    assert [verdict.name[-1] for verdict in selection.trace] == ["C", "A", "B"]
    assert "on this machine: MEASURED_C takes" in str(selection) and selection.to_dict()["measured"] == selection.measured


def test_what_does_not_serve_stays_out_however_fast(measured: Callable[..., None]) -> None:
    sinks = replace(REQUEST, features=frozenset({"sinks"}))
    measured(sinks, A=times(2.0), B=times(1.0), C=times(0.1))
    assert chosen(sinks) == "B"
    assert chosen(sinks, disable=["MEASURED_B"]) == "A"


def test_off_unless_asked_for(measured: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    measured(A=times(2.0), B=times(1.0))
    for value in ("0", "", " "):
        monkeypatch.setenv("ATTN_PREFERENCES", value)
        assert chosen() == "A" and said() == ""
    monkeypatch.delenv("ATTN_PREFERENCES")
    assert chosen() == "A" and said() == ""
    monkeypatch.setenv("ATTN_PREFERENCES", "1")
    assert chosen() == "B" and chosen(measured=False) == "A"


@pytest.mark.parametrize("wrong", ["true", "banana", "2"])
def test_a_value_that_is_neither_a_switch_nor_a_path_is_an_error(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_PREFERENCES", wrong)
    with pytest.raises(ValueError, match=f"ATTN_PREFERENCES='{wrong}' must be 0, 1 or a file's path, such as ./{wrong}.json"):
        preferences.is_enabled()
    monkeypatch.setenv("ATTN_PREFERENCES", f"./{wrong}")
    assert preferences.is_enabled()


def test_an_explicit_choice_is_never_moved(measured: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    measured(A=times(2.0), B=times(1.0))
    assert chosen(backend="MEASURED_A") == "A" and said(backend="MEASURED_A") == ""
    with selector.global_force_attn_backend_context_manager("MEASURED_A"):
        assert chosen() == "A"
    monkeypatch.setenv("ATTN_BACKEND", "MEASURED_A")
    assert chosen() == "A"


def test_never_where_the_same_bits_are_asked_for(measured: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    invariant = replace(REQUEST, features=frozenset({"batch_invariant"}))
    measured(invariant, A=times(2.0), B=times(1.0))
    assert chosen(invariant) == "A" and "batch_invariant is requested" in said(invariant)
    measured(A=times(2.0), B=times(1.0))
    assert chosen() == "B"
    monkeypatch.setattr("attn.selection.platforms.Platform.deterministic", lambda self: "torch is deterministic")
    assert chosen() == "A" and said() == "priority list used: torch is deterministic"


def test_the_frameworks_own_switches_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from attn.selection.platforms import platform_for

    here = platform_for("torch")
    assert here.deterministic() == ""
    torch.use_deterministic_algorithms(True)
    try:
        assert "use_deterministic_algorithms" in here.deterministic()
    finally:
        torch.use_deterministic_algorithms(False)
    pytest.importorskip("jax")
    there = platform_for("jax")
    there.device()  # XLA reads its flags here
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false --xla_gpu_deterministic_ops=true")
    assert "--xla_gpu_deterministic_ops" in there.deterministic()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    assert there.deterministic() == ""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (times(1.0), times(0.96)),
        (times(1.0, spread=0.4), times(0.5, spread=0.4)),
        (times(1.0, 1.0), times(0.5, 2.0)),
    ],
    ids=["within the margin", "spreads overlap", "faster in one batch, slower in another"],
)
def test_what_is_not_clearly_faster_stays_behind(measured: Callable[..., None], first: Any, second: Any) -> None:
    measured(A=first, B=second)
    assert chosen() == "A" and "nothing takes under 95 %" in said()


def test_a_first_that_was_not_measured_and_a_batch_that_is_missing(measured: Callable[..., None]) -> None:
    measured(B=times(1.0), C=times(0.5))
    assert chosen() == "A" and "MEASURED_A was not measured" in said()
    measured(A=times(2.0, 2.0), B=times(1.0))
    assert chosen() == "A", "B has no time in the second batch"


def test_another_class_under_the_name_was_not_measured(
    measured: Callable[..., None], make_backend: Callable[..., type]
) -> None:
    measured(A=times(2.0), B=times(1.0))
    AttentionBackendEnum["MEASURED_B"].clear_override()
    register_backend("MEASURED_B", "somebody.else.Backend")
    other = make_backend("OTHER")
    other.__name__, other.__qualname__ = "Other", "Other"
    register_backend("MEASURED_B", other)
    assert chosen() == "A"


@pytest.mark.parametrize(
    "changes",
    [
        {"head_size": 128},
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"num_heads": 16},
        {"features": frozenset({"sinks"})},
        {"kv_cache_dtype": "float32"},
    ],
    ids=str,
)
def test_times_of_another_request_do_not_count(measured: Callable[..., None], changes: dict[str, Any]) -> None:
    measured(A=times(2.0), B=times(1.0))
    other = replace(REQUEST, **changes)
    selection = selector.select(other, framework="torch")
    assert selection.name in ("MEASURED_A", None)
    assert selection.name is None or "has no times for this request" in selection.measured


def test_unspecified_heads_match_all_measured_heads(measured: Callable[..., None]) -> None:
    measured(A=times(2.0), B=times(1.0))
    measured(replace(REQUEST, num_heads=16), A=times(1.0), B=times(2.0))
    bare = replace(REQUEST, num_heads=None, num_kv_heads=None)
    assert chosen() == "B" and chosen(replace(REQUEST, num_heads=16)) == "A"
    assert chosen(bare) == "A" and "2 batches" in said(bare)


def test_get_attn_backend_follows_too_and_notices_a_new_file(
    measured: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = replace(REQUEST, num_heads=None, num_kv_heads=None)

    def ask() -> str:
        return attn.get_attn_backend(64, "float32", None, 16).get_name()

    assert ask() == "A"
    measured(bare, A=times(2.0), B=times(1.0))
    assert ask() == "B"
    measured(bare, A=times(1.0), B=times(2.0))
    assert ask() == "A"
    measured(bare, A=times(2.0), B=times(1.0))
    assert ask() == "B"
    with monkeypatch.context() as strict:
        strict.setattr("attn.selection.platforms.Platform.deterministic", lambda self: "torch is deterministic")
        assert ask() == "A"
    assert ask() == "B"
    monkeypatch.delenv("ATTN_PREFERENCES")
    assert ask() == "A"


# files


def path_of(tmp_path: Path) -> Path:
    return tmp_path / "preferences-torch-test-CPU.json"


def edited(tmp_path: Path, **changes: Any) -> None:
    file = path_of(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "NVIDIA H100"}, "another machine (device 'NVIDIA H100', expected 'test CPU')"),
        ({"machine": "another processor x 96"}, "another machine (machine 'another processor x 96'"),
        ({"version": "1.0"}, "another machine (version '1.0'"),
        ({"attn": "0.0.1"}, "another machine (attn '0.0.1'"),
        ({"format": 2}, "another machine (format 2, expected 1)"),
        ({"entries": [{"request": {"head_size": "64"}}]}, "broken"),
        ({"entries": [{"request": {"head_size": 64, "dtype": "float32"}, "backends": {"A": {"path": "a.B"}}}]}, "invalid (Key"),
        ({"entries": None}, "invalid (TypeError"),
    ],
)
def test_foreign_and_broken_files_are_ignored_with_a_reason(
    measured: Callable[..., None], tmp_path: Path, changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    measured(A=times(2.0), B=times(1.0))
    edited(tmp_path, **changes)
    with caplog.at_level("WARNING"):
        assert chosen() == "A" and words in said() and str(path_of(tmp_path)) in said()
    assert [record.message for record in caplog.records if "is ignored" in record.message].__len__() == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"', '{"entries": []}', "\x00\xff"])
def test_no_content_of_a_file_makes_selection_fail(measured: Callable[..., None], tmp_path: Path, text: str) -> None:
    measured(A=times(2.0), B=times(1.0))
    path_of(tmp_path).write_bytes(text.encode("latin-1"))
    assert chosen() == "A" and "is ignored" in said()


@pytest.mark.parametrize("numbers", [[0, 0, 0], [1, 2, 3], [float("nan")] * 3, [-1, -1, -1], ["1", "1", "1"], [1]])
def test_numbers_that_are_no_times(measured: Callable[..., None], tmp_path: Path, numbers: list[Any]) -> None:
    measured(A=times(2.0), B=times(1.0))
    found = json.loads(path_of(tmp_path).read_text())
    found["entries"][0]["backends"]["MEASURED_B"]["times"]["q0"] = numbers
    path_of(tmp_path).write_text(json.dumps(found))
    assert chosen() == "A" and "invalid" in said()


def test_a_file_that_is_not_there_or_named(
    measured: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(A=times(2.0), B=times(1.0))
    named = tmp_path / "mine.json"
    monkeypatch.setenv("ATTN_PREFERENCES", str(named))
    assert chosen() == "A" and "mine.json cannot be read: No such file" in said()
    os.replace(path_of(tmp_path), named)
    assert chosen() == "B"


def test_a_file_that_one_device_ignores_is_read_by_the_one_it_belongs_to(
    measured: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One named file, and a process with both frameworks: each device reads the file for itself."""
    measured(A=times(2.0), B=times(1.0))
    file = path_of(tmp_path)
    other = Device("jax", "cpu", "test CPU", "x86_64")
    assert "it belongs to another machine" in str(preferences.read(file, other))
    assert isinstance(preferences.read(file, DEVICE), list)
    assert "it belongs to another machine" in str(preferences.read(file, other))


def test_a_device_that_is_not_here_has_no_times(measured: Callable[..., None]) -> None:
    measured(A=times(2.0), B=times(1.0))
    assert "this machine's device only" in said(device=Device("torch", "cpu", "another CPU"))


def test_runs_add_up_and_an_unchanged_file_is_read_once(measured: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    measured(A=times(2.0), B=times(1.0))
    other = replace(REQUEST, head_size=128)
    measured(other, A=times(1.0), B=times(2.0))
    assert chosen() == "B" and chosen(other) == "A"
    monkeypatch.setattr(preferences.cache_file, "read", lambda *_: pytest.fail("read again"))
    assert chosen() == "B"


# attn tune


def test_tune_measures_keeps_and_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    """On this machine's CPU, with torch's own backends."""
    pytest.importorskip("torch")
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))
    call = [
        "tune",
        "2q1s20",
        "q8",
        "--framework",
        "torch",
        "--heads",
        "4/2",
        "--head-size",
        "32",
        "--without",
        "FLEX_ATTENTION",
    ]
    assert main(call) == 0
    told = capsys.readouterr().out
    [file] = tmp_path.iterdir()
    assert f"saved: {file}" in told and "ATTN_PREFERENCES=1" in told
    found = json.loads(file.read_text())
    assert found["machine"] and found["version"]
    [entry] = found["entries"]
    assert entry["backends"].keys() == {"CPU_ATTN", "TORCH_SDPA"}
    assert all(of["times"].keys() == {"2q1s20", "q8"} for of in entry["backends"].values())
    sdpa = entry["backends"]["TORCH_SDPA"]["times"]  # make this one the fastest, whichever it was
    sdpa |= {batch: [1e-6, 1e-6, 1e-6] for batch in sdpa}
    file.write_text(json.dumps(found))
    explain = ["explain", "--head-size", "32", "--num-heads", "4", "--num-kv-heads", "2", "--framework", "torch"]
    assert main(explain) == 0 and "-> CPU_ATTN" in capsys.readouterr().out
    monkeypatch.setenv("ATTN_PREFERENCES", "1")
    assert main(explain) == 0
    told = capsys.readouterr().out
    assert "-> TORCH_SDPA" in told and "measured on this machine: TORCH_SDPA takes 0.00 of the time of CPU_ATTN" in told
    layer = pytest.importorskip("attn.torch").Attention(4, 32, num_kv_heads=2, block_size=16)
    assert layer.selection.name == "TORCH_SDPA"


def test_tune_says_before_it_measures_that_it_cannot_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("attn.tools.bench.tuning.open_bench", lambda framework: pytest.fail("measured"))
    (tmp_path / "a file").write_text("")
    for file in (tmp_path / "a file" / "times.json", tmp_path):
        assert main(["tune", "q4", "--framework", "torch", "--file", str(file)]) == 2
        assert str(tmp_path) in capsys.readouterr().err


def test_tune_does_not_overwrite_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    mine = tmp_path / "thesis.json"
    mine.write_text("{}")
    assert main(["tune", "q4", "--framework", "torch", "--file", str(mine)]) == 2
    assert "move it away" in capsys.readouterr().err and mine.read_text() == "{}"


def test_a_backend_that_is_wrong_is_not_kept() -> None:
    from attn.tools.bench import BenchCase, BenchRow, Timing
    from attn.tools.bench.tuning import kept_of

    def row(name: str, batch: str, right: bool = True) -> BenchRow:
        return BenchRow(BenchCase(batch, "4/2", 32), name, Timing(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0), 1.0, 1.0, 1.0, 1.0, right)

    rows = [row("CPU_ATTN", "q4"), row("CPU_ATTN", "q8"), row("TORCH_SDPA", "q4"), row("TORCH_SDPA", "q8", right=False)]
    [entry] = kept_of(rows)
    assert [name for name, _ in entry.times] == ["CPU_ATTN"] and set(*entry.times.values()) == {"q4", "q8"}


def test_writing_is_one_step(backends: Any, tmp_path: Path) -> None:
    """Nothing but the file is left, and a reader that comes meanwhile sees the old one or the new one."""
    file = tmp_path / "deep" / "times.json"
    for ms in (1.0, 2.0):
        key = ("MEASURED_A", AttentionBackendEnum["MEASURED_A"].get_path())
        preferences.record([RequestTimes(REQUEST, {key: times(ms)})], DEVICE, file)
        time.sleep(0.01)
    assert list(file.parent.iterdir()) == [file]
    [entry] = preferences.read(file, DEVICE)
    assert isinstance(entry, RequestTimes) and entry.times[key]["q0"].ms == 2.0


# pairs


def timed(batch: str, **ms: float) -> list[Any]:
    """Rows of a bench: milliseconds of backends over a batch."""
    from attn.tools.bench import BenchCase, BenchRow, Timing

    case = BenchCase(batch, "4/2", 32, dtype="float32")
    return [BenchRow(case, name, Timing(t, t, t, 1.0, 1.0, 1.0, 0.0), 1.0, 1.0, 1.0, 1.0, True) for name, t in ms.items()]


def test_a_pair_is_timed_where_two_backends_with_one_cache_are_fastest_in_their_phases() -> None:
    pytest.importorskip("torch")
    from attn.tools.bench.tuning import pairs_of

    rows = [
        *timed("4q1s64", TORCH_SDPA=1.0, FLEX_ATTENTION=2.0, CPU_ATTN=3.0),
        *timed("2q64", TORCH_SDPA=3.0, FLEX_ATTENTION=1.0, CPU_ATTN=2.0),
        *timed("4q1s64_q64", TORCH_SDPA=3.0, FLEX_ATTENTION=1.0, CPU_ATTN=2.0),
    ]
    cases = list(dict.fromkeys(row.case for row in rows))
    entries = pairs_of(cases, "torch", rows)
    assert [(entry.backend, entry.case.batch) for entry in entries] == [
        ("TORCH_SDPA+FLEX_ATTENTION", batch) for batch in ("4q1s64", "2q64", "4q1s64_q64")
    ]
    assert pairs_of(cases, "torch", rows, ["flex_attention"]) == []
    assert pairs_of(cases[:1], "torch", rows) == [], "no prompts"
    other = [*timed("4q1s64", TORCH_SDPA=1.0, CPU_ATTN=3.0), *timed("2q64", TORCH_SDPA=3.0, CPU_ATTN=1.0)]
    assert pairs_of(cases[:2], "torch", other) == [], "their caches differ"
    same = [*timed("4q1s64", TORCH_SDPA=1.0), *timed("2q64", TORCH_SDPA=3.0)]
    assert pairs_of(cases[:2], "torch", same) == []


def test_a_measured_pair_competes_with_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is chosen by its own times; the note says what each batch took."""
    pytest.importorskip("torch")
    from attn.selection.platforms import platform_for

    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))
    device, names = platform_for("torch").device(), ("CPU_ATTN", "TORCH_SDPA", "TORCH_SDPA+FLEX_ATTENTION")
    if device.platform != "cpu":
        pytest.skip("the list of a CPU")

    def write(*ms: tuple[float, float]) -> None:
        found = {(name, AttentionBackendEnum[name].get_path()): times(*of) for name, of in zip(names, ms, strict=True)}
        preferences.record([RequestTimes(REQUEST, found)], device)

    monkeypatch.setenv("ATTN_PREFERENCES", "1")
    write((2.0, 2.0), (1.0, 4.0), (1.0, 1.0))
    selection = selector.select(REQUEST, framework="torch")
    assert selection.name == "TORCH_SDPA+FLEX_ATTENTION" and selection.backend is AttentionBackendEnum[names[2]].get_class()
    assert "takes 0.50 of the time of CPU_ATTN" in selection.measured and "q0 0.50, q1 0.50" in selection.measured
    assert selector.select(REQUEST, framework="torch", disable=["FLEX_ATTENTION"]).name == "CPU_ATTN"
    assert selector.select(REQUEST, framework="torch", measured=False).name == "CPU_ATTN"
    write((2.0, 2.0), (1.0, 4.0), (1.0, 4.0))
    assert selector.select(REQUEST, framework="torch").name == "CPU_ATTN"
