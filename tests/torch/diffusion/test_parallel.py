"""Ulysses and ring attention on real process groups (gloo, three and two ranks), equal to one device."""

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.backends.registry import register_diffusion_backend
from attn.errors import UnsupportedError
from attn.torch import DiffusionAttention
from attn.torch.diffusion.backends.sdpa import SDPABackend, SDPAImpl
from attn.torch.diffusion.parallel import SequenceParallelAttention

H, K, D, ROWS = 6, 3, 32, 8


def _tensors(ranks: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    length = ranks * ROWS
    shapes = {
        "q": (2, length, H, D),
        "k": (2, length, K, D),
        "v": (2, length, K, D),
        "jq": (2, 5, H, D),
        "jk": (2, 5, K, D),
        "jv": (2, 5, K, D),
    }
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found["mask"] = torch.rand(2, length, generator=generator) < 0.7
    found["mask"][1, :ROWS] = False  # a rank whose keys are all padding
    found["k"][~found["mask"]] = torch.nan
    return found


def _meta(t: dict[str, torch.Tensor], part: slice, joint: str) -> DiffusionAttentionMetadata:
    more = {"joint_query": t["jq"], "joint_key": t["jk"], "joint_value": t["jv"], "joint_strategy": joint} if joint else {}
    return DiffusionAttentionMetadata(attn_mask=t["mask"][:, part], **more)


def _rank(rank: int, ranks: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
    t, part = _tensors(ranks), slice(rank * ROWS, (rank + 1) * ROWS)
    for strategy in ("ulysses", "ring"):
        layer = SequenceParallelAttention(H, D, num_kv_heads=K, strategy=strategy, dtype=torch.float32)
        with pytest.raises(UnsupportedError, match="key requires grad: .* no gradients"):  # they would be lost in silence
            layer(t["q"][:, part], t["k"][:, part].clone().requires_grad_(), t["v"][:, part])
    with torch.no_grad():
        for strategy in ("ulysses", "ring"):
            layer = SequenceParallelAttention(H, D, num_kv_heads=K, strategy=strategy, dtype=torch.float32)
            for joint in ("", "front", "rear"):
                out = layer(t["q"][:, part], t["k"][:, part], t["v"][:, part], _meta(t, part, joint))
                whole = DiffusionAttention(H, D, num_kv_heads=K, dtype=torch.float32)
                want = whole(t["q"], t["k"], t["v"], _meta(t, slice(None), joint))
                text = 5 if joint else 0
                image = want[:, text:] if joint != "rear" else want[:, : want.shape[1] - text]
                parts = [want[:, :text] if joint != "rear" else want[:, want.shape[1] - text :], image[:, part]]
                error = (out - torch.cat(parts if joint != "rear" else parts[::-1], 1)).abs().max()
                results.put((rank, strategy, joint, float(error)))
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_strategy_equals_one_device(ranks: int, tmp_path: Path) -> None:
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (ranks, str(tmp_path / "store"), results), nprocs=ranks)
    told = [results.get() for _ in range(ranks * 6)]
    assert {(r, s, j) for r, s, j, _ in told} == {
        (r, s, j) for r in range(ranks) for s in ("ulysses", "ring") for j in ("", "front", "rear")
    }
    assert max(error for *_, error in told) < 2e-6, told


def test_a_ring_asks_for_the_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper the first of the list returns none: the ring took it, and failed."""

    class First(SDPABackend):
        name = "FIRST"
        capabilities = replace(SDPABackend.capabilities, priority=1)  # type: ignore[type-var]

    class FirstImpl(SDPAImpl, backend=First):
        can_return_lse = False

    register_diffusion_backend("FIRST", First)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    chosen = {
        strategy: SequenceParallelAttention(4, D, strategy=strategy, features=["mask"]).local.selection
        for strategy in ("ulysses", "ring")
    }
    assert chosen["ulysses"].name == "FIRST" and chosen["ulysses"].request.features == {"mask"}
    assert chosen["ring"].name == "TORCH_SDPA" and chosen["ring"].request.features == {"mask", "lse"}
    assert "FIRST: lse not supported" in chosen["ring"].reasons
    with pytest.raises(UnsupportedError, match="FIRST  lse not supported"):
        SequenceParallelAttention(4, D, strategy="ring", backend="FIRST")
