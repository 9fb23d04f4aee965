"""tpu-inference: `attn` as an attention backend of vLLM's engine on TPUs.

    vllm serve MODEL --attention-backend attn                        # with attn and tpu-inference installed
    ATTN_BACKEND=XLA_ATTN vllm serve MODEL --attention-backend attn  # this backend, or an error

`plugin` is the entry point (`vllm.general_plugins`), which vLLM calls in each of its processes. It registers the name "attn"
with `register_attention_backend`; engines that select another backend are not changed.

The classes that the engine calls are in `_tpu_inference`, which is imported when the engine selects the name. Written for
tpu-inference 0.32; compatibility is checked by signatures and fields, not by version.
"""

import dataclasses
import importlib
import importlib.util
import inspect
from typing import Any

from attn.errors import BackendLoadError
from attn.integrations.vllm import logger
from attn.torch.backends._vendor import lacking

NAME = "attn"
PATH = "attn.integrations._tpu_inference.TPUAttnBackend"
_INTERFACE = "tpu_inference.layers.common.attention_backend"
_METADATA = "tpu_inference.layers.common.attention_metadata"
#: Functions and classes of `_INTERFACE` with the parameters that they must have. `attention` must have no others, which could
#: change its meaning.
_CALL = ("self", "kv_cache", "q", "k", "v", "md", "shared_md", "mesh", "sm_scale", "q_scale", "k_scale", "v_scale", "sinks")
_RULES = ("attention_chunk_size", "update_kv_cache", "use_causal_mask", "attn_logits_soft_cap")
_ATTENTION = (*_CALL, *_RULES, "head_dim_original", "decode_query_size")
_NEEDS = (
    ("register_attention_backend", ("name", "attention", "vllm_backend")),
    ("AttentionBackend.get_kv_cache_shape", ("total_num_pages", "page_size", "num_kv_heads", "head_dim", "kv_dtype")),
    ("AttentionBackend.attention", _ATTENTION),
)
#: Fields of a batch that are read.
_FIELDS = ("block_tables", "seq_lens", "query_start_loc", "request_distribution")


def plugin() -> None:
    """Call `register` from vLLM where tpu-inference is installed; incompatibility is only logged, since the engine may be
    running with another backend."""
    # vLLM calls this on every platform, and most have no such package: no word about it
    if importlib.util.find_spec("tpu_inference") is None:
        return
    try:
        register()
    except BackendLoadError as error:
        logger.warning_once("attn is not available as an attention backend of tpu-inference: %s", error)


def register() -> str:
    """Register `attn` with tpu-inference; may be called repeatedly. Returns the name for --attention-backend.

    Raises `BackendLoadError` if tpu-inference is missing or has an interface other than the one that this module is written
    for (with what differs), or if the name is already taken.
    """
    try:
        interface, metadata = importlib.import_module(_INTERFACE), importlib.import_module(_METADATA)
    except ImportError as error:
        raise BackendLoadError(
            f"tpu-inference's attention interface cannot be imported: {error} (pip install tpu-inference==0.32.0)"
        ) from error
    why = [*lacking(_INTERFACE, interface, _NEEDS), *_unknown_arguments(interface), *_missing_fields(metadata)]
    if why:
        raise BackendLoadError(f"this version of tpu-inference has an incompatible attention interface: {'; '.join(why)}")
    try:
        interface.register_attention_backend(NAME, attention=create, vllm_backend=PATH)
    # the name is taken, or the engine refuses the class
    except ValueError as error:
        raise BackendLoadError(f"tpu-inference does not register {NAME}: {error}") from error
    return NAME


def create() -> Any:
    """Return the `AttentionBackend` of tpu-inference that runs this library's kernels."""
    return importlib.import_module("attn.integrations._tpu_inference").create()


def _unknown_arguments(interface: Any) -> list[str]:
    attention = getattr(getattr(interface, "AttentionBackend", None), "attention", None)
    parameters = inspect.signature(attention).parameters if attention else {}
    return [f"{_INTERFACE}.AttentionBackend.attention has the unknown {name}" for name in parameters if name not in _ATTENTION]


def _missing_fields(metadata: Any) -> list[str]:
    cls = getattr(metadata, "AttentionMetadata", None)
    if not dataclasses.is_dataclass(cls):
        return [f"{_METADATA} has no dataclass AttentionMetadata"]
    known = {field.name for field in dataclasses.fields(cls)}
    return [f"{_METADATA}.AttentionMetadata has no {name}" for name in _FIELDS if name not in known]
