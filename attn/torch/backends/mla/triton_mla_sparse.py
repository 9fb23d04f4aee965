"""TRITON_MLA_SPARSE: MLA over chosen keys by this package's own Triton kernel, on NVIDIA and AMD GPUs.

The kernel of TRITON_MLA, with one tile per token that holds its heads. It reads the rows that the token's indices list instead
of the whole sequence, and splits that list as a decode splits its sequence.
"""

from typing import Any

import torch

from attn.capabilities import Device, Feature, Request
from attn.torch.backends import _hopper
from attn.torch.backends._triton import TritonPagedBackend
from attn.torch.backends.mla import _triton
from attn.torch.backends.mla._metadata import MLACommonMetadata
from attn.torch.backends.mla._mla import DecodeCall
from attn.torch.backends.mla._sparse import SparseMLABackend, SparseMLAImpl
from attn.torch.interpreter import judged_on, prepare


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


class TritonMLASparseImpl(SparseMLAImpl, backend=TritonMLASparseBackend):
    #: Keys of a list per program; 0: the launch rule chooses by the batch.
    fixed_split_size: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare(self.backend.get_name())

    def _writes_by_kernel(self, kv_cache: torch.Tensor) -> bool:
        return True  # interpreted on a CPU, as the decode is

    def _stages(self, attn_metadata: MLACommonMetadata, signature: tuple[Any, ...]) -> Any:
        return _triton.stages(attn_metadata, signature)

    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _triton.decode(self, call, self._indices(call), self.fixed_split_size)
