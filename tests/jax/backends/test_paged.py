"""What serving requires of every paged backend under jax, PALLAS interpreted: donation, layers in a scan, checks inside the
step, no derivatives (about 30 s)."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from attn import reference
from attn.backends.metadata import CommonAttentionMetadata
from attn.errors import MetadataError, UnsupportedError
from attn.jax import Attention
from tests.levels import LEVEL

H, K, D, P, N = 4, 2, 64, 16, 6
LENS = (1, 3), (20, 9)


class Step:
    """One layer and one batch of a backend: `arguments(cache)` are those of `layer`."""

    def __init__(self, backend: str, **more: Any) -> None:
        self.layer = Attention(H, D, num_kv_heads=K, block_size=P, backend=backend, **more)
        self.layer.impl.need_to_return_lse_for_decode = True
        self.cache = self.layer.new_kv_cache(N)
        self.common = CommonAttentionMetadata.from_lens(*LENS, [[4, 1], [2]], P)
        self.meta = self.layer.backend.get_builder_cls()(self.layer.kv_cache_spec).build(0, self.common)
        rng = np.random.default_rng(0)
        self.q, self.k, self.v = (self.meta.pad(rng.standard_normal((4, heads, D), np.float32)) for heads in (H, K, K))

    def __call__(self, q: Any, kv_cache: Any, meta: Any = None) -> Any:
        return self.layer(q, self.k, self.v, kv_cache, meta or self.meta)

    def expected(self, q: Any) -> tuple[Any, Any]:
        """The oracle's (out, lse) over a cache of zeros."""
        zeros = np.zeros((N, P, K, D))
        written = reference.write_kv(self.k[:4], self.v[:4], zeros, zeros, self.common.slot_mapping)
        requests = {name: getattr(self.common, name) for name in ("query_start_loc", "seq_lens", "block_table")}
        return reference.paged_attention(np.asarray(q[:4]), *written, **requests)


ON_GPU = jax.default_backend() == "gpu"


@pytest.fixture(scope="module", params=["XLA_ATTN", "TRITON_ATTN_JAX" if ON_GPU else "PALLAS"])
def step(request: pytest.FixtureRequest) -> Step:
    return Step(request.param)


def test_a_donated_cache_keeps_its_memory(step: Step) -> None:
    """The compiled step aliases the cache; slots that are not written hold what they held."""
    cache = jnp.full_like(step.cache, 7)
    compiled = jax.jit(step.__call__, donate_argnums=1).lower(step.q, cache).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.nbytes
    where = cache.unsafe_buffer_pointer()
    _, after = compiled(step.q, cache)
    assert cache.is_deleted() and after.unsafe_buffer_pointer() == where
    keys, _ = step.layer.backend.logical_kv_cache(after)
    slots = step.common.slot_mapping
    flat = np.asarray(keys).reshape(N * P, K, -1)
    np.testing.assert_array_equal(flat[slots], step.k[:4])
    assert (np.delete(flat, slots, axis=0) == 7).all()


@pytest.mark.parametrize("name", ["XLA_ATTN", "PALLAS"])
def test_a_bound_beyond_every_key_hides_none(name: str) -> None:
    """Positions are int32, to which a bound of a window is added."""
    outputs = []
    for side in (None, 2**31 - 1, 2**40):
        step = Step(name, sliding_window=(side, side), attn_type="encoder_decoder", chunk_size=None)
        outputs.append(step(step.q, step.cache)[0][0])
    step = Step(name, chunk_size=2**40)
    assert np.isfinite(step(step.q, step.cache)[0][0]).all()
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])


@pytest.mark.parametrize("name", ["XLA_ATTN", "PALLAS"])
def test_under_64_bit_types(name: str) -> None:
    want = Step(name)
    with jax.enable_x64(True):
        step = Step(name)
        (out, lse), _ = jax.jit(step.__call__)(step.q, step.cache)
    assert (out.dtype, lse.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(out, want(want.q, want.cache)[0][0], atol=1e-6)


def test_layers_in_a_scan(step: Step) -> None:
    """Caches stacked and taken apart by the scan, or one after the other in an array that it carries: the same answer."""

    @jax.jit
    def stacked(q: Any, caches: Any) -> Any:
        def one(x: Any, cache: Any) -> Any:
            (out, lse), cache = step(x, cache)
            return out, (cache, lse)

        return jax.lax.scan(one, q, caches)

    @jax.jit
    def carried(q: Any, caches: Any) -> Any:
        def one(state: Any, i: Any) -> Any:
            (out, lse), cache = step(state[0], state[1], step.meta.of_layer(i, N))
            return (out, cache), lse

        return jax.lax.scan(one, (q, caches), jnp.arange(2))

    out, (caches, lse) = stacked(step.q, jnp.stack([step.cache] * 2))
    axis = 0 if step.layer.backend.get_name() == "PALLAS" else 1  # which one is N
    whole = step.layer.new_kv_cache(N, layers=2)
    assert whole.shape == jnp.concatenate([step.cache] * 2, axis).shape
    (again, line), line_lse = carried(step.q, whole)
    # compiled fast, the two programs round differently
    near = 0.0 if os.environ.get(LEVEL) == "full" else 1e-6
    np.testing.assert_allclose(again, out, rtol=near, atol=near)
    np.testing.assert_allclose(line_lse, lse, rtol=near, atol=near)
    np.testing.assert_array_equal(line, jnp.concatenate([*caches], axis))
    want, want_lse = step.expected(step.expected(step.q)[0].astype(np.float32))
    np.testing.assert_allclose(out[:4], want, atol=1e-5)
    np.testing.assert_allclose(lse[1][:, :4], want_lse, atol=1e-5)


def test_a_layer_of_a_batch_needs_its_block_size(step: Step) -> None:
    with pytest.raises(MetadataError, match="block_size"):
        type(step.meta)(**{**vars(step.meta), "block_size": None}).of_layer(1, N)
    with pytest.raises(MetadataError, match="num_blocks = None: must be the number of blocks of one layer's cache"):
        type(step.meta)(**{**vars(step.meta), "num_blocks": None}).of_layer(1)


def test_values_are_checked_inside_the_step(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ATTN_DEBUG=device, where the step is functionalised; a batch that fails touches no memory."""
    monkeypatch.setenv("ATTN_DEBUG", "device")

    def checked(q: Any, cache: Any, meta: Any) -> Any:
        return step(q, cache, meta)

    run = jax.jit(checkify.checkify(checked))
    error, ((out, _), _) = run(step.q, step.cache, step.meta)
    error.throw()
    np.testing.assert_allclose(out[:4], step.expected(step.q)[0], atol=1e-5)
    for field, at, value in (("block_table", (0, 1), N), ("slot_mapping", (2,), N * P), ("slot_mapping", (2,), -2)):
        bad = type(step.meta)(**{**vars(step.meta), field: getattr(step.meta, field).at[at].set(value)})
        error, ((out, _), cache) = run(step.q, step.cache, bad)
        with pytest.raises(checkify.JaxRuntimeError, match=f"{field}: "):
            error.throw()
        assert jnp.isnan(out).all() and not cache.any()


def test_derivatives_are_refused_in_our_words(step: Step) -> None:
    said = "backward not supported: its layers are for serving. To train, use attn.attention"
    with pytest.raises(UnsupportedError, match=said):
        jax.grad(lambda q: step(q, step.cache)[0][0].sum())(step.q)
    with pytest.raises(UnsupportedError, match=said):
        jax.jvp(lambda cache: step(step.q, cache)[0], (step.cache,), (step.cache,))
    jax.eval_shape(jax.grad(lambda x: x * 2 + step(step.q, step.cache)[0][0].sum()), 1.0)  # which does not depend on it
