"""Sequences too long for one device: Ulysses and ring attention (`attn.diffusion.parallel`) over `torch.distributed` groups."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.parallel import BaseSequenceParallel
from attn.errors import UnsupportedError


class SequenceParallelAttention(BaseSequenceParallel, nn.Module):
    """`DiffusionAttention` over a sequence that is sharded over a group of ranks.

    Arguments are those of `DiffusionAttention` (num_heads and num_kv_heads of the whole layer), and:
        group: a `torch.distributed` process group; the default one when None.
        strategy: "ulysses" or "ring"; a ring's layer is chosen among backends that return the log-sum-exp.

    Raises ValueError for an unknown strategy, `ShapeError` for heads that the ranks do not divide, `UnsupportedError` for
    causal rings and, with every candidate's reasons, for a layer that no backend serves.
    """

    framework, members = "torch", "ranks"

    def _join(self, *, group: Any = None, **choice: Any) -> dict[str, Any]:  # type: ignore[override]
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        return choice

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: DiffusionAttentionMetadata | None = None,
    ) -> torch.Tensor:
        """query: [B, S / W, H, D]; key, value: [B, M / W, K, D]: this rank's rows, the same number on every rank.

        attn_mask: bool [B, M / W], this rank's keys. Joint streams are replicated on every rank, as are their rows in the
        result: [B, J + S / W, H, D]. Returns this rank's rows. Raises `UnsupportedError` for arrays that require gradients.
        """
        meta = attn_metadata or DiffusionAttentionMetadata()
        arrays = {"query": query, "key": key, "value": value, "joint_query": meta.joint_query}
        arrays |= {"joint_key": meta.joint_key, "joint_value": meta.joint_value}
        if torch.is_grad_enabled():
            # an exchange makes new arrays that no gradient flows through, so they would be lost in silence
            for name, array in arrays.items():
                if array is not None and array.requires_grad:
                    raise UnsupportedError(f"{self.strategy}: {name} requires grad: exchanges between ranks have no gradients")
        self.local.follow(query.device)
        return self._attend(query, key, value, attn_metadata)

    def _exchanged(self, x: torch.Tensor, split: int, join: int) -> torch.Tensor:
        # [W, ...]: the exchange sends slice i to rank i, and takes contiguous arrays only
        sent = x.unflatten(split, (self.size, x.shape[split] // self.size)).movedim(split, 0).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        # in the order of ranks, which is that of the sequence and of the heads
        return received.movedim(0, join).flatten(join, join + 1)

    def _gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        gathered = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(gathered, x.contiguous(), group=self.group)
        return torch.cat(gathered, dim)

    def _own_heads(self, x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.chunk(self.size, 2)[self.rank]

    def _passed(self, arrays: list[torch.Tensor | None]) -> Callable[[], list[torch.Tensor | None]]:
        # point-to-point operations take ranks of the whole job, not of the group
        group: Any = self.group or dist.group.WORLD
        after = dist.get_global_rank(group, (self.rank + 1) % self.size)
        before = dist.get_global_rank(group, (self.rank - 1) % self.size)
        arrived = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in arrays]
        moves = []
        for sent, received in zip(arrays, arrived, strict=True):
            if sent is not None and received is not None:
                # not every library of a process group sends bools; the view shares memory with what is returned
                sent, received = (x.view(torch.uint8) if x.dtype == torch.bool else x for x in (sent.contiguous(), received))
                moves.append(dist.P2POp(dist.isend, sent, after, group))
                moves.append(dist.P2POp(dist.irecv, received, before, group))
        # All at once: a ring in which each rank first sends and then receives could wait for itself.
        requests = dist.batch_isend_irecv(moves)

        def waited() -> list[torch.Tensor | None]:
            for request in requests:
                request.wait()
            return arrived

        return waited
