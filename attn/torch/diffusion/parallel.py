"""Sequences too long for one device: Ulysses and ring attention over a `torch.distributed` group.

Each rank holds S / W rows of every tensor. *Ulysses* (arXiv 2309.14509) exchanges rows for heads, so that a rank attends to
whole sequences with H / W heads. It needs two all-to-alls and supports any backend, masks and joint streams; the number of
ranks must divide the heads. *Ring* (arXiv 2310.01889) keeps queries, passes keys and values around, and merges partial
results by log-sum-exp. It supports any number of heads; it needs a backend that returns the log-sum-exp, and is not causal.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.parallel import share_heads, wanted_features
from attn.errors import UnsupportedError
from attn.torch.diffusion.layer import DiffusionAttention
from attn.torch.merge import merge_attn_states


class SequenceParallelAttention(nn.Module):
    """`DiffusionAttention` over a sequence that is sharded over a group of ranks.

    Arguments are those of `DiffusionAttention` (num_heads and num_kv_heads of the whole layer), and:
        group: a `torch.distributed` process group; the default one when None.
        strategy: "ulysses" or "ring"; a ring's layer is chosen among backends that return the log-sum-exp.

    Raises ValueError for an unknown strategy, `ShapeError` for heads that the ranks do not divide, `UnsupportedError` for
    causal rings and, with every candidate's reasons, for a layer that no backend serves.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        num_kv_heads: int | None = None,
        *,
        group: Any = None,
        strategy: str = "ulysses",
        features: Collection[str] = (),
        **choice: Any,
    ) -> None:
        super().__init__()
        self.group, self.strategy = group, strategy
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        num_heads, num_kv_heads, head_size = share_heads(
            num_heads, num_kv_heads, head_size, strategy=strategy, causal=causal, size=self.ranks, members="ranks"
        )
        wanted = wanted_features(strategy, features)
        self.local = DiffusionAttention(num_heads, head_size, softmax_scale, causal, num_kv_heads, features=wanted, **choice)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: DiffusionAttentionMetadata | None = None,
    ) -> torch.Tensor:
        """query: [B, S / W, H, D]; key, value: [B, M / W, K, D]: this rank's rows, the same number on every rank.

        attn_mask: bool [B, M / W], this rank's keys. Joint streams are replicated on every rank, as are their rows in the
        result: [B, J + S / W, H, D]. Returns this rank's rows.
        """
        meta = attn_metadata or DiffusionAttentionMetadata()
        if meta.kv_lens is not None or (meta.attn_mask is not None and meta.attn_mask.ndim != 2):
            raise UnsupportedError(f"{self.strategy}: supports only masks of keys [B, M / W] (others span the ranks)")
        if self.strategy == "ulysses":
            return self._ulysses(query, key, value, meta)
        return self._ring(query, key, value, meta)

    # --- Ulysses -----------------------------------------------------------------------------------------------------

    def _ulysses(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, meta: DiffusionAttentionMetadata
    ) -> torch.Tensor:
        whole = DiffusionAttentionMetadata(
            attn_mask=None if meta.attn_mask is None else self._gathered(meta.attn_mask, 1),
            joint_query=self._own_heads(meta.joint_query),
            joint_key=self._own_heads(meta.joint_key),
            joint_value=self._own_heads(meta.joint_value),
            joint_attn_mask=meta.joint_attn_mask,
            joint_strategy=meta.joint_strategy,
        )
        out = self.local(*(self._rows_for_heads(x) for x in (query, key, value)), whole)
        joint = 0 if meta.joint_query is None else meta.joint_query.shape[1]
        if not joint:
            return self._heads_for_rows(out)
        front = meta.joint_strategy == "front"
        text, image = (out[:, :joint], out[:, joint:]) if front else (out[:, -joint:], out[:, :-joint])
        parts = [self._gathered(text, 2), self._heads_for_rows(image)]
        return torch.cat(parts if front else parts[::-1], 1)

    def _rows_for_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange [B, S / W, H, D] of all heads for [B, S, H / W, D] of this rank's heads."""
        batch, rows, heads, size = x.shape
        sent = x.view(batch, rows, self.ranks, heads // self.ranks, size).permute(2, 0, 1, 3, 4).contiguous()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        return got.transpose(0, 1).reshape(batch, self.ranks * rows, heads // self.ranks, size)

    def _heads_for_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse exchange: [B, S, H / W, D] for [B, S / W, H, D]."""
        batch, rows, heads, size = x.shape
        sent = x.view(batch, self.ranks, rows // self.ranks, heads, size).transpose(0, 1).contiguous()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        return got.permute(1, 2, 0, 3, 4).reshape(batch, rows // self.ranks, self.ranks * heads, size)

    def _own_heads(self, x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.chunk(self.ranks, 2)[self.rank]

    def _gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    # --- ring --------------------------------------------------------------------------------------------------------

    def _ring(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, meta: DiffusionAttentionMetadata
    ) -> torch.Tensor:
        impl, front = self.local.impl, meta.joint_strategy == "front"
        if meta.joint_query is not None:  # its rows see every key on every rank, so the results are equal
            query = torch.cat([meta.joint_query, query] if front else [query, meta.joint_query], 1)
        outs: list[torch.Tensor] = []
        lses: list[torch.Tensor] = []
        if meta.joint_key is not None:  # replicated on every rank: it counts once
            part = DiffusionAttentionMetadata(attn_mask=meta.joint_attn_mask)
            out, lse = impl.forward_lse(query, meta.joint_key, meta.joint_value, part)
            outs, lses = [out], [lse]
        current = [key, value, *([] if meta.attn_mask is None else [meta.attn_mask.to(torch.uint8)])]
        for step in range(self.ranks):
            pending = self._start_exchange(current) if step < self.ranks - 1 else None
            part = DiffusionAttentionMetadata(attn_mask=current[2].bool() if len(current) == 3 else None)
            out, lse = impl.forward_lse(query, current[0], current[1], part)
            outs.append(out)
            lses.append(lse)
            if pending is not None:
                arrived, requests = pending
                for request in requests:
                    request.wait()
                current = arrived
        batch, rows = query.shape[:2]
        merged, _ = merge_attn_states(
            [out.to(lses[0].dtype).flatten(0, 1) for out in outs], [lse.transpose(0, 1).flatten(1) for lse in lses]
        )
        return merged.to(query.dtype).unflatten(0, (batch, rows))

    def _start_exchange(self, current: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any]]:
        """Start sending this rank's arrays to the next rank and receiving the previous rank's. Returns (buffers, requests)."""
        group: Any = self.group or dist.group.WORLD
        after = dist.get_global_rank(group, (self.rank + 1) % self.ranks)
        before = dist.get_global_rank(group, (self.rank - 1) % self.ranks)
        arrived = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in current]
        moves = []
        for sent, received in zip(current, arrived, strict=True):
            moves.append(dist.P2POp(dist.isend, sent.contiguous(), after, group))
            moves.append(dist.P2POp(dist.irecv, received, before, group))
        return arrived, dist.batch_isend_irecv(moves)
