"""Everything that the tables list can be requested: every word of every backend's record, in all three registries (about 3 s).

On records and not on this machine: packages count as installed, and no device is named.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from attn.backends.mla.prefill.abstract import MLAPrefillRequest
from attn.backends.registry import blocksparse_candidate
from attn.capabilities import ENCODER_TYPES, KINDS, UNSERVED, Feature, MultipleOf, Request
from attn.diffusion.backends.abstract import DiffusionRequest
from attn.dtypes import PER_TOKEN_HEAD
from attn.imports import assuming
from attn.reports import report
from attn.reports.machines import PACKAGES

pytest.importorskip("torch")
pytest.importorskip("jax")
MODULES = [module for modules in PACKAGES.values() for module in modules]


def candidates() -> Iterator[tuple[str, Any]]:
    for registry, enum in report.REGISTRIES.items():
        yield from ((registry, member.candidate()) for member in enum)
    yield from (("attention", blocksparse_candidate(framework)) for framework in ("torch", "jax"))


RECORDS = [
    pytest.param(registry, found.backend, id=f"{registry}-{found.name}-{found.backend.capabilities.framework}")
    for registry, found in candidates()
    if found.backend is not None and found.backend.capabilities is not None
]


def sizes_of(rules: Any) -> list[int]:
    """Sizes at the ends of each rule."""
    found = [[rule.minimum, rule.maximum or rule.minimum * 8] if isinstance(rule, MultipleOf) else [rule] for rule in rules]
    return [size for sizes in found for size in sizes]


def plainest(registry: str, backend: Any) -> Request:
    """The least that a backend can be asked for: the first of each of its lists, and the kind of attention it is."""
    can = backend.capabilities
    kinds = frozenset(kind.value for kind in KINDS if kind in can.features)
    common = {"head_size": sizes_of(can.head_sizes)[0], "dtype": can.dtypes[0], "features": kinds}
    if registry == "diffusion":
        return DiffusionRequest(**common, error_budget=backend.error)
    if registry == "mla_prefill":
        return MLAPrefillRequest(**common, v_head_dim=sizes_of(backend.v_head_dims)[0])
    page = sizes_of(backend.get_supported_kernel_block_size())[-1]
    return Request(**common, block_size=page, kv_cache_dtype=can.kv_cache_dtypes[0], attn_type=can.attn_types[0])


def variations(registry: str, backend: Any) -> Iterator[tuple[str, Request]]:
    """(what a reason against it would name, a request of exactly that and the plainest rest), for all that is listed."""
    can, plain = backend.capabilities, plainest(registry, backend)
    for feature in report._features(backend):
        yield feature, replace(plain, features=plain.features | {feature})
    for size in sizes_of(can.head_sizes):
        yield "head_size=", replace(plain, head_size=size)
    for dtype in can.dtypes:
        yield "dtype=", replace(plain, dtype=dtype)
    if registry == "mla_prefill":
        for size in sizes_of(backend.v_head_dims):
            yield "v_head_dim=", replace(plain, v_head_dim=size)
    if registry == "attention":
        for attn_type in can.attn_types:
            yield "attn_type=", replace(plain, attn_type=attn_type)
        pages = sizes_of(backend.get_supported_kernel_block_size())
        sizes = [(size, page) for size in sizes_of(can.head_sizes) for page in pages]
        for kv_cache_dtype in can.kv_cache_dtypes:
            stored = replace(plain, kv_cache_dtype=kv_cache_dtype)
            # codes that share bytes, or pages with their scales, may need heads and pages of some of the sizes
            others = sizes if kv_cache_dtype in PER_TOKEN_HEAD else ()
            sized = [stored, *(replace(stored, head_size=size, block_size=page) for size, page in others)]
            yield "kv_cache_dtype=", min(sized, key=lambda x: sum("kv_cache_dtype=" in why for why in backend.why_not(x)))
        for page in sizes_of(backend.get_supported_kernel_block_size()):
            yield "block_size=", replace(plain, block_size=page)


@pytest.mark.parametrize(("registry", "backend"), RECORDS)
def test_what_a_record_lists_can_be_asked_for(registry, backend):
    with assuming(MODULES):
        for word, request in variations(registry, backend):
            assert [why for why in backend.why_not(request) if word in why] == [], f"{backend.get_name()}: {request}"


@pytest.mark.parametrize(("registry", "backend"), RECORDS)
def test_what_a_record_does_not_list_is_refused_by_name(registry, backend):
    with assuming(MODULES):
        plain = plainest(registry, backend)
        for feature in set(Feature) - set(report._features(backend)) - set(KINDS):
            assert any(feature in why for why in backend.why_not(replace(plain, features=plain.features | {feature})))


def test_words_that_no_backend_serves_yet_are_those_that_no_record_lists():
    """A feature that a backend serves must be removed from `UNSERVED`, and its errors no longer mention it."""
    listed = {feature for parameter in RECORDS for feature in report._features(parameter.values[1])}
    assert set(Feature) - listed == UNSERVED
    with assuming(MODULES):
        for registry, backend in (parameter.values for parameter in RECORDS):
            plain = plainest(registry, backend)
            said = backend.why_not(replace(plain, features=plain.features | {"cascade", "tree_mask"}))
            assert "cascade not supported: no built-in backend serves it yet" in said
            assert not any("tree_mask" in why and "yet" in why for why in said)


def test_every_record_was_looked_at():
    assert len(RECORDS) >= 45 and {parameter.values[0] for parameter in RECORDS} == set(report.REGISTRIES)
    assert any(ENCODER_TYPES[0] in p.values[1].capabilities.attn_types for p in RECORDS)
