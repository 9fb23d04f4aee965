"""The API of a layer in either framework: build a batch, request a log-sum-exp, create a cache."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attn
from attn import CommonAttentionMetadata, reference
from attn.errors import DTypeError, MetadataError, ShapeError, UnsupportedError
from attn.imports import resolve_obj_by_qualname

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")

P = 16
LATENT = (4, 32, 16, 8, 16)  #: heads, L, Dn, Dr, Dv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  #: where torch's layers live and are called
KINDS = ["torch", "jax", "torch MLA", "jax MLA"]


def new_layer(kind: str, **more: Any) -> Any:
    framework, _, latent = kind.partition(" ")
    if framework == "torch":
        more = {"backend": "TORCH_MLA" if latent else "TORCH_SDPA", **more}
    if not latent:
        made = resolve_obj_by_qualname(f"attn.{framework}.Attention")(
            4, more.pop("size", 16), num_kv_heads=2, block_size=P, **more
        )
        return made.to(DEVICE) if framework == "torch" else made
    heads, rank, nope, _, value = LATENT
    up = array(framework, np.random.default_rng(0).standard_normal((rank, heads, nope + value), np.float32) * rank**-0.5)
    return resolve_obj_by_qualname(f"attn.{framework}.MLAAttention")(*LATENT, up, block_size=P, **more)


def array(framework: str, values: Any) -> Any:
    return torch.from_numpy(np.asarray(values)).to(DEVICE) if framework == "torch" else jnp.asarray(values)


def host(values: Any) -> Any:
    return np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values)


def inputs(kind: str, rows: int) -> list[Any]:
    shapes = [(4, 24), (32,), (8,)] if "MLA" in kind else [(4, 16), (2, 16), (2, 16)]
    return [np.random.default_rng(i).standard_normal((rows, *shape), np.float32) for i, shape in enumerate(shapes)]


def expected(kind: str, query: Any, first: Any, second: Any) -> Any:
    """The oracle's (out, lse) of one causal prompt."""
    if "MLA" not in kind:
        return reference.attention(query, first, second, causal=True)
    _, rank, nope, _, value = LATENT
    up = np.random.default_rng(0).standard_normal((rank, 4, nope + value), np.float32) * rank**-0.5
    return reference.mla_unabsorbed(
        query[..., :nope], query[..., nope:], first, second, up[..., :nope], up[..., nope:], scale=24**-0.5, causal=True
    )


def called(kind: str, layer: Any, rows: int, metadata: Any, cache: Any) -> Any:
    given = [array(kind.split()[0], x) for x in inputs(kind, rows)]
    if kind.startswith("torch"):
        return layer(*given, cache, metadata)
    return layer(*(metadata.pad(x) for x in given), cache, metadata)[0]


def one(rows: int = 5, block: int = 3) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lens([rows], [rows], [[block]], P)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_built_by_its_layer_and_lse_by_asking(kind: str) -> None:
    layer = new_layer(kind, return_lse=True)
    assert "lse" in layer.selection.request.features
    cache = layer.new_kv_cache(8)
    out, lse = (host(x) for x in called(kind, layer, 5, layer.build(one()), cache))
    want, want_lse = expected(kind, *inputs(kind, 5))
    np.testing.assert_allclose(out[:5], want, atol=1e-5)
    np.testing.assert_allclose(lse[:, :5], want_lse, atol=1e-5)
    plain = new_layer(kind)
    alone = host(called(kind, plain, 5, plain.build(one()), plain.new_kv_cache(8)))
    np.testing.assert_allclose(alone[:5], want, atol=1e-5)
    make = layer.backend.get_builder_cls()
    long_form = make(layer.kv_cache_spec, device=layer.builder().device).build(0, one())
    np.testing.assert_array_equal(host(called(kind, layer, 5, long_form, layer.new_kv_cache(8))[0]), out)
    with pytest.raises(ValueError, match="return_lse='yes' must be True or False"):
        new_layer(kind, return_lse="yes")


@pytest.mark.parametrize(
    ("kind", "mapping"),
    [("torch", {"full": "FLEX_ATTENTION"}), ("torch MLA", {"mla": "TORCH_MLA"}), ("jax MLA", {"mla": "XLA_MLA"})],
)
def test_a_backend_per_kind_of_layer(kind: str, mapping: dict[str, str]) -> None:
    """A layer without `backend=` uses the backend of its kind, in both frameworks; an explicit one wins."""
    with attn.backend_per_kind_context_manager(mapping):
        layer = new_layer(kind, backend=None)
        assert [layer.selection.name] == list(mapping.values())
        assert layer.selection.source == f"backend_per_kind[{next(iter(mapping))!r}]"
        assert new_layer("torch", backend="TORCH_SDPA").selection.source == "argument"
    wrong = attn.backend_per_kind_context_manager({"full": "FLASHMLA", "mla": "FLASH_ATTN"})
    with wrong, pytest.raises(UnsupportedError, match=r"requested by backend_per_kind\["):
        new_layer(kind, backend=None)


def test_a_backend_without_a_log_sum_exp_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="lse not supported"):
        new_layer("torch", return_lse=True, backend="ROCM_AITER_FA")


@pytest.mark.parametrize("kind", KINDS)
def test_builders_are_kept_and_keep_what_they_check(kind: str) -> None:
    """One for each device and cache extent; a cache that is made later changes no builder that is there."""
    layer = new_layer(kind)
    layer.new_kv_cache(4)
    early = layer.builder()
    assert layer.builder() is early
    layer.new_kv_cache(2)
    assert layer.builder() is early, "the largest cache counts"
    layer.new_kv_cache(8)
    with pytest.raises(MetadataError, match=r"block_table\[0, 0\] = 5: must be between 0 and 3"):
        early.build(0, one(block=5))
    assert layer.build(one(block=5)).block_size == P
    with pytest.raises(MetadataError, match=r"block_table\[0, 0\] = 8: must be between 0 and 7"):
        layer.build(one(block=8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, -1, "32", 2.0, True, None])
def test_a_cache_has_a_positive_number_of_blocks(kind: str, count: Any) -> None:
    layer = new_layer(kind)
    with pytest.raises(ValueError, match=f"num_blocks={count!r} must be a positive int"):
        layer.new_kv_cache(count)
    assert layer.kv_cache_spec.num_blocks is None


def test_builders_are_no_part_of_a_layer() -> None:
    """Copies and pickles of a layer have none of its builders; a builder of exact extents is another one."""
    layer = new_layer("torch")
    builder = layer.builder()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.builder() is not builder
    twin = new_layer("jax")
    assert twin.build(one()).slot_mapping.shape == (8,)
    assert twin.builder(config={"bucket": False}).build(0, one()).slot_mapping.shape == (5,)
    assert jax.tree.leaves(twin.build(one()))[0].devices() == {jax.devices()[0]}


def test_a_torch_layers_own_device() -> None:
    """Batches and caches go where the module was moved to, or to torch's default device; a call may say otherwise."""
    layer = new_layer("torch").to("meta")
    assert layer.new_kv_cache(2).device.type == layer.build(one(block=1)).seq_lens.device.type == "meta"
    assert layer.build(one(block=1), device="cpu").seq_lens.device.type == "cpu"
    with torch.device("meta"):
        assert new_layer("torch").new_kv_cache(2).device.type == "meta"


def pages(kind: str, count: int, size: int = 16) -> list[Any]:
    rows = [(32,), (8,)] if "MLA" in kind else [(2, size), (2, size)]
    return [np.random.default_rng(i).standard_normal((count, P, *row), np.float32) for i, row in enumerate(rows)]


PAGES = [*((kind, "fp8") for kind in (*KINDS, "jax PALLAS")), ("torch", "auto"), ("torch", "int8_per_token_head")]
PAGES += [("jax", "int4_per_token_head")]


@pytest.mark.parametrize(("kind", "kv_cache_dtype"), PAGES)
def test_pages_from_elsewhere(kind: str, kv_cache_dtype: str) -> None:
    """Numbers are stored as new tokens are; codes bit for bit; no other page changes, whatever the backend's layout."""
    framework, _, backend = kind.partition(" ")
    more = {"backend": backend, "size": 64} if backend == "PALLAS" else {}
    kind = framework if more else kind
    layer = new_layer(kind, kv_cache_dtype=kv_cache_dtype, **more, **({"k_scale": 0.03} if kv_cache_dtype == "fp8" else {}))
    ids, numbers = [6, 1, 3], pages(kind, 3, more.get("size", 16))
    cache = layer.load_pages(layer.new_kv_cache(8), ids, *(array(framework, x) for x in numbers))
    # the same tokens, written by calls
    flat = [array(framework, x.reshape(-1, *x.shape[2:])) for x in numbers]
    slots = np.concatenate([np.arange(i * P, i * P + P) for i in ids])
    slots = array(framework, slots)
    by_calls = layer.impl.do_kv_cache_update(layer, *flat, layer.new_kv_cache(8), slots)
    as_bytes = lambda x: host(x.view(torch.uint8) if framework == "torch" else x.view(jnp.uint8))  # noqa: E731
    np.testing.assert_array_equal(as_bytes(cache), as_bytes(by_calls))
    if kv_cache_dtype in ("int8_per_token_head", "int4_per_token_head"):
        codes = [x.astype(np.int8) for x in numbers]
        with pytest.raises(UnsupportedError, match=f"keys has dtype int8: {kv_cache_dtype} stores scales too"):
            layer.load_pages(cache, ids, *(array(framework, x) for x in codes))
        return
    held = layer.backend.logical_kv_cache(cache)
    stored = [x[np.array(ids)] if framework == "jax" else x.view(torch.uint8)[ids].view(x.dtype) for x in held]
    if "MLA" in kind:
        stored = [stored[0][:, :, 0, :32], stored[0][:, :, 0, 32:40]]
    stored = [x[..., : y.shape[-1]] for x, y in zip(stored, numbers, strict=True)]
    again = layer.load_pages(layer.new_kv_cache(8), ids, *stored)
    np.testing.assert_array_equal(as_bytes(again), as_bytes(cache))


@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_fit_nowhere(kind: str) -> None:
    layer = new_layer(kind)
    cache, (keys, values) = layer.new_kv_cache(4), (array(kind.split()[0], x) for x in pages(kind, 2))
    bad_ids = {
        (0, 4): r"block_ids\[1\] = 4: must be between 0 and 3",
        (2, 2): r"block_ids\[1\] = 2: must be listed once",
        (0, 1.5): r"block_ids\[1\] = 1.5",
        (-1, 0): r"block_ids\[0\] = -1",
    }
    for ids, message in bad_ids.items():
        with pytest.raises(MetadataError, match=message):
            layer.load_pages(cache, ids, keys, values)
    with pytest.raises(ShapeError, match=r"keys has shape .*: must be \[1, 16, "):
        layer.load_pages(cache, [0], keys, values)
    with pytest.raises(DTypeError, match=r"keys has dtype int32: must be a float dtype \(values\) or float32"):
        layer.load_pages(cache, [0, 1], array(kind.split()[0], np.zeros(keys.shape, np.int32)), values)


@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize("window", [[3, 0], np.array([3, 0]), (np.int64(3), 0), 4, np.int64(4)], ids=repr)
def test_a_window_may_be_an_array_or_of_numpys_ints(kind: str, window: Any) -> None:
    layer = new_layer(kind, sliding_window=window)
    stored = layer.kv_cache_spec.sliding_window
    assert stored == (4 if np.ndim(window) == 0 else (3, 0)) and {*map(type, np.atleast_1d(stored).tolist())} == {int}
    assert hash(layer.kv_cache_spec) and layer.impl.window == (3, 0)
    layer.build(CommonAttentionMetadata.from_lens([1], [1], [[0]], P))
