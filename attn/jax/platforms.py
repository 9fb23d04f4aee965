"""The platforms of jax: TPU, GPU and CPU, each with its priority list of backends and the reasons for the order.

A platform is queried only when a layer is selected; nothing in this module runs at import. `jax.default_device`, else
`jax.default_backend()` determines the current platform; the others can still be queried about devices that are not present.
"""

import contextlib
import functools
import os
import platform as host
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from attn.capabilities import Device, Feature, Request
from attn.kernels.launch import PROCESSORS
from attn.selection.platforms import Platform

#: Prefixes of `device_kind` -> the generation's short name; the longest match wins ("TPU v5" alone is v5p).
TPU_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
    "TPU v7x": "v7x",
}


#: XLA flags that request deterministic results.
_DETERMINISTIC = {
    f"--xla_gpu_{name}{value}"
    for name in ("deterministic_ops", "exclude_nondeterministic_ops")
    for value in ("", "=true", "=1")
}


class JaxPlatform(Platform):
    """Base class: the framework's name, the present device, and the priority lists of MLA and diffusion."""

    framework = "jax"
    absent: str  #: the device's description on a machine without one
    dense: tuple[str, ...]  #: the backends of paged attention, in order

    @functools.cache  # noqa: B019  (one platform object per process)
    def device(self) -> Device:
        try:
            device = jax.devices(self.name)[0]
        except RuntimeError:  # no such backend here
            return Device("jax", self.name, self.absent)
        return Device("jax", self.name, device.device_kind, self.arch(device))

    def arch(self, device: jax.Device) -> str:
        """The hardware generation, as `Capabilities.archs` rules spell it."""
        raise NotImplementedError

    #: Multi-head latent attention over all keys: the backend that has run on devices first.
    latent: tuple[str, ...] = ("XLA_MLA", "PALLAS_MLA")
    expanded: tuple[str, ...] = ("XLA", "PALLAS")  #: the same, of long prompts
    sparse: tuple[str, ...] = ("XLA_MLA_SPARSE", "PALLAS_MLA_SPARSE")  #: latent attention over chosen keys

    def mla(self, request: Request, device: Device) -> tuple[str, ...]:
        return self.sparse if Feature.SPARSE_MLA in request.features else self.latent

    def deterministic(self) -> str:
        flags = os.environ.get("XLA_FLAGS", "").split()
        present = [flag for flag in flags if flag in _DETERMINISTIC]
        return f"XLA_FLAGS has {present[0]}" if present else ""

    def mla_prefill_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        return self.expanded

    def diffusion_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        # Measured (H200, TFLOP/s): TRITON_ATTN_JAX 552 to 622, CUDNN 591 to 619, neither always faster, and the second takes
        # masks. PALLAS is for TPUs. On a CPU it would be interpreted, so XLA_ATTN comes first there.
        return ("PALLAS", "XLA_ATTN") if self.name == "tpu" else ("CUDNN", "TRITON_ATTN_JAX", "XLA_ATTN", "PALLAS")

    def priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        if {Feature.MLA, Feature.SPARSE_MLA} & request.features:
            return self.mla(request, device)
        return self.dense


class TpuPlatform(JaxPlatform):
    """Google's TPUs."""

    name, absent = "tpu", "TPU (none here)"

    def arch(self, device: jax.Device) -> str:
        return tpu_arch(device.device_kind)

    # PALLAS copies pages to VMEM by DMA, and scores never leave it. By libtpu's estimate decode takes less time than reading
    # the keys from HBM, and the cache is never copied. It passes the conformance suite in TPU interpret mode; it has not run
    # on a TPU. XLA_ATTN takes any shape and feature, but every chunk's scores pass through HBM.
    dense = ("PALLAS", "XLA_ATTN")
    # PALLAS_MLA_SPARSE copies the chosen keys to VMEM, and scores never leave it; XLA_MLA_SPARSE gathers them in HBM first.
    # Neither has run on a TPU.
    sparse = ("PALLAS_MLA_SPARSE", "XLA_MLA_SPARSE")


class GpuPlatform(JaxPlatform):
    """NVIDIA and AMD GPUs in jax."""

    name, absent = "gpu", "GPU (none here)"

    def arch(self, device: jax.Device) -> str:
        capability = getattr(device, "compute_capability", "")
        return f"sm_{capability.replace('.', '')}" if capability[:1].isdigit() else capability

    # Measured (H200, 64 decodes over 4,096 keys, 32/8 heads of 128): TRITON_ATTN_JAX 0.29 ms with the write, XLA_ATTN 2.59. The
    # second has every feature on every GPU and needs no second compiler; PALLAS is for TPUs.
    dense = ("TRITON_ATTN_JAX", "XLA_ATTN", "PALLAS")
    latent = ("TRITON_MLA_JAX", "XLA_MLA", "PALLAS_MLA")
    expanded = ("TRITON_JAX", "XLA", "PALLAS")


class CpuPlatform(JaxPlatform):
    """Any host processor."""

    name, absent = "cpu", f"{host.machine()} CPU"

    @functools.cache  # noqa: B019
    def device(self) -> Device:
        return Device("jax", "cpu", f"{host.machine()} CPU", host.machine())  # always present, whatever the default backend

    dense = ("XLA_ATTN", "PALLAS")  # the second is interpreted on a CPU, for tests: thousands of times slower


PLATFORMS: dict[str, type[JaxPlatform]] = {p.name: p for p in (TpuPlatform, GpuPlatform, CpuPlatform)}


def tpu_arch(device_kind: str) -> str:
    """`v5e`, `v6e`, `v7x`, ... for a TPU's `device_kind`; for an unknown kind, the kind itself."""
    known = max((name for name in TPU_KINDS if device_kind.startswith(name)), key=len, default="")
    return TPU_KINDS.get(known, device_kind.removeprefix("TPU ").replace(" ", "_"))


@contextlib.contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """Trace for a TPU generation (`v5e`, `v6e`, ...) or GPU (`sm_90`) that is not present, to lower, compile or export for it:

        with compiling_for("v6e"):
            artifact = jax.export.export(step, platforms=("tpu",))(*arguments).serialize()

    Pallas kernels are traced for one chip, whose memories determine their block sizes. Without this context a host without
    TPUs traces for Pallas's interpreter, and JAX refuses to lower that for a TPU. Triton's kernels are compiled as they are
    traced: lower for `platforms=("cuda",)`, and `("rocm",)` for AMD's. Raises ValueError for an unknown name.
    """
    kinds = {short: long for long, short in reversed(TPU_KINDS.items())}  # the first of several kinds: libtpu's name
    if arch not in kinds and arch not in PROCESSORS:
        raise ValueError(f"arch={arch!r} is not a known TPU generation or GPU; known: {', '.join([*kinds, *PROCESSORS])}")
    device = AbstractDevice(kinds[arch], 1, "tpu") if arch in kinds else AbstractDevice(arch, PROCESSORS[arch], "gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


@functools.cache
def _named(name: str) -> JaxPlatform:
    if name not in PLATFORMS:
        raise ValueError(f"jax platform {name!r} is unknown; known: {', '.join(PLATFORMS)}")
    return PLATFORMS[name]()


def platform(name: str | None = None) -> JaxPlatform:
    """The platform called `name`, by default that of `jax.default_device`, else of `jax.default_backend()`."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if name is None and default is not None:  # a device, or the name of a backend
        name = (jax.devices(default)[0] if isinstance(default, str) else default).platform
    return _named(jax.default_backend() if name is None else name)


def platform_of(x: Any) -> JaxPlatform | None:
    """The platform of the device that an array is committed to; None if it is traced, may be moved to the default device, or is
    no array of JAX."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or not x.committed:
        return None
    return platform(next(iter(x.devices())).platform)
