"""When FlexAttention's program is FlashAttention's kernel: PyTorch's back end `FLASH`, which has to be asked for.

PyTorch (2.11 and newer) writes the mods into FlashAttention 4's kernel instead of a Triton one where its kernel option
`BACKEND` says so and the package flash-attn-4 is installed. On Hopper that kernel takes blocks of 64 rows and pages as small as
16 keys, from release 4.0.0b36 on; on Blackwell its tiles are longer than a page. It computes in 16 bits. What it cannot
compile goes to the Triton kernel, with a warning once.
"""

import functools
import re
import typing

import torch

from attn.imports import installed, version_of
from attn.logger import init_logger

logger = init_logger(__name__)

ROWS = 64  #: the rows of a block that the kernel takes
_LONGEST_PAGE = 64  #: keys of a page that every head size's tile can be cut down to
_FIRST_RELEASE = 36  #: of 4.0.0's betas, the first that was read to cut its tiles down
_failed: list[str] = []  # what the compiler said, once it has failed: it is not asked again


def reasons(dtype: torch.dtype, block: int, page: int, device: torch.device) -> list[str]:
    """Why a program of such blocks and pages is not asked of FlashAttention; empty when it is."""
    why = list(_of_installation()) + _failed
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        why.append("its block sizes fit sm_90 only")
    if dtype not in (torch.bfloat16, torch.float16):
        why.append(f"dtype={str(dtype).removeprefix('torch.')} (supports bfloat16, float16)")
    if block != ROWS:
        why.append(f"too few rows a request for blocks of {ROWS}")
    if page > _LONGEST_PAGE:
        why.append(f"block_size={page} (supports up to {_LONGEST_PAGE})")
    return why


@functools.cache
def _of_installation() -> tuple[str, ...]:
    """Why this installation has no such back end."""
    from torch.nn.attention import flex_attention as flex

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
    """Whether an error is the compiler's; if so the Triton kernel is asked for from now on."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    if not isinstance(error, TorchDynamoException | InductorError):
        return False
    said = str(error).strip().partition("\n")[0]
    _failed.append(f"it was not compiled: {said}")
    logger.warning_once("FLEX_ATTENTION: PyTorch's FLASH back end was not compiled, the Triton kernel serves: %s", said)
    return True
