"""Measured launches: what is tried, stored on disk and used, and that nothing is measured unless requested (3 s)."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attn import envs
from attn.kernels.launch import TUNED, Launch, decode_launch
from attn.torch import autotune

CPU, SHAPE = torch.device("cpu"), (4, 64, 2, 2)
pytestmark = pytest.mark.triton_interpreter  # a fake timer, and the launches of the interpreter


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))
    TUNED.clear()
    autotune._loaded.clear()
    yield
    TUNED.clear()
    autotune._loaded.clear()


def by_rule() -> Launch:
    return decode_launch("interpreter", *SHAPE)


def timer(monkeypatch: pytest.MonkeyPatch, cost: Callable[[Launch], float]) -> list[Launch]:
    """Let a launch cost what `cost` says; the launches that were timed, in order."""
    tried: list[Launch] = []

    def time(run: Callable[[], Any]) -> float:
        run()
        (launch,) = TUNED.values()
        tried.append(launch)
        return cost(launch)

    monkeypatch.setattr(autotune, "_time", time)
    return tried


def tune() -> Launch:
    return autotune.tune("decode", SHAPE, lambda: None, CPU)


def test_the_fastest_is_kept_and_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = timer(monkeypatch, lambda launch: 1.0 / launch.block_n)
    best = tune()
    assert tried[0] == by_rule() and len(set(tried)) == len(tried) > 4
    assert best.block_n == 2 * by_rule().block_n and {("decode", "interpreter", *SHAPE): best} == TUNED
    count = len(tried)
    assert tune() == best and len(tried) == count, "known by now"
    TUNED.clear()
    autotune._loaded.clear()  # as another process starts
    assert tune() == best and len(tried) == count, "read from the file"
    (path,) = tmp_path.iterdir()
    assert path.name == "launches-cpu.json" and json.loads(path.read_text())["arch"] == "interpreter"


def test_noise_does_not_replace_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    timer(monkeypatch, lambda launch: 1.0 if launch == by_rule() else 0.98)
    assert tune() == by_rule()


def test_what_does_not_fit_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def cost(launch: Launch) -> float:
        if launch.block_n > by_rule().block_n:
            raise OutOfResources(1, 0, "shared memory")
        return 1.0

    timer(monkeypatch, cost)
    assert tune() == by_rule()

    def broken(launch: Launch) -> float:
        raise RuntimeError("the device is gone")

    timer(monkeypatch, broken)
    TUNED.clear()
    autotune._loaded.clear()
    for path in envs.cache_dir().iterdir():
        path.unlink()
    with pytest.raises(RuntimeError, match="the device is gone"):
        tune()
    assert not TUNED


def with_entry(data: dict[str, Any], key: list[Any], launch: list[int]) -> dict[str, Any]:
    return {**data, "entries": [{"key": key, "launch": launch}]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: "{", "JSONDecodeError"),
        (lambda data: [], "AttributeError"),
        (lambda data: {**data, "triton": "0.1"}, "it belongs to another machine"),
        (lambda data: {**data, "device": "another"}, "it belongs to another machine"),
        (
            lambda data: {**data, "entries": [{"key": ["decode", "interpreter", 4, 64, 2, 2], "launch": [16, 48, 4, 1]}]},
            "is not a valid launch",
        ),
        (lambda data: with_entry(data, ["decode", "sm_90", 4, 64, 2, 2], [16, 32, 4, 1]), "is not a valid launch"),
        (
            lambda data: {**data, "entries": [{"key": ["decode", "interpreter", 4, 64, 2], "launch": [16, 32, 4, 1]}]},
            "is not a valid launch",
        ),
        (
            lambda data: {**data, "entries": [{"key": ["decode", "interpreter", 32, 64, 2, 2], "launch": [16, 32, 4, 1]}]},
            "is not a valid launch",
        ),
    ],
)
def test_a_file_that_is_broken_or_of_others_is_ignored_with_its_reason(
    change: Callable[[Any], Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = timer(monkeypatch, lambda launch: 1.0)
    tune()
    (path,) = envs.cache_dir().iterdir()
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    TUNED.clear()
    autotune._loaded.clear()
    count = len(tried)
    with caplog.at_level(logging.WARNING, "attn"):
        tune()
    assert len(tried) == 2 * count and reason in caplog.text and path.name in caplog.text
    assert json.loads(path.read_text())["entries"], "replaced by what was tuned now"


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert envs.cache_dir() == tmp_path
    monkeypatch.delenv("ATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert envs.cache_dir() == Path("/cache/attn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert envs.cache_dir() == Path("/home/somebody/.cache/attn")


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
def test_a_call_tunes_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from attn.backends.abstract import KVCacheSpec
    from attn.backends.metadata import CommonAttentionMetadata
    from attn.torch.backends.triton_attn import TritonAttentionBackend

    tried = timer(monkeypatch, lambda launch: 1.0 / launch.block_n)
    spec = KVCacheSpec(16, 1, 32, "float32")
    batch = CommonAttentionMetadata.from_lens([1], [20], [[0, 1]], 16)
    metadata = TritonAttentionBackend.get_builder_cls()(spec, ["layer"], None, CPU).build(0, batch)
    impl = TritonAttentionBackend.get_impl_cls()(2, 32, 0.2, 1)
    torch.manual_seed(0)
    query, cache, one = torch.randn(1, 2, 32), torch.randn(2, 2, 16, 1, 32), torch.ones(())
    layer = SimpleNamespace(_k_scale=one, _v_scale=one)
    want = impl.forward(layer, query, None, None, cache, metadata)
    assert not TUNED and not tried
    monkeypatch.setenv("ATTN_AUTOTUNE", "1")
    torch.testing.assert_close(impl.forward(layer, query, None, None, cache, metadata), want)
    assert [key[0] for key in TUNED] == ["decode"] and tried
    monkeypatch.setenv("ATTN_AUTOTUNE", "yes")
    with pytest.raises(ValueError, match="ATTN_AUTOTUNE='yes' must be 0 or 1"):
        impl.forward(layer, query, None, None, cache, metadata)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
def test_a_call_that_writes_its_tokens_is_measured_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in one launch with decodes, which is measured as two launches, of which none may write."""
    from types import SimpleNamespace

    from attn.backends.abstract import KVCacheSpec
    from attn.backends.metadata import CommonAttentionMetadata
    from attn.torch.backends._triton import _BatchPlan
    from attn.torch.backends.triton_attn import TritonAttentionBackend

    timed: list[int] = []

    def time(run: Callable[[], Any]) -> float:
        run()
        timed.append(1)
        return 1.0

    monkeypatch.setattr(autotune, "_time", time)
    monkeypatch.setattr(autotune, "_around", lambda by_rule, least: [])
    spec = KVCacheSpec(16, 1, 32, "float16")
    batch = CommonAttentionMetadata.from_lens([18, 1], [20, 9], [[0, 1], [2]], 16)
    metadata = TritonAttentionBackend.get_builder_cls()(spec, ["layer"], None, CPU).build(0, batch)
    impl = TritonAttentionBackend.get_impl_cls()(2, 32, 0.2, 1)
    impl._plan = lambda *_: _BatchPlan(together=True, writes=True)
    torch.manual_seed(0)
    query, key, value = (torch.randn(19, n, 32, dtype=torch.float16) for n in (2, 1, 1))
    cache, one = torch.randn(2, 3, 16, 1, 32, dtype=torch.float16), torch.ones(())
    layer, found = SimpleNamespace(_k_scale=one, _v_scale=one), []
    for on in ("0", "1"):
        monkeypatch.setenv("ATTN_AUTOTUNE", on)
        found.append((impl.forward(layer, query, key, value, there := cache.clone(), metadata), there))
    assert timed and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
