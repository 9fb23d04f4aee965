"""The cache under jax: what is stored, where, and that nothing is copied."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from attn import CommonAttentionMetadata, reference
from attn.backends.abstract import KVCacheSpec
from attn.errors import DTypeError, MetadataError, ShapeError, UnsupportedError
from attn.jax import Attention, MLAAttention, kv_cache
from attn.jax.backends.xla_attn import XLAAttentionBackend
from attn.testing import bits

K, D, P, N = 2, 16, 8, 10
EXACT = True


@pytest.mark.parametrize("code", ["fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_are_the_oracles(code: str, dtype: str) -> None:
    """Round to nearest even, saturated: bit for bit, over halfway cases, overflow, subnormals and infinities."""
    rng = np.random.default_rng(0)
    halves = np.arange(-300, 300) / 2
    wide = rng.standard_normal(4000) * np.exp2(rng.integers(-20, 18, 4000))
    x = np.concatenate([halves, wide, [np.inf, -np.inf, 0.0, -0.0, 448, 464, 480, 61440]])
    x = np.resize(x, (len(x) // (K * D) + 1, K, D)).astype(jnp.dtype(dtype))
    scale = np.array([1.0, 0.25], np.float32)  # powers of two: the oracle divides in float64
    element = kv_cache.element_type(code, dtype)
    got = np.asarray(kv_cache.encode(jnp.asarray(x), element, jnp.asarray(scale)))
    np.testing.assert_array_equal(got.view(np.uint8), reference.quantize(x, code, scale).view(np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_int4_are_the_oracles(dtype: str) -> None:
    """Two codes a byte and a float32 scale of each token and head; a token of zeros has a scale of 0."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((500, K, D)) * np.exp2(rng.integers(-20, 18, (500, 1, 1)))).astype(jnp.dtype(dtype))
    x[7] = 0
    element = kv_cache.element_type("int4_per_token_head", dtype)
    got = np.asarray(kv_cache.encode(jnp.asarray(x), element))
    # the oracle divides in float64: near a tie a code may be the next one
    wanted = [bits.encode(x.astype(np.float32), "int4_per_token_head", nudge=1 + n * 2.0**-21) for n in (0, -1, 1)]
    assert (got[None] == wanted).any(0).all() and (got != wanted[0]).mean() < 1e-2
    assert not bits.decode(got, "int4_per_token_head")[7].any()
    # the layer's scale divides first, as in other quantised caches
    halved = np.asarray(kv_cache.encode(jnp.asarray(x), element, jnp.float32(2)))
    np.testing.assert_array_equal(bits.decode(halved, "int4_per_token_head") * 2, bits.decode(got, "int4_per_token_head"))


@pytest.mark.parametrize("spoiled", [np.nan, np.inf])
def test_an_int4_row_with_a_number_that_is_not_finite_is_nan(spoiled: float) -> None:
    x = np.ones((2, K, D), np.float32)
    x[1, 0, 3] = spoiled
    rows = np.asarray(kv_cache.encode(jnp.asarray(x), jnp.dtype("uint8")))
    isnan = np.isnan(bits.decode(rows, "int4_per_token_head"))
    assert isnan[1, 0].all() and isnan.sum() == D


def test_int4_is_served_by_name_and_automatically_where_it_is_declared() -> None:
    """XLA_ATTN serves it at any size, except a head whose numbers do not pair; PALLAS says which sizes it serves."""
    cache = {"kv_cache_dtype": "int4_per_token_head"}
    layer = Attention(4, D, num_kv_heads=K, block_size=P, **cache)
    assert layer.selection.name == "XLA_ATTN"
    assert layer.new_kv_cache(N).shape == (2, N, P, K, D // 2 + 4)
    with pytest.raises(
        UnsupportedError, match=r"PALLAS +head_size=64 \(kv_cache_dtype=int4_per_token_head supports 128, 256\)"
    ):
        Attention(4, 64, num_kv_heads=K, block_size=16, backend="PALLAS", **cache)
    with pytest.raises(UnsupportedError, match=r"head_size=15 \(kv_cache_dtype=int4_per_token_head supports multiples of 2\)"):
        Attention(4, 15, num_kv_heads=K, block_size=P, **cache)


def test_nan_stays_nan_where_it_can() -> None:
    x = jnp.full((1, 1, 1), jnp.nan)
    assert jnp.isnan(kv_cache.encode(x, jnp.dtype("float8_e4m3fn")).astype(jnp.float32))
    assert jnp.isnan(kv_cache.encode(x, jnp.dtype("float8_e5m2")).astype(jnp.float32))
    assert kv_cache.encode(x, jnp.dtype("int8")) == 0


def test_a_plain_cache_ignores_scales() -> None:
    x = jnp.ones((1, K, D), jnp.float32)
    assert (kv_cache.encode(x, jnp.dtype("bfloat16"), 4.0) == 1).all()


def test_element_types() -> None:
    assert kv_cache.element_type("auto", jnp.bfloat16) == jnp.bfloat16
    assert kv_cache.element_type("fp8", "float32") == jnp.dtype("float8_e4m3fn")
    with pytest.raises(DTypeError, match="kv_cache_dtype 'int3' is unknown"):
        kv_cache.element_type("int3", "float32")


def test_allocate() -> None:
    cache = kv_cache.allocate(XLAAttentionBackend, KVCacheSpec(P, K, D, "bfloat16", "fp8_e5m2"), N)
    assert cache.shape == (2, N, P, K, D) and cache.dtype == jnp.dtype("float8_e5m2") and not cache.astype(jnp.float32).any()


@pytest.mark.parametrize("slots", [[3, -1, 79, 40], [-1, -1, -1, -1], [79, 0, 1, -1]])
def test_slots(slots: list[int]) -> None:
    """-1 writes nowhere, least of all the last slot, where JAX's own indexing would put it."""
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 4, K, D), np.float32)
    cache = rng.standard_normal((2, N, P, K, D), np.float32)
    want = np.stack(reference.write_kv(key, value, cache[0], cache[1], np.array(slots)))
    at = jnp.asarray(slots, jnp.int32)
    np.testing.assert_array_equal(kv_cache.write_pair(jnp.asarray(key), jnp.asarray(value), jnp.asarray(cache), at), want)
    apart = kv_cache.write(jnp.asarray(key), jnp.asarray(value), jnp.asarray(cache[0]), jnp.asarray(cache[1]), at)
    np.testing.assert_array_equal(np.stack(apart), want)


def test_a_donated_cache_is_written_in_place() -> None:
    cache = jnp.zeros((2, N, P, K, D))
    where = cache.unsafe_buffer_pointer()
    rows = jnp.ones((3, K, D))
    after = jax.jit(kv_cache.write_pair, donate_argnums=2)(rows, rows, cache, jnp.array([1, -1, 5]))
    assert cache.is_deleted() and after.unsafe_buffer_pointer() == where
    assert after.sum() == 2 * 2 * K * D


def test_check_scale() -> None:
    assert kv_cache.check_scale("k_scale", 0.5, K).shape == ()
    assert kv_cache.check_scale("k_scale", [0.5, 2.0], K).tolist() == [0.5, 2.0]
    assert jax.jit(lambda s: kv_cache.check_scale("k_scale", s, K) * 2)(0.5) == 1.0
    wrong: Any
    for wrong in (0.0, -1.0, float("nan"), float("inf"), [1.0, 0.0]):
        with pytest.raises(ValueError, match="k_scale=.* must be finite and"):
            kv_cache.check_scale("k_scale", wrong, K)
    with pytest.raises(ShapeError, match=r"k_scale has shape \[3\]: must be a scalar or \[2\]"):
        kv_cache.check_scale("k_scale", [1.0, 1.0, 1.0], K)


def test_layers_in_one_cache_keep_to_their_pages() -> None:
    """Caches of L layers in one array: a builder checks ids against one layer's N, and says so where it was not told N."""
    layers, blocks = 3, 4
    layer = Attention(2, 16, block_size=P)
    cache = layer.new_kv_cache(blocks, layers=layers)
    assert cache.shape == (2, layers * blocks, P, 2, 16)
    build = layer.backend.get_builder_cls()(layer.kv_cache_spec).build
    with pytest.raises(MetadataError, match=r"block_table\[0, 0\] = 5: must be between 0 and 3"):
        build(0, CommonAttentionMetadata.from_lens([1], [1], [[5]], P))
    batch = build(0, CommonAttentionMetadata.from_lens([1], [1], [[3]], P))
    row = jnp.ones((1, 2, 16))
    for i in range(layers):
        _, cache = layer(row, row * (i + 1), row, cache, batch.of_layer(i, blocks))
        batch.of_layer(i)  # N is known to the batch
    keys, _ = layer.backend.logical_kv_cache(cache)
    written = np.asarray(keys)[:, 0, 0, 0]
    np.testing.assert_array_equal(written.reshape(layers, blocks), [[0, 0, 0, i + 1] for i in range(layers)])


def test_a_stack_allocated_as_one_cache_is_refused() -> None:
    """`new_kv_cache(L * N)` has ids checked against all layers' blocks: one of a batch's could be another layer's."""
    layer = Attention(2, 16, block_size=P)
    layer.new_kv_cache(8)
    batch = layer.backend.get_builder_cls()(layer.kv_cache_spec).build(0, CommonAttentionMetadata.from_lens([1], [1], [[5]], P))
    with pytest.raises(MetadataError, match=r"num_blocks = 4: must be 8, .* new_kv_cache\(num_blocks, layers=\.\.\.\)"):
        jax.jit(lambda batch, i: batch.of_layer(i, 4))(batch, 1)


@pytest.mark.parametrize("latent", [False, True])
def test_a_smaller_cache_than_the_batch_was_checked_against_is_refused(latent: bool) -> None:
    """A batch's ids may lie past the end of a smaller one, where nothing could be read; its own builder knows that end."""
    layer: Any = MLAAttention(2, 16, 8, 8, 8, jnp.ones((16, 2, 16)), block_size=P) if latent else Attention(2, 16, block_size=P)
    small, large = layer.new_kv_cache(4), layer.new_kv_cache(8)
    row = jnp.ones((1, 2, 16))
    new = (jnp.ones((1, 16)), jnp.ones((1, 8))) if latent else (row, row)
    batch = CommonAttentionMetadata.from_lens([1], [1], [[3]], P)
    layer(row, *new, large, layer.build(batch))
    with pytest.raises(ShapeError, match=r"kv_cache has 4 blocks, .* checked against 8, .*num_blocks=4"):
        jax.jit(layer.__call__)(row, *new, small, layer.build(batch))
    build = layer.backend.get_builder_cls()(dataclasses.replace(layer.kv_cache_spec, num_blocks=4)).build
    layer(row, *new, small, build(0, batch))


def layer_and_rows(latent: bool) -> tuple[Any, tuple[Any, ...]]:
    """A layer, and the arguments of a call for one token."""
    row = jnp.ones((1, 2, 16))
    if latent:
        layer: Any = MLAAttention(2, 16, 8, 8, 8, jnp.ones((16, 2, 16)), block_size=P)
        return layer, (row, jnp.ones((1, 16)), jnp.ones((1, 8)))
    return Attention(2, 16, block_size=P), (row, row, row)


ONE = CommonAttentionMetadata.from_lens([1], [1], [[3]], P)
LATENT = pytest.mark.parametrize("latent", [False, True], ids=["paged", "latent"])


def test_slots_of_all_layers_are_within_int32() -> None:
    """A layer's slots are behind those of the layers before it: past 2**31 tokens would be written elsewhere, or nowhere."""
    batch = Attention(2, 16, block_size=P).build(ONE)
    blocks = 2**30 // P - 1
    batch.of_layer(1, blocks)
    with pytest.raises(
        MetadataError, match=f"layer = 2: must be below 2, with {blocks} blocks of {P} a layer: slots are int32"
    ):
        batch.of_layer(2, blocks)


@LATENT
@pytest.mark.parametrize(
    "number", [3, 99, -1, 1.0, True, "0", None, [0], np.float32(1), jnp.int32(3), jnp.int32(-1), jnp.float32(0)]
)
def test_a_layer_that_the_cache_does_not_have_is_refused_at_once(latent: bool, number: Any) -> None:
    """Past the end, nothing is written and zeros are read; -1 would be another layer's block in a batch's slots."""
    layer, _ = layer_and_rows(latent)
    layer.new_kv_cache(4, layers=3)
    message = (
        re.escape(f"layer = {number!r}: must be an int between 0 and 2, ") + r".*new_kv_cache\(num_blocks, layers=\.\.\.\)"
    )
    with pytest.raises(MetadataError, match=message):
        layer.build(ONE).of_layer(number)
    with pytest.raises(MetadataError, match=message):
        jax.jit(lambda batch: batch.of_layer(number))(layer.build(ONE))
    for fine in (0, 2, np.int64(1), jnp.int32(2)):
        layer.build(ONE).of_layer(fine)


@LATENT
@pytest.mark.parametrize("number", [1, 3, 99])
def test_a_layer_of_a_cache_without_layers_is_refused_by_the_call(latent: bool, number: int) -> None:
    """`new_kv_cache` without `layers=`: the batch does not know whether caches were concatenated by hand, the call does."""
    layer, rows = layer_and_rows(latent)
    cache = layer.new_kv_cache(4)
    message = rf"kv_cache has 4 blocks, .* at least {number + 1} layers of 4: .* new_kv_cache\(4, layers=\.\.\.\)"
    with pytest.raises(ShapeError, match=message):
        layer(*rows, cache, layer.build(ONE).of_layer(number))
    with pytest.raises(MetadataError, match="layer = -1: must be an int of at least 0, "):
        layer.build(ONE).of_layer(-1)
    out, _ = layer(*rows, cache, layer.build(ONE).of_layer(0))
    assert out.any()
    stack = jnp.concatenate([cache] * 4, 0 if latent or layer.backend.get_name() != "XLA_ATTN" else 1)
    out, _ = layer(*rows, stack, layer.build(ONE).of_layer(min(number, 3)))
    assert out.any()


def scanned(layer: Any, rows: Any, cache: Any, batch: Any, numbers: Any) -> Any:
    """The sum of each layer's output."""

    @jax.jit
    def layers(cache: Any, batch: Any) -> Any:
        def one(cache: Any, i: Any) -> Any:
            out, cache = layer(*rows, cache, batch.of_layer(i))
            return cache, jnp.abs(out).sum()

        return jax.lax.scan(one, cache, numbers)[1]

    return layers(cache, batch)


@LATENT
def test_a_scan_over_a_cache_without_layers_is_refused(latent: bool) -> None:
    layer, rows = layer_and_rows(latent)
    with pytest.raises(
        ShapeError, match=r"kv_cache has 4 blocks, .* at least 2 layers of 4: .* new_kv_cache\(4, layers=\.\.\.\)"
    ):
        scanned(layer, rows, layer.new_kv_cache(4), layer.build(ONE), jnp.arange(3))
    cache = layer.new_kv_cache(4, layers=1)
    assert scanned(layer, rows, cache, layer.build(ONE), jnp.arange(1)).all(), "a model of one layer, with layers=1"
    large = layer.new_kv_cache(4, layers=3)
    assert scanned(layer, rows, large, layer.build(ONE), jnp.arange(3)).all()
    with pytest.raises(ShapeError, match="kv_cache has 4 blocks, .* at least 3 layers of 4"):
        scanned(layer, rows, cache, layer.build(ONE), jnp.arange(3))
    for numbers in (jnp.arange(3.0), jnp.zeros((3, 1), jnp.int32)):
        with pytest.raises(MetadataError, match="layer = .*: must be an int, or a traced scalar of an integer dtype"):
            scanned(layer, rows, large, layer.build(ONE), numbers)


@pytest.mark.parametrize("numbers", [[0, 1, 2], [-1], [2**20]])
def test_a_traced_layer_is_checked_in_the_step_on_request(numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "device")
    layer, rows = layer_and_rows(False)
    cache = layer.new_kv_cache(4, layers=2)
    error, _ = checkify.checkify(lambda: scanned(layer, rows, cache, layer.build(ONE), jnp.array(numbers)))()
    assert "a live entry is not between 0 and 7" in str(error.get())


def test_a_batch_is_of_one_layer_once() -> None:
    """Twice, the numbers would add up."""
    layer, _ = layer_and_rows(False)
    layer.new_kv_cache(4, layers=3)
    with pytest.raises(MetadataError, match=r"layer = 1: must be passed once: this batch is from of_layer\(\)"):
        layer.build(ONE).of_layer(1).of_layer(1)


@pytest.mark.parametrize("blocks", [0, -1, 4.0, True])
def test_the_blocks_of_a_layer_are_a_positive_int(blocks: Any) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        layer_and_rows(False)[0].build(ONE).of_layer(0, blocks)


def test_the_layers_of_a_stack_share_a_program() -> None:
    layer, rows = layer_and_rows(False)
    cache = layer.new_kv_cache(4, layers=3)
    step = jax.jit(layer.__call__)
    for i in range(3):
        step(*rows, cache, layer.build(ONE).of_layer(i))
    assert step._cache_size() == 1


@pytest.mark.parametrize("count", [0, -1, "32", 2.0, True])
def test_a_stack_has_a_positive_number_of_layers(count: Any) -> None:
    layer = Attention(2, 16, block_size=P)
    with pytest.raises(ValueError, match=f"layers={count!r} must be a positive int"):
        layer.new_kv_cache(4, layers=count)
    assert layer.kv_cache_spec.num_blocks is None
