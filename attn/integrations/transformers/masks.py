"""transformers' mask interface: patterns are described, other masks materialised."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Padding:
    """Attributes of a described mask in addition to the valid keys: its window; `whole`: all keys are valid; `all_rows`: rows
    are real even if their keys are not; and, once computed, each entry's lengths on the host."""

    window: int | None
    whole: bool = False
    all_rows: bool = False
    _lens: tuple[list[int], list[int], list[int] | None] | None = None

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

    A mask is materialised, [B, 1, S, T], if the pattern is unknown, if transformers requires it (`allow_..._skip=False`), and
    over a cache that has dropped keys (`kv_offset`): `generate` makes the masks of some models before the call, and the model
    then reads a two-dimensional one as the padding of all tokens so far. A materialised mask carries its description.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = mask_function or causal_mask_function
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
    drawn: Any = sdpa_mask(
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


def _captured(function: Any, maker: str, name: str) -> Any:
    """Return the variable `name` captured by a function that transformers' `maker` made, or None."""
    if getattr(function, "__qualname__", "").partition(".")[0] != maker or function.__closure__ is None:
        return None
    captured = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return captured[name].cell_contents if name in captured else None
