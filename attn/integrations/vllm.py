"""vLLM: `attn` as an attention backend of its engine, under the name that vLLM keeps for other people's, CUSTOM.

    vllm serve MODEL --attention-backend CUSTOM                          # with attn installed, that is all
    LLM(MODEL, attention_backend="CUSTOM")
    ATTN_BACKEND=FLASHINFER vllm serve MODEL --attention-backend CUSTOM  # one of ours by name, or refused

`plugin` is the entry point (`vllm.general_plugins`), which vLLM calls in each of its processes. It takes nothing over: who
does not ask for CUSTOM keeps vLLM's own backend. On processors vLLM would run its own backend also for who does ask, so
its platform is made to listen there.

What vLLM calls is in `_vllm`, which only vLLM imports, by the path registered here. Written against vLLM 0.32 and 0.33,
whose interfaces are asked for what is needed (`_NEEDS`), not for their version.
"""

import functools
import logging
from typing import Any

from attn.errors import BackendLoadError
from attn.logger import AttnLogger
from attn.torch.backends._vendor import lacking

PATH = "attn.integrations._vllm.AttnBackend"
#: Names of `vllm.v1.attention.backend`, each with arguments that it must take.
_NEEDS = (
    ("AttentionBackend.validate_configuration", ("head_size", "dtype", "kv_cache_dtype", "block_size", "attn_type")),
    ("AttentionBackend.get_supported_kernel_block_sizes", ("kv_cache_spec",)),
    ("AttentionBackend.supported_kv_cache_layouts", ()),
    ("AttentionImpl.forward", ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")),
    ("AttentionMetadataBuilder", ("kv_cache_spec", "layer_names", "vllm_config", "device")),
    ("AttentionMetadataBuilder.build", ("common_attn_metadata",)),
    ("CommonAttentionMetadata", ("block_table_tensor", "slot_mapping", "query_start_loc_cpu", "seq_lens")),
)

#: Below vLLM's own logger, which shows what comes to it; this library's says nothing unless an application wants it to.
logger = AttnLogger(logging.getLogger("vllm.attn"), {})


def plugin() -> None:
    """`register`, for vLLM to call: a vLLM that it cannot serve is told in the log, since others may be running in it."""
    try:
        register()
    except BackendLoadError as error:
        logger.warning_once("attn does not serve vLLM's CUSTOM attention backend: %s", error)


def register() -> str:
    """Make CUSTOM of vLLM's registry lead to `attn`; again is harmless. Returns the class path.

    Raises `BackendLoadError` where vLLM is missing, has another interface, or has given CUSTOM to somebody else.
    """
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention import backend as interface
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom: Any = AttentionBackendEnum.CUSTOM
    except (ImportError, AttributeError) as error:
        raise BackendLoadError(f"vLLM's attention interface cannot be imported: {error} (pip install vllm)") from error
    why = list(lacking("vllm.v1.attention.backend", interface, _NEEDS))
    if not hasattr(getattr(interface, "AttentionBackend", None), "forward_includes_kv_cache_update"):
        why.append("its backends do not write the cache apart from the attention (forward_includes_kv_cache_update)")
    if why:
        raise BackendLoadError(f"this vLLM has another attention interface: {'; '.join(why)}")
    if custom.is_overridden() and custom.get_path() != PATH:
        raise BackendLoadError(f"CUSTOM of vLLM's registry leads to {custom.get_path()} already")
    register_backend(custom, PATH)
    if current_platform.is_cpu():
        _make_it_listen(type(current_platform), custom)
    return PATH


def _make_it_listen(platform: Any, custom: Any) -> None:
    """Have the platform for processors obey or refuse CUSTOM when it is asked for, as vLLM's other platforms do."""
    choose = platform.get_attn_backend_cls.__func__
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
