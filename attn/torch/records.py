"""The common fields of PyTorch backends' records, by library or type of device. A backend adds its own."""

from functools import partial
from typing import Final

from attn.capabilities import Capabilities

_HALF: Final = ("bfloat16", "float16")
_ALL: Final = ("cuda", "rocm", "xpu", "cpu")

CUDA = partial(Capabilities, framework="torch", platforms=("cuda",), dtypes=_HALF, archs=(("cuda", ("sm_80+",)),))
TRITON = partial(CUDA, platforms=("cuda", "rocm"), dtypes=(*_HALF, "float32"), packages=("triton",))
FLASHINFER = partial(CUDA, packages=("flashinfer",), install="flashinfer-python")
AITER = partial(
    CUDA,
    platforms=("rocm",),
    packages=("aiter",),
    install="git+https://github.com/ROCm/aiter",
    archs=(("rocm", ("gfx942", "gfx950")),),
)
ANYWHERE = partial(Capabilities, framework="torch", platforms=_ALL, dtypes=("float32", "float16", "bfloat16", "float64"))
