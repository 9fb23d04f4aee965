"""When FlexAttention uses FlashAttention's kernel: PyTorch's back end `FLASH`, which must be requested explicitly.

PyTorch (2.11 and newer) compiles the mods into FlashAttention 4's kernel instead of a Triton kernel if the kernel option
`BACKEND` is "FLASH" and the package flash-attn-4 is installed. On Hopper, from release 4.0.0b36 on, that kernel supports blocks
of 64 rows and pages as small as 16 keys; on Blackwell its tiles are longer than a page. It computes in 16 bits. If it cannot
be compiled, the Triton kernel is used, with one warning.
"""

import functools
import re
import typing

import torch

from attn.imports import installed, version_of
from attn.logger import init_logger

logger = init_logger(__name__)

ROWS = 64  #: the only number of rows per block that the kernel supports
_LONGEST_PAGE = 64  #: the largest page size, in keys, that the tiles of every head size can be reduced to
_FIRST_RELEASE = 36  #: the first beta of 4.0.0 whose source is known to reduce its tiles to a page
_failed: list[str] = []  # the compiler's error, after a failure: the kernel is then not requested again


def reasons(dtype: torch.dtype, block: int, page: int, device: torch.device) -> list[str]:
    """Return why FlashAttention's kernel is not used for such blocks and pages; empty if it is used."""
    why = list(_of_installation()) + _failed
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        why.append("its block sizes fit sm_90 only")
    if dtype not in (torch.bfloat16, torch.float16):
        why.append(f"dtype={str(dtype).removeprefix('torch.')} (supports bfloat16, float16)")
    if block != ROWS:
        why.append(f"too few rows per request for blocks of {ROWS}")
    if page > _LONGEST_PAGE:
        why.append(f"block_size={page} (supports up to {_LONGEST_PAGE})")
    return why


@functools.cache
def _of_installation() -> tuple[str, ...]:
    """Return why this installation lacks the back end; empty if it has it."""
    from torch.nn.attention import flex_attention as flex

    # the names of back ends are a literal type, which is all that says whether this one exists
    if "FLASH" not in typing.get_args(getattr(flex, "_Backend", None)):
        return (f"PyTorch {torch.__version__} has no FLASH back end",)
    version = version_of("flash-attn-4")
    if version is None or not installed("flash_attn.cute"):
        return ("flash-attn-4 is not installed",)
    beta = re.match(r"4\.0\.0b(\d+)", version)
    if beta and int(beta[1]) < _FIRST_RELEASE:
        return (f"flash-attn-4 {version} (supports 4.0.0b{_FIRST_RELEASE} and newer)",)
    return ()


def gave_up(error: Exception) -> bool:
    """Whether an error is the compiler's; if so, log it and use the Triton kernel from now on."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    # an error of the call itself, as of memory, would be raised by the Triton kernel too
    if not isinstance(error, TorchDynamoException | InductorError):
        return False
    reason = str(error).strip().partition("\n")[0]
    _failed.append(f"it failed to compile: {reason}")
    logger.warning_once("FLEX_ATTENTION: PyTorch's FLASH back end failed to compile; using the Triton kernel: %s", reason)
    return True
