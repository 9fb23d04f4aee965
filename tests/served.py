"""A layer of either framework with a filled cache and one batch, for tests of whole calls."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from attn import CommonAttentionMetadata
from attn.imports import resolve_obj_by_qualname

P = 16
LATENT = (4, 32, 16, 8, 16)  #: heads, L, Dn, Dr, Dv
Q_LENS, SEQ_LENS = [5, 1, 3], [5, 37, 20]
TABLE = [[9], [7, 4, 2], [11, 0]]  #: six of twelve pages


def array(framework: str, values: Any) -> Any:
    return torch.from_numpy(np.asarray(values)) if framework == "torch" else jnp.asarray(values)


def owned(r: int) -> slice:
    """The rows of request r."""
    return slice(sum(Q_LENS[:r]), sum(Q_LENS[: r + 1]))


class Served:
    """A layer, its filled cache (`pages` before the call), one batch and its arguments; `kind` is "torch", "jax MLA", ..."""

    def __init__(self, kind: str, backend: str | None = None, reach: dict[str, Any] | None = None, **more: Any) -> None:
        self.framework, _, latent = kind.partition(" ")
        rng = np.random.default_rng(0)
        if latent:
            heads, rank, nope, rope, value = LATENT
            up = rng.standard_normal((rank, heads, nope + value), np.float32) * rank**-0.5
            more["kv_b_proj"] = array(self.framework, up)
            shapes: list[tuple[int, ...]] = [(heads, nope + rope), (rank,), (rope,)]
        else:
            more["num_kv_heads"] = 2
            shapes = [(4, 16), (2, 16), (2, 16)]
        make = resolve_obj_by_qualname(f"attn.{self.framework}.{latent}Attention")
        self.layer = make(*(LATENT if latent else (4, 16)), block_size=P, backend=backend, **more)
        self.encoder = more.get("attn_type") == "encoder_only"
        self.rows = [rng.standard_normal((sum(Q_LENS), *shape), np.float32) for shape in shapes]
        self.cache = None if self.encoder else self.layer.new_kv_cache(12)
        if not self.encoder:
            self.pages = [rng.standard_normal((12, P, *shape), np.float32) for shape in shapes[1:]]
            self.cache = self.layer.load_pages(self.cache, range(12), *(array(self.framework, x) for x in self.pages))
        lens = Q_LENS if self.encoder else SEQ_LENS
        batch = CommonAttentionMetadata.from_lens(Q_LENS, lens, TABLE, P, writes=not self.encoder, **(reach or {}))
        self.metadata = self.layer.build(batch)

    def given(self, rows: Any = None) -> list[Any]:
        put = [array(self.framework, x) for x in (self.rows if rows is None else rows)]
        return put if self.framework == "torch" else [self.metadata.pad(x) for x in put]

    def __call__(self, rows: Any = None, **options: Any) -> Any:
        result = self.layer(*self.given(rows), self.cache, self.metadata, **options)
        return result if self.framework == "torch" else result[0]

    def sequence(self, part: int, r: int) -> Any:
        """Request r's keys (`part` 0) or values (1), in order, the new ones last."""
        stored = self.pages[part][TABLE[r]].reshape(-1, *self.pages[part].shape[2:])[: SEQ_LENS[r] - Q_LENS[r]]
        return np.concatenate([stored, self.rows[part + 1][owned(r)]])
