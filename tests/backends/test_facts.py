"""Backends as class data, and backends that override vLLM's interface methods instead (about 5 s)."""

from typing import Any

import pytest
import torch

from attn import reference
from attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from attn.backends.mla.prefill.abstract import MLAPrefillBackend
from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum
from attn.backends.registry import AttentionBackendEnum, register_backend, registered_backend
from attn.capabilities import Capabilities, Feature, MultipleOf
from attn.diffusion.backends.abstract import DiffusionAttentionBackend, DiffusionAttentionImpl
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.errors import UnsupportedError
from attn.reports import report
from attn.selector import make_request, select
from attn.testing import check_conformance, conformance_cases, run_conformance
from attn.torch import Attention
from attn.torch.metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder

RECORD = Capabilities(
    framework="torch", platforms=("cpu",), dtypes=("float32",), features=frozenset({Feature.SLIDING_WINDOW}), priority=1
)


class Template(AttentionImpl[AttentionMetadata]):
    def __init__(self, *arguments: Any, **keywords: Any) -> None: ...

    def forward(self, layer: Any, query: Any, *arguments: Any, **keywords: Any) -> Any:
        return query


def stated(**data: Any) -> type[AttentionBackend]:
    return type("Stated", (AttentionBackend,), data)


def dense(**data: Any) -> type[DiffusionAttentionBackend]:
    return type("Stated", (DiffusionAttentionBackend,), data)


# --- data ---------------------------------------------------------------------------------------------------------


def test_the_interfaces_methods_return_the_data() -> None:
    backend = stated(
        name="MINE", metadata_cls=AttentionMetadata, builder_cls=PagedAttentionMetadataBuilder, block_sizes=(16, MultipleOf(32))
    )

    class Impl(Template, backend=backend):
        pass

    assert backend.get_name() == "MINE" and backend.get_metadata_cls() is AttentionMetadata
    assert backend.get_builder_cls() is PagedAttentionMetadataBuilder
    assert backend.get_impl_cls() is backend.impl_cls is Impl and Impl.backend is backend
    for owner in (backend, Impl, Impl(1, 8, 1.0)):
        sizes = owner.get_supported_kernel_block_size()
        assert sizes == [16, MultipleOf(32)] and sizes is not owner.get_supported_kernel_block_size()


def test_a_template_or_a_variant_of_an_implementation_changes_no_backend() -> None:
    backend = stated(name="MINE")

    class Impl(Template, backend=backend):
        pass

    class Variant(Impl):
        pass

    assert backend.impl_cls is Impl and Variant.backend is backend and not hasattr(Template, "backend")
    assert Template.get_supported_kernel_block_size() == [MultipleOf(1)]


def test_a_backend_that_shares_anothers_implementation_keeps_its_own_block_sizes() -> None:
    first = stated(name="FIRST", block_sizes=(16,))
    type("Impl", (Template,), {}, backend=first)
    second = type("Second", (first,), {"name": "SECOND", "block_sizes": (64,)})
    assert second.get_supported_kernel_block_size() == [64] and first.get_supported_kernel_block_size() == [16]


@pytest.mark.parametrize("registry", [AttentionBackendEnum, DiffusionAttentionBackendEnum])
def test_backend_and_implementation_of_every_member_name_each_other(registry: Any) -> None:
    seen = 0
    for member in registry:
        if (backend := member.candidate().backend) is not None:
            assert vars(backend.get_impl_cls())["backend"].get_impl_cls() is backend.get_impl_cls(), member
            if registry is AttentionBackendEnum:
                assert backend.get_builder_cls().metadata_cls is backend.get_metadata_cls(), member
            seen += 1
    assert seen > 8


# --- complaints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registry", "backend", "lacking"),
    [
        (AttentionBackendEnum, stated(), "name (or get_name()), impl_cls (or get_impl_cls())"),
        (AttentionBackendEnum, stated(name="MINE"), "impl_cls (or get_impl_cls())"),
        (AttentionBackendEnum, stated(name="MINE", get_impl_cls=staticmethod(lambda: Template)), ""),
        (AttentionBackendEnum, stated(get_name=staticmethod(lambda: "MINE"), impl_cls=Template), ""),
        (AttentionBackendEnum, type("Stated", (), {"name": "MINE", "get_impl_cls": 3}), "get_name(), get_impl_cls()"),
        (MLAPrefillBackendEnum, type("Stated", (MLAPrefillBackend,), {}), "name (or get_name())"),
        (MLAPrefillBackendEnum, type("Stated", (MLAPrefillBackend,), {"name": "MINE"}), ""),
        (DiffusionAttentionBackendEnum, dense(name="MINE"), "impl_cls (or get_impl_cls())"),
        (DiffusionAttentionBackendEnum, dense(name="MINE", impl_cls=DiffusionAttentionImpl), ""),
    ],
)
def test_an_incomplete_class_is_refused_by_what_it_lacks(registry: Any, backend: type, lacking: str) -> None:
    words = f"Stated lacks what every {registry.label} has: {lacking}" if lacking else ""
    assert registry.complaint(backend) == words


def test_a_class_without_an_implementation_is_never_chosen() -> None:
    register_backend("MINE", stated(name="MINE", capabilities=RECORD))
    assert select(make_request(64, "float32"), framework="torch").name != "MINE"
    with pytest.raises(UnsupportedError, match=r"Stated lacks what every attention backend has: impl_cls \(or get_impl_cls"):
        select(make_request(64, "float32"), framework="torch", backend="MINE").require()


# --- a backend of the interface alone -----------------------------------------------------------------------------


class OldImpl(AttentionImpl[PagedAttentionMetadata]):
    """As written for vLLM: block sizes belong to the implementation, arguments are kept, and `forward` does it all."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: Any = None,
        alibi_slopes: Any = None,
        sliding_window: Any = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: Any = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: Any = None,
    ) -> None:
        asked = {"alibi": alibi_slopes, "soft_cap": logits_soft_cap, "kv_sharing": kv_sharing_target_layer_name}
        if why := [f"{name} not supported" for name, value in asked.items() if value]:
            raise UnsupportedError(f"OLD: {'; '.join(why)}", why)
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads or num_heads, head_size
        self.scale, self.window = scale, (None if sliding_window is None else sliding_window - 1, None)

    @staticmethod
    def get_supported_kernel_block_size() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> Any:
        live = slot_mapping >= 0
        for cache, new in zip(kv_cache, (key, value), strict=True):
            cache.view(-1, *cache.shape[2:])[slot_mapping[live]] = new[: len(slot_mapping)][live]
        return kv_cache

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any = None,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        meta, out = attn_metadata, torch.empty_like(query) if output is None else output
        if meta is None:
            return out.zero_()
        if key is not None:
            self.do_kv_cache_update(layer, key, value, kv_cache, meta.slot_mapping[: meta.num_actual_tokens])
        result, _ = reference.paged_attention(
            query.numpy(),
            kv_cache[0].numpy(),
            kv_cache[1].numpy(),
            query_start_loc=meta.query_start_loc.numpy(),
            seq_lens=meta.seq_lens.numpy(),
            block_table=meta.block_table.numpy(),
            scale=self.scale,
            causal=meta.causal,
            window=self.window,
        )
        out[: meta.num_actual_tokens] = torch.from_numpy(result[: meta.num_actual_tokens]).to(out.dtype)
        return out


class OldBackend(AttentionBackend):
    capabilities = RECORD

    @staticmethod
    def get_name() -> str:
        return "OLD"

    @staticmethod
    def get_impl_cls() -> type[OldImpl]:
        return OldImpl

    @staticmethod
    def get_metadata_cls() -> type[PagedAttentionMetadata]:
        return PagedAttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[PagedAttentionMetadataBuilder]:
        return PagedAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        return (0, 1, 2, 3, 4)

    @staticmethod
    def logical_kv_cache(kv_cache: Any) -> tuple[Any, Any]:
        return kv_cache[0], kv_cache[1]


class WiredImpl(OldImpl):
    """The same, that names its backend in its body."""

    backend = OldBackend


@pytest.mark.usefixtures("no_gpu")
def test_a_backend_of_the_interface_alone_is_registered_chosen_and_listed() -> None:
    with registered_backend("OLD", OldBackend) as member:
        assert AttentionBackendEnum.complaint(OldBackend) == "" and member.get_class() is OldBackend
        assert select(make_request(64, "float32", block_size=32), framework="torch").name == "OLD"
        odd = select(make_request(64, "float32", block_size=40), framework="torch", backend="OLD")
        assert "block_size=40 (supports multiples of 16)" in str(odd)
        row = report.backends("attention")["OLD"]
        assert row.verdict == "available" and row.block_sizes == ("multiples of 16",)
        layer = Attention(4, 64, 0.125, 2, dtype=torch.float32)
        assert isinstance(layer.impl, OldImpl) and layer.backend.get_builder_cls() is PagedAttentionMetadataBuilder
    for owner in (OldBackend, OldImpl, WiredImpl):
        assert owner.get_supported_kernel_block_size() == [MultipleOf(16)]


def test_a_backend_of_the_interface_alone_conforms() -> None:
    check_conformance(OldBackend, conformance_cases(OldBackend)[0])
    with registered_backend("OLD", OldBackend):
        assert run_conformance(["OLD"], only="mixed batch").ok
