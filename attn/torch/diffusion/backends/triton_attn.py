"""TRITON_ATTN: our own Triton kernel on dense batches: exact, any head size, on NVIDIA and AMD GPUs.

It is the paged kernel: dense keys are a cache whose pages lie in order. A length that is no multiple of a page is padded
once; key masks pack.
"""

import torch

from attn.capabilities import Capabilities, MultipleOf
from attn.diffusion.backends.dense import Keys
from attn.torch.diffusion.backends._dense import DenseBackend, DenseImpl

_PAGE = 64


class TritonAttentionBackend(DenseBackend):
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda", "rocm"),
        dtypes=("bfloat16", "float16", "float32"),
        head_sizes=(MultipleOf(8, 32, 256),),
        packages=("triton",),
        archs=(("cuda", ("sm_80+",)),),
    )

    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"

    @staticmethod
    def get_impl_cls() -> type["TritonAttentionImpl"]:
        return TritonAttentionImpl


class TritonAttentionImpl(DenseImpl):
    backend = TritonAttentionBackend
    can_return_lse = True

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: Keys) -> torch.Tensor:
        return self._run(query, key, value, keys, None)

    def _attend_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: Keys
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, rows = query.shape[:2]
        lse = torch.empty(self.num_heads, batch * rows, dtype=torch.float32, device=query.device)
        out = self._run(query, key, value, keys, lse)
        return out, lse.unflatten(1, (batch, rows)).transpose(0, 1)

    def _run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: Keys, lse: torch.Tensor | None
    ) -> torch.Tensor:
        from attn.torch.kernels.paged_attention import paged_attention

        batch, rows = query.shape[:2]
        device = query.device
        if keys.present is None:
            lens = torch.full((batch,), key.shape[1], dtype=torch.int32, device=device)
        else:  # without causality the order of keys means nothing: those that are there come first
            order = (~keys.present).to(torch.uint8).argsort(dim=1, stable=True)[..., None, None]
            key, value = (x.gather(1, order.expand_as(x)) for x in (key, value))
            lens = keys.present.sum(1, dtype=torch.int32)
        if short := -key.shape[1] % _PAGE:
            key, value = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, short)) for x in (key, value))
        length = key.shape[1]
        pages = torch.arange(batch * length // _PAGE, dtype=torch.int32, device=device).view(batch, -1)
        cached = (x.contiguous().view(-1, _PAGE, *x.shape[2:]) for x in (key, value))
        starts = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=device)
        out = torch.empty_like(query).flatten(0, 1)
        paged_attention(
            out, lse, query.flatten(0, 1), *cached, starts, lens, pages, rows, length - short, self.scale, None,
            0 if self.causal else None, None, 0.0, None, None,
        )  # fmt: skip
        return out.unflatten(0, (batch, rows))
