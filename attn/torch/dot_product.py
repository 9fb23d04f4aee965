"""`attn.torch.scaled_dot_product_attention`: torch's function of that name over the diffusion registry's backends."""

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F

from attn import envs
from attn.arguments import check_flag, fold_sign
from attn.backend_enum import generation
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.diffusion.selector import ENV_VAR
from attn.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from attn.torch.alignment import aligned
from attn.torch.autocast import autocast, enabled
from attn.torch.diffusion.backends._dense import DenseImpl
from attn.torch.diffusion.chosen import impl_for, known, properties_of
from attn.torch.metadata import keep

#: `name` is the backend that this thread requested. Thread-local, not a context variable, which a graph cannot guard on.
_requested = threading.local()
#: Torch's own function divides by the number of heads, and the process dies.
_DIES_WITHOUT_HEADS = torch.__version__ < "2.13"
#: Launches of calls, by all that decides them (`_kind`): a call like an earlier one is neither checked nor chosen for again.
#: None: such a call was made once.
_launches: dict[Any, Callable[..., torch.Tensor] | None] = {}


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
    broadcastable to the scores of query and key, [..., H, L, S]; is_causal aligns the first row with the first key (top-left).
    Returns [..., H, L, Ev]; a row that sees no key is 0. The diffusion registry chooses the backend (`sdpa_backend` and
    ATTN_DIFFUSION_BACKEND force one).
    Masks of floats and calls with an empty dimension run torch's own function, unless `sdpa_backend` forces a backend.
    `torch.autocast` casts arguments as it does for torch's function.

    Raises `ShapeError`, `DTypeError` and `DeviceError` for tensors that do not belong together, ValueError for other invalid
    arguments, and `UnsupportedError` with reasons; dropout is not supported.
    """
    kind = None
    if attn_mask is None and not dropout_p:
        kind = _kind(query, key, value, is_causal, scale, enable_gqa)
        if (launch := _launches.get(kind)) is not None:
            return launch(query, key, value).transpose(1, 2)
    is_causal, enable_gqa = check_flag("is_causal", is_causal), check_flag("enable_gqa", enable_gqa)
    if dropout_p:
        raise UnsupportedError(f"dropout_p={dropout_p}: dropout of attention weights is not supported")
    for name, array in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(array, torch.Tensor) and (array is not None or name != "attn_mask"):
            raise TypeError(f"{name} is a {type(array).__name__}: must be a torch.Tensor")
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    inputs = (query, key, value)
    query, key, value = _checked(query, key, value, attn_mask, enable_gqa)
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal and attn_mask: pass only one of them")
    requested = getattr(_requested, "name", None)
    additive = attn_mask is not None and attn_mask.dtype != torch.bool
    empty = requested is None and 0 in (*query.shape, *key.shape, *value.shape)
    no_heads = empty and query.shape[-3] == 0 and _DIES_WITHOUT_HEADS
    if empty and not no_heads:
        query, key, value = inputs  # whether torch's result has their broadcast dimensions depends on which of them are 0
    if scale is not None:
        scale = known(scale)
        # Backends of the registry and torch's own function are given a positive scale: `fold_sign` says why.
        query, scale = fold_sign(query, scale), abs(scale)
    elif not empty:
        # torch's default. A forced backend says itself what it thinks of heads of size 0.
        scale = max(1, known(query.shape[-1])) ** -0.5
    if additive and requested is not None:
        raise UnsupportedError(f"{requested}: attn_mask of {attn_mask.dtype}: additive masks are not supported")  # type: ignore[union-attr]
    if no_heads:  # with enable_gqa there may be heads of keys
        return query @ key[..., :0, :, :].transpose(-2, -1) @ value[..., :0, :, :]
    if additive or empty:
        query, key, value = aligned(query), aligned(key), aligned(value)
        attn_mask = None if attn_mask is None else aligned(attn_mask, strides=False)  # torch pads a mask whose strides are odd
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    rows, width = query.shape[-2], value.shape[-1]
    if is_causal and key.shape[-2] > rows:
        key, value = key[..., :rows, :], value[..., :rows, :]  # keys that no row sees
    if is_causal and key.shape[-2] < rows:
        # Top left, as torch has it: the registry's backends align the last row with the last key, so only a mask says this.
        attn_mask = torch.ones(rows, key.shape[-2], dtype=torch.bool, device=query.device).tril()
        is_causal = False
    lead = query.shape[:-3]
    mask = None
    if attn_mask is not None:
        # A mask [..., H, L, S] gets the query's leading dimensions, which are flattened to one below; its own last three may
        # stay 1.
        mask = torch.broadcast_to(attn_mask, (*lead, *attn_mask.shape[-3:])) if attn_mask.ndim > 3 else attn_mask
        mask = mask.reshape(-1, *mask.shape[-3:]) if mask.ndim > 3 else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if width > query.shape[-1]:
        query, key = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key))  # zeros do not change scores
    elif width < query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - width))
    # [B, L, H, E], as the registry's backends take it
    q, k, v = ((x.flatten(0, -4) if lead else x[None]).transpose(1, 2) for x in (query, key, value))
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    impl = impl_for(properties_of(q, k, scale, is_causal, mask, wants_grad, requested))
    out: torch.Tensor = impl.forward(q, k, v, None if mask is None else DiffusionAttentionMetadata(attn_mask=mask))
    as_passed = query is inputs[0] and key is inputs[1] and value is inputs[2] and mask is None
    if kind is not None and as_passed and isinstance(impl, DenseImpl):
        # made at the second call: a decode's length comes once
        keep(_launches, kind, impl.repeated(q, k, v) if kind in _launches else None)
    return out.transpose(1, 2)[..., :width].reshape(*lead, out.shape[2], rows, width)


def _kind(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Any:
    """Return all that decides a call without a mask, or None for one that is computed anew: of tensors of other types, of other
    ranks, with gradients or within `torch.autocast`."""
    if not type(query) is type(key) is type(value) is torch.Tensor or torch.compiler.is_compiling():
        return None
    q, k, v, device = query.shape, key.shape, value.shape, query.device
    if not len(q) == len(k) == len(v) == 4 or type(is_causal) is not bool or type(enable_gqa) is not bool:
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    if (scale is not None and type(scale) is not float) or enabled(device.type):
        return None
    arrays = q, k, v, query.stride(), key.stride(), value.stride(), query.dtype, key.dtype, value.dtype
    chosen_by = getattr(_requested, "name", None), generation(), envs.read(ENV_VAR), envs.read("ATTN_DISABLE")
    return *arrays, device, key.device, value.device, is_causal, scale, enable_gqa, *chosen_by


def _checked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value with their leading dimensions (and, without grouped heads, their heads) broadcast, as torch
    broadcasts them. Raises `ShapeError`, `DTypeError` and `DeviceError`."""
    inputs = (query, key, value)
    q, k, v = (x.shape for x in inputs)
    outer = -3 if enable_gqa else -2
    # Ranks first: the indices below would raise IndexError for a tensor of too few dimensions.
    ok = len(q) >= 3 and len(q) == len(k) == len(v) and q[-1] == k[-1] and k[-2] == v[-2]
    if ok and enable_gqa:
        ok = k[-3] == v[-3] and (k[-3] == 0 or q[-3] % k[-3] == 0)
    if ok and not q[:outer] == k[:outer] == v[:outer]:
        # Grouped heads without the flag, in words of their own: the shapes alone only fail to broadcast.
        if not enable_gqa and k[-3] == v[-3] != q[-3] and 1 not in (k[-3], q[-3]):
            raise ShapeError(f"key has {k[-3]} heads, query {q[-3]}: must be equal unless enable_gqa=True")
        try:
            lead = torch.broadcast_shapes(q[:outer], k[:outer], v[:outer])
        except RuntimeError:
            ok = False
        else:
            query, key, value = (x.expand(*lead, *x.shape[outer:]) for x in inputs)
    if not ok:
        shapes = ", ".join(str(list(x.shape)) for x in inputs)
        raise ShapeError(
            f"query, key, value have shapes {shapes}: must be [..., H, L, E], [..., K, S, E], [..., K, S, Ev] of equal rank, "
            "with equal heads or, with enable_gqa=True, H a multiple of K"
        )
    if not (query.dtype == key.dtype == value.dtype and query.dtype.is_floating_point):
        dtypes = ", ".join(str(x.dtype) for x in inputs)
        raise DTypeError(f"query, key, value have dtypes {dtypes}: must be one float dtype")
    if not query.device == key.device == value.device:
        raise DeviceError(f"query, key, value are on {query.device}, {key.device}, {value.device}: must be one device")
    if attn_mask is not None:
        lead = torch.broadcast_shapes(q[:outer], k[:outer])  # value's are not among the dimensions of the scores
        _check_mask(attn_mask, query, (*lead, *q[outer:-1], k[-2]))
    return query, key, value


def _check_mask(mask: torch.Tensor, query: torch.Tensor, scores: tuple[int, ...]) -> None:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise DTypeError(f"attn_mask has dtype {mask.dtype}: must be bool, float32 or the query's {query.dtype}")
    if mask.device != query.device:
        raise DeviceError(f"attn_mask is on {mask.device}: must be on the query's {query.device}")
    # `zip` from the right: a mask may lack leading dimensions
    within = 2 <= mask.ndim <= len(scores)
    if not within or any(have not in (1, want) for have, want in zip(mask.shape[::-1], scores[::-1], strict=False)):
        shape = list(mask.shape)
        raise ShapeError(f"attn_mask has shape {shape}: must have 2 dimensions or more, and broadcast to {list(scores)}")
