"""TRITON_MLA_SPARSE: MLA over chosen keys by this package's own Triton kernel, on NVIDIA and AMD GPUs.

The kernel of TRITON_MLA, with one tile per token that holds its heads. It reads the rows that the token's indices list instead
of the whole sequence, and splits that list as a decode splits its sequence.
"""

import torch

from attn.capabilities import Device, Feature, Request
from attn.torch.backends import _hopper
from attn.torch.backends._triton import TritonPagedBackend
from attn.torch.backends.mla import _triton
from attn.torch.backends.mla._mla import DecodeCall
from attn.torch.backends.mla._sparse import SparseMLABackend, SparseMLAImpl
from attn.torch.interpreter import judged_on


class TritonMLASparseBackend(SparseMLABackend):
    name = "TRITON_MLA_SPARSE"
    is_interpreted = staticmethod(TritonPagedBackend.is_interpreted)
    capabilities = _triton.capabilities(frozenset({Feature.SPARSE_MLA, Feature.LSE, Feature.NAN_SAFE}))

    @classmethod
    def off_paths(cls, device: Device | None = None) -> tuple[str, ...]:
        return _hopper.off_paths("hopper_mla", device)

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        return super().why_not(request, judged_on(device)) + _triton.device_reasons(request, device)


class TritonMLASparseImpl(SparseMLAImpl, _triton.TritonKernelsImpl, backend=TritonMLASparseBackend):
    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._launch(call, self._indices(call))
