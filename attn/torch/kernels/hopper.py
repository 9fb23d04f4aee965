"""Whether `hopper_prefill` and `hopper_mla` can be used with the Triton that is installed, and if not, why.

They are written in Gluon, whose interface changes between releases. What they need is looked up (`_gluon`), not a version
number; a release that has all the names and still cannot compile a kernel turns that kernel off at its first launch, and the
call goes on with the general kernels. Triton is imported when something is asked, so that this module needs none.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

COMPILED_WITH = "3.6 to 3.9"  #: releases of Triton that tests compile the kernels with
KERNELS = ("hopper_prefill", "hopper_mla")
_failed: dict[str, str] = {}  # kernels that this Triton could not compile, with the compiler's words
_P = ParamSpec("_P")
_T = TypeVar("_T")


class CannotCompile(RuntimeError):
    """A kernel for Hopper was not compiled, and is off from now on; nothing was launched."""


def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _lacking() -> str:
    if not has_triton():
        return "triton is not installed"
    import triton

    try:
        from attn.torch.kernels import _gluon
    except (ImportError, AttributeError) as error:
        return f"Gluon of triton {triton.__version__} is another: {error} (needs triton {COMPILED_WITH})"
    missing = _gluon.lacking()
    return missing and f"triton {triton.__version__} has no {missing} (needs triton {COMPILED_WITH})"


def why_off(kernel: str) -> str:
    """Why a kernel of `KERNELS` is off with the installed Triton, whatever the device; empty where it is on."""
    return _lacking() or _failed.get(kernel, "")


def is_on(kernel: str) -> bool:
    """Whether a kernel of `KERNELS` can be launched. A reason against it is logged once: ask on a Hopper GPU only."""
    if why := why_off(kernel):
        _warn(kernel, why)
    return not why


@functools.cache
def _warn(kernel: str, why: str) -> None:
    logging.getLogger(__name__).warning("%s is off, general kernels take its place: %s", kernel, why)


def turn_off(kernel: str, error: Exception) -> None:
    """Turn a kernel off for an error of its launch that is the compiler's, and raise `CannotCompile`; nothing for others."""
    import triton
    from triton.errors import TritonError

    if not isinstance(error, TritonError) and "PassManager" not in str(error):  # MLIR's passes fail as RuntimeError
        return
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    words = " ".join(str(cause).split())
    _failed[kernel] = f"triton {triton.__version__} cannot compile it ({type(cause).__name__}: {words[-200:]})"
    raise CannotCompile(_failed[kernel]) from error


def or_general(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Repeat a call in which a kernel for Hopper turned out not to compile: it is off now, so that general ones are taken."""

    @functools.wraps(call)
    def repeated(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return call(*args, **kwargs)
        except CannotCompile:
            return call(*args, **kwargs)

    return repeated
