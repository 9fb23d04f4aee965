"""The torch driver of the dense suite: runs NumPy calls on tensors and returns NumPy arrays."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.testing.conformance import is_interpreted
from attn.testing.dense import DenseArrays, DenseCase, Sampled, attend, vast_places
from attn.torch.interpreter import correct_bfloat16
from attn.torch.testing import views

Array = npt.NDArray[Any]


def dense(backend: Any, call: DenseArrays) -> Array:
    """Run a diffusion backend on a call of the dense suite. Returns [B, S, H, D] in float64."""
    case, device = call.case, _device(backend)

    def tensor(values: Array) -> torch.Tensor:
        made = torch.from_numpy(values.copy()).to(device, getattr(torch, case.dtype))
        # rows wider than a head's, at addresses that are no multiple of 16 bytes
        if case.layout == "fused":
            return views(made.flatten(0, 1)).unflatten(0, made.shape[:2])
        return made if case.layout == "heads" else made.transpose(1, 2).contiguous().transpose(1, 2)

    impl = backend.get_impl_cls()(case.num_heads, case.head_size, case.scale, case.causal, case.num_kv_heads)
    mask = None if call.given_mask is None else torch.from_numpy(call.given_mask)
    joint = None if call.joint is None else list(map(tensor, call.joint))
    with torch.no_grad():
        out: torch.Tensor = attend(impl, call, list(map(tensor, (call.query, call.key, call.value))), mask, joint)
    assert out.dtype == getattr(torch, case.dtype)
    return out.double().cpu().numpy()


def _device(backend: Any) -> str:
    if is_interpreted(backend):
        correct_bfloat16()
        return "cpu"
    return "cuda" if torch.cuda.is_available() and {"cuda", "rocm"} & set(backend.capabilities.platforms) else "cpu"


_AT_ONCE = 1 << 16  #: rows


def vast(backend: Any, case: DenseCase) -> Iterator[Sampled]:
    """Run a diffusion backend on a call too large to copy from the device; yield samples at `vast_places`."""
    device, dtype = _device(backend), getattr(torch, case.dtype)
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, heads: int) -> torch.Tensor:
        whole = torch.empty(case.batch, rows, heads, case.head_size, dtype=dtype, device=device)
        for part in whole.flatten(0, 1).split(_AT_ONCE):
            part.normal_(generator=generator)
        return whole

    rows, keys = case.rows + case.joint[0], case.keys + case.joint[1]
    query, key, value = (normal(n, h) for n, h in ((rows, case.num_heads), *((keys, case.num_kv_heads),) * 2))
    places, group = vast_places(case), case.num_heads // case.num_kv_heads
    for b, h, length, pairs in places:
        strength = (np.log(length) + 3.5) * case.head_size**-0.5  # the key's weight is about 30 times all others'
        for row, target in pairs:
            query[b, row, h] = query[b, row, h] / 4 + strength * key[b, target, h // group]
    meta = DiffusionAttentionMetadata(joint_strategy="rear" if case.rear else "front", kv_lens=case.lens or None)
    for b, length in enumerate(case.lens):
        # keys past an entry's length may hold anything, and must not be read into a result
        key[b, length:] = value[b, length:] = torch.nan
    tensors = [query, key, value]
    if case.joint[1]:
        assert not case.rear  # the joint stream's rows come first
        split = case.joint + case.joint[1:]
        meta.joint_query, meta.joint_key, meta.joint_value = (x[:, :n] for x, n in zip(tensors, split, strict=True))
        tensors = [x[:, n:] for x, n in zip(tensors, split, strict=True)]
    impl = backend.get_impl_cls()(case.num_heads, case.head_size, case.scale, case.causal, case.num_kv_heads)
    with torch.no_grad():
        out: torch.Tensor = impl.forward(*tensors, meta)
    assert out.shape == query.shape and out.dtype == dtype
    finite = all(bool(torch.isfinite(part).all()) for part in out.flatten(0, 1).split(_AT_ONCE))
    for b, h, length, pairs in places:
        at = [row for row, _ in pairs]
        parts = (query[b, at, h], out[b, at, h], key[b, :length, h // group], value[b, :length, h // group])
        q, o, k, v = (x.float().cpu().numpy() for x in parts)
        yield Sampled(q, o, k, v, finite)
