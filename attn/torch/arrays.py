"""Convert JAX and NumPy arrays to torch tensors and tensors to NumPy, sharing memory where both sides can.

Shared memory can be written through the tensor although JAX assumes that its arrays are immutable, so implementations never
write to their inputs. A read-only NumPy array is copied, since torch has no read-only tensors. This module does not import
JAX: JAX arrays support DLPack, and a tracer is recognised by its class.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from attn.errors import DeviceError, DTypeError

#: dtypes that NumPy has only through ml_dtypes: they cross as integers of the same width.
_CARRIED = {
    getattr(torch, name): name for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """View the same memory as integers, so that copying preserves the bits of NaN."""
    return tensor.view(_INTEGERS[tensor.itemsize])


def bits_of(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    """Return a copy of a tensor as `attn.testing.bits` stores its dtype."""
    # `copy` below: on a CPU all of the above may share the tensor's memory, which its owner writes to later
    host = tensor.detach().cpu().contiguous()
    if host.dtype not in _CARRIED:
        return host.numpy().copy()
    return raw(host).numpy().view(f"u{host.itemsize}").copy()


def static(tensors: Iterable[Any]) -> list[Any] | None:
    """Return the hashable metadata of tensors, without values and addresses; None unless all are plain tensors or None.

    First whether gradients are recorded, and if so which tensors require them.
    """
    facts: list[Any] = [recorded := torch.is_grad_enabled()]
    for x in tensors:
        if type(x) is torch.Tensor:
            # one flat list: a tuple for each tensor would have to be made and hashed too
            facts += x.shape, x.stride(), x.dtype, x.device
            if recorded:
                facts.append(x.requires_grad)
        elif x is None:
            facts.append(None)
        else:
            return None
    return facts


#: Compares tensors' types, dtypes, devices, shapes, strides and `requires_grad` with those of others, in one call.
#: Private to torch. Without it every call takes the way of the first one, by `static`.
_Guards: Any = getattr(getattr(torch._C, "_dynamo", None) and torch._C._dynamo.guards, "TensorGuards", None)


class Facts:
    """The interned result of `static` for a call's tensors: equal results are one object, so that comparing them is cheap."""

    def __init__(self) -> None:
        self._check: Any = None
        self._recorded, self._absent, self._present = False, list[int](), list[int]()

    def hold(self, tensors: Sequence[Any]) -> bool:
        """Return whether tensors have these facts; False until `watch` was called with tensors that have them."""
        if self._check is None or torch.is_grad_enabled() is not self._recorded:
            return False
        for i in self._absent:
            if tensors[i] is not None:
                return False
        return self._check(*([tensors[i] for i in self._present] if self._absent else tensors))  # None is not like a tensor

    def watch(self, tensors: Sequence[Any]) -> None:
        """Remember the facts of these tensors: `hold` compares others with them in one call."""
        if _Guards is not None:
            present = [x for x in tensors if x is not None]
            # Dimensions are compared by these lists; one of None would match any size.
            sizes, strides = [list(x.shape) for x in present], [list(x.stride()) for x in present]
            self._check = _Guards(*present, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
            self._recorded = torch.is_grad_enabled()
            self._absent = [i for i, x in enumerate(tensors) if x is None]
            self._present = [i for i, x in enumerate(tensors) if x is not None]


@functools.lru_cache(maxsize=1024)
def _facts(known: tuple[Any, ...]) -> Facts:
    return Facts()


def facts_of(tensors: Sequence[Any], last: Facts | None) -> Facts | None:
    """Return what is known of tensors beside values and addresses; None unless all are plain tensors or None. last: of another
    call, which probably has the same."""
    if last is not None and last.hold(tensors):
        return last
    known = static(tensors)
    facts = None if known is None else _facts(tuple(known))
    # Seen twice in a row: only then is it likely that a third call has them, and worth making the guards.
    if facts is not None and facts is last:
        facts.watch(tensors)
    return facts


def from_foreign(x: Any, like: torch.Tensor | None = None) -> torch.Tensor:
    """Convert a NumPy or JAX array to a tensor, on the device of `like` (None: on the array's device).

    Raises TypeError for a tracer, `DeviceError` for an array on several devices, `DTypeError` for a dtype that torch does not
    have.
    """
    tensor = _from_numpy(np.asarray(x)) if isinstance(x, np.ndarray | np.generic) else _from_dlpack(x)
    return tensor if like is None else tensor.to(like.device)


def _from_numpy(array: "np.ndarray[Any, Any]") -> torch.Tensor:
    if not array.flags.writeable:  # torch would alias read-only memory as writable
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        if array.dtype.name not in _CARRIED.values():
            raise DTypeError(f"a NumPy array of dtype {array.dtype} has no counterpart in torch") from error
        carrier = np.int16 if array.itemsize == 2 else np.uint8
        return _from_numpy(array.view(carrier)).view(getattr(torch, array.dtype.name))
    except ValueError:  # torch supports neither foreign byte orders nor negative strides
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


def _from_dlpack(array: Any) -> torch.Tensor:
    if any(cls.__name__ == "Tracer" for cls in type(array).__mro__):
        raise TypeError(
            "a JAX tracer has no memory and cannot cross to torch: call outside of jax.jit, jax.grad and jax.vmap, or use a "
            "jax backend"
        )
    devices = array.devices()
    # DLPack describes memory of one device
    if len(devices) != 1:
        raise DeviceError(f"the array is on {len(devices)} devices: gather it on one before passing it to torch")
    try:
        return torch.from_dlpack(array)  # type: ignore[attr-defined]
    except (BufferError, RuntimeError) as error:
        raise DTypeError(f"a JAX array of dtype {array.dtype} cannot cross to torch: {error}") from error


def to_numpy(x: torch.Tensor, like: Any = None) -> "np.ndarray[Any, Any]":
    """Convert a tensor to a NumPy array of the same dtype, sharing its memory if it is on the CPU.

    `like` is unused, since NumPy has no devices; it keeps the signature common to both frameworks. bfloat16 and fp8 become
    ml_dtypes. Raises ValueError for a tensor that requires grad, `DTypeError` for a dtype that NumPy does not have.
    """
    if x.requires_grad:
        raise ValueError("a tensor that requires grad cannot leave torch, gradients do not cross: pass tensor.detach()")
    # lazy conjugation and negation are flags of a tensor, which NumPy's arrays do not have
    x = x.detach().cpu().resolve_conj().resolve_neg()
    name = _CARRIED.get(x.dtype)
    try:
        if name is None:
            return x.numpy()
        import ml_dtypes

        return raw(x).numpy().view(getattr(ml_dtypes, name))
    except TypeError as error:
        raise DTypeError(f"a tensor of dtype {x.dtype} has no counterpart in NumPy") from error
    except ModuleNotFoundError as error:
        raise DTypeError(f"NumPy needs ml_dtypes for {name}: install ml_dtypes, or pass tensor.float()") from error
