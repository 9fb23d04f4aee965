"""The choice for calls without a layer is made once per kind of call, however many sizes it comes in."""

import sys
from dataclasses import replace

import pytest
import torch

import attn
import attn.torch
from attn.diffusion.backends.registry import register_diffusion_backend
from attn.errors import UnsupportedError
from attn.integrations.transformers import _function
from attn.torch.diffusion import chosen
from attn.torch.diffusion.backends.sdpa import SDPABackend, SDPAImpl


def choose(rows, keys, causal=False, backend=None):
    q, k = torch.empty(1, rows, 4, 16), torch.empty(1, keys, 4, 16)
    return chosen.impl_for(chosen.properties_of(q, k, 0.25, causal, None, False, backend))


def test_decoding_fifty_tokens_chooses_once():
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 60, 16)
    attn.torch.scaled_dot_product_attention(q, k[..., :8, :], k[..., :8, :])
    before = len(chosen._choices)
    for keys in range(9, 59):
        attn.torch.scaled_dot_product_attention(q, k[..., :keys, :], k[..., :keys, :])
    # the number of keys counts by its common divisor with SAGE_ATTN's 64
    assert len(chosen._choices) - before <= 6


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_graph_has_the_choice_as_a_constant(dynamic):
    def attend(q, k):  # the budget and the scale are symbols of a dynamic graph
        return chosen.impl_for(chosen.properties_of(q, k, q.shape[-1] ** -0.5, False, None, False)).forward(q, k, k)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="eager")
    for rows in (5, 9, 1):
        q, k = torch.randn(2, rows, 4, 16), torch.randn(2, rows + 3, 4, 16)
        torch.testing.assert_close(compiled(q, k), attend(q, k))


#: Caches that miss at each decoded token, and why.
PER_STEP = {
    "attn.integrations.transformers.packing._batch": "a step's batch, which the layers of the step share",
    "attn.torch.dot_product._launches": "the launch of a step's shapes, which the layers of the step share; 256 at most",
}


def misses():
    """The misses of every cache of a function, and the sizes of every dictionary, in the loaded modules of this package."""
    found = {}
    for module in [name for name in sys.modules if name.partition(".")[0] == "attn"]:
        for name, value in vars(sys.modules[module]).items():
            if isinstance(value, type(chosen._limits)):
                found[f"{module}.{name}"] = value.cache_info().misses
            elif isinstance(value, dict) and not name.startswith("__"):
                found[f"{module}.{name}"] = len(value)
    return found


@pytest.mark.parametrize("way", ["drop-in", "dense", "packed", "CPU_ATTN", "TORCH_SDPA"])
def test_no_cache_misses_at_every_token(way):
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 70, 16)
    module = torch.nn.Module()
    layer = attn.torch.Attention(4, 16, backend=way) if way.isupper() else None
    cache = layer and layer.new_kv_cache(8)

    def step(keys):
        if layer is not None:
            batch = attn.CommonAttentionMetadata.from_lens([1], [keys], [range(8)], 16)
            token = k[0, :, keys - 1][None]
            layer(q[0, :, 0][None], token, token, cache, layer.build(batch))
        elif way == "drop-in":
            attn.torch.scaled_dot_product_attention(q, k[..., :keys, :], k[..., :keys, :])
        else:
            options = {"softcap": 3.0} if way == "packed" else {}
            _function(None)(module, q, k[..., :keys, :], k[..., :keys, :], None, **options)

    step(8)
    before = misses()
    for keys in range(9, 59):
        step(keys)
    grown = {name: count - before.get(name, 0) for name, count in misses().items()}
    assert {name: count for name, count in grown.items() if count > 7 and name not in PER_STEP} == {}


def limited(**changes):
    """Register a backend like TORCH_SDPA, but preferred and with limits of calls."""

    class Impl(SDPAImpl):
        pass

    class Limited(SDPABackend):
        capabilities = replace(SDPABackend.capabilities, priority=1)
        get_name = staticmethod(lambda: "LIMITED")
        get_impl_cls = staticmethod(lambda: Impl)

    for name, value in changes.items():
        setattr(Limited, name, value)
    register_diffusion_backend("LIMITED", Limited)
    return Impl


@pytest.mark.parametrize(
    ("changes", "served", "rejected"),
    [
        ({"min_keys": 5}, [(1, 5), (1, 900)], [(1, 4), (9, 1)]),
        ({"key_multiple": 3}, [(1, 6), (2, 900)], [(1, 4), (9, 1)]),
        ({"causal_unequal": False}, [(6, 6), (900, 900)], [(1, 4), (9, 1)]),
        ({"why_not_call": classmethod(lambda cls, rows, keys, *_: ["odd"] * (keys % 2))}, [(1, 4), (9, 8)], [(1, 5), (3, 1)]),
    ],
    ids=["min_keys", "key_multiple", "causal_unequal", "its own"],
)
def test_limits_of_calls_are_asked_at_each_call(changes, served, rejected):
    kind = limited(**changes)
    causal = "causal_unequal" in changes
    for rows, keys in [*served, *rejected, *served]:
        assert isinstance(choose(rows, keys, causal), kind) == ((rows, keys) in served), (rows, keys)


def test_a_rejection_names_the_sizes_of_its_own_call():
    limited(min_keys=5)
    for keys in (3, 4):
        with pytest.raises(UnsupportedError, match=f"keys={keys} "):
            choose(1, keys, backend="LIMITED")
