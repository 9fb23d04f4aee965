"""Two backends that serve one layer together, over one cache: `TRITON_ATTN+FLASH_ATTN`.

The first named serves *decodes*, requests of up to `FEW_ROWS` new tokens, and the second *prompts*, longer ones. A batch of
both is divided where its first prompt begins, if most requests from there on are prompts, which is how engines order a batch.
The first serves any other batch whole: prompts and decodes in no order, and lengths that only the device knows, so that a
graph which was captured with such a batch serves any. A batch is divided once, when its metadata is built; if its fields are
assigned later, the first backend serves it whole.

A pair serves what both of its backends serve. Its first backend writes the cache; both read it, so their layouts must be equal.
`batch_invariant` is not served, since the place of a request in its batch decides who serves it. There are no pairs under jax:
`PALLAS` shares its layout with no other backend, and the number of decodes, which would divide a batch, is a value that a
compiled program does not know. MLA layers have a backend for prompts already (`prefill_backend`).

Nothing here is chosen: pairs are named like any other backend, by a platform's list, by `attn tune` or by the caller. A pair's
class is the attribute of this module that has both names: `attn.torch.backends.pair.TRITON_ATTN__FLASH_ATTN`.
"""

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from attn.backend_enum import PAIR
from attn.backends.abstract import AttentionLayer, AttentionMetadataBuilder, AttentionType
from attn.backends.metadata import FEW_ROWS, CommonAttentionMetadata
from attn.backends.paged import PagedCall
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Capabilities, Device, Feature, Request, sizes_of_both
from attn.torch.alignment import aligned
from attn.torch.backends._paged import QKV, PagedAttentionBackend, PagedAttentionImpl
from attn.torch.metadata import PLANNED_BY, PagedAttentionMetadata

_PHASES = ("decodes", "prompts")
_divided_by = attrgetter(*PLANNED_BY)


class MemberBatch(NamedTuple):
    """Some requests of a batch: which backend of the pair serves them, their rows, and their metadata, which is its own."""

    member: int
    rows: slice
    meta: PagedAttentionMetadata


#: Features that a pair does not have though both its backends do.
_ALONE = frozenset({Feature.BATCH_INVARIANT, Feature.BACKWARD})
#: Attributes that the layer sets on the implementation after construction, for the members to read.
_SHARED = ("alibi_slopes", "sinks", "need_to_return_lse_for_decode", "layer_dtype")


class PairedBackend(PagedAttentionBackend):
    """Base of all pairs. `members`: the backends of decodes and of prompts."""

    members: ClassVar[tuple[type[Any], type[Any]]]

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        """Return each member's reasons, whether their caches differ, and what a pair does not serve."""
        if foreign := [member.get_name() for member in cls.members if not issubclass(member, PagedAttentionBackend)]:
            return [f"{' and '.join(foreign)}: a pair is of two backends for torch over pages of keys and values"]
        why = [
            f"{member.get_name()}, for {phase}: {reason}"
            for member, phase in zip(cls.members, _PHASES, strict=True)
            for reason in member.why_not(request, device)
        ]
        # compared by views of an example, because layouts are functions of each backend
        one, other = (_layout(member, request) for member in cls.members)
        if one != other:
            names = " and ".join(member.get_name() for member in cls.members)
            why.append(f"{names} lay their caches out differently: {list(one[0])} and {list(other[0])} for 7 blocks")
        if request.attn_type != AttentionType.DECODER:
            why.append(f"attn_type={request.attn_type} (a pair supports {AttentionType.DECODER})")
        return why + [f"{feature} not supported by a pair" for feature in sorted(request.features & _ALONE)]

    @classmethod
    def off_paths(cls, device: Device | None = None) -> tuple[str, ...]:
        return tuple(f"{member.get_name()}: {off}" for member in cls.members for off in member.off_paths(device))

    @classmethod
    def rules(cls, device: Device | None = None) -> tuple[str, ...]:
        decodes, prompts = (member.get_name() for member in cls.members)
        return (
            f"{decodes} serves requests of up to {FEW_ROWS} new tokens, {prompts} longer ones; {decodes} serves all of a batch "
            "that has both in no order, or whose lengths only the device knows",
            *(f"{member.get_name()}: {rule}" for member in cls.members for rule in member.rules(device)),
        )


def _layout(backend: type[Any], request: Request) -> tuple[Any, ...]:
    """Return the layout of a cache of 7 blocks: its shape, its order in memory, and the views of keys and values."""
    # numbers that differ, so that another order of dimensions has another shape
    extent = (7, request.block_size or 16, request.num_kv_heads or 3, request.head_size, request.kv_cache_dtype)
    cache = torch.empty(backend.get_kv_cache_shape(*extent), device="meta")
    views = tuple((x.shape, x.stride(), x.storage_offset()) for x in backend.logical_kv_cache(cache))
    return tuple(cache.shape), backend.get_kv_cache_stride_order(), views


class PairedMetadataBuilder(AttentionMetadataBuilder[Any]):
    """The decodes' builder, which adds the members' batches to one that has prompts."""

    members: ClassVar[tuple[type[Any], type[Any]]]

    def __init__(self, kv_cache_spec: Any, layer_names: Sequence[str] = (), config: Any = None, device: Any = None) -> None:
        super().__init__(kv_cache_spec, layer_names, config, device)
        self._builders = [m.get_builder_cls()(kv_cache_spec, layer_names, config, device) for m in self.members]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedAttentionMetadata:
        """Return the whole batch's metadata by the decodes' builder, with `member_batches`. Raises `MetadataError` (see
        `CommonAttentionMetadata.validate`)."""
        batch = common_attn_metadata
        whole: PagedAttentionMetadata = self._builders[0].build(common_prefix_len, batch, fast_build)
        # Without member batches the decodes' backend serves the batch whole.
        ends, batches = (0, decodes_of(batch), batch.num_reqs), list[MemberBatch]()
        if ends[1] == batch.num_reqs:
            return whole
        for member, (first, last) in enumerate(((0, ends[1]), (ends[1], batch.num_reqs))):
            if first < last:
                meta = self._builders[member].slice_of(whole, batch, first, last, fast_build)
                # rows follow one another as requests do
                start = 0 if first == 0 else batches[-1].rows.stop
                batches.append(MemberBatch(member, slice(start, start + meta.num_actual_tokens), meta))
        whole.member_batches, whole.divided_by = tuple(batches), _divided_by(whole)
        return whole


def _capture(builder: PairedMetadataBuilder, common_attn_metadata: CommonAttentionMetadata) -> PagedAttentionMetadata:
    """Build a batch to capture a CUDA graph with: the decodes' backend serves it whole, as its own builder says."""
    return builder._builders[0].build_for_cudagraph_capture(common_attn_metadata)


def decodes_of(batch: CommonAttentionMetadata) -> int:
    """Return the number of requests at the start of a batch that the decodes' backend serves; the other one serves the rest.

    A request without new tokens is of either. All, unless the host knows the lengths and most requests from the first prompt on
    are prompts.
    """
    lens = batch.query_lens_cpu()
    if batch.max_query_len <= FEW_ROWS or lens is None or batch.seq_lens_cpu is None:
        return batch.num_reqs
    prompts = np.flatnonzero(lens > FEW_ROWS)
    first = int(prompts[0]) if len(prompts) else batch.num_reqs
    # A batch is divided at one place, so that both members' batches are slices of it. In one of no order, most of what
    # follows the first prompt may be decodes, which the other backend would serve.
    return first if 2 * len(prompts) > np.count_nonzero(lens[first:]) else batch.num_reqs


def _member_batches(batch: PagedAttentionMetadata) -> "tuple[MemberBatch, ...]":
    """Return the batches of the members; () if fields were assigned since: the decodes' backend then serves it whole."""
    # compared by identity, as fields are where calls are kept
    if batch.member_batches and not all(map(is_, batch.divided_by, _divided_by(batch))):
        batch.member_batches = ()
    return batch.member_batches


class PairedImpl(PagedAttentionImpl):
    """Base of the pairs' implementations: one of each member, over the same cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._members = tuple(member.get_impl_cls()(*args, **kwargs) for member in self.backend.members)  # type: ignore[attr-defined]

    def _member(self, index: int) -> Any:
        member = self._members[index]
        for name in _SHARED:
            # at each call: a layer may set them later, as it does with sinks of another dtype
            setattr(member, name, getattr(self, name))
        return member

    def traces(self, attn_metadata: Any) -> bool:
        return self.traceable and all(self._members[own.member].traceable for own in attn_metadata.member_batches)

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        return self._member(0).do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def _constants(self) -> tuple[Any, ...]:
        # calls of a pair and of its first backend alone differ, though layers of both may share a batch
        return type(self), *self._member(0)._constants()

    def _kind_of_batch(self, attn_metadata: PagedAttentionMetadata, kv_cache: Any) -> Any:
        # None, never repeated: launches depend on each member's lengths, which the key of a batch does not contain
        return None if _member_batches(attn_metadata) else self._member(0)._kind_of_batch(attn_metadata, kv_cache)

    def _stages(self, call: PagedCall) -> Any:
        """Return what keeps the write: of a batch of both members, also where the decodes' backend keeps all
        launches of its own."""
        member = self._member(0)
        return PagedAttentionImpl._stages(member, call) if _member_batches(call.meta) else member._stages(call)

    def _run_first(self, call: PagedCall, qkv: QKV) -> Callable[..., bool] | None:
        """Run a call; one of decodes alone is repeated as the decodes' backend repeats its own."""
        if _member_batches(call.meta):
            return super()._run_first(call, qkv)
        return self._member(0)._run_first(call, qkv)

    def _attend(self, call: PagedCall) -> None:
        batches = _member_batches(call.meta)
        if not batches:
            self._member(0)._attend(call)
        for index, rows, meta in batches:
            own = call._replace(
                query=aligned(call.query[rows]),
                meta=meta,
                # the mask of these rows, whose arrays are slices of the batch's
                mask=self.visible(meta),
                output=call.output[rows],
                lse=None if call.lse is None else call.lse[:, rows],
                held=None if call.held is None else call.held.setdefault(_PHASES[index], {}),
            )
            self._member(index)._attend(own)

    @property
    def has_row_operator(self) -> bool:  # type: ignore[override]
        return bool(self._member(0).has_row_operator)

    def row_launcher(self, device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
        return self._member(0).row_launcher(device, dtype)

    def attend_keys(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend keys that are in no cache by the decodes' backend, as it does."""
        return self._member(0).attend_keys(*args, **kwargs)


@functools.cache
def pair_of(decodes: type[Any], prompts: type[Any]) -> type[PairedBackend]:
    """Return the backend that serves a layer's decodes by one backend class and its prompts by another."""
    members, names = (decodes, prompts), (decodes.get_name(), prompts.get_name())
    here = {"__module__": __name__, "__qualname__": "__".join(names)}
    facts: dict[str, Any] = {**here, "name": PAIR.join(names), "members": members}
    if not all(issubclass(member, PagedAttentionBackend) and member.capabilities for member in members):
        return type(here["__qualname__"], (PairedBackend,), {**facts, "impl_cls": PairedImpl})  # it refuses every request
    # both read the cache, so the lesser limit holds
    spans = [span for member in members if (span := member.max_cache_span) is not None]
    facts |= {
        "metadata_cls": decodes.get_metadata_cls(),
        "block_sizes": sizes_of_both(*(member.get_supported_kernel_block_size() for member in members)),
        "capabilities": _capabilities(members),
        "interpreted_on": decodes.interpreted_on + prompts.interpreted_on,
        "max_cache_span": min(spans, default=None),
    }
    facts |= {name: staticmethod(getattr(decodes, name)) for name in _LAYOUT}
    switches = [member.is_interpreted for member in members if hasattr(member, "is_interpreted")]
    if switches:
        facts["is_interpreted"] = staticmethod(switches[0])
    captures = hasattr(decodes.get_builder_cls(), "build_for_cudagraph_capture")
    capture: dict[str, Any] = {"build_for_cudagraph_capture": _capture} if captures else {}
    nested = {name: {**here, "__qualname__": f"{here['__qualname__']}.{name}"} for name in ("builder_cls", "impl_cls")}
    facts["builder_cls"] = type("builder_cls", (PairedMetadataBuilder,), nested["builder_cls"] | {"members": members} | capture)
    backend = type(here["__qualname__"], (PairedBackend,), facts)
    impls = [member.get_impl_cls() for member in members]
    kept = {name: getattr(impls[0], name) for name in ("traceable", "attends_keys", "attends_valid_keys")}
    # a log-sum-exp has rows of both members
    kept["can_return_lse_for_decode"] = all(impl.can_return_lse_for_decode for impl in impls)
    type("impl_cls", (PairedImpl,), nested["impl_cls"] | kept, backend=backend)
    return backend


_LAYOUT = ("get_kv_cache_shape", "get_kv_cache_stride_order", "logical_kv_cache")


def _capabilities(members: Sequence[type[Any]]) -> Capabilities:
    """Return the limits that both members share, except architectures, which each checks in `why_not`."""
    one, other = (member.capabilities for member in members)
    both: dict[str, Any] = {
        name: tuple(word for word in getattr(one, name) if word in getattr(other, name))
        for name in ("platforms", "dtypes", "kv_cache_dtypes")
    }
    return Capabilities(
        framework="torch",
        **both,
        head_sizes=sizes_of_both(one.head_sizes, other.head_sizes),
        features=members[0].served_features() & members[1].served_features() - _ALONE,
        refusals=one.refusals + other.refusals,
        packages=tuple(dict.fromkeys((*one.packages, *other.packages))),
        install=" ".join(dict.fromkeys(word for record in (one, other) for word in record.install.split())),
    )


def __getattr__(name: str) -> Any:
    """Return the pair `DECODES__PROMPTS` of two registered backends. Raises AttributeError for any other name."""
    decodes, _, prompts = name.partition("__")
    if decodes and prompts and f"{decodes}{PAIR}{prompts}" in AttentionBackendEnum:
        return pair_of(*(AttentionBackendEnum[name].get_class() for name in (decodes, prompts)))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
