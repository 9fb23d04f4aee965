"""transformers' mask interface: patterns are described, other masks materialised."""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attn.backends.metadata import spans_of
from attn.errors import UnsupportedError
from attn.integrations.transformers.call import NAME
from attn.torch.kernels.runs import Runs


@dataclass
class Padding:
    """Attributes of a described mask in addition to the valid keys: its window; `whole`: all keys are valid; `all_rows`: rows
    are real even if their keys are not; `chunk`: positions per chunk, counted from an entry's first valid key; `spans`:
    [B, S, 2] int32 on the host, the rows' spans among an entry's valid keys, cut by the window if `span_window`; `draw`: makes
    the mask [B, 1, S, T], for a mask that a window does not describe; and, once computed, each entry's lengths on the host."""

    window: int | None
    whole: bool = False
    all_rows: bool = False
    chunk: int | None = None
    spans: Any = None
    span_window: bool | None = None
    draw: Callable[[], torch.Tensor] | None = None
    _lens: tuple[list[int], list[int], list[int] | None] | None = None
    _runs: Runs | None = None
    to_end: bool = False  #: whether every run ends at the last key, once they are made

    @property
    def plain(self) -> bool:
        """Whether the valid keys, causality and the window say everything."""
        return self.chunk is None and self.spans is None and self.draw is None

    def runs(self, present: torch.Tensor) -> Runs | None:
        """Return each entry's valid keys if they are one run; made once, waits for the device."""
        if self._runs is None:
            _, keys, firsts = self.lens(present, present.shape[1])
            if firsts is None:
                return None
            self._runs = Runs(*(torch.tensor(x, dtype=torch.int32, device=present.device) for x in (firsts, keys)))
            self.to_end = all(not n or first + n == present.shape[1] for first, n in zip(firsts, keys, strict=True))
        return self._runs

    def lens(self, present: torch.Tensor, rows: int) -> tuple[list[int], list[int], list[int] | None]:
        """Return each entry's valid (rows, keys), and its first valid key unless some entry's valid keys have gaps.

        Waits for the device.
        """
        if self._lens is None:
            queries, keys = present[:, -rows:].sum(1), present.sum(1)
            at = torch.arange(present.shape[1], device=present.device)
            first = torch.where(present, at, present.shape[1]).amin(1)
            last = torch.where(present, at, -1).amax(1)
            solid = bool(((last - first + 1 == keys) | (keys == 0)).all())
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

    None means that every row sees every key, or that rows and keys are the same tokens and the call is causal. A described
    mask [B, T'] carries its `Padding`; if T' is below the number of keys, the rest are unused slots of a static cache.

    Chunks, and blocks of tokens that see each other, are described as well (docs/semantics.md §18), as `attn_described` of an
    empty mask [B, 1, 0, T']: models take one with four dimensions as it is, and it fails where the description is lost.

    A mask is materialised, [B, 1, S, T], if the pattern is unknown, if transformers requires it (`allow_..._skip=False`), and
    over a cache that has dropped keys (`kv_offset`): `generate` makes the masks of some models before the call, and the model
    then reads a two-dimensional one as the padding of all tokens so far. A materialised mask carries its description.

    Raises `UnsupportedError` for a model whose layers would add the mask to scores of their own instead of calling `"attn"`.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    model = None
    if "config" in kwargs and not torch.compiler.is_compiling():
        model = _computes_itself(kwargs["config"].__class__)
    if model is not None:
        raise UnsupportedError(
            f'{model}: attn_implementation="{NAME}" not supported: its layers compute attention without transformers\' '
            'AttentionInterface; use attn_implementation="eager"'
        )
    mask_function = causal_mask_function if mask_function is None else mask_function  # torch 2.11 traces no truth of functions
    found = None if use_vmap or isinstance(q_offset, torch.Tensor) or torch.compiler.is_compiling() else _pattern(mask_function)
    end = q_offset + q_length - kv_offset  # keys up to the last row's
    described: torch.Tensor | None = None
    if found is not None and end <= kv_length and not (end < kv_length and kv_offset):
        causal, window = found
        described = _described(batch_size, end if causal else kv_length, kv_length, kv_offset, window, attention_mask, device)
        padding: Padding = described.attn_padding  # type: ignore[attr-defined]
        if allow_is_causal_skip if causal else allow_is_bidirectional_skip:
            placed = not causal or q_length in (1, kv_length)  # else None would leave the rows' positions open
            if padding.whole and padding.window is None and described.shape[1] == kv_length and placed:
                return None
            if not kv_offset:
                return described
    draw = functools.partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    fixed = isinstance(q_offset, torch.Tensor) or torch.compiler.is_compiling()
    if found is None and not fixed and end == kv_length:
        reach = _reach(mask_function)
        if reach is not None:
            present = _described(batch_size, end, kv_length, kv_offset, reach.window, attention_mask, device)
            if _reached(present, reach, q_length, q_offset, kv_offset):
                present.attn_padding.draw = draw  # type: ignore[attr-defined]
                empty = present.new_empty(batch_size, 1, 0, end)
                empty.attn_described = present  # type: ignore[attr-defined]
                return empty
    drawn: Any = draw()
    if described is not None:
        drawn.attn_described = described
    return drawn  # type: ignore[no-any-return]


def _described(
    batch_size: int,
    end: int,
    kv_length: int,
    kv_offset: int,
    window: int | None,
    attention_mask: torch.Tensor | None,
    device: torch.device | str,
) -> torch.Tensor:
    """Return bool [B, end], which of the first `end` keys are valid, with its `Padding`."""
    from transformers.masking_utils import prepare_padding_mask

    present = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if present is not None:
        present = present[:, kv_offset : kv_offset + end].bool()
    whole = present is None or bool(present.all())
    if present is None:
        present = torch.ones(batch_size, end, dtype=torch.bool, device=device)
    present.attn_padding = Padding(window if window is not None and window < end else None, whole)  # type: ignore[attr-defined]
    return present


def _pattern(function: Callable[..., Any]) -> tuple[bool, int | None] | None:
    """Return (causal, window) of a mask function that is one of transformers' plain ones; None for any other."""
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


@dataclass(frozen=True)
class _Reach:
    """A causal mask function with a window, chunks of positions after left padding, or blocks of tokens [B, N], -1 for none;
    span_window: whether the window cuts blocks."""

    window: int | None = None
    chunk: int | None = None
    left_padding: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    span_window: bool | None = None


def _reach(function: Callable[..., Any]) -> _Reach | None:
    """Read how transformers composed a mask function; None unless each part and their order are known."""
    from transformers.masking_utils import causal_mask_function

    either: Any = _captured(function, "or_masks", "mask_functions") or ()
    if len(either) == 2:  # causal, or a window, or a block
        blocks, base = _captured(either[1], "blockwise_overlay", "block_sequence_ids"), _pattern(either[0])
        if blocks is None or base is None or not base[0]:
            return None
        return _Reach(base[1], blocks=blocks, span_window=None if base[1] is None else False)
    both: Any = _captured(function, "and_masks", "mask_functions") or ()
    if len(both) != 2:
        return None
    chunk = _captured(both[0], "chunked_overlay", "chunk_size")
    if isinstance(chunk, int) and both[1] is causal_mask_function:
        return _Reach(chunk=chunk, left_padding=_captured(both[0], "chunked_overlay", "left_padding"))
    inner, window = _reach(both[0]), _captured(both[1], "sliding_window_overlay", "sliding_window")
    if inner is None or inner.blocks is None or inner.window is not None or not isinstance(window, int):
        return None
    return _Reach(window, blocks=inner.blocks, span_window=True)  # the window cuts causal rows and blocks alike


def _reached(present: torch.Tensor, reach: _Reach, rows: int, q_offset: int, kv_offset: int) -> bool:
    """Add chunks and spans to the description `present` [B, T']; False if they cannot be described exactly.

    Keys before the chunk of an entry's first row are marked as not valid, so that positions count from a chunk's start.
    """
    padding: Padding = present.attn_padding  # type: ignore[attr-defined]
    if reach.chunk is not None:
        left = torch.as_tensor(reach.left_padding, device=present.device)
        first_row = left.clamp(min=q_offset)
        start = left + (first_row - left) // reach.chunk * reach.chunk - kv_offset
        present &= torch.arange(present.shape[1], device=present.device) >= start[:, None]
        padding.whole = bool(present.all())
        _, keys, firsts = padding.lens(present, rows)
        if firsts is None or any(k and f != s for k, f, s in zip(keys, firsts, start.tolist(), strict=True)):
            return False
        padding.chunk = reach.chunk if rows > 1 else None
        return True
    assert reach.blocks is not None
    if padding.window is not None and padding.lens(present, rows)[2] is None:
        return False  # positions in a window count keys that are not valid
    valid = present.cpu().numpy()
    blocks = reach.blocks[:, kv_offset : kv_offset + present.shape[1]].cpu().numpy()
    if blocks.shape != valid.shape:
        return False
    spans = np.full((len(valid), rows, 2), -1, np.int32)
    for b, keep in enumerate(valid):
        own = blocks[b][keep]
        runs = own[np.flatnonzero(np.diff(own, prepend=-2))]
        runs = runs[runs >= 0]
        if len(np.unique(runs)) != len(runs):
            return False  # tokens of one block with others between them are not a span
        mine = keep[-rows:]
        own = np.where(own < 0, -1, own)
        spans[b, mine] = spans_of([own], [int(mine.sum())])
    padding.spans = spans if (spans >= 0).any() else None
    padding.span_window = reach.span_window if padding.window is not None else None
    return True


#: Types of models in which some layers call the implementation and those that take this mask do not.
_PARTLY = {"git"}


@functools.cache
def _computes_itself(config_class: Any) -> str | None:
    """Return the name of a configuration's model if its layers compute attention without transformers' AttentionInterface.

    By the source of transformers' own model, as transformers checks it in `set_attn_implementation`, but not when a model is
    created with `attn_implementation`. None for models that transformers does not know.
    """
    from transformers import MODEL_MAPPING

    try:
        found = MODEL_MAPPING[config_class]
    except KeyError:
        return None
    model: Any = found[0] if isinstance(found, tuple) else found
    source = inspect.getsource(sys.modules[model.__module__])
    if getattr(config_class, "model_type", None) in _PARTLY:
        return str(model.__name__)
    own = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return str(model.__name__) if own and "ALL_ATTENTION_FUNCTIONS" not in source else None


def _captured(function: Any, maker: str, name: str) -> Any:
    """Return the variable `name` captured by a function that transformers' `maker` made, or None."""
    if getattr(function, "__qualname__", "").partition(".")[0] != maker or function.__closure__ is None:
        return None
    captured = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return captured[name].cell_contents if name in captured else None
