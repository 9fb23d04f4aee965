"""Block-sparse attention (Phi-3-small): local blocks and every n-th column of blocks, by the kernels of TRITON_ATTN.

The pattern is that of docs/semantics.md §13: query block qb sees key block kb if kb <= qb and either qb - kb < local_blocks or
(kb + shift + 1) % vert_stride == 0, with one shift per head unless `homo_head`. Tiles of keys that no head of a group attends
are not loaded, which is the gain over a dense kernel. The selector's `is_blocksparse` selects this backend.
"""

from dataclasses import dataclass
from typing import Any

from attn.capabilities import MASK_FEATURES, WINDOW_FEATURES, AttentionType, Device, Feature, Request
from attn.torch.backends import _triton


@dataclass(frozen=True)
class BlocksparseParams:
    """The pattern.

    homo_head: whether all heads have the same pattern. head_offset: the first global head of this rank. total_heads: the
    number of heads on all ranks (None: this rank's).
    """

    block_size: int = 64
    local_blocks: int = 16
    vert_stride: int = 8
    homo_head: bool = False
    head_offset: int = 0
    total_heads: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("block_size", 1), ("local_blocks", 0), ("vert_stride", 1), ("head_offset", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"blocksparse_params: {name}={value!r} must be an int of at least {least}")


class BlocksparseFlashAttentionBackend(_triton.TritonPagedBackend):
    name = "BLOCKSPARSE"
    capabilities = _triton.capabilities(
        ("cuda", "rocm"),
        attn_types=(AttentionType.DECODER,),
        features=_triton.FEATURES - WINDOW_FEATURES - MASK_FEATURES | {Feature.BLOCK_SPARSE},
    )

    @classmethod
    def off_paths(cls, device: Device | None = None) -> tuple[str, ...]:
        return ()  # block-sparse patterns always use the general kernels

    @classmethod
    def rules(cls, device: Device | None = None) -> tuple[str, ...]:
        return ()


class BlocksparseFlashAttentionImpl(_triton.TritonPagedImpl, backend=BlocksparseFlashAttentionBackend):
    """Takes the arguments of `PagedImpl`, and `blocksparse_params`: a `BlocksparseParams` or a dict of its fields; None for the
    defaults."""

    def __init__(self, *args: Any, blocksparse_params: BlocksparseParams | dict[str, Any] | None = None, **kwargs: Any) -> None:
        params = blocksparse_params or BlocksparseParams()
        self.params = BlocksparseParams(**params) if isinstance(params, dict) else params
        super().__init__(*args, **kwargs)

    def request(self) -> Request:
        dense = super().request()
        return Request(**{**vars(dense), "features": dense.features | {Feature.BLOCK_SPARSE}})

    def _sparse(self) -> list[int]:
        p = self.params
        # As Phi-3-small's own kernel has it: columns are spread over all heads of the layer, at least one apart.
        shift = 0 if p.homo_head else max(1, p.vert_stride // (p.total_heads or self.num_heads))
        return [p.block_size, p.local_blocks, p.vert_stride, shift, p.head_offset]
