"""The torch driver of the dense family's suite: a call in NumPy becomes tensors, and comes back."""

from typing import Any

import numpy.typing as npt
import torch

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.testing.dense import DenseCall

Array = npt.NDArray[Any]


def dense(backend: Any, call: DenseCall) -> Array:
    """A diffusion backend's answer to a call of the dense family, [B, S, H, D] in float64."""
    case = call.case

    served = backend.capabilities.platforms
    device = "cuda" if torch.cuda.is_available() and {"cuda", "rocm"} & set(served) else "cpu"

    def tensor(values: Array) -> torch.Tensor:
        return torch.from_numpy(values.copy()).to(device, getattr(torch, case.dtype))

    impl = backend.get_impl_cls()(case.num_heads, case.head_size, case.scale, case.causal, case.num_kv_heads)
    meta = DiffusionAttentionMetadata(joint_strategy="rear" if case.rear else "front")
    if case.lens:
        meta.kv_lens = case.lens
    elif call.present is not None or call.mask is not None:
        given = call.present if call.mask is None else call.mask
        meta.attn_mask = torch.from_numpy(given)
    if call.joint is not None:
        query, meta.joint_key, meta.joint_value = map(tensor, call.joint)
        meta.joint_query = query if query.shape[1] else None
    with torch.no_grad():
        out: torch.Tensor = impl.forward(tensor(call.query), tensor(call.key), tensor(call.value), meta)
    assert out.dtype == getattr(torch, case.dtype)
    array: Array = out.double().cpu().numpy()
    return array
