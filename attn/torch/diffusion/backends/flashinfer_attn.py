"""FLASHINFER_ATTN: FlashInfer's ragged wrapper (CUTLASS on Blackwell, FA3 on Hopper, FA2 elsewhere), keys packed.

A plan is cached by shape, so the steps and layers of a denoising run share it.
"""

import functools
from typing import Any

import torch

from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.diffusion.backends.dense import DenseCall
from attn.errors import UnsupportedError
from attn.torch import records
from attn.torch.backends._flashinfer import workspace
from attn.torch.backends._vendor import LN2, arch_of, int32
from attn.torch.diffusion.backends._dense import DenseImpl, pack, state_of_nothing, without_keys_zeroed


class FlashInferAttentionBackend(DiffusionAttentionBackend):
    name = "FLASHINFER_ATTN"
    capabilities = records.FLASHINFER(head_sizes=(64, 128, 256))


class FlashInferAttentionImpl(DenseImpl, backend=FlashInferAttentionBackend):
    can_return_lse = True

    def _attend(self, call: DenseCall) -> torch.Tensor:
        return self._run(call)[0]

    def _attend_lse(self, call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
        arch = arch_of(call.query.device)
        # 1e-3 in bfloat16, more than a log-sum-exp may be wrong by; the output, which the same sums divide, is within its
        # tolerance
        if arch.startswith("sm_") and not arch.startswith(("sm_90", "sm_10")):
            raise UnsupportedError(
                f"FLASHINFER_ATTN: lse on {arch}: FlashInfer's FA2 kernels sum rounded weights (supports sm_90, sm_10*)"
            )
        return self._run(call)

    def _run(self, call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
        if (nothing := state_of_nothing(call)) is not None:
            return nothing
        query, (batch, rows) = call.query, call.query.shape[:2]
        key, value, lens = pack(call)
        shape = (self.num_heads, self.num_kv_heads, self.head_size)
        # a plan reads lengths on the host, which `pack` has fetched
        wrapper = _planned(query.device, query.dtype, rows, tuple(lens.tolist()), shape, self.causal, self.scale)
        out, lse = wrapper.run(query.flatten(0, 1).contiguous(), key.contiguous(), value.contiguous(), return_lse=True)
        # the wrapper's log-sum-exp is base 2, [T, H]
        out, lse = out.unflatten(0, (batch, rows)), (lse * LN2).unflatten(0, (batch, rows)).transpose(1, 2)
        return without_keys_zeroed(call, out, lse, self.causal)


@functools.lru_cache(8)
def _planned(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    lens: tuple[int, ...],
    shape: tuple[int, int, int],
    causal: bool,
    scale: float,
) -> Any:
    """shape: query heads, kv heads, head size."""
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD")
    starts = int32(range(0, (len(lens) + 1) * rows, rows))
    bounds = int32([0, *torch.tensor(lens).cumsum(0).tolist()])
    wrapper.plan(starts, bounds, *shape, causal=causal, sm_scale=scale, q_data_type=dtype, kv_data_type=dtype)
    return wrapper
