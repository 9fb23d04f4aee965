"""transformers' masks: patterns are described, others materialised; and what a layer's call makes of either.

`mask` makes a step's mask. A pattern that is known is a `Described`, which travels to every layer as `attn_described` of the
tensor that transformers passes on. `read` interprets the mask of a call, a caller's own too.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from attn.backends.metadata import spans_of
from attn.errors import UnsupportedError
from attn.integrations.transformers.call import CAUSAL, EVERYTHING, NAME, ModuleCall, replaced, require, visible
from attn.torch.kernels.runs import Runs
from attn.visibility import BatchMask, LayerMask, Visibility

_T = TypeVar("_T")


class Described:
    """A mask without its elements: which keys are valid, and which of these a row sees.

    seen: causality, a window that hides a key, chunks, whose positions are counted from an entry's first valid key, and spans
    [B, S, 2] int32 on the host, among an entry's valid keys. present: bool [B, T'], the valid keys; keys from T' on are unused
    slots of a static cache. rows: of the call, the last keys' tokens. whole: all keys are valid. all_rows: rows are real even
    if their keys are not. draw: makes the mask [B, 1, S, T'], if `seen` and `present` alone do not say how. shared: the layers
    of a step have this description in common, so an entry's lengths are read once for all.
    """

    def __init__(self, seen: Visibility, present: torch.Tensor, rows: int, whole: bool = False, all_rows: bool = False) -> None:
        self.seen, self.present, self.rows, self.whole, self.all_rows = seen, present, rows, whole, all_rows
        self.end = present.shape[1]
        self.draw: Callable[[], torch.Tensor] | None = None
        self.shared = False
        self._lens: tuple[list[int], list[int], list[int] | None] | None = None
        self._runs: Runs | None = None
        self._last: dict[int, Described] = {}

    def last(self, keys: int) -> "Described":
        """Return which of the last `keys` keys are valid, for single rows that see all of these."""
        if keys not in self._last:
            self._last[keys] = Described(EVERYTHING, self.present[:, -keys:], 1)
            self._last[keys].shared = self.shared
        return self._last[keys]

    def runs(self) -> Runs | None:
        """Return each entry's valid keys if they are one run. Waits for the device at the first call."""
        _, keys, firsts = self.lens()
        if self._runs is None and firsts is not None:
            self._runs = Runs(*(torch.tensor(x, dtype=torch.int32, device=self.present.device) for x in (firsts, keys)))
        return self._runs

    def lens(self) -> tuple[list[int], list[int], list[int] | None]:
        """Return each entry's valid (rows, keys), and its first valid key unless some entry's valid keys have gaps.

        Waits for the device at the first call.
        """
        if self._lens is None:
            present, end = self.present, self.end
            queries, keys = present[:, -self.rows :].sum(1), present.sum(1)
            index = torch.arange(end, device=present.device)
            first = torch.where(present, index, end).amin(1)
            last = torch.where(present, index, -1).amax(1)
            solid = bool(((last - first + 1 == keys) | (keys == 0)).all())
            # one wait for all three
            q_lens, k_lens, firsts = torch.stack([queries, keys, first]).tolist()
            self._lens = q_lens, k_lens, firsts if solid else None
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
    allow_is_bidirectional_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Implement transformers' mask interface: None for a plain pattern, bool [B, T'] with padding, else bool [B, 1, S, T].

    None means that every row sees every key, or that rows and keys are the same tokens and the call is causal. If T' of a mask
    [B, T'] is below the number of keys, the rest are unused slots of a static cache. A model whose layers may not say whether
    they are causal gets a mask instead of None.

    Chunks, and blocks of tokens that see each other, are described as well (docs/semantics.md §18), by an empty mask
    [B, 1, 0, T']: models take one with four dimensions as it is, and it fails where the description is lost. Over a static
    cache the mask is also materialised, because it may enter a graph.

    A mask is materialised, [B, 1, S, T], if the pattern is unknown, if transformers requires it (`allow_..._skip=False`), if
    the model passes its last rows to layers that use the keys of others (Gemma 4), which see no description, in a graph unless
    it is causality among the rows alone, and over a cache that has dropped keys (`kv_offset`): `generate` makes the masks of
    some models before the call, and the model then reads a two-dimensional one as the padding of all tokens so far. If the
    pattern is known, it is described all the same.

    Raises `UnsupportedError` for a model whose layers would add the mask to scores of their own instead of calling `"attn"`.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    model, sliced = None, False
    if "config" in kwargs and not torch.compiler.is_compiling():
        config_class: Any = type(kwargs["config"])  # not its `__class__`: a configuration looks attributes up in Python
        model = _computes_itself(config_class)
        sharing = q_length > 1 and _slices_masks(config_class)
        sliced = sharing and getattr(kwargs["config"].get_text_config(), "num_kv_shared_layers", 0) > 0
    if model is not None:
        raise own_attention(model, NAME)
    mask_function = causal_mask_function if mask_function is None else mask_function  # torch 2.11 traces no truth of functions
    known_offset = not isinstance(q_offset, torch.Tensor)
    # Known without a look at any element: the case of each token that is decoded.
    says_causal = "config" not in kwargs or _says_causal(type(kwargs["config"]))
    plain = attention_mask is None and mask_function is causal_mask_function and allow_is_causal_skip and known_offset
    plain = plain and (says_causal or q_length == 1)
    if plain and q_length in (1, kv_length) and q_offset + q_length == kv_offset + kv_length:
        return None  # the rows are those of the last key, or of all keys
    make: Any = sdpa_mask
    arguments: Any = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    options = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "use_vmap": use_vmap, "device": device}
    draw = functools.partial(make, *arguments, **options)
    if not known_offset or torch.compiler.is_compiling():
        return draw()  # type: ignore[no-any-return]
    pattern, end = translated(mask_function), q_offset + q_length - kv_offset  # keys up to the last row's
    # unknown; or rows behind the keys; or unused slots behind keys that were dropped: no description says that
    if pattern is None or end > kv_length or (end < kv_length and kv_offset):
        return draw()  # type: ignore[no-any-return]
    causal = pattern.layer.causal
    end = end if causal else kv_length  # without causality rows see keys of the whole cache
    present, whole = _valid(attention_mask, batch_size, end, kv_length, kv_offset, device)
    left = pattern.layer.window[0]
    described = Described(visible(causal, None if left is None or left + 1 >= end else left + 1), present, q_length, whole)
    if pattern.reaches:
        if not _reached(described, pattern, q_offset, kv_offset):
            return draw()  # type: ignore[no-any-return]
        # a static cache's mask may enter a graph, which sees no description
        result: Any = draw() if end < kv_length or sliced else described.present.new_empty(batch_size, 1, 0, end)
        described.draw = draw
    else:
        skip = allow_is_causal_skip if causal else allow_is_bidirectional_skip  # else models read a tensor
        placed = not causal or q_length in (1, kv_length)  # else None would leave the rows' positions open
        hides = not described.whole or described.seen.layer.window[0] is not None or described.end < kv_length
        if skip and placed and not hides and says_causal:
            return None
        result = described.present if skip and not kv_offset and not sliced else draw()
    result.attn_described, described.shared = described, True
    return result  # type: ignore[no-any-return]


class Pattern(NamedTuple):
    """A mask function: what rows see, the left padding [B] after which chunks begin, blocks [B, N] of tokens that see each
    other, -1 for none."""

    layer: LayerMask
    left_padding: Any = None
    blocks: Any = None

    @property
    def reaches(self) -> bool:
        return self.layer.chunk_size is not None or self.blocks is not None


def translated(function: Any) -> Pattern | None:
    """Translate a mask function of transformers; None unless each part and their order are known."""
    from transformers.masking_utils import bidirectional_mask_function

    pattern = _composed(function)
    return pattern if function is bidirectional_mask_function or (pattern is not None and pattern.layer.causal) else None


def _composed(function: Any) -> Pattern | None:
    """Translate a mask function, or a part of one, which is not causal."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is causal_mask_function:
        return Pattern(LayerMask())
    if function is bidirectional_mask_function:
        return Pattern(LayerMask(causal=False))
    if isinstance(window := _captured(function, "sliding_window_overlay", "sliding_window"), int):
        return Pattern(LayerMask(False, (window - 1, None)))
    if isinstance(chunk := _captured(function, "chunked_overlay", "chunk_size"), int):
        return Pattern(LayerMask(False, chunk_size=chunk), _captured(function, "chunked_overlay", "left_padding"))
    if (blocks := _captured(function, "blockwise_overlay", "block_sequence_ids")) is not None:
        return Pattern(LayerMask(causal=False), blocks=blocks)
    for maker, combined in (("and_masks", _both), ("or_masks", _either)):
        parts = [_composed(part) for part in _captured(function, maker, "mask_functions") or ()]
        # two parts, both known: more of them, or an unknown one, may hide what this formula does not
        known = [part for part in parts if part is not None]
        if len(parts) == len(known) == 2:
            return combined(*known)
    return None


def _both(first: Pattern, second: Pattern) -> Pattern | None:
    """Return what both allow: causality, or this with blocks, within a window; or causality within chunks."""
    base, limit = (first, second) if first.layer.causal else (second, first)
    if base.layer != CAUSAL.layer or limit.layer.causal or limit.blocks is not None:
        return None
    joined = base.layer & limit.layer
    if base.blocks is None:
        return Pattern(joined, limit.left_padding)
    # (causal or block) and window: the window cuts blocks too
    return None if joined.window[0] is None else Pattern(joined._replace(span_window=True), blocks=base.blocks)


def _either(base: Pattern, block: Pattern) -> Pattern | None:
    """Return what one of them allows: causality, within a window or not, or a block."""
    if not base.layer.causal or base.reaches or block.layer.causal or block.blocks is None:
        return None
    # (causal and window) or block: the window leaves blocks whole
    cuts = None if base.layer.window[0] is None else False
    return Pattern(base.layer._replace(span_window=cuts), blocks=block.blocks)


def _captured(function: Any, maker: str, name: str) -> Any:
    """Return the variable `name` captured by a function that transformers' `maker` made, or None."""
    # transformers makes mask functions as closures: the maker's name and its variables say what they are
    if getattr(function, "__qualname__", "").partition(".")[0] != maker or function.__closure__ is None:
        return None
    captured = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return captured[name].cell_contents if name in captured else None


def _valid(
    attention_mask: torch.Tensor | None, batch: int, end: int, kv_length: int, kv_offset: int, device: torch.device | str
) -> tuple[torch.Tensor, bool]:
    """Return bool [B, end], which of the first `end` keys are valid, and whether all are."""
    from transformers.masking_utils import prepare_padding_mask

    known = getattr(attention_mask, "attn_described", None)
    if known is not None and known.end == end and not kv_offset:
        return known.present[:], known.whole  # `generate` makes a static cache's mask, from which the model makes one again
    present = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if present is None:
        return torch.ones(batch, end, dtype=torch.bool, device=device), True
    present = present[:, kv_offset : kv_offset + end].bool()
    return present, bool(present.all())


def _reached(described: Described, pattern: Pattern, q_offset: int, kv_offset: int) -> bool:
    """Describe chunks and spans, beside the window of `described`; False if they cannot be described exactly.

    Keys before the chunk of an entry's first row are marked as not valid, so that positions count from a chunk's start.
    """
    present, rows, layer = described.present, described.rows, described.seen.layer
    if pattern.layer.chunk_size is not None:
        chunk, left = pattern.layer.chunk_size, torch.as_tensor(pattern.left_padding, device=present.device)
        first_row = left.clamp(min=q_offset)
        # the first key of the chunk that an entry's first row is in, counted from its first token
        start = left + (first_row - left) // chunk * chunk - kv_offset
        described.present = present & (torch.arange(present.shape[1], device=present.device) >= start[:, None])
        described.whole = bool(described.present.all())
        _, keys, firsts = described.lens()
        # a single row sees the keys of its chunk, all of which are left
        if rows > 1:
            described.seen = Visibility(layer._replace(chunk_size=chunk))
        return firsts is not None and all(not k or f == s for k, f, s in zip(keys, firsts, start.tolist(), strict=True))
    windowed = layer.window[0] is not None
    if windowed and described.lens()[2] is None:
        return False  # positions in a window count keys that are not valid
    valid = present.cpu().numpy()
    blocks = pattern.blocks[:, kv_offset : kv_offset + present.shape[1]].cpu().numpy()
    if blocks.shape != valid.shape:
        return False
    spans = np.full((len(valid), rows, 2), -1, np.int32)
    for b, keep in enumerate(valid):
        ids = blocks[b][keep]
        # the block of each run of tokens; -2 is no block, so that the first token begins one
        runs = ids[np.flatnonzero(np.diff(ids, prepend=-2))]
        runs = runs[runs >= 0]
        if len(np.unique(runs)) != len(runs):
            return False  # tokens of one block with others between them are not a span
        # rows are the last keys' tokens, of which padding has none
        rows_valid = keep[-rows:]
        ids = np.where(ids < 0, -1, ids)
        spans[b, rows_valid] = spans_of([ids], [int(rows_valid.sum())])
    if (spans >= 0).any():
        cuts = pattern.layer.span_window if windowed else None
        described.seen = Visibility(layer._replace(span_window=cuts), BatchMask(spans=spans))
    return True


def read(call: ModuleCall, draw: bool = False) -> None:
    """Replace a call's mask by what it says: in `seen` and `valid`, and by the keys that its rows may see.

    A mask that is no pattern is left, as bool, and so is one under which only a mask can be used. draw: make one that includes
    all that rows see, over the keys from the first on.

    Raises `UnsupportedError` for a mask that cannot be used, for a window of rows that see later keys, and for causal rows
    without a mask whose positions are ambiguous.
    """
    rows, seen = call.query.shape[2], call.seen
    if call.mask is None and rows == 1 and seen.layer.window[0] is None and not draw:
        call.seen = EVERYTHING
        return
    keys = call.key.shape[2]
    start, end, valid = 0, keys, None
    if call.mask is not None:
        # a graph has only the tensor
        described = None if torch.compiler.is_compiling() else getattr(call.mask, "attn_described", None)
        if described is None:
            described = _recognised(call, draw)
        if isinstance(described, Described) and described.draw is not None and (draw or call.wants_grad or call.wide):
            described = described.draw()
        if not isinstance(described, Described):
            call.mask, call.seen = described[..., :keys], EVERYTHING
            return
        seen, end = described.seen, described.end
        valid = None if described.whole else described
    elif rows != keys and rows > 1 and seen.layer.causal and not getattr(call.module, "is_kv_shared_layer", False):
        raise call.refusal(
            f"{rows} causal rows over {keys} keys without a mask",
            "the rows' positions are ambiguous: let transformers make the mask, or pass one",
        )
    causal, left = seen.layer.causal, seen.layer.window[0]
    single = rows == 1 and not draw and seen.layer.chunk_size is None and seen.batch.spans is None
    if left is not None:
        if left + 1 >= end:
            seen = CAUSAL if causal else EVERYTHING
        elif not causal:
            if call.layer_name.partition(" ")[0] not in _CUT_BY_CACHE:
                raise call.non_causal_window()
            seen = EVERYTHING
        elif single:  # the row sees its last keys
            start = end - left - 1
            valid = None if valid is None else valid.last(left + 1)
    if start or end != keys:
        call.key, call.value = call.key[:, :, start:end], call.value[:, :, start:end]
    call.mask, call.seen, call.valid = None, EVERYTHING if single else seen, valid
    if draw:
        call.mask, call.seen, call.valid = as_drawn(call), EVERYTHING, None


def keys_seen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, causal: bool, window: int | None
) -> tuple[torch.Tensor, torch.Tensor, int | None] | None:
    """Return the keys and values that a call's rows see, and the window within these, if `read` would leave nothing else of its
    mask: of a single row, whether the layer has one; of a prompt, whose rows are these keys' tokens, how many keys before its
    own a row sees, None for all. None if more is left, as for other rows."""
    rows, keys = query.shape[2], key.shape[2]
    end, left = keys, None if window is None else window - 1
    if mask is not None:
        described = getattr(mask, "attn_described", None)
        if described is None or not described.whole:
            return None
        (layer, batch), end = described.seen, described.end
        if layer.chunk_size is not None or batch.spans is not None:
            return None
        if rows > 1:
            # other rows than the keys' own need positions
            if rows != end or not (causal and layer.causal):
                return None
            return key[:, :, :end], value[:, :, :end], layer.window[0]
        causal, left = layer.causal, layer.window[0]
    if rows != 1:
        return None
    # the row is the last one: a window leaves its last keys
    start = 0 if left is None else max(end - left - 1, 0)
    if start and not causal:
        return None
    cut = (key[:, :, start:end], value[:, :, start:end]) if start or end != keys else (key, value)
    return *cut, None if window is None else True


def drawn(call: ModuleCall) -> ModuleCall:
    """Return a call under a mask that includes all that its rows see. Raises as `read`."""
    call = replaced(call)
    read(call, draw=True)
    return call


def _recognised(call: ModuleCall, draw: bool) -> Described | torch.Tensor:
    """Return what describes a mask of the caller's own, or the mask as bool if it is no pattern or is to be drawn."""
    tensor: Any = call.mask
    if not isinstance(tensor, torch.Tensor):
        raise call.refusal(f"a mask of type {type(tensor).__name__}", "must be a tensor or None")
    if tensor.ndim == 2:
        if tensor.dtype != torch.bool:
            is_padding = (tensor == 0) | (tensor == 1)
            require(call, is_padding, f"a mask [B, T] of {tensor.dtype} with values other than 0 and 1", "pass a bool mask")
        # padding alone: what rows see beside it is the layer's
        return Described(call.seen, tensor.bool(), call.query.shape[2])
    if tensor.ndim == 4 and not tensor.shape[2]:
        raise call.refusal(
            "a copy of a mask of chunks or spans",
            'a copy (to another device, for example) has no description: use one device, or attn_implementation="sdpa"',
        )
    # dense backends take masks as they are: whether it is a pattern need not be found out
    if draw or (call.plain and call.backend is None):
        return as_bool(call, tensor)

    def known() -> Described | None:
        described = recognised(call, as_bool(call, tensor))
        if described is not None:
            described.shared = True
        return described

    description = once(tensor, (call.seen.layer, call.query.shape[:3:2], call.key.shape[2]), known)
    return as_bool(call, tensor) if description is None else description


def once(mask: torch.Tensor, key: Any, make: Callable[[], _T]) -> _T:
    """Return what `make` returns, kept with a mask for the other layers of its step, until it is changed in place. It must be
    neither the mask nor a view of it, which would keep the mask for good."""
    if torch.compiler.is_compiling() or mask.is_inference():
        return make()
    values: dict[Any, tuple[int, Any]] = vars(mask).setdefault("attn_kept", {})
    version, value = values.get(key, (None, None))
    # changed in place since
    if version != mask._version:
        values[key] = mask._version, (value := make())
    return value  # type: ignore[return-value]


def as_bool(call: ModuleCall, mask: torch.Tensor) -> torch.Tensor:
    """Convert a mask to True = attend. Raises `UnsupportedError` for one with values other than 0 and the lowest number, and
    for integers: 1 attends in a mask of flags, and does not hide in a mask that is added."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.dtype.is_floating_point:
        raise call.refusal(
            f"a mask {list(mask.shape)} of {mask.dtype}", "pass a bool mask, True = attend, or floats to be added"
        )
    hidden = _hidden(mask)
    require(call, hidden | (mask == 0), "a mask with values other than 0 and -inf", "pass it as position_bias")
    return ~hidden


def with_bias(call: ModuleCall) -> ModuleCall:
    """Return a call whose mask says only which keys rows see: other values than 0 and the lowest number are a bias (Doge).

    Waits for the device, once a mask of floats that is the caller's own.
    """
    mask: Any = call.mask
    if not isinstance(mask, torch.Tensor) or not mask.is_floating_point() or mask.ndim != 4 or hasattr(mask, "attn_described"):
        return call
    if once(mask, "is_flags", lambda: bool((_hidden(mask) | (mask == 0)).all())):
        return call
    return replaced(call, mask=~_hidden(mask), bias=mask if call.bias is None else call.bias + mask)


def _hidden(mask: torch.Tensor) -> torch.Tensor:
    """Return where a mask of floats is -inf, or the lowest number, which transformers writes."""
    return mask <= torch.finfo(mask.dtype).min / 2  # half of it, because bfloat16's, in float32, is above float32's


def as_drawn(call: ModuleCall) -> torch.Tensor:
    """Return bool [B or 1, 1, S, T] of a call that was read: causality, the window and the valid keys."""
    rows, keys = call.query.shape[2], call.key.shape[2]
    position, key = (torch.arange(first, keys, device=call.query.device) for first in (keys - rows, 0))
    allowed: torch.Tensor = Visibility(call.seen.layer).allowed(position[:, None], key)
    return allowed[None, None] if call.valid is None else allowed & call.valid.present[:, None, None]


def recognised(call: ModuleCall, drawn: torch.Tensor) -> Described | None:
    """Return the description of a materialised mask if it is the call's causality and window over some valid keys; else None.

    Keys after the last that a row sees are unused slots of a static cache. Compares the mask with the expected one; waits for
    the device.
    """
    causal, (left, _) = call.seen.layer.causal, call.seen.layer.window
    if drawn.ndim != 4 or drawn.shape[1] != 1 or (left is not None and not causal):
        return None
    drawn = drawn[:, 0].expand(len(call.query), -1, -1)
    rows, visible = drawn.shape[1], drawn.any(1)
    # waits for the device, once a step: its layers share the result
    used_keys = visible.any(0).nonzero()
    end = max(int(used_keys[-1]) + 1 if len(used_keys) else 0, rows if causal else 1)
    if end > drawn.shape[2]:
        return None
    present, drawn = visible[:, :end], drawn[..., :end]
    if left is not None:  # keys before the first row's window are seen by no row, and may be valid
        present = present | (torch.arange(end, device=present.device) < end - rows - left)
    described = Described(call.seen, present.clone(), call.query.shape[2], bool(present.all()), all_rows=not causal)
    expected = as_drawn(replaced(call, key=call.key[:, :, :end], valid=described))[:, 0].expand(drawn.shape)
    if causal:  # a padding row sees nothing; a row that sees a key is valid, even if no row sees its own key
        expected = expected & present[:, -rows:, None]
    return described if torch.equal(expected, drawn) else None


#: Layers that pass a window of which their cache is already cut: every row sees every key (see their model's decoder mask).
_CUT_BY_CACHE = {"DiffusionGemmaDecoderTextAttention"}
#: Types of models in which some layers call the implementation and those that take this mask do not.
_PARTLY = {"bigbird_pegasus", "git", "informer"}


@functools.cache
def _model_of(config_class: Any) -> Any:
    """Return the class of transformers' own model with a configuration, or None."""
    from transformers import MODEL_MAPPING

    try:
        models = MODEL_MAPPING[config_class]
    except KeyError:
        return None
    return models[0] if isinstance(models, tuple) else models


@torch.compiler.assume_constant_result
def _says_causal(config_class: Any) -> bool:
    """Whether `is_causal` of a configuration's layers can be relied on: it is wrong or missing in models that do not declare
    SDPA or other implementations, and eager does not read it (NLLB-MoE's decoder, Splinter). True for unknown models."""
    model = _model_of(config_class)
    return model is None or model._supports_sdpa or model._supports_attention_backend


@functools.cache
def _slices_masks(config_class: Any) -> bool:
    """Whether a configuration's model passes rows of its masks on, to layers that compute only the logits that are kept."""
    model = _model_of(config_class)
    parts = () if model is None else vars(sys.modules[model.__module__]).values()
    return any(hasattr(part, "_maybe_slice_kv_shared_inputs") for part in parts)


@functools.cache
def _computes_itself(config_class: Any) -> str | None:
    """Return the name of a configuration's model if some of its layers would not call the implementation; None for models that
    transformers does not know."""
    model = _model_of(config_class)
    if model is None or not (getattr(config_class, "model_type", None) in _PARTLY or has_own_attention(model)):
        return None
    return str(model.__name__)


@functools.cache
def has_own_attention(model: Any) -> bool:
    """Whether the layers of a class of transformers compute attention without its AttentionInterface.

    By the source of their module, as transformers checks it in `set_attn_implementation`, but not when a model is created with
    `attn_implementation`.
    """
    module = sys.modules.get(model.__module__)
    if module is None or not model.__module__.startswith("transformers."):
        return False
    source = inspect.getsource(module)
    has_attention = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE) is not None
    return has_attention and "ALL_ATTENTION_FUNCTIONS" not in source


def attention_tables(model: Any) -> list[dict[str, Any]]:
    """The tables in the module of a model's class in which its layers look up their attention by implementation."""
    names = vars(sys.modules[model.__module__]) if model.__module__ in sys.modules else {}
    return [table for name, table in names.items() if name.endswith("ATTENTION_CLASSES") and isinstance(table, dict)]


def own_attention(model: str, implementation: str) -> UnsupportedError:
    return UnsupportedError(
        f'{model}: attn_implementation="{implementation}" not supported: its layers compute attention without transformers\' '
        'AttentionInterface; use attn_implementation="eager"'
    )
