"""vLLM: `attn` as an attention backend of its engine, under vLLM's name for external backends, CUSTOM.

    vllm serve MODEL --attention-backend CUSTOM                          # with attn installed
    LLM(MODEL, attention_backend="CUSTOM")
    ATTN_BACKEND=FLASHINFER vllm serve MODEL --attention-backend CUSTOM  # this backend, or an error

`plugin` is the entry point (`vllm.general_plugins`), which vLLM calls in each of its processes. Without CUSTOM, vLLM's own
backends are used as before. On CPUs vLLM would use its own backend even if CUSTOM is requested, so its CPU platform is
patched to use CUSTOM.

The interfaces that vLLM calls are in `_vllm`, which only vLLM imports, by the path registered in this module. Written for
vLLM 0.32 and 0.33; compatibility is checked by required interfaces (`_NEEDS`), not by version.
"""

import functools
import inspect
import logging
from collections.abc import Iterable
from typing import Any

from attn.errors import BackendLoadError
from attn.logger import AttnLogger
from attn.torch.backends._vendor import lacking

PATH = "attn.integrations._vllm.AttnBackend"
#: Names of `vllm.v1.attention.backend`, each with arguments that it must accept.
_NEEDS = (
    ("AttentionBackend.validate_configuration", ("head_size", "dtype", "kv_cache_dtype", "block_size", "attn_type")),
    ("AttentionBackend.get_supported_kernel_block_sizes", ("kv_cache_spec",)),
    ("AttentionBackend.supported_kv_cache_layouts", ()),
    ("AttentionImpl.forward", ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")),
    ("AttentionMetadataBuilder", ("kv_cache_spec", "layer_names", "vllm_config", "device")),
    ("AttentionMetadataBuilder.build", ("common_attn_metadata",)),
    ("CommonAttentionMetadata", ("block_table_tensor", "slot_mapping", "query_start_loc_cpu", "seq_lens")),
)

#: A child of vLLM's logger, which is configured; this library's is silent unless an application configures it.
logger = AttnLogger(logging.getLogger("vllm.attn"), {})


def plugin() -> None:
    """Call `register` from vLLM; incompatibility is only logged, since vLLM may be running with other backends."""
    try:
        register()
    except BackendLoadError as error:
        logger.warning_once("attn is not available as vLLM's CUSTOM attention backend: %s", error)


def register() -> str:
    """Register `attn` as CUSTOM in vLLM's registry; may be called repeatedly. Returns the class path.

    Raises `BackendLoadError` if vLLM is missing, has an incompatible interface, or CUSTOM is already registered otherwise.
    """
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention import backend as interface
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        # within the `try`: older versions have no such member
        custom: Any = AttentionBackendEnum.CUSTOM
    except (ImportError, AttributeError) as error:
        raise BackendLoadError(f"vLLM's attention interface cannot be imported: {error} (pip install vllm)") from error
    why = list(lacking("vllm.v1.attention.backend", interface, _NEEDS))
    if not hasattr(getattr(interface, "AttentionBackend", None), "forward_includes_kv_cache_update"):
        why.append("its backends do not write the cache separately from attention (forward_includes_kv_cache_update)")
    if why:
        raise BackendLoadError(f"this version of vLLM has an incompatible attention interface: {'; '.join(why)}")
    # by another plug-in, which would lose its backend without a word
    if custom.is_overridden() and custom.get_path() != PATH:
        raise BackendLoadError(f"CUSTOM of vLLM's registry is already {custom.get_path()}")
    register_backend(custom, PATH)
    if current_platform.is_cpu():
        _patch_cpu_platform(type(current_platform), custom)
    return PATH


def _patch_cpu_platform(platform: Any, custom: Any) -> None:
    """Make vLLM's CPU platform use or reject CUSTOM when it is requested, as vLLM's other platforms do."""
    choose = platform.get_attn_backend_cls.__func__
    # patched before: `register` may be called repeatedly
    if hasattr(choose, "of_attn"):
        return

    @functools.wraps(choose)
    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> Any:
        if selected_backend is not custom:
            return choose(cls, selected_backend, attn_selector_config, *args, **kwargs)
        reasons = custom.get_class().validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"Selected backend {custom} is not valid for this configuration. Reason: {reasons}")
        return custom.get_path()

    get_attn_backend_cls.of_attn = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def mark_images(spans: Any, first: int, ranges: Iterable[tuple[int, int]]) -> str | None:
    """Set the rows of one request to the range of positions that each is in. Returns why a range is not whole, or None.

    spans: [n, 2] of NumPy, the request's new rows, of which the first is at position `first`. ranges: (first, last), inclusive.
    """
    end = first + len(spans)
    for start, last in ranges:
        # of the range, the positions that are new in this step
        rows = range(max(start, first), min(last + 1, end))
        # a single token sees itself in any case; a range of earlier steps has no row here
        if start >= last or not rows:
            continue
        # its first rows would attend without the rest of the image, which is not in the cache yet
        if last >= end:
            return f"that ends at token {end}, within image tokens {start} to {last} (pass --disable-chunked-mm-input)"
        spans[rows.start - first : rows.stop - first] = start, last
    return None


def layer_name() -> str:
    """Return the name of the layer under construction, which vLLM does not pass to an implementation (`prefix`)."""
    import torch

    frame = inspect.currentframe()
    # outwards from here: the innermost module with a `prefix` is the layer
    while frame := frame and frame.f_back:
        if isinstance(frame.f_locals.get("self"), torch.nn.Module) and frame.f_locals.get("prefix"):
            return str(frame.f_locals["prefix"])
    return "an attention layer"
