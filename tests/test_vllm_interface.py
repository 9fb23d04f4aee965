"""vLLM's and vllm-omni's registries: names, signatures, messages and behaviour, each at the path that the naming rule gives
it."""

import enum
import inspect
import warnings

import pytest

from attn import distributed, selector
from attn.backends import abstract, registry
from attn.backends.mla.prefill import registry as prefill
from attn.diffusion.backends import registry as diffusion

REQUIRED = inspect.Parameter.empty

#: Members of vLLM's and vllm-omni's enums, in their order. Ours may come between or after; none may go or swap.
ATTENTION_MEMBERS = [
    "FLASH_ATTN", "TRITON_ATTN", "XFORMERS", "ROCM_ATTN", "ROCM_AITER_MLA", "ROCM_AITER_FA", "TORCH_SDPA", "FLASHINFER",
    "FLASHINFER_MLA", "TRITON_MLA", "CUTLASS_MLA", "FLASHMLA", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA", "PALLAS", "IPEX",
    "NO_ATTENTION", "FLEX_ATTENTION", "TREE_ATTN", "ROCM_AITER_UNIFIED_ATTN", "CPU_ATTN", "CUSTOM",
]  # fmt: skip
PREFILL_MEMBERS = ["FLASH_ATTN", "FLASHINFER", "TRTLLM_RAGGED", "TOKENSPEED_MLA", "CUSTOM"]
DIFFUSION_MEMBERS = {"CUDNN_ATTN", "FLASHINFER_ATTN", "FLASH_ATTN", "SAGE_ATTN", "SAGE_ATTN_3", "TORCH_SDPA"}

#: vLLM's class paths as they are here: with the framework added, module and class names unchanged.
CLASS_PATHS = {
    registry.AttentionBackendEnum: {
        "FLASH_ATTN": "attn.torch.backends.flash_attn.FlashAttentionBackend",
        "TRITON_ATTN": "attn.torch.backends.triton_attn.TritonAttentionBackend",
        "XFORMERS": "attn.torch.backends.xformers.XFormersAttentionBackend",
        "ROCM_ATTN": "attn.torch.backends.rocm_attn.RocmAttentionBackend",
        "ROCM_AITER_MLA": "attn.torch.backends.mla.rocm_aiter_mla.AiterMLABackend",
        "ROCM_AITER_FA": "attn.torch.backends.rocm_aiter_fa.AiterFlashAttentionBackend",
        "FLASHINFER": "attn.torch.backends.flashinfer.FlashInferBackend",
        "FLASHINFER_MLA": "attn.torch.backends.mla.flashinfer_mla.FlashInferMLABackend",
        "TRITON_MLA": "attn.torch.backends.mla.triton_mla.TritonMLABackend",
        "CUTLASS_MLA": "attn.torch.backends.mla.cutlass_mla.CutlassMLABackend",
        "FLASHMLA": "attn.torch.backends.mla.flashmla.FlashMLABackend",
        "FLASHMLA_SPARSE": "attn.torch.backends.mla.flashmla_sparse.FlashMLASparseBackend",
        "FLASH_ATTN_MLA": "attn.torch.backends.mla.flashattn_mla.FlashAttnMLABackend",
        "PALLAS": "attn.jax.backends.pallas.PallasAttentionBackend",
        "IPEX": "attn.torch.backends.ipex.IpexAttentionBackend",
        "NO_ATTENTION": "attn.backends.no_attention.NoAttentionBackend",
        "FLEX_ATTENTION": "attn.torch.backends.flex_attention.FlexAttentionBackend",
        "TREE_ATTN": "attn.torch.backends.tree_attn.TreeAttentionBackend",
        "ROCM_AITER_UNIFIED_ATTN": "attn.torch.backends.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend",
        "CPU_ATTN": "attn.torch.backends.cpu_attn.CPUAttentionBackend",
        "CUSTOM": "",
    },
    prefill.MLAPrefillBackendEnum: {
        "FLASH_ATTN": "attn.torch.backends.mla.prefill.flash_attn.FlashAttnPrefillBackend",
        "FLASHINFER": "attn.torch.backends.mla.prefill.flashinfer.FlashInferPrefillBackend",
        "TRTLLM_RAGGED": "attn.torch.backends.mla.prefill.trtllm_ragged.TrtllmRaggedPrefillBackend",
        "TOKENSPEED_MLA": "attn.torch.backends.mla.prefill.tokenspeed_mla.TokenspeedMLAPrefillBackend",
        "CUSTOM": None,
    },
    diffusion.DiffusionAttentionBackendEnum: {
        "FLASH_ATTN": "attn.torch.diffusion.backends.flash_attn.FlashAttentionBackend",
        "TORCH_SDPA": "attn.torch.diffusion.backends.sdpa.SDPABackend",
        "SAGE_ATTN": "attn.torch.diffusion.backends.sage_attn.SageAttentionBackend",
        "SAGE_ATTN_3": "attn.torch.diffusion.backends.sage_attn3.SageAttention3Backend",
        "CUDNN_ATTN": "attn.torch.diffusion.backends.cudnn_attn.CuDNNAttentionBackend",
        "FLASHINFER_ATTN": "attn.torch.diffusion.backends.flashinfer_attn.FlashInferAttentionBackend",
    },
}

#: Every name that vLLM's and vllm-omni's modules document, underscored ones included, by our module.
NAMES = {
    registry: "_OVERRIDES logger AttentionBackendEnum _AttentionBackendEnumMeta _Backend _BackendMeta register_backend",
    prefill: "MLAPrefillBackendEnum _MLAPrefillBackendEnumMeta _MLA_PREFILL_OVERRIDES register_mla_prefill_backend",
    selector: (
        "forced_attn_backend logger _cached_get_attn_backend backend_name_to_enum get_attn_backend "
        "get_env_variable_attn_backend get_global_forced_attn_backend global_force_attn_backend "
        "global_force_attn_backend_context_manager STR_BACKEND_ENV_VAR"
    ),
    abstract: (
        "T AttentionBackend AttentionImpl AttentionLayer AttentionMetadata AttentionType MLAAttentionImpl MultipleOf "
        "is_quantized_kv_cache"
    ),
    diffusion: "logger DiffusionAttentionBackendEnum register_diffusion_backend",
}


@pytest.mark.parametrize("module", NAMES, ids=lambda m: m.__name__)
def test_every_name_of_the_seed_is_at_its_path(module):
    absent = [name for name in NAMES[module].split() if not hasattr(module, name)]
    assert absent == []


def in_order(wanted, members):
    remaining = iter(members)
    return all(name in remaining for name in wanted)


@pytest.mark.parametrize(
    ("enumeration", "wanted"),
    [(registry.AttentionBackendEnum, ATTENTION_MEMBERS), (prefill.MLAPrefillBackendEnum, PREFILL_MEMBERS)],
)
def test_members_stand_in_the_seeds_order(enumeration, wanted):
    assert in_order(wanted, enumeration.__members__)
    assert list(enumeration.__members__)[-1] == "CUSTOM"


def test_diffusion_members():
    assert set(diffusion.DiffusionAttentionBackendEnum.__members__) >= DIFFUSION_MEMBERS | {"CUSTOM", "ASCEND_ATTN"}


@pytest.mark.parametrize("enumeration", CLASS_PATHS, ids=lambda e: e.__name__)
def test_class_paths_follow_the_naming_rule(enumeration):
    assert {name: enumeration[name].value for name in CLASS_PATHS[enumeration]} == CLASS_PATHS[enumeration]


IMPL_INIT = {
    "num_heads": REQUIRED,
    "head_size": REQUIRED,
    "scale": REQUIRED,
    "num_kv_heads": None,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
    "logits_soft_cap": None,
    "attn_type": "decoder",
    "kv_sharing_target_layer_name": None,
}
CALL_END = {"kv_cache": REQUIRED, "attn_metadata": REQUIRED}
OUTPUTS = {"output": None, "output_scale": None, "output_block_scale": None}
MLA_INIT = {
    **dict.fromkeys(IMPL_INIT, REQUIRED),
    "q_lora_rank": REQUIRED,
    "kv_lora_rank": REQUIRED,
    "qk_nope_head_dim": REQUIRED,
    "qk_rope_head_dim": REQUIRED,
    "qk_head_dim": REQUIRED,
    "v_head_dim": REQUIRED,
    "kv_b_proj": REQUIRED,
    "indexer": None,
}
SELECTION = {
    "head_size": REQUIRED,
    "dtype": REQUIRED,
    "kv_cache_dtype": REQUIRED,
    "block_size": REQUIRED,
    "is_attention_free": REQUIRED,
    "is_blocksparse": False,
}
REGISTER = {"backend": REQUIRED, "class_path": None}
SIGNATURES = [
    (registry.AttentionBackendEnum.get_path, {"self": REQUIRED, "include_classname": True}),
    (registry.AttentionBackendEnum.get_class, {"self": REQUIRED}),
    (registry.AttentionBackendEnum.is_overridden, {"self": REQUIRED}),
    (registry.AttentionBackendEnum.clear_override, {"self": REQUIRED}),
    (registry._AttentionBackendEnumMeta.__getitem__, {"cls": REQUIRED, "name": REQUIRED}),
    (registry._BackendMeta.__getattribute__, {"cls": REQUIRED, "name": REQUIRED}),
    (registry._BackendMeta.__getitem__, {"cls": REQUIRED, "name": REQUIRED}),
    (registry.register_backend, REGISTER),
    (prefill.register_mla_prefill_backend, REGISTER),
    (prefill.MLAPrefillBackendEnum.get_path, {"self": REQUIRED}),
    (diffusion.register_diffusion_backend, REGISTER),
    (diffusion.DiffusionAttentionBackendEnum.get_path, {"self": REQUIRED, "include_classname": True}),
    (selector.backend_name_to_enum, {"backend_name": REQUIRED}),
    (selector.get_env_variable_attn_backend, {}),
    (selector.get_global_forced_attn_backend, {}),
    (selector.global_force_attn_backend, {"attn_backend": REQUIRED}),
    (selector.global_force_attn_backend_context_manager, {"attn_backend": REQUIRED}),
    (selector.get_attn_backend, {**SELECTION, "use_mla": False}),
    (selector._cached_get_attn_backend, {**SELECTION, "use_v1": False, "use_mla": False}),
    (abstract.AttentionBackend.get_name, {}),
    (abstract.AttentionBackend.get_impl_cls, {}),
    (abstract.AttentionBackend.get_metadata_cls, {}),
    (abstract.AttentionBackend.get_builder_cls, {}),
    (abstract.AttentionBackend.get_supported_kernel_block_size, {}),
    (
        abstract.AttentionBackend.get_kv_cache_shape,
        {
            **dict.fromkeys(("num_blocks", "block_size", "num_kv_heads", "head_size"), REQUIRED),
            "cache_dtype_str": "auto",
        },
    ),
    (abstract.AttentionBackend.get_kv_cache_stride_order, {}),
    (abstract.AttentionBackend.full_cls_name, {}),
    (abstract.AttentionImpl.__init__, {"self": REQUIRED, **IMPL_INIT}),
    (abstract.AttentionImpl.get_supported_kernel_block_size, {}),
    (
        abstract.AttentionImpl.forward,
        {**dict.fromkeys(("self", "layer", "query", "key", "value"), REQUIRED), **CALL_END, **OUTPUTS},
    ),
    (abstract.AttentionImpl.fused_output_quant_supported, {"self": REQUIRED, "quant_key": REQUIRED}),
    (abstract.AttentionImpl.supports_quant_query_input, {"self": REQUIRED}),
    (abstract.AttentionImpl.process_weights_after_loading, {"self": REQUIRED, "act_dtype": REQUIRED}),
    (abstract.MLAAttentionImpl.__init__, {"self": REQUIRED, **MLA_INIT}),
    (
        abstract.MLAAttentionImpl.forward,
        {
            **dict.fromkeys(("self", "layer", "hidden_states_or_cq", "kv_c_normed", "k_pe"), REQUIRED),
            **CALL_END,
            **OUTPUTS,
        },
    ),
    (
        abstract.AttentionLayer.forward,
        {**dict.fromkeys(("self", "query", "key", "value"), REQUIRED), **CALL_END},
    ),
    (abstract.MultipleOf.__init__, {"self": REQUIRED, "base": REQUIRED}),
    (abstract.is_quantized_kv_cache, {"kv_cache_dtype": REQUIRED}),
]


@pytest.mark.parametrize(("function", "wanted"), SIGNATURES, ids=lambda x: getattr(x, "__qualname__", ""))
def test_every_call_that_the_seed_accepts_is_accepted(function, wanted):
    """Same parameters in the same order with the same defaults; ours may add optional ones after them.

    A parameter that the seed requires may have a default here: no seed call changes meaning by that.
    """
    parameters = inspect.signature(function).parameters
    assert list(parameters)[: len(wanted)] == list(wanted)
    for name, default in wanted.items():
        assert parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert default is REQUIRED or parameters[name].default == default
    for name in list(parameters)[len(wanted) :]:
        extra = parameters[name]
        assert extra.default is not REQUIRED or extra.kind in (extra.VAR_KEYWORD, extra.VAR_POSITIONAL), name


def test_make_metadata_and_new_take_anything():
    for function in (abstract.AttentionBackend.make_metadata, abstract.AttentionImpl.__new__):
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def test_selection_reads_vllm_use_v1_per_call_and_needs_no_engine_version(monkeypatch):
    from attn import envs

    assert envs.vllm_use_v1()
    monkeypatch.setenv("VLLM_USE_V1", "0")
    assert not envs.vllm_use_v1()


# --- messages, word for word -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enumeration", "message"),
    [
        (
            registry.AttentionBackendEnum,
            "Backend CUSTOM must be registered before use. Use register_backend(Backend.CUSTOM, 'your.module.YourClass')",
        ),
        (
            prefill.MLAPrefillBackendEnum,
            "MLA prefill backend CUSTOM must be registered before use. "
            "Use register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, 'your.module.YourClass')",
        ),
    ],
)
def test_message_of_an_unregistered_custom_backend(enumeration, message):
    for ask in (enumeration.CUSTOM.get_path, enumeration.CUSTOM.get_class):
        with pytest.raises(ValueError) as caught:
            ask()
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("enumeration", "kind"),
    [(registry.AttentionBackendEnum, "attention backend"), (prefill.MLAPrefillBackendEnum, "MLA prefill backend")],
)
def test_message_of_an_unknown_name(enumeration, kind):
    with pytest.raises(ValueError) as caught:
        enumeration["NOPE"]
    options = ", ".join(enumeration.__members__)
    assert str(caught.value) == f"Unknown {kind}: 'NOPE'. Valid options are: {options}"
    assert caught.value.__suppress_context__


RENAMED = (
    "_Backend has been renamed to AttentionBackendEnum. Please update your code to use AttentionBackendEnum instead. "
    "_Backend will be removed in a future release."
)


@pytest.mark.parametrize(
    "use",
    [
        lambda: registry._Backend.FLASH_ATTN,
        lambda: registry._Backend["FLASH_ATTN"],
        lambda: registry._Backend.__members__["FLASH_ATTN"],
        lambda: next(iter(registry._Backend)),
        lambda: registry._Backend(registry.AttentionBackendEnum.FLASH_ATTN.value),
    ],
    ids=["attribute", "item", "members", "iteration", "call"],
)
def test_deprecated_backend_warns_at_the_caller_and_answers(use, caplog):
    with pytest.warns(DeprecationWarning) as caught:
        assert use() is registry.AttentionBackendEnum.FLASH_ATTN
    assert {str(w.message) for w in caught} == {RENAMED}
    assert all(w.filename == __file__ for w in caught)
    assert [r.getMessage() for r in caplog.records] == [RENAMED]


def test_deprecated_backend_logs_once(caplog):
    with warnings.catch_warnings(action="ignore"):
        for _ in range(3):
            _ = registry._Backend.TRITON_ATTN
    assert len(caplog.records) == 1


def test_deprecated_backend_stands_in_for_the_enum():
    import pickle
    from typing import get_args

    with warnings.catch_warnings(action="ignore"):
        assert isinstance(registry.AttentionBackendEnum.PALLAS, registry._Backend)
        assert not isinstance("PALLAS", registry._Backend)
        assert list(registry._Backend) == list(registry.AttentionBackendEnum)
        assert len(registry._Backend) == len(registry.AttentionBackendEnum)
        assert registry.AttentionBackendEnum.PALLAS in registry._Backend and "PALLAS" in registry._Backend
        assert pickle.loads(pickle.dumps(registry._Backend)) is registry._Backend
        assert registry._Backend in get_args(registry._Backend | None)
        assert registry._Backend.__name__ == "_Backend" and "Deprecated" in registry._Backend.__doc__
        with pytest.raises(ValueError, match="Unknown attention backend: 'NOPE'"):
            registry._Backend["NOPE"]
        with pytest.raises(AttributeError):
            _ = registry._Backend.NOPE


def test_reading_only_the_deprecated_name_is_silent():
    """Tools that ask a class what it is called are no users of it (filterwarnings=error is the assertion)."""
    assert registry._Backend.__name__ and registry._Backend.__module__ and repr(type(registry._Backend))


# --- abstract classes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "methods"),
    [
        (abstract.AttentionBackend, {"get_kv_cache_shape"}),  # the seed's others return class data, and may be overridden
        (abstract.AttentionImpl, {"__init__", "forward"}),
        (abstract.MLAAttentionImpl, {"__init__", "forward"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_abstract_methods(cls, methods):
    assert cls.__abstractmethods__ == methods
    with pytest.raises(TypeError, match="abstract"):
        cls()


def test_a_class_written_for_the_seeds_interface_works_unchanged():
    class Impl(abstract.AttentionImpl):
        def __init__(self, num_heads, head_size, scale, **kwargs):
            self.num_heads = num_heads

        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None, output_scale=None):
            return query

    class Meta(abstract.AttentionMetadata):
        def __init__(self, a, b=2):
            self.a, self.b = a, b

    class Backend(abstract.AttentionBackend):
        @staticmethod
        def get_name():
            return "MINE"

        @staticmethod
        def get_impl_cls():
            return Impl

        @staticmethod
        def get_metadata_cls():
            return Meta

        @staticmethod
        def get_builder_cls():
            return None

        @staticmethod
        def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
            return (num_blocks, block_size, num_kv_heads, head_size)

    made = Backend.make_metadata(1, b=3)
    assert (made.a, made.b) == (1, 3)
    assert [rule.base for rule in Backend.get_supported_kernel_block_size()] == [1]
    assert Backend.full_cls_name() == (__name__, Backend.__qualname__)
    assert Backend.accept_output_buffer is False
    with pytest.raises(NotImplementedError):
        Backend.get_kv_cache_stride_order()
    impl = Impl(4, 64, 0.125)
    assert impl.forward(None, "q", None, None, None, None) == "q"
    assert not impl.supports_quant_query_input()
    assert not impl.fused_output_quant_supported(None)
    assert impl.process_weights_after_loading(None) is None


class Lse(abstract.AttentionImpl):
    can_return_lse_for_decode = True

    def __init__(self):
        self.seen_in_init = (self.dcp_world_size, self.dcp_rank)

    def forward(self, *args, **kwargs):
        return None


class NoLse(Lse):
    can_return_lse_for_decode = False


def test_dcp_attributes_without_a_group():
    impl = Lse()
    assert (impl.dcp_world_size, impl.dcp_rank, impl.need_to_return_lse_for_decode) == (1, 0, False)
    assert impl.seen_in_init == (1, 0)
    assert not abstract.AttentionImpl.can_return_lse_for_decode
    assert not abstract.AttentionImpl.need_to_return_lse_for_decode


def test_dcp_attributes_within_a_group():
    distributed.set_dcp_group(distributed.DCPGroup(world_size=4, rank_in_group=3))
    assert (Lse().dcp_world_size, Lse().dcp_rank, Lse().need_to_return_lse_for_decode) == (4, 3, True)
    assert Lse().seen_in_init == (4, 3)
    assert NoLse().need_to_return_lse_for_decode is False
    distributed.set_dcp_group(distributed.DCPGroup(world_size=1, rank_in_group=0))
    assert Lse().need_to_return_lse_for_decode is False


def test_dcp_group_asserts_when_unset_also_without_asserts():
    """Callers read the AssertionError as "no DCP", so `python -O` must not turn it into None."""
    with pytest.raises(AssertionError):
        distributed.get_dcp_group()
    tree = compile(inspect.getsource(distributed), "distributed", "exec", optimize=1)
    namespace = {"__name__": "distributed_without_asserts"}
    exec(tree, namespace)
    with pytest.raises(AssertionError):
        namespace["get_dcp_group"]()


@pytest.mark.parametrize("group", [(0, 0, 1), (2, 2, 1), (2, -1, 1), (2, 0, 0)])
def test_nonsense_dcp_groups_are_refused(group):
    with pytest.raises(ValueError, match="need world_size >= 1"):
        distributed.DCPGroup(*group)


def test_attention_types_are_the_seeds_strings():
    names = {
        "DECODER": "decoder",
        "ENCODER": "encoder",
        "ENCODER_ONLY": "encoder_only",
        "ENCODER_DECODER": "encoder_decoder",
    }
    assert {name: getattr(abstract.AttentionType, name) for name in names} == names
    assert not issubclass(abstract.AttentionType, enum.Enum)


def test_is_quantized_kv_cache():
    assert not abstract.is_quantized_kv_cache("auto") and abstract.is_quantized_kv_cache("fp8")


def test_layer_protocol_names_the_scales():
    assert set(abstract.AttentionLayer.__annotations__) == {
        "_q_scale",
        "_k_scale",
        "_v_scale",
        "_q_scale_float",
        "_k_scale_float",
        "_v_scale_float",
        "_prob_scale",
    }


DOCSTRINGS = [
    (registry.AttentionBackendEnum, "Enumeration of all supported attention backends."),
    (registry.AttentionBackendEnum, "To get the actual backend class (respecting overrides), use:"),
    (registry.AttentionBackendEnum.get_path, "Get the class path for this backend (respects overrides)."),
    (registry.AttentionBackendEnum.get_class, "Get the backend class (respects overrides)."),
    (registry.AttentionBackendEnum.clear_override, "Clear any override for this backend, reverting to the default."),
    (registry.register_backend, "Register or override a backend implementation."),
    (registry._BackendMeta, "Metaclass to provide deprecation warnings when accessing _Backend."),
    (registry._Backend, "Deprecated: Use AttentionBackendEnum instead."),
    (prefill.MLAPrefillBackendEnum, "Enumeration of all supported MLA prefill backends."),
    (prefill.register_mla_prefill_backend, "Register or override an MLA prefill backend implementation."),
    (diffusion.DiffusionAttentionBackendEnum, "Enumeration of all supported diffusion attention backends."),
    (diffusion.register_diffusion_backend, "Register or override a diffusion backend implementation."),
    (selector.get_attn_backend, "Selects which attention backend to use and lazily imports it."),
    (selector.global_force_attn_backend, "Force all attention operations to use a specified backend."),
    (abstract.AttentionBackend, "Abstract class for attention backends."),
    (abstract.AttentionType, "Use string to be compatible with `torch.compile`."),
    (abstract.AttentionImpl.fused_output_quant_supported, "is fusion supported for this type of quantization"),
    (abstract.AttentionImpl.supports_quant_query_input, "True if the implementation can accept pre-quantized queries."),
]


@pytest.mark.parametrize(("thing", "sentence"), DOCSTRINGS, ids=lambda x: getattr(x, "__qualname__", ""))
def test_docstrings_keep_the_seeds_sentences(thing, sentence):
    assert sentence in inspect.getdoc(thing)


# --- selector behaviour that vLLM defines --------------------------------------------------------------------


def test_backend_name_to_enum():
    assert selector.backend_name_to_enum("FLASH_ATTN") is registry.AttentionBackendEnum.FLASH_ATTN
    assert selector.backend_name_to_enum("NOPE") is None
    with pytest.raises(AssertionError):
        selector.backend_name_to_enum(None)


def test_env_variable(monkeypatch):
    assert selector.get_env_variable_attn_backend() is None
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "XFORMERS")
    assert selector.get_env_variable_attn_backend() is registry.AttentionBackendEnum.XFORMERS
    monkeypatch.setenv(selector.STR_BACKEND_ENV_VAR, "PALLAS")
    assert selector.get_env_variable_attn_backend() is registry.AttentionBackendEnum.PALLAS
    monkeypatch.setenv("ATTN_BACKEND", "NOPE")
    assert selector.get_env_variable_attn_backend() is None


def test_the_force_shows_as_the_seeds_module_attribute():
    assert selector.forced_attn_backend is None
    selector.global_force_attn_backend(registry.AttentionBackendEnum.CPU_ATTN)
    assert selector.forced_attn_backend is selector.get_global_forced_attn_backend()
    assert selector.forced_attn_backend is registry.AttentionBackendEnum.CPU_ATTN
    selector.global_force_attn_backend(None)
    assert selector.forced_attn_backend is None


def test_the_cached_selection_can_be_emptied_as_a_functools_cache():
    selector._cache[("key",)] = object
    selector._cached_get_attn_backend.cache_clear()
    assert not selector._cache
