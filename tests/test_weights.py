"""Attention weights of layers: they are those of the oracle, and give the layer's output (about 20 s)."""

import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from attn import CommonAttentionMetadata, reference, weights
from attn.arrays import ops_of
from attn.errors import UnsupportedError
from attn.imports import resolve_obj_by_qualname
from attn.pictures import weights_of
from tests.levels import sampled
from tests.served import Q_LENS, SEQ_LENS, P, Served, owned

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")

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
    served = Served(framework, **more)
    out, *rest, found = served(return_weights=True)
    assert len(rest) == more.get("return_lse", False)
    rules = {"window": served.layer.impl.window, "scale": more.get("scale", 0.25), "causal": True}
    rules |= {name: more.get(name) for name in ("logits_soft_cap", "alibi_slopes")}
    for r, one in enumerate(found):
        own = owned(r)
        want = weights_of(served.rows[0][own], served.sequence(0, r), more.get("sinks"), **rules)[..., : SEQ_LENS[r]]
        assert isinstance(one, torch.Tensor if framework == "torch" else jax.Array)
        np.testing.assert_allclose(np.asarray(one), want, atol=1e-5)
        value = np.repeat(served.sequence(1, r), 2, 1)
        np.testing.assert_allclose(np.einsum("hnm,mhd->nhd", np.asarray(one), value), np.asarray(out[own]), atol=1e-4)


def check_latent(served, out, found):
    """The weights, over the latents' expanded values, give the output."""
    up = np.asarray(ops_of(served.framework).up_projection(served.layer))
    for r, one in enumerate(found):
        value = np.einsum("ml,lhv->mhv", served.sequence(0, r), up[..., 16:])
        np.testing.assert_allclose(np.einsum("hnm,mhv->nhv", np.asarray(one), value), np.asarray(out[owned(r)]), atol=1e-4)
        assert one.shape == (4, Q_LENS[r], SEQ_LENS[r]) and np.allclose(np.asarray(one).sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_weights_of_a_latent_layer(framework):
    served = Served(f"{framework} MLA")
    check_latent(served, *served(return_weights=True))


def test_weights_of_selected_keys():
    """Of an indexer's keys, -1 and keys that a row does not have are none."""
    rng, chosen = np.random.default_rng(1), np.full((9, 8), -1, np.int32)
    last = [m - n + i for n, m in zip(Q_LENS, SEQ_LENS, strict=True) for i in range(n)]
    for row, p in zip(chosen, last, strict=True):
        row[: min(p + 1, 8)] = rng.permutation(p + 1)[:8]
    indexer = SimpleNamespace(topk_indices=torch.from_numpy(chosen))
    served = Served("torch MLA", "TORCH_MLA_SPARSE", indexer=indexer)
    out, found = served(return_weights=True)
    check_latent(served, out, found)
    rows = [row for one in found for row in one[0].numpy()]
    assert [set(np.flatnonzero(row)) for row in rows] == [set(row[row >= 0]) for row in chosen]


def test_weights_over_a_tree_and_a_quantised_cache():
    more = {"kv_cache_dtype": "fp8", "k_scale": 0.02, "v_scale": 0.02, "features": ["tree_mask"]}
    served = Served("torch", "TORCH_SDPA", {"tree_mask": TREE}, **more)
    out, found = served(return_weights=True)
    last = found[2].numpy()  # three drafts: the third does not see the second
    assert (last[:, 2, 18] == 0).all() and (last[:, 2, 17] > 0).all() and (last[:, 1, 18] > 0).all()
    quantised = reference.quantize(served.sequence(1, 2), "fp8_e4m3", 0.02)
    value = np.repeat(reference.dequantize(quantised, "fp8_e4m3") * 0.02, 2, 1)
    np.testing.assert_allclose(np.einsum("hnm,mhd->nhd", last, value), out[6:].numpy(), atol=1e-3)


def test_weights_are_bounded_and_warned_about_once(monkeypatch, caplog):
    served = Served("torch", "TORCH_SDPA")
    for _ in range(2):
        served(return_weights=True)
    assert sum("computed by the formula" in record.getMessage() for record in caplog.records) == 1
    monkeypatch.setattr(weights, "MAX_ELEMENTS", 487)
    with pytest.raises(UnsupportedError, match="488 attention weights: must be at most 487; pass fewer rows or requests"):
        served(return_weights=True)


def test_weights_need_values():
    def call(served):
        return lambda *given: served.layer(*given, served.cache, served.metadata, return_weights=True)

    served = {framework: Served(framework) for framework in ("jax", "torch")}
    with pytest.raises(UnsupportedError, match="return_weights=True under a transformation of JAX .* not supported"):
        jax.jit(call(served["jax"]))(*served["jax"].given())
    with pytest.raises(Exception, match="return_weights=True in a graph"):
        torch.compile(call(served["torch"]), backend="eager", fullgraph=True)(*served["torch"].given())


def test_weights_have_no_gradients():
    served = Served("torch", "TORCH_SDPA")
    given = [x.requires_grad_() for x in served.given()]
    _, found = served.layer._with_weights(None, *given, served.cache, served.metadata)
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
        metadata = layer.build(batch)
        given = [torch.from_numpy(x) if framework == "torch" else metadata.pad(jnp.asarray(x)) for x in rows]
        found = layer(*given, layer.new_kv_cache(8), metadata, return_weights=True)
        found = found[-1] if framework == "torch" else found[0][-1]
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
        from tests.served import Served
        before = {{name for name in sys.modules if name.startswith("attn.testing")}}
        for kind in ("{framework}", "{framework} MLA"):
            Served(kind)(return_weights=True)
        assert {{name for name in sys.modules if ".testing" in name and name.startswith("attn.")}} == before == set()
    """
    quick = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=quick, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
