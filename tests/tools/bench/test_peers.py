"""The peers of attn bench: the arguments of each, on the CPU and on stand-ins with the vendors' signatures. Five seconds."""

import signal
import time
from collections.abc import Callable

import pytest
import torch

from attn.errors import UnsupportedError
from attn.tools.bench import LIMITS, BenchCase, peers
from attn.tools.bench.deadline import deadline
from attn.tools.bench.on_torch import Workload

CPU = torch.device("cpu")
DECODE, MIXED, PROMPTS = "3q1s40", "1q6s20_2q1s30", "2q20"


def case(batch: str, **changes: object) -> BenchCase:
    return BenchCase(batch, "4/2", 64, **changes)  # type: ignore[arg-type]


def error(peer: peers.Peer, batch: str, **changes: object) -> float:
    """The relative RMS error of one call, as the benchmark judges it."""
    with torch.no_grad():
        workload = Workload(case(batch, **changes), "TORCH_SDPA", CPU)
        workload.output.fill_(torch.nan)
        out = peer.prepare(workload)()
        workload.output.copy_(out.transpose(1, 2).flatten(0, 1) if out.dim() == 4 else out)
        return workload.error()


def named(name: str) -> peers.Peer:
    return next(peer for peer in peers.PEERS if peer.name == name)


@pytest.mark.parametrize("batch", [DECODE, PROMPTS])
def test_a_dense_peer_attends_what_the_pages_hold(batch: str) -> None:
    assert error(named("sdpa"), batch) < LIMITS["bfloat16"]


@pytest.mark.parametrize(
    ("batch", "changes", "said"),
    [(MIXED, {}, "equal lengths"), ("2q4s8", {}, "equal lengths"), (DECODE, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8")],
)
def test_a_dense_peer_takes_nothing_that_would_not_be_the_same_work(batch: str, changes: dict[str, str], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        error(named("sdpa"), batch, **changes)


@pytest.mark.parametrize(
    ("name", "batch"),
    [(f"flashinfer-{kind}", batch) for kind in ("fa2", "fa3") for batch in (DECODE, MIXED)] + [("flashinfer-decode", DECODE)],
)
def test_flashinfers_wrappers(name: str, batch: str, standins: Callable[..., None]) -> None:
    standins("flashinfer_pkg")
    assert error(named(name), batch) < LIMITS["bfloat16"]


def test_what_flashinfers_wrappers_do_not_take(standins: Callable[..., None]) -> None:
    standins("flashinfer_pkg")
    with pytest.raises(UnsupportedError, match="one token per request"):
        error(named("flashinfer-decode"), MIXED)
    with pytest.raises(UnsupportedError, match="kv_cache_dtype=fp8"):
        error(named("flashinfer-fa3"), DECODE, kv_cache_dtype="fp8")


@pytest.mark.parametrize("batch", [DECODE, MIXED, "1q20s30"])
def test_vllms_kernel(batch: str, standins: Callable[..., None]) -> None:
    standins("vllm_pkg")
    assert error(named("vllm-triton"), batch) < LIMITS["bfloat16"]
    with pytest.raises(UnsupportedError, match="kv_cache_dtype=int8"):
        error(named("vllm-triton"), batch, kv_cache_dtype="int8")


@pytest.mark.parametrize("root", ["fa3", "fa4"])
def test_one_package_behind_flash_attn(root: str, standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    standins(root)
    found = [provider for provider in peers.providers.present() if provider.install.startswith("flash-attn")]
    assert found
    monkeypatch.setattr(peers.providers, "present", lambda: found)
    for peer in peers._of_providers():
        assert peer.name == f"FLASH_ATTN:{found[0].name}"
        assert error(peer, MIXED) < LIMITS["bfloat16"]
        with pytest.raises(UnsupportedError, match="block_size=5"):
            error(peer, MIXED, block_size=5)


def test_the_cpu_has_no_gpus_peers() -> None:
    assert set(peers.peers_on(CPU)) == {"sdpa", "flex"}


def test_a_deadline_ends_what_takes_longer_and_nothing_else() -> None:
    with pytest.raises(TimeoutError, match=r"not ready after 0.05 s"), deadline(0.05):
        time.sleep(5)
    with deadline(0.05):
        pass
    time.sleep(0.06)


def test_a_deadline_leaves_the_timer_of_its_caller() -> None:
    """Such as the time limit of a test."""
    before, outer = signal.signal(signal.SIGALRM, lambda *_: None), signal.setitimer(signal.ITIMER_REAL, 1000.0, 7.0)
    try:
        with deadline(500.0):
            pass
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        assert 900 < left <= 1000 and interval == 7
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)
