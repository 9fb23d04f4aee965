"""Shared code of the stand-ins for vendors' packages: strict checks, and the oracle in place of every kernel.

A stand-in has the vendor's module path and its function's exact signature, refuses what the vendor's kernel refuses or
silently computes wrongly, and answers with `attn.reference` in float64, rounded once to the vendor's output dtype. What
it shows is that an adapter's arguments mean what the vendor documents; nothing about the vendor's kernel.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from attn import reference

HALVES = (torch.float16, torch.bfloat16)


def check(name: str, tensor: Any, shape: Sequence[int | None], *dtypes: torch.dtype, contiguous: bool = False) -> None:
    """AssertionError unless `tensor` has this shape (None: any extent), one of these dtypes, and unit last stride, and
    numbers by heads can be read as vectors of 16 bytes, which vendors' kernels do without a check (pytorch#183484)."""
    assert isinstance(tensor, torch.Tensor), f"{name} is a {type(tensor).__name__}, not a tensor"
    agrees = tensor.dim() == len(shape) and all(w in (None, g) for w, g in zip(shape, tensor.shape, strict=True))
    assert agrees, f"{name} has shape {list(tensor.shape)}, not {list(shape)}"
    assert not dtypes or tensor.dtype in dtypes, f"{name} has dtype {tensor.dtype}, not one of {dtypes}"
    assert tensor.numel() < 2 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1, (
        f"{name} has last stride {tensor.stride(-1)}, not 1"
    )
    assert not contiguous or tensor.is_contiguous(), f"{name} is not contiguous"
    if tensor.is_floating_point() and tensor.dim() > 2 and tensor.numel():
        used = [step for step, extent in zip(tensor.stride()[:-1], tensor.shape, strict=False) if extent > 1]
        places = [tensor.data_ptr(), *(step * tensor.itemsize for step in used)]
        assert not any(place % 16 for place in places), f"{name}: address and strides {places}: not multiples of 16 bytes"


def bulk_copied(name: str, tensor: torch.Tensor) -> None:
    """AssertionError unless every stride but the last is a multiple of 16 bytes, as the tensor memory accelerator wants it,
    that of a dimension of one included (vllm#40737)."""
    wrong = [step for step in tensor.stride()[:-1] if step * tensor.itemsize % 16]
    assert not wrong, f"{name} has strides {tensor.stride()} of {tensor.itemsize} bytes: not multiples of 16 bytes"


def looked_up(table: torch.Tensor, lens: torch.Tensor, page: int, pages: int, tile: int) -> None:
    """AssertionError unless the entries of whole tiles of keys name pages of the cache: a kernel that takes keys a tile at a
    time looks up what is past the end too, and masks it afterwards (vllm#42494)."""
    columns = torch.arange(table.shape[1])
    read = table[columns < -(-(-(-lens // tile) * tile) // page)[:, None]]
    assert bool(((read >= 0) & (read < pages)).all()), f"page ids of a tile of {tile} keys are outside of {pages} pages"


def array(tensor: torch.Tensor) -> Any:
    """A tensor's numbers in float64, or its integers."""
    return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()


def window(sides: Sequence[int | None], causal: bool, none: int | None) -> tuple[int | None, int | None]:
    """A vendor's (left, right), `none` meaning unbounded, with its `causal` flag, as the oracle takes it."""
    left, right = (None if side == none else int(side) for side in sides)  # type: ignore[arg-type]
    return left, 0 if causal else right


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lens: Any,
    table: torch.Tensor | None,
    **rules: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, Dv] in q's dtype, lse [H, T] float32) of a ragged batch: paged where there is a table."""
    rules["causal"] = False  # causality is the window's right side
    begin = [int(x) for x in starts]
    lens = [int(x) for x in lens]
    if table is not None:
        out, lse = reference.paged_attention(
            array(q), array(k), array(v), query_start_loc=begin, seq_lens=lens, block_table=array(table), **rules
        )
    else:
        parts, row = [], 0
        for r, length in enumerate(lens):
            rows, keys = slice(begin[r], begin[r + 1]), slice(row, row + length)
            parts.append(reference.attention(array(q[rows]), array(k[keys]), array(v[keys]), **rules))
            row += length
        out = np.concatenate([o for o, _ in parts])
        lse = np.concatenate([s for _, s in parts], axis=1)
    return torch.from_numpy(out).to(q.dtype), torch.from_numpy(lse).float()


def latent(
    q: torch.Tensor, cache: torch.Tensor, starts: Any, lens: Any, table: torch.Tensor, scale: float, rank: int = 512
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA, causal: q [T, H, L + Dr] over cache [N, P, L + Dr]. (out [T, H, L] in q's dtype, lse [H, T])."""
    rows = cache[:, :, None]
    return varlen(q, rows, rows[..., :rank], starts, lens, table, scale=scale, window=(None, 0))
