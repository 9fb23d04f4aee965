"""Hints on what would change a choice: a package, block size or head size with which a preferred backend would serve.

Each hint is found by evaluating the backends' own records with one thing changed, so it cannot be out of date.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Device, MultipleOf, Request, supports_size
from attn.imports import assuming
from attn.reports.machines import PACKAGES
from attn.selection.platforms import platform_for
from attn.selection.verdicts import Selection, judge

#: Common page sizes to suggest, smallest first.
BLOCK_SIZES = (16, 32, 64, 128, 256)
#: Framework -> the accelerator whose kernels a head size is checked against when the choice is for another device.
_ACCELERATOR = {"torch": "cuda", "jax": "tpu"}


def hints(selection: Selection) -> tuple[str, ...]:
    """Return hints as sentences; none for a backend requested by name."""
    if selection.source != "priority":
        return ()
    # Only backends that the list prefers to the winner: a change that lets a later one serve changes nothing.
    position = selection.trace.index(selection.winner) if selection.winner else len(selection.trace)
    ahead = [verdict for verdict in selection.trace[:position] if not any(r.startswith("disabled by") for r in verdict.reasons)]
    changes_of = {verdict.name: list(_changes(verdict.name, selection.request, selection.device)) for verdict in ahead}
    sentences = [f"{', or '.join(changes)}: {name}" for name, changes in changes_of.items() if changes]
    return (*sentences, *_head_size(selection.request, selection.device))


def _changes(name: str, request: Request, device: Device) -> Iterator[str]:
    """Yield changes with which a rejected backend would serve: another block size, or a package."""
    # Without pages there is no block size to change.
    if request.block_size is not None:
        served_sizes = (size for size in BLOCK_SIZES if _serves(name, replace(request, block_size=size), device))
        yield from (f"with block_size={size}" for size in itertools.islice(served_sizes, 1))
    # GPUs before Ampere have no bfloat16 products: their kernels are for float16
    dtypes = {"": request} | ({"dtype=float16": replace(request, dtype="float16")} if request.dtype == "bfloat16" else {})
    for dtype, other in dtypes.items():
        # Here float16 alone helps; packages below are tried with the request's own dtype first, then with float16.
        if dtype and _serves(name, other, device):
            yield f"with {dtype}"
            return
        for package, modules in PACKAGES.items():
            # In addition to what the outer assumption has: one package at a time, since advice to install two would be
            # a guess.
            with assuming(modules, beside=True):
                served = _serves(name, other, device)
            if served:
                yield f"with {' and '.join(filter(None, (dtype, package)))} installed"
                return


def _serves(name: str, request: Request, device: Device) -> bool:
    return judge(AttentionBackendEnum[name].candidate(), request, device).ok


def _head_size(request: Request, device: Device) -> Iterator[str]:
    """Report a head size that no accelerator kernel supports; the framework's own operations support any."""
    # A layer tried out on a laptop is meant for an accelerator, and its head size is known before one is at hand.
    platform = device.platform if device.platform != "cpu" else _ACCELERATOR[device.framework]
    accelerator = device if device.platform == platform else Device(device.framework, platform)
    rules: dict[str, list[str]] = {}
    for name in platform_for(device.framework, platform).priorities(request, accelerator):
        sizes = getattr(getattr(AttentionBackendEnum[name].candidate().backend, "capabilities", None), "head_sizes", None)
        if sizes is None or supports_size(request.head_size, sizes):
            # A kernel that supports the size: nothing to report. A backend without limits runs the framework's own
            # operations, not a kernel.
            if sizes is not None and MultipleOf(1) not in sizes:
                return
            continue
        rules.setdefault(", ".join(map(str, sizes)), []).append(name)
    if rules:
        supported = "; ".join(f"{', '.join(names)}: {sizes}" for sizes, names in rules.items())
        yield f"no kernel for {platform} supports head_size={request.head_size} ({supported})"
