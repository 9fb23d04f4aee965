"""What a sequence-parallel layer of either framework refuses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.errors import ShapeError, UnsupportedError
from attn.imports import resolve_obj_by_qualname


@pytest.mark.parametrize(("framework", "members"), [("torch", "ranks"), ("jax", "devices")])
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_heads": 3}, ShapeError, "num_heads=3 over 2 {}: Ulysses needs a multiple"),
        ({"num_heads": 4, "num_kv_heads": 1}, ShapeError, "num_kv_heads=1 over 2 {}"),
        ({"num_heads": 3, "strategy": "ring", "causal": True}, UnsupportedError, "ring: a causal layer is not supported .{} "),
        ({"num_heads": 4, "strategy": "star"}, ValueError, "'star' is unknown; known: ulysses, ring"),
    ],
)
def test_what_does_not_divide_is_refused(
    arguments: dict[str, Any], error: type[Exception], words: str, framework: str, members: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    layer = resolve_obj_by_qualname(f"attn.{framework}.diffusion.parallel.SequenceParallelAttention")
    group = {"axis_name": "sp", "axis_size": 2} if framework == "jax" else {}
    with pytest.raises(error, match=words.format(members)):
        layer(head_size=32, **group, **arguments)


@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"joint_query": torch.zeros(1, 2, 4, 32)}, "{}: a joint stream needs joint_key and joint_value"),
        ({"joint_attn_mask": torch.ones(1, 2, dtype=torch.bool)}, "{}: a joint stream needs joint_key and joint_value"),
        (
            {**dict.fromkeys(("joint_key", "joint_value"), torch.zeros(1, 2, 4, 32)), "joint_strategy": "middle"},
            "{}: joint_strategy='middle' is unknown; known: front, rear",
        ),
    ],
)
def test_a_part_of_a_joint_stream_is_refused(
    meta: dict[str, Any], words: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    layer = resolve_obj_by_qualname("attn.torch.diffusion.parallel.SequenceParallelAttention")(4, 32, strategy=strategy)
    monkeypatch.setattr(layer, "_passed", lambda arrays: lambda: arrays)
    x = torch.zeros(1, 3, 4, 32)
    with pytest.raises(ValueError, match=words.format(strategy)):
        layer(x, x, x, DiffusionAttentionMetadata(**meta))
