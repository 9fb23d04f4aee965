"""transformers: `attn` as an attention implementation, dense and in its continuous batching.

    from attn.integrations import transformers as attn_transformers
    attn_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attn")            # the fastest for each call
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attn:FLASHINFER")  # one by name, or refused
    with attn_transformers.paged(model):                                                      # continuous batching
        model.generate_batch(...)

A call goes one of four ways, by what it needs alone:

* dense: causal squares, single tokens, bidirectional calls, masks that are no pattern: the diffusion registry's choice.
* packed: whatever else is causal, a window, a cap or sinks: rows without padding, over a paged cache made for the call, by
  the attention registry's choice. A backend asked for by name takes every call this way.
* paged: continuous batching, in transformers' own pages where a layer keeps all of its keys, else packed.
* formula: `attn.attention`, in float32 and differentiable, for what no kernel has: a mask beside a cap, a window or sinks,
  gradients beside them, values wider than keys.

Masks are described, not drawn, while they are a causal, windowed or bidirectional pattern with padding (`mask`); any other
becomes boolean [B, 1, S, T], which is known again as such a pattern where that matters. In a graph (`torch.compile`) masks are
drawn; the dense way is traced, any other is one operator.

Arguments that are known to change what attention means and are not served (`_UNKNOWN`, dropout, weights asked for) are refused
with the layer's name; whatever else transformers hands on beside a call is not looked at. Written against transformers 5.23,
whose attention and mask interfaces it fills; another one's absence is a sentence, not a crash.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import attn
from attn.backends.metadata import CommonAttentionMetadata, slots_of
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import AttentionType, Feature, supports_size
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.errors import BackendLoadError, UnsupportedError
from attn.torch import kv_cache as caches
from attn.torch.diffusion.chosen import chosen_impl
from attn.torch.graphs import uncaptured
from attn.torch.layer import Attention

NAME = "attn"
#: What continuous batching takes for an implementation that wants no mask: transformers looks for this word in the name.
PAGED_NAME = "attn_flash"
_BLOCK_SIZES = (16, 32, 64, 128, 256)
#: Words of a call that change what attention means and that have no place here, and the feature that backends call it.
_UNKNOWN = {
    "alibi": Feature.ALIBI, "alibi_slopes": Feature.ALIBI, "head_mask": None, "block_mask": None,
    "indexer": Feature.SPARSE_MLA, "chunk_size": None,
}  # fmt: skip


def register() -> tuple[str, ...]:
    """Add "attn" and "attn:<NAME>" for each paged torch backend to transformers' implementations; again is harmless.

    Returns the names. Raises `BackendLoadError` where transformers is missing or has no such interfaces.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise BackendLoadError(
            f"transformers' attention interface cannot be imported: {error} (pip install transformers)"
        ) from error
    named = [m for m in AttentionBackendEnum if str(m.value or "").startswith("attn.torch.") and ".mla." not in str(m.value)]
    names: dict[str, str | None] = {NAME: None, PAGED_NAME: None}
    for member in named:
        names |= {f"{NAME}:{member.name}": member.name, f"{PAGED_NAME}:{member.name}": member.name}
    for name, backend in names.items():
        AttentionInterface.register(name, _function(backend))
        AttentionMaskInterface.register(name, mask)
    return tuple(name for name in names if not name.startswith(PAGED_NAME))


@contextlib.contextmanager
def paged(model: Any, backend: str | None = None) -> Generator[Any, None, None]:
    """`model` with attention that `generate_batch` takes, in the block; the implementation it had comes back after.

    transformers admits to continuous batching what is called eager, sdpa or flash-something, and loads what it is told to by
    the last; so the name is put into the config past that.
    """
    register()
    name = PAGED_NAME if backend is None else f"{PAGED_NAME}:{backend}"
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield model
    finally:
        model.config._attn_implementation = before


# --- masks -----------------------------------------------------------------------------------------------------------


@dataclass
class Padding:
    """What a described mask says beside the keys that are there: its window; `whole`, that all of them are; `all_rows`, that
    rows are real whose keys are not; and once it was asked for, on the host, what each entry has."""

    window: int | None
    whole: bool = False
    all_rows: bool = False
    _lens: tuple[list[int], list[int], bool] | None = None

    def lens(self, present: torch.Tensor, rows: int) -> tuple[list[int], list[int], bool]:
        """(rows, keys) that are there of each entry, and whether its keys lie side by side. Waits for the device once."""
        if self._lens is None:
            queries, keys = present[:, -rows:].sum(1), present.sum(1)
            at = torch.arange(present.shape[1], device=present.device)
            first = torch.where(present, at, present.shape[1]).amin(1)
            last = torch.where(present, at, -1).amax(1)
            solid = bool(((last - first + 1 == keys) | (keys == 0)).all())
            self._lens = queries.tolist(), keys.tolist(), solid
        return self._lens


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """transformers' mask interface: None for a plain pattern, bool [B, T'] for one with padding, else bool [B, 1, S, T].

    A described mask carries its `Padding`; T' below the number of keys says that those after are a static cache's, unused.
    """
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

    mask_function = mask_function or causal_mask_function
    found = None if use_vmap or isinstance(q_offset, torch.Tensor) or torch.compiler.is_compiling() else _pattern(mask_function)
    end = q_offset + q_length - kv_offset  # keys up to the last row's own
    if found is None or end > kv_length or (end < kv_length and kv_offset):
        drawn: torch.Tensor | None = sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        return drawn
    causal, window = found
    if not causal:
        end = kv_length
    present = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if present is not None:
        present = present[:, kv_offset : kv_offset + end].bool()
        present = None if bool(present.all()) else present
    window = window if window is not None and window < end else None
    if present is None and window is None and end == kv_length:
        return None
    whole = present is None
    if present is None:
        present = torch.ones(batch_size, end, dtype=torch.bool, device=device)
    present.attn_padding = Padding(window, whole)  # type: ignore[attr-defined]
    return present


def _pattern(function: Callable[..., Any]) -> tuple[bool, int | None] | None:
    """(causal, window) of a mask function that is one of transformers' own plain ones; None for any other."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is causal_mask_function:
        return True, None
    if function is bidirectional_mask_function:
        return False, None
    parts = _captured(function, "and_masks", "mask_functions")
    if parts is not None and len(parts) == 2 and parts[1] is causal_mask_function:
        window = _captured(parts[0], "sliding_window_overlay", "sliding_window")
        if isinstance(window, int):
            return True, window
    return None


def _captured(function: Any, maker: str, name: str) -> Any:
    """The variable `name` that a function made by transformers' `maker` has captured, or None."""
    if getattr(function, "__qualname__", "").partition(".")[0] != maker or function.__closure__ is None:
        return None
    held = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return held[name].cell_contents if name in held else None


# --- a call ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """One layer's call: query [B, S, H, D]; key [B, T, K, D], value [B, T, K, Dv], in the library's order of dimensions."""

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    causal: bool
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None
    backend: str | None

    @property
    def plain(self) -> bool:
        """Whether there is nothing but a softmax over what is visible."""
        return self.soft_cap is None and self.sinks is None and self.window is None

    @property
    def wants_grad(self) -> bool:
        tensors = (self.query, self.key, self.value, self.sinks)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    @property
    def layer_name(self) -> str:
        if isinstance(self.module, _InGraph):
            return self.module.layer_name
        index = getattr(self.module, "layer_idx", None)
        return f"{type(self.module).__name__}{'' if index is None else f' of layer {index}'}"

    def refusal(self, what: str, who: str) -> UnsupportedError:
        asked = f' (attn_implementation="{NAME}:{self.backend}")' if self.backend else ""
        return UnsupportedError(f"{self.layer_name}{asked}: {what} not supported; {who}")

    def by_name(self, what: str, feature: Feature) -> UnsupportedError:
        """A backend was asked for by name, and no paged one has `feature`; the dense ones that have it are named."""
        found = _having(DiffusionAttentionBackendEnum, {feature})
        return self.refusal(what, f'attn_implementation="{NAME}" gives it to {found}, or to a formula without a kernel')


@dataclass(frozen=True, eq=False)
class _InGraph:
    """What stands for the module of a call that an operator of a graph makes; one for each name of a layer."""

    layer_name: str


_in_graph = functools.lru_cache(1024)(_InGraph)


def _having(registry: Any, features: Collection[str]) -> str:
    """The torch backends of a registry whose capabilities have all of `features`, wherever they run."""
    known = [member for member in registry if str(member.value or "").startswith("attn.torch.")]
    have = [
        member.name
        for member in known
        if (record := member.get_class().capabilities) is not None and record.features.issuperset(features)
    ]
    return ", ".join(have) or "no backend"


def _function(backend: str | None) -> Callable[..., Any]:
    """transformers' attention function for one backend."""

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """query: [B, H, S, D]; key: [B, K, T, D]; value: [B, K, T, Dv]. Returns ([B, S, H, Dv], None: no weights)."""
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
        call = _Call(module, q, k, v, causal, scale, sliding_window, softcap, s_aux, backend)
        _refuse_unknown(call, attention_mask, dropout, kwargs)
        if cache is not None:
            return _paged(call, cache, kwargs), None
        if position_bias is not None:
            return _biased(call, attention_mask, position_bias), None
        if torch.compiler.is_compiling() and not (call.plain and backend is None):
            if call.wants_grad:
                beside = "gradients in a graph, beside a window, a cap, sinks or a backend by name,"
                raise call.refusal(beside, "no backend has them: call under torch.no_grad(), or train without torch.compile")
            return _as_operator(call, attention_mask), None
        return _attend(call, attention_mask), None

    return attention


def _refuse_unknown(call: _Call, attention_mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise call.refusal(
            f"dropout of attention weights ({dropout})", "no backend has it: set attention_dropout=0, or use eager"
        )
    if kwargs.get("output_attentions"):
        raise call.refusal("output_attentions", "weights are never held: use eager to look at them")
    if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
        raise call.refusal(f"a mask of type {type(attention_mask).__name__}", "tensors and None are")
    for name, feature in _UNKNOWN.items():
        if kwargs.get(name) is not None:
            have = "no backend has it" if feature is None else f"{_having(AttentionBackendEnum, {feature})} have it as layers"
            raise call.refusal(name, f"{have}: use eager")


def _attend(call: _Call, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The call by the way that its needs name; see the module."""
    rows, keys = call.query.shape[1], call.key.shape[1]
    padding: Padding | None = None
    if attention_mask is not None and attention_mask.ndim != 2:
        drawn = _bool(call, attention_mask)
        if call.plain and call.backend is None:
            return _dense(_replace(call, causal=False), drawn[..., : call.key.shape[1]])
        attention_mask = _recognised(call, drawn)
        if attention_mask is None:
            return _masked(call, drawn)
    if attention_mask is not None:
        padding = getattr(attention_mask, "attn_padding", None) or Padding(call.window)
        attention_mask = attention_mask.bool()
        keys = attention_mask.shape[1]
        call = _replace(call, key=call.key[:, :keys], value=call.value[:, :keys], window=padding.window)
        if padding.whole:
            attention_mask = None
    elif call.causal and keys > rows > 1:  # an empty static cache: no keys but the rows' own are there
        keys = rows
        call = _replace(call, key=call.key[:, :keys], value=call.value[:, :keys])
    if call.window is not None and call.window >= keys:
        call = _replace(call, window=None)
    if call.window is not None and not call.causal:
        raise call.refusal("a window without causality and without a mask", "let transformers make the mask")
    if rows == 1:
        if call.window is not None:  # of one row: its last keys
            call = _replace(call, key=call.key[:, -call.window :], value=call.value[:, -call.window :], window=None)
            attention_mask = None if attention_mask is None else attention_mask[:, -call.key.shape[1] :]
            padding = None if attention_mask is None else Padding(None)
        call = _replace(call, causal=False)
    square = rows == keys
    alone = call.plain and call.backend is None and (not call.causal or (square and attention_mask is None))
    if alone:
        return _dense(call, attention_mask)
    if attention_mask is None:
        lens: tuple[list[int], list[int]] = ([rows] * len(call.query), [keys] * len(call.query))
        solid = True
    else:
        assert padding is not None
        own = (call.causal or square) and not padding.all_rows  # rows are the last keys' own
        *both, solid = padding.lens(attention_mask, rows if own else 0)
        lens = (both[0] if own else [rows] * len(call.query), both[1])
    if call.wants_grad or call.value.shape[-1] > call.query.shape[-1] or not (solid or call.window is None):
        return _formula(call, _drawn(call, attention_mask))
    return _packed(call, attention_mask, *lens)


def _replace(call: _Call, **changes: Any) -> _Call:
    return _Call(**{**vars(call), **changes})


def _bool(call: _Call, given: torch.Tensor) -> torch.Tensor:
    """A mask as True = attend. Raises `UnsupportedError` for one that adds anything but 0 and the lowest number."""
    if given.dtype == torch.bool:
        return given
    hidden = given <= torch.finfo(given.dtype).min / 2
    if bool((~hidden & (given != 0)).any()):
        raise call.refusal("a mask that adds numbers other than 0 and -inf", "pass it as position_bias")
    return ~hidden


def _drawn(call: _Call, present: torch.Tensor | None) -> torch.Tensor:
    """bool [B, 1, S, T] of a described mask: causality and window, as the call has them, and keys that are there."""
    rows, keys = call.query.shape[1], call.key.shape[1]
    ahead = torch.arange(keys, device=call.query.device) - torch.arange(keys - rows, keys, device=call.query.device)[:, None]
    allowed = torch.ones_like(ahead, dtype=torch.bool) if not call.causal else ahead <= 0
    if call.window is not None:
        allowed = allowed & (ahead > -call.window)
    return allowed[None, None] if present is None else allowed & present[:, None, None, :]


def _masked(call: _Call, drawn: torch.Tensor) -> torch.Tensor:
    """Under a drawn mask, which says all there is about causality and windows."""
    drawn = drawn[..., : call.key.shape[1]]
    call = _replace(call, causal=False, window=None)
    if call.backend is not None:
        raise call.by_name(f"{Feature.MASK.value} (a mask that is no causal or windowed pattern)", Feature.MASK)
    return _dense(call, drawn) if call.plain else _formula(call, drawn)


def _recognised(call: _Call, drawn: torch.Tensor) -> torch.Tensor | None:
    """bool [B, T']: the keys that are there, if `drawn` is this call's causality and window over them; else None.

    Keys at and after T' are a static cache's, unused. Compares the mask with what it would be, and waits for the device.
    """
    if drawn.ndim != 4 or drawn.shape[1] != 1 or (call.window is not None and not call.causal):
        return None
    drawn = drawn[:, 0].expand(len(call.query), -1, -1)
    rows, seen = drawn.shape[1], drawn.any(1)
    some = seen.any(0).nonzero()
    end = max(int(some[-1]) + 1 if len(some) else 0, rows if call.causal else 1)
    if end > drawn.shape[2]:
        return None
    present, drawn = seen[:, :end], drawn[..., :end]
    if call.window is not None:  # what comes before the first row's window is seen by none, and may be there
        present = present | (torch.arange(end, device=present.device) <= end - rows - call.window)
    expected = _drawn(_replace(call, key=call.key[:, :end]), present)[:, 0].expand(drawn.shape)
    if call.causal:  # a row of padding sees nothing; one that does is no padding, though nobody sees its key
        expected = expected & present[:, -rows:, None]
    if not torch.equal(expected, drawn):
        return None
    present = present.clone()
    present.attn_padding = Padding(call.window, bool(present.all()), all_rows=not call.causal)  # type: ignore[attr-defined]
    return present


# --- in a graph ------------------------------------------------------------------------------------------------------


def _as_operator(call: _Call, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """A call that no graph can hold, as one operator of it; its mask is drawn there, and recognised when it runs."""
    return _operator(  # type: ignore[no-any-return]
        call.query, call.key, call.value, attention_mask, call.sinks, call.causal, call.scale, call.window, call.soft_cap,
        call.backend, call.layer_name,
    )  # fmt: skip


@uncaptured("attn::transformers", mutates_args=())
def _operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    backend: str | None,
    layer_name: str,
) -> torch.Tensor:
    call = _Call(_in_graph(layer_name), query, key, value, causal, scale, window, soft_cap, sinks, backend)
    return _attend(call, attention_mask).contiguous()


@_operator.register_fake
def _(query, key, value, *rest):  # type: ignore[no-untyped-def]
    return query.new_empty(*query.shape[:3], value.shape[3])


# --- the ways --------------------------------------------------------------------------------------------------------


def _widened(call: _Call) -> torch.Tensor:
    """Values as wide as keys: zeros beside them, which add nothing."""
    return F.pad(call.value, (0, call.query.shape[-1] - call.value.shape[-1]))


def _dense(call: _Call, mask: torch.Tensor | None) -> torch.Tensor:
    """By the diffusion registry's choice; mask: [B, T] of keys, or drawn."""
    if call.value.shape[-1] > call.query.shape[-1]:
        return _formula(call, _drawn(call, mask) if mask is None or mask.ndim == 2 else mask)
    impl = chosen_impl(
        None, 0.0, call.query.device.type, call.query.shape[2], call.key.shape[2], call.query.shape[3], call.query.dtype,
        call.scale, call.causal, mask is not None and mask.ndim != 2, call.wants_grad, mask is not None and mask.ndim == 2,
        call.query.shape[1], call.key.shape[1],
    )  # fmt: skip
    out: torch.Tensor = impl.forward(call.query, call.key, _widened(call), DiffusionAttentionMetadata(attn_mask=mask))
    return out[..., : call.value.shape[-1]]


def _formula(call: _Call, drawn: torch.Tensor) -> torch.Tensor:
    """By `attn.attention`; the mask says all."""
    if call.backend is not None:
        if call.wants_grad:
            raise call.by_name("gradients", Feature.BACKWARD)
        raise call.by_name("values wider than keys, or a window over keys with gaps,", Feature.MASK)
    out: torch.Tensor = attn.attention(
        call.query, call.key, call.value, scale=call.scale, logits_soft_cap=call.soft_cap, sinks=call.sinks, mask=drawn
    )
    return out


def _biased(call: _Call, attention_mask: torch.Tensor | None, bias: torch.Tensor) -> torch.Tensor:
    """With numbers added to scores (T5), which torch's SDPA alone takes; bias: broadcastable to [B, H, S, T]."""
    if call.backend is not None or not call.plain:
        raise call.refusal("position_bias beside a window, a cap, sinks or a backend by name", f'plain "{NAME}" takes it alone')
    if attention_mask is not None and attention_mask.ndim == 4:
        drawn = _bool(call, attention_mask)
    else:
        drawn = _drawn(call, attention_mask)
    added = torch.where(drawn, bias.to(call.query.dtype), -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=call.scale, enable_gqa=True)
    return torch.where(drawn.any(-1)[..., None], out, 0).transpose(1, 2)


_layers: "weakref.WeakKeyDictionary[Any, dict[Any, Attention]]" = weakref.WeakKeyDictionary()


def _layer(call: _Call, attn_type: str, block_size: int | None = None) -> Attention:
    """The attention layer of a module for calls like this one, made once; it shares the module's sinks."""
    made = _layers.setdefault(call.module, {})
    causal = call.causal or attn_type != AttentionType.DECODER
    key = (attn_type, block_size, causal, call.scale, call.window, call.soft_cap, call.sinks is None, call.backend,
           call.query.shape[2:], call.key.shape[2], call.query.dtype, call.query.device)  # fmt: skip
    if key not in made:
        options = {
            "scale": call.scale, "num_kv_heads": call.key.shape[2], "sliding_window": call.window,
            "logits_soft_cap": call.soft_cap, "attn_type": attn_type, "sinks": call.sinks, "dtype": call.query.dtype,
            "backend": call.backend, "features": [] if causal else [Feature.NON_CAUSAL],
        }  # fmt: skip
        made[key] = _first_size(call, options, block_size)
    layer = made[key]
    if call.sinks is not None:
        layer.impl.sinks = call.sinks.detach().float()  # the module's own, which may have been loaded since
    return layer


def _first_size(call: _Call, options: dict[str, Any], block_size: int | None) -> Attention:
    """A layer of `block_size`, or of the first size that its backend takes."""
    num_heads, head_size = call.query.shape[2:]
    try:
        layer = Attention(num_heads, head_size, **options, block_size=block_size or _BLOCK_SIZES[0])
        allowed = layer.backend.get_supported_kernel_block_size()
        if block_size is None and not supports_size(_BLOCK_SIZES[0], allowed):
            size = next(size for size in _BLOCK_SIZES if supports_size(size, allowed))
            layer = Attention(num_heads, head_size, **options, block_size=size)
    except UnsupportedError as error:
        raise UnsupportedError(f"{call.layer_name}: {error}\n{_who_serves(call, options)}", error.reasons) from None
    return layer.to(call.query.device)


def _who_serves(call: _Call, options: dict[str, Any]) -> str:
    """A sentence on the backends that have what a call needs, and those of them that this machine runs."""
    needs = {
        Feature.SLIDING_WINDOW: call.window, Feature.SOFT_CAP: call.soft_cap, Feature.SINKS: call.sinks,
        Feature.NON_CAUSAL: None if call.causal else True,
    }  # fmt: skip
    features = [feature for feature, value in needs.items() if value is not None]
    try:
        trace = Attention(*call.query.shape[2:], **{**options, "backend": None}).selection.trace
    except UnsupportedError:
        trace = ()
    here = ", ".join(verdict.name for verdict in trace if verdict.ok) or "none"
    who = _having(AttentionBackendEnum, features)
    return f"Backends that have {', '.join(features) or 'what this layer needs'}: {who}; that serve it here: {here}"


def _packed(call: _Call, present: torch.Tensor | None, q_lens: list[int], k_lens: list[int]) -> torch.Tensor:
    """Rows and keys that are there, side by side; what rows of padding give is 0."""
    batch, rows, heads, _ = call.query.shape
    value = _widened(call)
    if present is None:
        queries, keys, values = (x.flatten(0, 1) for x in (call.query, call.key, value))
        real = None
    else:
        real = present[:, -rows:].flatten() if sum(q_lens) < batch * rows else None
        queries = call.query.flatten(0, 1) if real is None else call.query.flatten(0, 1)[real]
        keys, values = (x.flatten(0, 1)[present.flatten()] for x in (call.key, value))
    out = _over_pages(call, queries, keys, values, q_lens, k_lens)
    if real is not None:
        whole = out.new_zeros(batch * rows, *out.shape[1:])
        whole[real] = out
        out = whole
    return out.view(batch, rows, heads, -1)[..., : call.value.shape[-1]]


def _over_pages(call: _Call, query: torch.Tensor, key: Any, value: Any, q_lens: list[int], k_lens: list[int]) -> torch.Tensor:
    """query: [T, H, D]; key, value: [S, K, D], packed. Returns [T, H, D]."""
    attn_type = AttentionType.DECODER if call.causal or q_lens != k_lens else AttentionType.ENCODER_ONLY
    layer = _layer(call, attn_type)
    size = layer.kv_cache_spec.block_size
    batch, slots, blocks = _batch(tuple(q_lens), tuple(k_lens), size, call.causal or attn_type != AttentionType.DECODER)
    cache = None
    if attn_type != AttentionType.ENCODER_ONLY:
        cache = layer.new_kv_cache(blocks, query.device)
        layer.impl.do_kv_cache_update(layer, key, value, cache, torch.from_numpy(slots).to(query.device))
        key = value = None
    build = layer.backend.get_builder_cls()(layer.kv_cache_spec, device=query.device).build
    result: torch.Tensor = layer(query, key, value, cache, build(0, batch))
    return result


@functools.lru_cache(64)
def _batch(
    q_lens: tuple[int, ...], k_lens: tuple[int, ...], size: int, causal: bool
) -> tuple[CommonAttentionMetadata, Any, int]:
    """(the batch, every key's slot, blocks) over blocks in order."""
    each = [-(-k // size) for k in k_lens]
    ends = np.cumsum(each)
    table = [range(end - n, end) for end, n in zip(ends, each, strict=True)]
    batch = CommonAttentionMetadata.from_lens(q_lens, k_lens, table, size, causal=causal)
    request = np.repeat(np.arange(len(k_lens)), k_lens)
    position = np.arange(sum(k_lens)) - np.repeat(np.cumsum(k_lens) - k_lens, k_lens)
    return batch, slots_of(batch.block_table, request, position, size), max(1, int(ends[-1]) if len(ends) else 1)


# --- continuous batching ---------------------------------------------------------------------------------------------


def _paged(call: _Call, cache: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """One packed row of requests [1, T, ...] over transformers' `PagedAttentionCache`; rows of padding are 0."""
    index = call.module.layer_idx
    pool = cache.layer_to_allocator[index]
    starts = kwargs["cu_seq_lens_q"].cpu().numpy()
    key_starts = kwargs["cu_seq_lens_k"][pool.layer_type].cpu().numpy()
    q_lens, k_lens = np.diff(starts), np.diff(key_starts)
    live = (q_lens > 0) & (k_lens > 0)
    rows, query = int(starts[-1]), call.query[0]
    out = torch.zeros_like(query[..., : call.value.shape[-1]])
    read, written = kwargs["read_index"][pool.index], kwargs["write_index"][pool.index]
    try:
        views = pool.get_cache_for_block_table(index)
    except NotImplementedError:  # a window's layer: a ring of the last keys
        views = None
    if views is not None and read.numel() and call.value.shape[-1] == query.shape[-1]:
        page = pool.tokens_per_page
        layer = _layer(call, AttentionType.DECODER, page)
        pages = _in_place(layer.backend, *views)
        layer.impl.do_kv_cache_update(layer, call.key[0], call.value[0], pages, written)
        where = read.cpu().numpy()
        table = [where[a:b:page] // page for a, b in zip(key_starts[:-1][live], key_starts[1:][live], strict=True)]
        batch = CommonAttentionMetadata.from_lens(q_lens[live].tolist(), k_lens[live].tolist(), table, page)
        build = layer.backend.get_builder_cls()(layer.kv_cache_spec, device=query.device).build
        result = layer(query[:rows], None, None, pages, build(0, batch))
    else:
        both = cache.update(
            key_states=call.key.transpose(1, 2), value_states=call.value.transpose(1, 2), layer_idx=index, kwargs=dict(kwargs)
        )
        key, value = (x[0].transpose(0, 1)[: int(key_starts[-1])] for x in both)
        packed = _replace(call, key=key[None], value=value[None])
        result = _over_pages(call, query[:rows], key, _widened(packed)[0], q_lens[live].tolist(), k_lens[live].tolist())
    out[: len(result)] = result[..., : out.shape[-1]]
    return out[None]


def _in_place(backend: Any, key_pages: torch.Tensor, value_pages: torch.Tensor) -> torch.Tensor:
    """transformers' pages of one layer, keys and values [N, P, K, D] of one storage, as a cache of a backend: a view."""
    apart = value_pages.storage_offset() - key_pages.storage_offset()
    both = key_pages.as_strided((2, *key_pages.shape), (apart, *key_pages.stride()), key_pages.storage_offset())
    return caches.in_layout(backend, both)
