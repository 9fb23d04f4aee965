"""Base classes of the dense backends that use this package's Triton kernels."""

import torch

from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.diffusion.backends.dense import DenseCall
from attn.torch.diffusion.backends._dense import DenseImpl


class TritonBackend(DiffusionAttentionBackend):
    """Base of the backends that use this package's Triton kernels."""

    @staticmethod
    def is_interpreted() -> bool:
        """Whether TRITON_INTERPRET makes the kernels run interpreted on the host, on whichever device the tensors are."""
        import triton

        return bool(triton.knobs.runtime.interpret)


class TritonImpl(DenseImpl):
    """Base of the implementations. A subclass names its backend and implements `_launch`, which both hooks call."""

    can_return_lse = True

    def _attend(self, call: DenseCall) -> torch.Tensor:
        return self._launch(call, None)

    def _attend_lse(self, call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
        batch, rows = call.query.shape[:2]
        # in memory [H, B, S], which is the paged kernel's [H, T] without a copy
        lse = torch.empty(self.num_heads, batch, rows, dtype=torch.float32, device=call.query.device).transpose(0, 1)
        return self._launch(call, lse), lse

    def _launch(self, call: DenseCall, lse: torch.Tensor | None) -> torch.Tensor:
        """Return the output [B, S, H, D]. lse: [B, H, S] to be filled, heads outermost in memory, or None."""
        raise NotImplementedError


def present_first(call: DenseCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (key, value, lens [B] int32 on the device) with the present keys of each entry moved to its start.

    Without causality the order of keys is irrelevant. Does not wait for the device.
    """
    key, value = call.key, call.value
    batch, length = key.shape[:2]
    if call.present is None:
        return key, value, torch.full((batch,), length, dtype=torch.int32, device=key.device)
    # with `lens` the present keys are first already
    if call.lens is None:
        # stable, so that the order of keys, and with it the result's bits, does not change between calls
        order = (~call.present).to(torch.uint8).argsort(dim=1, stable=True)[..., None, None]
        key, value = (x.gather(1, order.expand_as(x)) for x in (key, value))
    return key, value, call.present.sum(1, dtype=torch.int32)
