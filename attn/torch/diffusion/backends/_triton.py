"""What our own dense backends share: Triton's switches, and keys that are there put first."""

import torch

from attn.diffusion.backends.dense import Keys
from attn.torch.diffusion.backends._dense import DenseBackend


class TritonBackend(DenseBackend):
    """Base of the backends whose kernels are ours."""

    @staticmethod
    def is_interpreted() -> bool:
        """Whether TRITON_INTERPRET has the kernels interpreted on the host, wherever the tensors are."""
        import triton

        return bool(triton.knobs.runtime.interpret)


def front(keys: Keys, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(key, value, lens [B] int32 on the device): each entry's keys that are there are its first ones.

    Without causality the order of keys means nothing. Nothing waits for the device.
    """
    batch, length = key.shape[:2]
    if keys.present is None:
        return key, value, torch.full((batch,), length, dtype=torch.int32, device=key.device)
    if keys.lens is None:
        order = (~keys.present).to(torch.uint8).argsort(dim=1, stable=True)[..., None, None]
        key, value = (x.gather(1, order.expand_as(x)) for x in (key, value))
    return key, value, keys.present.sum(1, dtype=torch.int32)
