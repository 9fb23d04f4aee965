"""TRITON_ATTN: this package's own Triton kernel on dense batches: exact, any head size, on NVIDIA and AMD GPUs.

It is the paged kernel; repeated decodes (`launcher`) have a kernel of their own. On Hopper, rows are passed to its kernel
directly (`EqualPrompts`). Elsewhere a sequence that attends itself is passed directly, as for encoders; other keys are passed
as a cache with pages in order, for which the length is padded to a multiple of a page. Present keys are moved to the start,
unless lengths say that they are there.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from attn.capabilities import Device, MultipleOf
from attn.diffusion.backends.dense import DenseCall
from attn.kernels import hopper
from attn.kernels.hopper_prefill_launch import keys_below
from attn.kernels.launch import UNBOUNDED
from attn.torch import records
from attn.torch.backends import _hopper
from attn.torch.diffusion.backends._dense import state_of_nothing
from attn.torch.diffusion.backends._triton import TritonBackend, TritonImpl, present_first

_FEW = 16  #: rows of a decode, whose keys are split among programs
_PAGE = 128  #: keys per page; the Hopper kernel copies a tile of 128 at once from pages of that size


class TritonAttentionBackend(TritonBackend):
    name = "TRITON_ATTN"
    capabilities = records.TRITON(head_sizes=(MultipleOf(8, 32, 256),))

    @classmethod
    def off_paths(cls, device: Device | None = None) -> tuple[str, ...]:
        return _hopper.off_paths("hopper_prefill", device)


class TritonAttentionImpl(TritonImpl, backend=TritonAttentionBackend):
    traces_rows = masks_rows = True

    def launcher(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        return self._launcher(super().launcher(query, key, value), query, key, None)

    def padded_launcher(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: tuple[int, ...]
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        of_device = torch.tensor(lens, dtype=torch.int32, device=query.device)
        return self._launcher(super().padded_launcher(query, key, value, lens), query, key, of_device)

    def _launcher(self, general: Any, query: torch.Tensor, key: torch.Tensor, lens: torch.Tensor | None) -> Any:
        """Return `launcher`'s function, or with lens [B] `padded_launcher`'s. general: the one that serves all arrays."""
        if query.shape[1] == 1:
            from attn.torch.kernels.dense_decode import decoder
            from attn.torch.kernels.runs import Runs

            shape = self.num_heads, self.num_kv_heads, self.head_size
            rows = decoder(query.device, query.dtype, shape, self.signed_scale)
            return rows if lens is None else functools.partial(rows, sinks=None, runs=Runs(torch.zeros_like(lens), lens))
        if not _has_launch_of_its_own(query, key):
            return general
        prompts = self._equal_prompts(self.signed_scale)

        def launch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            out = prompts(query, key, value, None, lens)
            return general(query, key, value) if out is None else out

        # `Decoder` has `bound` too: callers ask for it where a step repeats
        launch.bound = functools.partial(prompts.bound, launch, lens)  # type: ignore[attr-defined]
        return launch

    def _equal_prompts(self, scale: float) -> Any:
        from attn.torch.kernels.hopper_prefill import EqualPrompts

        return EqualPrompts(scale, self.causal)

    @functools.cached_property
    def _prompts(self) -> Any:
        """The Hopper kernel's launch; the sign of the scale is the query's by now."""
        return self._equal_prompts(self.scale)

    def _launch(self, call: DenseCall, lse: torch.Tensor | None) -> torch.Tensor:
        from attn.torch.kernels.paged_attention import paged_attention

        query, key, value = call.query, call.key, call.value
        batch, rows = query.shape[:2]
        device, length = query.device, key.shape[1]
        if rows == 1 and lse is None:
            from attn.torch.kernels.dense_decode import row

            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            return row(q, k, v, self.scale, mask=call.present)
        if (nothing := state_of_nothing(call)) is not None:
            if lse is not None:
                lse.copy_(nothing[1])
            return nothing[0]
        lens: torch.Tensor | None = None
        pages: torch.Tensor | None = None
        if call.present is not None:
            key, value, lens = present_first(call)
        if _has_launch_of_its_own(query, key):
            state = None if lse is None else lse.transpose(0, 1).flatten(1)
            out = self._prompts(*(x.transpose(1, 2) for x in (query, key, value)), state, lens)
            if out is not None:
                return out  # type: ignore[no-any-return]
        if lens is None and rows == length:
            # read where they are, as an encoder's keys, without pages
            caches = [x.flatten(0, 1) for x in (key, value)]
        else:
            if lens is None:
                lens = torch.full((batch,), length, dtype=torch.int32, device=device)
            if short := -length % _PAGE:
                # whole pages for each batch entry; a page of padding is never read, since `lens` ends before it
                key, value = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, short)) for x in (key, value))
            caches = [x.contiguous().view(-1, _PAGE, *x.shape[2:]) for x in (key, value)]
            pages = torch.arange(caches[0].shape[0], dtype=torch.int32, device=device).view(batch, -1)
        starts = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=device)
        out = torch.empty_like(query, memory_format=torch.contiguous_format).flatten(0, 1)
        paged_attention(
            out,
            None if lse is None else lse.transpose(0, 1).flatten(1),
            query.flatten(0, 1),
            *caches,
            query_start_loc=starts,
            seq_lens=lens,
            block_table=pages,
            max_query_len=rows,
            max_seq_len=length,
            scale=self.scale,
            right=0 if self.causal else None,
            # either all requests have few enough rows for a decode's tile, or none has
            singles=False,
            # the number of keys that rows see decides the size of the Hopper kernel's tiles
            keys_below=keys_below(length, rows, UNBOUNDED, 0 if self.causal else UNBOUNDED),
        )
        return out.unflatten(0, (batch, rows))


def _has_launch_of_its_own(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether rows [B, S, H, D] over keys [B, M, K, D] are the Hopper kernel's, which reads both where they are."""
    from attn.torch.kernels.direct import arch

    # `is_on` logs why not, so it is asked on Hopper only
    rows = query.shape[1]
    return (rows > _FEW or rows == key.shape[1]) and arch() == "sm_90" and hopper.is_on("hopper_prefill")
