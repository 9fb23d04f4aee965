"""`attn.torch.scaled_dot_product_attention`: torch's function of that name over the diffusion registry's backends."""

import contextlib
import threading
from collections.abc import Generator

import torch
import torch.nn.functional as F

from attn.backends.arguments import check_flag, fold_sign
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.errors import ShapeError, UnsupportedError
from attn.torch.alignment import aligned
from attn.torch.diffusion.chosen import chosen_impl, known

#: `name` is the backend that this thread requested. Thread-local, not a context variable, which a graph cannot guard on.
_requested = threading.local()


@torch.compiler.assume_constant_result  # graphs cannot trace into the registry
def _name_of(backend: DiffusionAttentionBackendEnum | str) -> str:
    """The backend's name. Raises ValueError for an unknown one."""
    member = backend if isinstance(backend, DiffusionAttentionBackendEnum) else DiffusionAttentionBackendEnum[backend]
    return str(member.name)


@contextlib.contextmanager
def sdpa_backend(backend: DiffusionAttentionBackendEnum | str | None) -> Generator[None, None, None]:
    """Within the block, `scaled_dot_product_attention` uses this diffusion backend or fails; None restores automatic choice.

    Applies to this thread and also to graphs of `torch.compile`, which are recompiled when it changes. Modelled on
    `torch.nn.attention.sdpa_kernel`. Raises ValueError for an unknown backend.
    """
    name = None if backend is None else _name_of(backend)
    before = getattr(_requested, "name", None)
    _requested.name = name
    try:
        yield
    finally:
        _requested.name = before


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention with the signature and the semantics of `torch.nn.functional.scaled_dot_product_attention`.

    query: [..., H, L, E]; key: [..., K, S, E]; value: [..., K, S, Ev]; attn_mask: bool, True = attend, or floats to be added,
    broadcastable to [..., H, L, S]; is_causal aligns the first row with the first key (top-left). Returns [..., H, L, Ev]; a
    row that sees no key is 0. The diffusion registry chooses the backend (`sdpa_backend` and ATTN_DIFFUSION_BACKEND force one).
    Masks of floats run torch's own function, unless a backend is forced. Raises `ShapeError`, and `UnsupportedError` with
    reasons; dropout is not supported.
    """
    is_causal, enable_gqa = check_flag("is_causal", is_causal), check_flag("enable_gqa", enable_gqa)
    if dropout_p:
        raise UnsupportedError(f"dropout_p={dropout_p}: dropout of attention weights is not supported")
    if query.ndim < 3 or key.ndim != query.ndim or value.ndim != query.ndim:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ShapeError(f"query, key, value have shapes {shapes}: must be [..., heads, rows, head_size] of equal rank")
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal and attn_mask: pass only one of them")
    requested = getattr(_requested, "name", None)
    if scale is None:
        scale = known(query.shape[-1]) ** -0.5
    else:
        scale = known(scale)
        query, scale = fold_sign(query, scale), abs(scale)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        if requested is not None:
            raise UnsupportedError(f"{requested}: attn_mask of {attn_mask.dtype}: additive masks are not supported")  # type: ignore[union-attr]
        query, key, value = aligned(query), aligned(key), aligned(value)
        attn_mask = aligned(attn_mask, strides=False)  # torch pads a mask whose strides are odd
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    rows, width = query.shape[-2], value.shape[-1]
    if is_causal and key.shape[-2] > rows:
        key, value = key[..., :rows, :], value[..., :rows, :]  # keys that no row sees
    if is_causal and key.shape[-2] < rows:
        attn_mask = torch.ones(rows, key.shape[-2], dtype=torch.bool, device=query.device).tril()
        is_causal = False
    if key.shape[-3] != query.shape[-3] and not enable_gqa:
        raise ShapeError(f"key has {key.shape[-3]} heads, query {query.shape[-3]}: must be equal unless enable_gqa=True")
    lead = query.shape[:-3]
    mask = None
    if attn_mask is not None:
        mask = torch.broadcast_to(attn_mask, (*lead, *attn_mask.shape[-3:])) if attn_mask.ndim > 3 else attn_mask
        mask = mask.reshape(-1, *mask.shape[-3:]) if mask.ndim > 3 else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if width > query.shape[-1]:
        query, key = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key))  # zeros do not change scores
    elif width < query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - width))
    q, k, v = (x.reshape(-1, *x.shape[-3:]).transpose(1, 2) for x in (query, key, value))
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    impl = chosen_impl(
        requested,
        0.0,
        q.device.type,
        q.shape[2],
        k.shape[2],
        q.shape[3],
        q.dtype,
        scale,
        is_causal,
        mask is not None,
        wants_grad,
        False,
        q.shape[1],
        k.shape[1],
    )
    out: torch.Tensor = impl.forward(q, k, v, DiffusionAttentionMetadata(attn_mask=mask))
    return out.transpose(1, 2)[..., :width].reshape(*lead, out.shape[2], rows, width)
