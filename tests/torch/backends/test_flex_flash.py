"""FLEX_ATTENTION asks PyTorch for FlashAttention's kernel where that is installed and takes its blocks, and only there.

What it computes needs a Hopper GPU and flash-attn-4: `attn conform FLEX_ATTENTION --jobs 8` there.
"""

from collections.abc import Iterator

import pytest
import torch

from attn.torch.backends import _flex, _flex_flash
from attn.torch.backends._flex import FlexRules, MaskKey, ProgramShape
from attn.visibility import LayerMask

CUDA = torch.device("cuda")
RULES = FlexRules(MaskKey(LayerMask()), 1.0, None, False, True, 64, 16)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hopper GPU with the package installed, as far as a question is asked."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(_flex_flash, "installed", lambda module: True)
    monkeypatch.setattr(_flex_flash, "version_of", lambda package: "4.0.0b36")
    monkeypatch.setattr(_flex_flash, "_failed", [])
    _flex_flash._of_installation.cache_clear()
    yield
    _flex_flash._of_installation.cache_clear()


def test_it_is_asked_for_where_it_serves() -> None:
    from torch.nn.attention import flex_attention as flex

    assert _flex_flash.reasons(torch.bfloat16, 64, 16, CUDA) == []
    options = _flex.kernel_options(RULES, ProgramShape(torch.bfloat16, 4, 2, 64, "cuda", True))
    x = torch.zeros(1, 1, 1, 64)
    assert flex._apply_kernel_options(x, x, x, False, options)["BACKEND"] == "FLASH"  # PyTorch knows the word
    options = _flex.kernel_options(RULES, ProgramShape(torch.bfloat16, 4, 2, 64, "cuda"))
    assert options is not None and "BACKEND" not in options and options["BLOCK_N"] == 16


@pytest.mark.parametrize(
    ("dtype", "block", "page", "words"),
    [
        (torch.float32, 64, 16, "dtype=float32"),
        (torch.float16, 16, 16, "too few rows"),
        (torch.float16, 64, 128, "block_size=128"),
    ],
)
def test_calls_that_stay_with_triton(dtype: torch.dtype, block: int, page: int, words: str) -> None:
    (why,) = _flex_flash.reasons(dtype, block, page, CUDA)
    assert words in why


def test_machines_that_stay_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert "sm_90 only" in str(_flex_flash.reasons(torch.bfloat16, 64, 16, CUDA))
    for version, words in ((None, "not installed"), ("4.0.0b5", "4.0.0b36 and newer")):
        monkeypatch.setattr(_flex_flash, "version_of", lambda package, version=version: version)
        _flex_flash._of_installation.cache_clear()
        assert words in str(_flex_flash.reasons(torch.bfloat16, 64, 16, CUDA))


def test_what_cannot_be_compiled_is_not_asked_for_again() -> None:
    from torch._inductor.exc import InductorError

    assert not _flex_flash.gave_up(torch.OutOfMemoryError("no memory"))
    assert _flex_flash.reasons(torch.bfloat16, 64, 16, CUDA) == []
    assert _flex_flash.gave_up(InductorError(RuntimeError("no such tile"), None))  # type: ignore[arg-type]
    assert "no such tile" in str(_flex_flash.reasons(torch.bfloat16, 64, 16, CUDA))
