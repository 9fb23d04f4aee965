"""Platforms: what a device is called, and in which order its backends are tried.

The core knows the interface only. The wings' platforms (CUDA, ROCm, XPU, CPU under torch; TPU, GPU, CPU under jax) live
in `attn.torch.platforms` and `attn.jax.platforms`, with one priority literal a hardware generation, and are reached by
dotted name.
"""

import sys
from abc import ABC, abstractmethod
from typing import Any

from attn import envs
from attn.capabilities import WINGS, Device, Request
from attn.errors import BackendLoadError
from attn.imports import installed, pip_install, resolve_obj_by_qualname


class Platform(ABC):
    """One kind of device under one framework."""

    framework: str
    #: cuda, rocm, xpu, cpu / tpu, gpu, cpu
    name: str

    @abstractmethod
    def device(self) -> Device:
        """The device at hand, described; probed once, cheap afterwards."""

    @abstractmethod
    def priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        """Names of backends in the order to try them for `request` on `device`."""

    def mla_prefill_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        """Names of MLA prefill backends in the order to try them; none where the wing has none for this platform."""
        return ()

    def diffusion_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        """Names of diffusion backends in the order to try them."""
        return ()

    def deterministic(self) -> str:
        """Who in this process has asked the framework for the same bits in each run, or nothing."""
        return ""

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
        """The class path of the backend for these arguments, as vLLM's platforms return it.

        `selected_backend` is a registry member or None for automatic selection. Raises `UnsupportedError` with every
        reason when none serves.
        """
        # a floor above, reached by name: only this seed-shaped door looks up
        make_request = resolve_obj_by_qualname("attn.selector.make_request")
        select = resolve_obj_by_qualname("attn.selector.select")
        request = make_request(head_size, dtype, kv_cache_dtype, block_size, use_mla=use_mla)
        selection = select(request, platform=self, backend=selected_backend)
        selection.require()
        assert selection.winner is not None
        return selection.winner.path


def platform_for(framework: str, name: str | None = None) -> Platform:
    """The current platform of a wing, or its platform called `name` (whether or not such a device is at hand).

    Raises ValueError for an unknown wing or platform, `BackendLoadError` when its framework is not installed.
    """
    if framework not in WINGS:
        raise ValueError(f"framework={framework!r} (supports {', '.join(WINGS)})")
    if not installed(framework):
        raise BackendLoadError(f"{framework} is not installed: {pip_install(framework)}")
    return resolve_obj_by_qualname(f"attn.{framework}.platforms.platform")(name)  # type: ignore[no-any-return]


def default_framework() -> str:
    """Which wing serves a caller whose dtype does not say.

    ATTN_FRAMEWORK, else the only framework in `sys.modules`, else the only one installed, else: a TPU through jax, a
    torch accelerator, a jax accelerator, torch on the CPU. Raises ValueError for an unknown ATTN_FRAMEWORK and
    ImportError when neither is installed.
    """
    asked = envs.read("ATTN_FRAMEWORK")
    if asked:
        if asked not in WINGS:
            raise ValueError(f"ATTN_FRAMEWORK={asked!r} (supports {', '.join(WINGS)})")
        return asked
    for present in ([w for w in WINGS if w in sys.modules], [w for w in WINGS if installed(w)]):
        if len(present) == 1:
            return present[0]
    if not any(installed(w) for w in WINGS):
        raise ImportError(f"neither torch nor jax is installed: {pip_install('torch')}, or {pip_install('jax')}")
    jax_platform, torch_platform = platform_for("jax").name, platform_for("torch").name
    if jax_platform == "tpu" or (torch_platform == "cpu" and jax_platform != "cpu"):
        return "jax"
    return "torch"
