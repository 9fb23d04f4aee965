"""Whether `hopper_prefill` and `hopper_mla` can be used with the installed Triton, and if not, why.

They are written in Gluon, whose interface changes between releases. The check looks up the names that the kernels need
(`gluon`), not a version number. If a release has all the names but cannot compile a kernel, that kernel is disabled at its
first launch and the call continues with the general kernels. Triton is imported only when a function is called, so
importing this module does not need it.
"""

import functools
import importlib.util
import logging

COMPILED_WITH = "3.6 to 3.9"  #: releases of Triton that tests compile the kernels with
KERNELS = ("hopper_prefill", "hopper_mla")
_failed: dict[str, str] = {}  # kernels that this Triton could not compile, with the compiler's message


class CannotCompile(RuntimeError):
    """A Hopper kernel failed to compile and is now disabled; nothing was launched."""


def has_triton() -> bool:
    """Whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _lacking() -> str:
    if not has_triton():
        return "triton is not installed"
    import triton

    # AttributeError comes from `gluon._newest`, ImportError from a module or name that is missing
    try:
        from attn.kernels import gluon
    except (ImportError, AttributeError) as error:
        return f"Gluon of triton {triton.__version__} is incompatible: {error} (needs triton {COMPILED_WITH})"
    missing = gluon.lacking()
    return missing and f"triton {triton.__version__} has no {missing} (needs triton {COMPILED_WITH})"


def why_off(kernel: str) -> str:
    """Why a kernel of `KERNELS` is disabled with the installed Triton, on any device; "" if it is enabled."""
    return _lacking() or _failed.get(kernel, "")


def is_on(kernel: str) -> bool:
    """Whether a kernel of `KERNELS` can be launched. Logs a reason against it once: call only on a Hopper GPU."""
    if why := why_off(kernel):
        _warn(kernel, why)
    return not why


@functools.cache
def _warn(kernel: str, why: str) -> None:
    logging.getLogger(__name__).warning("%s is off, general kernels are used instead: %s", kernel, why)


def turn_off(kernel: str, error: Exception) -> None:
    """Disable a kernel and raise `CannotCompile` if a launch failed in the compiler; do nothing for other errors."""
    import triton
    from triton.errors import TritonError

    if not isinstance(error, TritonError) and "PassManager" not in str(error):  # MLIR's passes fail as RuntimeError
        return
    # Triton wraps the compiler's message in errors of its own; the innermost one names what failed.
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    words = " ".join(str(cause).split())
    _failed[kernel] = f"triton {triton.__version__} cannot compile it ({type(cause).__name__}: {words[-200:]})"
    raise CannotCompile(_failed[kernel]) from error
