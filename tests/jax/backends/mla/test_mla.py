"""`attn.jax.MLAAttention` where models use it: as a module, scanned over layers, sharded over heads, through vLLM's
`forward`, and in a small DeepSeek-V3-shaped model (about 20 s)."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

from attn.backends.metadata import CommonAttentionMetadata
from attn.errors import ShapeError, UnsupportedError
from attn.jax import MLAAttention

ROOT = Path(__file__).parents[4]

# The model's sizes: vocabulary, width, layers, heads, q_lora_rank, and L, Dr, Dn, Dv.
V, E, LAYERS, H, Q = 61, 48, 2, 4, 40
L, DR, DN, DV = 32, 16, 24, 20
FF, P = 96, 16


@pytest.mark.parametrize("kind", ["kernel", "weight", "flat", "bare"])
def test_every_form_of_the_up_projection(make_mla: Any, kind: str) -> None:
    batch = make_mla((1,), (5,))
    w = jnp.asarray(batch.w)
    flat = w.reshape(L, -1)
    linear = nnx.Linear(*flat.shape, use_bias=False, rngs=nnx.Rngs(0))
    linear.kernel[...] = flat
    forms = {"kernel": linear, "weight": SimpleNamespace(weight=flat.T), "flat": flat, "bare": w}
    layer = MLAAttention(H, L, DN, DR, DV, forms[kind], block_size=P)
    for got, want in zip(layer.impl.weights(layer.kv_b_proj), (w[..., :DN], w[..., DN:]), strict=True):
        np.testing.assert_array_equal(got, want)
    if kind == "kernel":  # a leaf of the module's state, which jit and optimisers see
        assert [leaf.shape for leaf in jax.tree.leaves(nnx.state(layer))] == [flat.shape]
    with pytest.raises(ShapeError, match="kv_b_proj's weights have shape"):
        layer.impl.weights(w[:, :3])


def test_the_seeds_shape(make_mla: Any) -> None:
    """`impl.forward` takes q, rebinds the cache of a variable, and takes weights from its own `kv_b_proj`."""
    batch = make_mla()
    q, kv_c, k_pe, cache, metadata = batch.arguments()
    want, written = batch.layer(q, kv_c, k_pe, cache, metadata)
    of_layer = (H, L + DR, (DN + DR) ** -0.5, 1, None, None, "auto", None, "decoder", None, None)
    impl = batch.layer.backend.get_impl_cls()(*of_layer, L, DN, DR, DN + DR, DV, jnp.asarray(batch.w))
    impl.need_to_return_lse_for_decode = True
    held = nnx.Variable(cache)
    out, _ = impl.forward(batch.layer, q, kv_c, k_pe[:, None], held, metadata)
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(held[...], written)
    with pytest.raises(TypeError, match=r"pass an nnx\.Variable"):
        impl.forward(batch.layer, q, kv_c, k_pe, cache, metadata)
    with pytest.raises(ValueError, match="output= cannot be filled"):
        impl.forward(batch.layer, q, kv_c, k_pe, held, metadata, output=out)
    with pytest.raises(UnsupportedError, match="output_scale"):
        impl.forward(batch.layer, q, kv_c, k_pe, held, metadata, output_scale=1.0)
    alone = impl.do_kv_cache_update(batch.layer, kv_c, k_pe, cache, metadata.slot_mapping)
    np.testing.assert_array_equal(alone, written)


def test_heads_over_a_mesh(make_mla: Any, tmp_path: Path) -> None:
    """Two devices hold half of the heads each, and the whole cache: the same answer, nothing communicated."""
    batch = make_mla()
    arguments = batch.arguments()
    w_uk, w_uv = batch.layer.impl.weights(batch.layer.kv_b_proj)
    ((out, lse), cache) = batch.layer(*arguments)
    script = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from tests.jax.mla_batches import Batch
batch = Batch()
w_uk, w_uv = batch.layer.impl.weights(batch.layer.kv_b_proj)
def step(q, kv_c, k_pe, cache, metadata, w_uk, w_uv):
    return batch.layer.impl.apply(q, kv_c, k_pe, cache, metadata, w_uk=w_uk, w_uv=w_uv)
mesh, heads = Mesh(np.array(jax.devices()), ("heads",)), P(None, "heads")
step = jax.jit(jax.shard_map(
    step, mesh=mesh, in_specs=(heads, P(), P(), P(), P(), heads, heads), out_specs=((heads, P("heads")), P())
))
text = step.lower(*batch.arguments(), w_uk, w_uv).compile().as_text()
assert not any(word in text for word in ("all-reduce", "all-gather", "collective-permute", "all-to-all")), text
(out, lse), cache = step(*batch.arguments(), w_uk, w_uv)
assert len(out.devices()) == 2
np.savez(sys.argv[1] + "/out.npz", out=out, lse=lse, cache=cache)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", script, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = np.load(tmp_path / "out.npz")
    np.testing.assert_allclose(got["out"], out, atol=1e-6)
    np.testing.assert_allclose(got["lse"], lse, atol=1e-6)
    np.testing.assert_array_equal(got["cache"], cache)


# --- a model ---------------------------------------------------------------------------------------------------------


def weights(seed: int = 0) -> dict[str, Any]:
    """Random weights of a DeepSeek-V3-shaped decoder with a dense MLP, those of its layers stacked."""
    rng = np.random.default_rng(seed)
    shapes = {"q_a": (E, Q), "q_b": (Q, H * (DN + DR)), "kv_a": (E, L + DR), "kv_b": (L, H * (DN + DV)), "o": (H * DV, E)}
    shapes |= {"gate": (E, FF), "up": (E, FF), "down": (FF, E)}
    layers = {name: rng.standard_normal((LAYERS, *s)) * 1.4 * s[0] ** -0.5 for name, s in shapes.items()}
    for name, size in {"norm1": E, "norm2": E, "q_norm": Q, "kv_norm": L}.items():
        layers[name] = 1 + 0.1 * rng.standard_normal((LAYERS, size))
    whole = {"embed": rng.standard_normal((V, E)), "head": rng.standard_normal((E, V)) * E**-0.5, "norm": np.ones(E)}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), {**whole, "layers": layers})


def norm(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def rope(x: Any, position: Any) -> Any:
    """x [T, ..., DR], pairs side by side, as DeepSeek has them."""
    angle = position[:, None] * 10000.0 ** (-jnp.arange(0, DR, 2) / DR)
    cos, sin = (f(angle).reshape(len(position), *[1] * (x.ndim - 2), DR // 2) for f in (jnp.cos, jnp.sin))
    even, odd = x[..., ::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def block(x: Any, position: Any, w: Any, attend: Any) -> tuple[Any, Any]:
    """One layer; attend(q, c, k_pe) -> ([T, H, DV], what it returns besides)."""
    h = norm(x, w["norm1"])
    q = (norm(h @ w["q_a"], w["q_norm"]) @ w["q_b"]).reshape(-1, H, DN + DR)
    q = jnp.concatenate([q[..., :DN], rope(q[..., DN:], position)], axis=-1)
    compressed = h @ w["kv_a"]
    made, rest = attend(q, norm(compressed[:, :L], w["kv_norm"]), rope(compressed[:, L:], position))
    x = x + made.reshape(-1, H * DV) @ w["o"]
    h = norm(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], rest


@jax.jit
def dense(params: Any, tokens: Any) -> Any:
    """Logits [S, V] of one sequence, unabsorbed, with the whole score matrix."""
    position = jnp.arange(len(tokens))

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        def attend(q: Any, c: Any, k_pe: Any) -> tuple[Any, None]:
            kv = jnp.einsum("sl,lhe->she", c, w["kv_b"].reshape(L, H, DN + DV))
            shared = jnp.broadcast_to(k_pe[:, None], (len(c), H, DR))
            scores = jnp.einsum("the,she->hts", q, jnp.concatenate([kv[..., :DN], shared], axis=-1)) * (DN + DR) ** -0.5
            scores = jnp.where(position <= position[:, None], scores, -jnp.inf)
            return jnp.einsum("hts,shv->thv", jax.nn.softmax(scores, axis=-1), kv[..., DN:]), None

        return block(x, position, w, attend)

    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    return norm(x, params["norm"]) @ params["head"]


def test_a_model_decodes_token_for_token() -> None:
    """Prefill (one prompt long enough to be expanded, then the rest of the other in a second chunk) and 64 greedy tokens of
    each through paged latents equal the dense forward, in float32; layers are scanned and the caches donated."""
    params, steps = weights(), 64
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, V, 90).tolist(), rng.integers(0, V, 37).tolist()]
    attention = MLAAttention(H, L, DN, DR, DV, None, block_size=P)  # weights are those of the layer that is scanned
    impl = attention.impl
    columns = -(-(90 + steps) // P)
    tables = rng.permutation(2 * columns).reshape(2, columns).astype(np.int32)
    caches = jnp.full((LAYERS, 2 * columns, P, L + DR), jnp.nan, jnp.float32)

    def step(params: Any, caches: Any, tokens: Any, metadata: Any) -> tuple[Any, Any]:
        owner = jnp.sum(jnp.arange(len(tokens))[:, None] >= metadata.query_start_loc[1:], axis=1)
        owner = jnp.minimum(owner, len(metadata.seq_lens) - 1)
        position = metadata.seq_lens[owner] - metadata.query_start_loc[owner + 1] + jnp.arange(len(tokens))

        def layer(x: Any, weights_and_cache: Any) -> tuple[Any, Any]:
            w, cache = weights_and_cache
            up = w["kv_b"].reshape(L, H, DN + DV)

            def run(q: Any, c: Any, k_pe: Any) -> Any:
                return impl.apply(q, c, k_pe, cache, metadata, w_uk=up[..., :DN], w_uv=up[..., DN:])

            return block(x, position, w, run)

        x, caches = jax.lax.scan(layer, params["embed"][tokens], (params["layers"], caches))
        last = x[jnp.maximum(metadata.query_start_loc[1:] - 1, 0)]
        return jnp.argmax(norm(last, params["norm"]) @ params["head"], axis=-1), caches

    step = jax.jit(step, donate_argnums=1)
    builder = attention.backend.get_builder_cls()(attention.kv_cache_spec)
    texts = [list(p) for p in prompts]

    def run(chunks: list[list[int]], lens: list[int]) -> list[int]:
        nonlocal caches
        used = [t[: -(-m // P)] for t, m in zip(tables, lens, strict=True)]
        batch = CommonAttentionMetadata.from_lens([len(c) for c in chunks], lens, used, P)
        metadata = builder.build(0, batch)
        tokens = metadata.pad(np.array([t for c in chunks for t in c], np.int32))
        best, caches = step(params, caches, tokens, metadata)
        return np.asarray(best)[:2].tolist()

    first, _ = run([prompts[0], prompts[1][:20]], [90, 20])
    texts[0].append(first)
    for _ in range(steps):
        done = len(texts[0]) == len(prompts[0]) + 1 and len(texts[1]) == len(prompts[1])
        chunks = [[texts[0][-1]], prompts[1][20:] if done else [texts[1][-1]]]
        for text, token in zip(texts, run(chunks, [len(t) for t in texts]), strict=True):
            text.append(token)
    for text, prompt in zip(texts, prompts, strict=True):
        whole = np.array(text + [0] * (160 - len(text)), np.int32)
        want = np.argmax(np.asarray(dense(params, whole)), axis=-1)[len(prompt) - 1 : len(text) - 1]
        assert len(want) >= steps and len(set(want.tolist())) > 8
        assert text[len(prompt) :] == want.tolist()


def test_values_are_checked_inside_the_step(make_mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ATTN_DEBUG=device, where the step is functionalised; a batch that fails touches no memory."""
    batch = make_mla((1, 3), (20, 9))
    q, kv_c, k_pe, cache, metadata = batch.arguments()
    want, _ = batch.layer(q, kv_c, k_pe, cache, metadata)
    monkeypatch.setenv("ATTN_DEBUG", "device")
    run = jax.jit(checkify.checkify(lambda cache, metadata: batch.layer(q, kv_c, k_pe, cache, metadata)))
    error, ((out, _), _) = run(cache, metadata)
    error.throw()
    np.testing.assert_allclose(out, want[0], atol=1e-6)
    for field, at, value in (("block_table", (0, 1), batch.num_blocks), ("slot_mapping", (2,), -2)):
        bad = dataclasses.replace(metadata, **{field: getattr(metadata, field).at[at].set(value)})
        error, ((out, _), after) = run(cache, bad)
        with pytest.raises(checkify.JaxRuntimeError, match=f"{field}: "):
            error.throw()
        assert jnp.isnan(out).all()
        np.testing.assert_array_equal(after, cache)


@pytest.mark.parametrize("name", ["XLA_MLA", "PALLAS_MLA"])
def test_under_64_bit_types(make_mla: Any, name: str) -> None:
    batch = make_mla((1, 3), (20, 9), backend=name)
    want, _ = batch.layer(*batch.arguments())
    with jax.enable_x64(True):
        got, _ = jax.jit(batch.layer.__call__)(*batch.arguments())
    for one, other in zip(got, want, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, atol=1e-6)
