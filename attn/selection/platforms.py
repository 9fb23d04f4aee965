"""Platforms: the device kinds of each framework, and the order in which their backends are tried.

The core has the interface only. The frameworks' platforms (CUDA, ROCm, XPU, CPU under torch; TPU, GPU, CPU under jax) are in
`attn.torch.platforms` and `attn.jax.platforms`, with one priority list per hardware generation, and are resolved by dotted
name.
"""

import sys
from abc import ABC, abstractmethod
from typing import Any

from attn import envs
from attn.capabilities import FRAMEWORKS, Device, Request
from attn.errors import BackendLoadError
from attn.imports import installed, pip_install, resolve_obj_by_qualname


class Platform(ABC):
    """One kind of device under one framework."""

    framework: str
    #: cuda, rocm, xpu, cpu / tpu, gpu, cpu
    name: str

    @abstractmethod
    def device(self) -> Device:
        """Describe the current device; probed once, cheap afterwards."""

    @abstractmethod
    def priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        """Return names of backends in the order to try them for `request` on `device`."""

    def mla_prefill_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        """Return names of MLA prefill backends in the order to try them; empty if the framework has none for this platform."""
        return ()

    def diffusion_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        """Return names of diffusion backends in the order to try them."""
        return ()

    def deterministic(self) -> str:
        """Return the framework setting that requests deterministic results in this process, or ""."""
        return ""

    def host(self) -> "Platform | None":
        """Return the host's platform if arrays are there unless a program places them, though there is an accelerator."""
        return None

    @property
    def device_name(self) -> str:
        return self.name

    def get_attn_backend_cls(
        self,
        selected_backend: Any,
        head_size: int,
        dtype: Any,
        kv_cache_dtype: str | None,
        block_size: int,
        use_v1: bool,
        use_mla: bool,
    ) -> str:
        """Return the class path of the backend for these arguments, as vLLM's platforms do.

        `selected_backend`: a registry member, or None for automatic selection. Raises `UnsupportedError` with every
        reason if no backend serves.
        """
        # `attn.selector` may not be imported here, so names are resolved; only this method, part of vLLM's interface, calls it
        make_request = resolve_obj_by_qualname("attn.selector.make_request")
        select = resolve_obj_by_qualname("attn.selector.select")
        request = make_request(head_size, dtype, kv_cache_dtype, block_size, use_mla=use_mla)
        selection = select(request, platform=self, backend=selected_backend)
        # Raises with the table of reasons; the path is vLLM's return value.
        selection.require()
        assert selection.winner is not None
        return selection.winner.path


def platform_for(framework: str, name: str | None = None) -> Platform:
    """Return the current platform of a framework, or its platform called `name` (whether or not such a device is present).

    Raises ValueError for an unknown framework or platform, `BackendLoadError` if the framework is not installed.
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework={framework!r} (supports {', '.join(FRAMEWORKS)})")
    # Without this check the error would be one of the module that imports the framework.
    if not installed(framework):
        raise BackendLoadError(f"{framework} is not installed: {pip_install(framework)}")
    return resolve_obj_by_qualname(f"attn.{framework}.platforms.platform")(name)


def default_framework() -> str:
    """Return the framework for a request whose dtype does not imply one.

    ATTN_FRAMEWORK, else the only framework in `sys.modules`, else the only one installed, else the first of: a TPU through
    jax, a torch accelerator, a jax accelerator, torch on the CPU. Raises ValueError for an unknown ATTN_FRAMEWORK and
    ImportError if neither is installed.
    """
    requested = envs.read("ATTN_FRAMEWORK")
    if requested:
        if requested not in FRAMEWORKS:
            raise ValueError(f"ATTN_FRAMEWORK={requested!r} (supports {', '.join(FRAMEWORKS)})")
        return requested
    # What the process uses says more than what the machine has; neither step imports anything.
    for present in ([w for w in FRAMEWORKS if w in sys.modules], [w for w in FRAMEWORKS if installed(w)]):
        if len(present) == 1:
            return present[0]
    if not any(installed(w) for w in FRAMEWORKS):
        raise ImportError(f"neither torch nor jax is installed: {pip_install('torch')}, or {pip_install('jax')}")
    # Both are imported here, which takes seconds: only where nothing cheaper decides.
    jax_platform, torch_platform = platform_for("jax").name, platform_for("torch").name
    if jax_platform == "tpu" or (torch_platform == "cpu" and jax_platform != "cpu"):
        return "jax"
    return "torch"
