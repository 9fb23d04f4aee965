"""The jax wing's platforms: TPU, GPU and CPU, each with its order of backends and the reasons for it.

A platform is asked only when a layer is selected; nothing here runs at import. `jax.default_backend()` says which one is
here; the others answer too, about devices that are not.
"""

import contextlib
import functools
import os
import platform as host
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from attn.capabilities import Device, Feature, Request
from attn.platforms import Platform

#: What `device_kind` begins with -> the generation's short name; the longest match wins ("TPU v5" alone is v5p).
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


#: Flags of XLA that ask for the same bits in each run.
_DETERMINISTIC = {
    f"--xla_gpu_{name}{value}"
    for name in ("deterministic_ops", "exclude_nondeterministic_ops")
    for value in ("", "=true", "=1")
}


class JaxPlatform(Platform):
    """Base: a framework name, the device at hand, and the MLA branch."""

    framework = "jax"
    #: what a machine without such a device says
    absent: str

    @functools.cache  # noqa: B019  (one platform object a process)
    def device(self) -> Device:
        if jax.default_backend() != self.name:
            return Device("jax", self.name, self.absent)
        device = jax.devices()[0]
        return Device("jax", self.name, device.device_kind, self.arch(device))

    def arch(self, device: jax.Device) -> str:
        """The hardware generation, as `Capabilities.archs` rules spell it."""
        raise NotImplementedError

    def dense(self, request: Request, device: Device) -> tuple[str, ...]:
        raise NotImplementedError

    def mla(self, request: Request, device: Device) -> tuple[str, ...]:
        """Multi-head latent attention: the proven backend first."""
        return ("XLA_MLA_SPARSE",) if Feature.SPARSE_MLA in request.features else ("XLA_MLA", "PALLAS_MLA")

    def deterministic(self) -> str:
        flags = os.environ.get("XLA_FLAGS", "").split()
        asked = [flag for flag in flags if flag in _DETERMINISTIC]
        return f"XLA_FLAGS has {asked[0]}" if asked else ""

    def mla_prefill_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        return ("XLA", "PALLAS")

    def diffusion_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        # PALLAS is for TPUs; on a CPU it would be interpreted, so that XLA_ATTN comes first there
        return ("PALLAS", "XLA_ATTN") if self.name == "tpu" else ("CUDNN", "XLA_ATTN", "PALLAS")

    def priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        if {Feature.MLA, Feature.SPARSE_MLA} & request.features:
            return self.mla(request, device)
        return self.dense(request, device)


class TpuPlatform(JaxPlatform):
    """Google's TPUs."""

    name, absent = "tpu", "TPU (none here)"

    def arch(self, device: jax.Device) -> str:
        return tpu_arch(device.device_kind)

    def dense(self, request: Request, device: Device) -> tuple[str, ...]:
        return (
            # Pages go to VMEM by DMA and scores never leave it: by libtpu's estimate decode takes less time than HBM needs to
            # deliver the keys, and the cache is never copied (benchmarks/notes/tpu-paged.md). It passes the conformance suite
            # in TPU interpret mode; it has not run on a TPU.
            "PALLAS",
            "XLA_ATTN",  # any shape and feature; every chunk's scores travel through HBM
        )


class GpuPlatform(JaxPlatform):
    """NVIDIA and AMD GPUs under jax."""

    name, absent = "gpu", "GPU (none here)"

    def arch(self, device: jax.Device) -> str:
        capability = getattr(device, "compute_capability", "")
        return f"sm_{capability.replace('.', '')}" if capability[:1].isdigit() else capability

    def dense(self, request: Request, device: Device) -> tuple[str, ...]:
        return (
            "XLA_ATTN",  # every feature, and no second compiler to trust
            "PALLAS",
        )


class CpuPlatform(JaxPlatform):
    """Any host processor."""

    name, absent = "cpu", f"{host.machine()} CPU"

    @functools.cache  # noqa: B019
    def device(self) -> Device:
        return Device("jax", "cpu", f"{host.machine()} CPU", host.machine())  # there is always one, whatever is the default

    def dense(self, request: Request, device: Device) -> tuple[str, ...]:
        return (
            "XLA_ATTN",
            "PALLAS",  # interpreted here, for tests: thousands of times slower
        )


PLATFORMS: dict[str, type[JaxPlatform]] = {p.name: p for p in (TpuPlatform, GpuPlatform, CpuPlatform)}


def tpu_arch(device_kind: str) -> str:
    """`v5e`, `v6e`, `v7x`, ... for a TPU's `device_kind`; the kind itself for one not known here."""
    known = max((kind for kind in TPU_KINDS if device_kind.startswith(kind)), key=len, default="")
    return TPU_KINDS.get(known, device_kind.removeprefix("TPU ").replace(" ", "_"))


@contextlib.contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """Trace for a TPU generation (`v5e`, `v6e`, ...) that is not here, to lower, compile or export for it:

        with compiling_for("v6e"):
            artifact = jax.export.export(step, platforms=("tpu",))(*arguments).serialize()

    Pallas kernels are traced for one chip, whose memories decide their block sizes: what is traced elsewhere on a host
    without TPUs is for its interpreter, and JAX refuses to lower that for one. Raises ValueError for an unknown name.
    """
    kinds = {short: kind for kind, short in reversed(TPU_KINDS.items())}  # of several, the first: what libtpu calls it
    if arch not in kinds:
        raise ValueError(f"arch={arch!r} is no TPU generation known here; known: {', '.join(kinds)}")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kinds[arch], 1, "tpu"))):
        yield


@functools.cache
def platform(name: str | None = None) -> JaxPlatform:
    """The platform called `name`, or the one that `jax.default_backend()` runs on.

    Raises ValueError for an unknown name.
    """
    if name is None:
        name = jax.default_backend()
    if name not in PLATFORMS:
        raise ValueError(f"jax platform {name!r} is unknown; known: {', '.join(PLATFORMS)}")
    return PLATFORMS[name]()
