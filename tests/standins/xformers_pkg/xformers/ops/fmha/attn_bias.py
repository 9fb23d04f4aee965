"""xformers 0.0.35's `ops/fmha/attn_bias.py`: the block-diagonal masks, of plain and of paged keys.

`window` is the mask in the oracle's words; all are aligned to the last query and the last key of a block.
"""

from dataclasses import dataclass

import torch


@dataclass
class _SeqLenInfo:
    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens, *, device=None):
        assert not isinstance(seqlens, torch.Tensor) and all(type(n) is int and n >= 0 for n in seqlens) and len(seqlens)
        starts = [sum(seqlens[:i]) for i in range(len(seqlens) + 1)]
        return cls(torch.tensor(starts, dtype=torch.int32, device=device), max(seqlens), min(seqlens), starts)

    def lengths(self):
        return [b - a for a, b in zip(self.seqstart_py, self.seqstart_py[1:], strict=False)]


@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    seqlen_py: list[int]
    padding: int

    @classmethod
    def from_seqlens_padded(cls, seqlens, padding, *, device=None):
        assert all(seqlen <= padding for seqlen in seqlens), f"Seqlens {seqlens} Padding {padding}"
        starts = list(range(0, len(seqlens) * padding + 1, padding))
        start = torch.tensor(starts, dtype=torch.int32, device=device)
        return cls(start, max(seqlens), min(seqlens), starts, list(seqlens), padding)

    def lengths(self):
        return self.seqlen_py


@dataclass
class BlockDiagonalMask:
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    window = (None, None)

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        assert kv_seqlen is None or len(q_seqlen) == len(kv_seqlen)
        queries = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        same = kv_seqlen is None or q_seqlen == kv_seqlen
        return cls(queries, queries if same else _SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    def make_causal_from_bottomright(self):
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo)

    def make_local_attention_from_bottomright(self, window_size):
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, window_size)


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    window = (None, 0)

    def __post_init__(self):
        for queries, keys in zip(self.q_seqinfo.lengths(), self.k_seqinfo.lengths(), strict=True):
            if keys < queries:
                raise ValueError(f"num_keys={keys} and num_queries={queries}. Expected `num_keys >= num_queries`")


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    _window_size: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self._window_size <= 0:
            raise ValueError(f"Expected `window_size > 0`, but window_size={self._window_size}")
        self.window = (self._window_size - 1, 0)


@dataclass
class PagedBlockDiagonalPaddedKeysMask:
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo
    block_tables: torch.Tensor
    page_size: int

    window = (None, None)

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen, block_tables, page_size, *, device=None):
        assert len(q_seqlen) == len(kv_seqlen) and block_tables.device == device
        queries, padding = _SeqLenInfo.from_seqlens(q_seqlen, device=device), block_tables.shape[1] * page_size
        return cls(queries, _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, padding, device=device), block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    window = (None, 0)
