"""Attention weights of layers: they are those of the oracle, and give the layer's output (about 20 s)."""

import os
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from attn import CommonAttentionMetadata, reference, weights
from attn.errors import UnsupportedError
from attn.imports import resolve_obj_by_qualname
from attn.pictures import weights_of
from tests.levels import sampled

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")

P = 16
LATENT = (4, 32, 16, 8, 16)  #: heads, L, Dn, Dr, Dv
Q_LENS, SEQ_LENS, TABLE = [5, 1, 3], [5, 37, 20], [[3], [7, 4, 2], [1, 0]]


def array(framework: str, values: Any) -> Any:
    return torch.from_numpy(np.asarray(values)) if framework == "torch" else jnp.asarray(values)


def served(framework: str, latent: bool = False, tree: Any = None, **more: Any) -> tuple[Any, list[Any], Any, Any, list[Any]]:
    """Return (layer, its rows, cache and metadata, the pages [8, P, ...] of keys and values before the call)."""
    rng = np.random.default_rng(0)
    if latent:
        heads, rank, nope, rope, value = LATENT
        more["kv_b_proj"] = array(framework, rng.standard_normal((rank, heads, nope + value), np.float32) * rank**-0.5)
    sizes = LATENT if latent else (4, 16)
    kind = resolve_obj_by_qualname(f"attn.{framework}.{'MLA' * latent}Attention")
    layer = kind(*sizes, block_size=P, **more, **({} if latent else {"num_kv_heads": 2}))
    shapes = [(4, 24), (32,), (8,)] if latent else [(4, 16), (2, 16), (2, 16)]
    rows = [rng.standard_normal((sum(Q_LENS), *shape), np.float32) for shape in shapes]
    pages = [rng.standard_normal((8, P, *shape), np.float32) for shape in shapes[1:]]
    cache = layer.load_pages(layer.new_kv_cache(8), range(8), *(array(framework, x) for x in pages))
    metadata = layer.build(CommonAttentionMetadata.from_lens(Q_LENS, SEQ_LENS, TABLE, P, tree_mask=tree))
    return layer, rows, cache, metadata, pages


def called(framework: str, layer: Any, rows: Any, cache: Any, metadata: Any, **options: Any) -> Any:
    given = [array(framework, x) for x in rows]
    if framework == "torch":
        return layer(*given, cache, metadata, **options)
    return layer(*(metadata.pad(x) for x in given), cache, metadata, **options)[0]


def sequence(rows: Any, pages: Any, r: int) -> Any:
    """Return request r's tokens in order, the new ones last."""
    stored = pages[TABLE[r]].reshape(-1, *pages.shape[2:])[: SEQ_LENS[r] - Q_LENS[r]]
    start = sum(Q_LENS[:r])
    return np.concatenate([stored, rows[start : start + Q_LENS[r]]])


TREE = np.broadcast_to(np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool), (3, 3, 3))


@pytest.mark.parametrize(
    ("framework", "more"),
    [
        ("torch", {"sinks": [0.5, 0.0, 1.0, -1.0], "sliding_window": 7, "logits_soft_cap": 3.0, "scale": -0.7}),
        ("torch", {"alibi_slopes": [0.5, 0.25, 0.125, 0.1], "return_lse": True}),
        ("jax", {"sinks": [0.5, 0.0, 1.0, -1.0], "sliding_window": 7, "logits_soft_cap": 3.0, "scale": -0.7}),
    ],
    ids=["torch, window, cap, sinks", "torch, slopes, lse", "jax, window, cap, sinks"],
)
def test_weights_are_the_oracles_and_give_the_output(framework, more):
    layer, rows, cache, metadata, pages = served(framework, **more)
    out, *rest, found = called(framework, layer, rows, cache, metadata, return_weights=True)
    assert len(rest) == more.get("return_lse", False)
    rules = {"window": layer.impl.window, "scale": more.get("scale", 0.25), "causal": True}
    rules |= {name: more.get(name) for name in ("logits_soft_cap", "alibi_slopes")}
    for r, one in enumerate(found):
        start = sum(Q_LENS[:r])
        own = slice(start, start + Q_LENS[r])
        want = weights_of(rows[0][own], sequence(rows[1], pages[0], r), more.get("sinks"), **rules)[..., : SEQ_LENS[r]]
        assert isinstance(one, torch.Tensor if framework == "torch" else jax.Array)
        np.testing.assert_allclose(np.asarray(one), want, atol=1e-5)
        value = np.repeat(sequence(rows[2], pages[1], r), 2, 1)
        np.testing.assert_allclose(np.einsum("hnm,mhd->nhd", np.asarray(one), value), np.asarray(out[own]), atol=1e-4)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_weights_of_a_latent_layer(framework):
    layer, rows, cache, metadata, pages = served(framework, latent=True)
    out, found = called(framework, layer, rows, cache, metadata, return_weights=True)
    up = np.asarray(layer.impl.up_projection() if framework == "torch" else layer.impl.up_projection(layer.kv_b_proj))
    for r, one in enumerate(found):
        start = sum(Q_LENS[:r])
        own, latent = slice(start, start + Q_LENS[r]), sequence(rows[1], pages[0], r)
        value = np.einsum("ml,lhv->mhv", latent, up[..., 16:])
        np.testing.assert_allclose(np.einsum("hnm,mhv->nhv", np.asarray(one), value), np.asarray(out[own]), atol=1e-4)
        assert one.shape == (4, Q_LENS[r], SEQ_LENS[r]) and np.allclose(np.asarray(one).sum(-1), 1, atol=1e-5)


def test_weights_over_a_tree_and_a_quantised_cache():
    layer, rows, cache, metadata, pages = served(
        "torch", tree=TREE, kv_cache_dtype="fp8", k_scale=0.02, v_scale=0.02, backend="TORCH_SDPA", features=["tree_mask"]
    )
    out, found = called("torch", layer, rows, cache, metadata, return_weights=True)
    last = found[2].numpy()  # three drafts: the third does not see the second
    assert (last[:, 2, 18] == 0).all() and (last[:, 2, 17] > 0).all() and (last[:, 1, 18] > 0).all()
    quantised = reference.quantize(sequence(rows[2], pages[1], 2), "fp8_e4m3", 0.02)
    value = np.repeat(reference.dequantize(quantised, "fp8_e4m3") * 0.02, 2, 1)
    np.testing.assert_allclose(np.einsum("hnm,mhd->nhd", last, value), out[6:].numpy(), atol=1e-3)


def test_weights_are_bounded_and_warned_about_once(monkeypatch, caplog):
    layer, rows, cache, metadata, _ = served("torch", backend="TORCH_SDPA")
    for _ in range(2):
        called("torch", layer, rows, cache, metadata, return_weights=True)
    assert sum("computed by the formula" in record.getMessage() for record in caplog.records) == 1
    monkeypatch.setattr(weights, "MAX_ELEMENTS", 487)
    with pytest.raises(UnsupportedError, match="488 attention weights: must be at most 487; pass fewer rows or requests"):
        called("torch", layer, rows, cache, metadata, return_weights=True)


def test_weights_need_values():
    layer, rows, cache, metadata, _ = served("jax")
    with pytest.raises(UnsupportedError, match="return_weights=True under a transformation of JAX .* not supported"):
        jax.jit(lambda *given: layer(*given, cache, metadata, return_weights=True))(*(metadata.pad(x) for x in rows))
    layer, rows, cache, metadata, _ = served("torch", backend="TORCH_SDPA")
    with pytest.raises(Exception, match="return_weights=True in a graph"):
        torch.compile(lambda *given: layer(*given, cache, metadata, return_weights=True), backend="eager", fullgraph=True)(
            *(torch.from_numpy(x) for x in rows)
        )


def test_weights_have_no_gradients():
    layer, rows, cache, metadata, _ = served("torch", backend="TORCH_SDPA")
    given = [torch.from_numpy(x).requires_grad_() for x in rows]
    _, found = layer._with_weights(None, *given, cache, metadata)
    assert not any(one.requires_grad for one in found)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_weights_of_spans_prefixes_and_chunks(framework):
    """Each is seen in the weights: they are zero exactly where the definition hides a key."""
    rng = np.random.default_rng(0)
    name = "TORCH_SDPA" if framework == "torch" else "XLA_ATTN"
    kind = resolve_obj_by_qualname(f"attn.{framework}.Attention")
    q_lens, lens = [5, 3], [5, 9]
    spans = np.array([[-1, -1], [1, 3], [1, 3], [1, 3], [-1, -1], [-1, -1], [7, 8], [7, 8]], np.int32)
    for layered, batched in (
        ({}, {"spans": spans}),
        ({}, {"prefix": np.array([2, 0], np.int32)}),
        ({"chunk_size": 4}, {}),
        ({"sliding_window": 3, "span_window": False}, {"spans": spans}),
        ({}, {"causal": np.array([True, False])}),
    ):
        features = [{"spans": "spans", "prefix": "spans", "causal": "mixed_causal"}[x] for x in batched]
        layer = kind(4, 16, block_size=P, num_kv_heads=2, backend=name, features=features, **layered)
        rows = [rng.standard_normal((8, heads, 16), np.float32) for heads in (4, 2, 2)]
        batch = CommonAttentionMetadata.from_lens(q_lens, lens, [[3], [7]], P, **batched)
        found = called(framework, layer, rows, layer.new_kv_cache(8), layer.build(batch), return_weights=True)[-1]
        for r, (n, m) in enumerate(zip(q_lens, lens, strict=True)):
            own = slice(sum(q_lens[:r]), sum(q_lens[:r]) + n)
            causal = batched.get("causal", [True, True])[r]
            of_rows = {"spans": batched["spans"][own]} if "spans" in batched else {}
            of_rows |= {"prefix": int(batched["prefix"][r])} if "prefix" in batched else {}
            of_rows |= {"chunk_size": layered.get("chunk_size"), "window": layer.impl.window}
            want = reference.visible_mask(n, m, causal=bool(causal), span_window=False, **of_rows)
            assert ((np.asarray(found[r]) > 0).all(0) == want).all(), (layered, batched)


@pytest.mark.parametrize("framework", sampled(["torch", "jax"], 1, "weights without test tools"))
def test_weights_need_no_test_tools(framework):
    """The tools of the suite are no part of a call: they took 348 ms to import, and each call went through JSON."""
    code = f"""
        import sys
        import numpy as np
        from tests.test_weights import called, served
        before = {{name for name in sys.modules if name.startswith("attn.testing")}}
        layer, rows, cache, metadata, _ = served("{framework}")
        called("{framework}", layer, rows, cache, metadata, return_weights=True)
        latent = served("{framework}", latent=True)
        called("{framework}", *latent[:4], return_weights=True)
        assert {{name for name in sys.modules if ".testing" in name and name.startswith("attn.")}} == before == set()
    """
    quick = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=quick, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
