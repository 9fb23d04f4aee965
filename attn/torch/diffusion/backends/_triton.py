"""What our own dense backends share: the hooks, with one launch behind both, and keys that are there put first."""

import torch

from attn.diffusion.backends.dense import DenseCall
from attn.torch.diffusion.backends._dense import DenseBackend, DenseImpl


class TritonBackend(DenseBackend):
    """Base of the backends whose kernels are ours."""

    @staticmethod
    def is_interpreted() -> bool:
        """Whether TRITON_INTERPRET has the kernels interpreted on the host, wherever the tensors are."""
        import triton

        return bool(triton.knobs.runtime.interpret)


class TritonImpl(DenseImpl):
    """The hooks. A subclass sets `backend` and writes `_launch`."""

    can_return_lse = True

    def _attend(self, call: DenseCall) -> torch.Tensor:
        return self._launch(call, None)

    def _attend_lse(self, call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
        batch, rows = call.query.shape[:2]
        lse = torch.empty(self.num_heads, batch, rows, dtype=torch.float32, device=call.query.device).transpose(0, 1)
        return self._launch(call, lse), lse

    def _launch(self, call: DenseCall, lse: torch.Tensor | None) -> torch.Tensor:
        """The output [B, S, H, D]. lse: [B, H, S] to be filled, heads outermost in memory, or None."""
        raise NotImplementedError


def front(call: DenseCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(key, value, lens [B] int32 on the device): each entry's keys that are there are its first ones.

    Without causality the order of keys means nothing. Nothing waits for the device.
    """
    key, value = call.key, call.value
    batch, length = key.shape[:2]
    if call.present is None:
        return key, value, torch.full((batch,), length, dtype=torch.int32, device=key.device)
    if call.lens is None:
        order = (~call.present).to(torch.uint8).argsort(dim=1, stable=True)[..., None, None]
        key, value = (x.gather(1, order.expand_as(x)) for x in (key, value))
    return key, value, call.present.sum(1, dtype=torch.int32)
