"""The interface: array conversion in `AttentionImpl.__call__`, a builder's state, and constructor arguments."""

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from attn import arrays
from attn.arguments import (
    check_attn_type,
    check_heads,
    check_scale,
    check_soft_cap,
    layer_features,
    rank_of_numbers,
    refuse,
    window_pair,
)
from attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, KVCacheSpec
from attn.capabilities import Request
from attn.errors import UnsupportedError


@pytest.fixture
def border(monkeypatch):
    """The border between two imaginary frameworks: `home`, where implementations live, and `away`."""
    crossings = []

    def to_framework(array, framework, *, like=None):
        crossings.append((array.kind, framework, None if like is None else like.kind))
        return array if array.kind == framework else Thing(framework, array.name)

    monkeypatch.setattr(arrays, "framework_of", lambda array: array.kind)
    monkeypatch.setattr(arrays, "to_framework", to_framework)
    return crossings


class Thing:
    """An array by framework and name."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name


class Impl(AttentionImpl):
    framework = "home"
    lse = False

    def __init__(self):
        self.calls = []

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output=None, output_scale=None, output_block_scale=None
    ):
        self.calls.append((layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale))
        out = Thing("home", "out")
        return (out, Thing("home", "lse")) if self.lse else out


def test_native_arrays_go_straight_through(border):
    impl, arrays_in = Impl(), [Thing("home", name) for name in "qkv"]
    assert impl("layer", *arrays_in, "cache", "meta").kind == "home"
    (call,) = impl.calls
    assert call == ("layer", *arrays_in, "cache", "meta", None, None, None)


def test_foreign_arrays_come_in_and_go_out_as_the_query_came(border):
    impl = Impl()
    out = impl("layer", *(Thing("away", name) for name in "qkv"), "cache", "meta")
    assert [(x.kind, x.name) for x in impl.calls[0][1:4]] == [("home", name) for name in "qkv"]
    assert (out.kind, out.name) == ("away", "out")
    assert border[-1] == ("home", "away", "away"), "the conversion of the output gets the query's device"


def test_each_array_crosses_for_itself(border):
    """A foreign key beside a native query, no value, a scale that is an array and one that is a float."""
    impl = Impl()
    scale = Thing("away", "scale")
    out = impl("layer", Thing("home", "q"), Thing("away", "k"), None, "cache", "meta", None, scale, 0.5)
    assert out.kind == "home"
    _, query, key, value, _, _, _, output_scale, block_scale = impl.calls[0]
    assert (query.kind, key.kind, value, output_scale.kind, block_scale) == ("home", "home", None, "home", 0.5)


def test_an_lse_goes_out_too(border):
    impl = Impl()
    impl.lse = True
    out, lse = impl(None, *(Thing("away", name) for name in "qkv"), None, None)
    assert (out.kind, lse.kind, lse.name) == ("away", "away", "lse")


def test_an_output_buffer_does_not_cross(border):
    with pytest.raises(ValueError, match="output= is written in place and cannot be converted"):
        Impl()(None, Thing("away", "q"), None, None, None, None, Thing("away", "buffer"))


def test_what_is_no_array_is_refused():
    with pytest.raises(TypeError, match="expected an array of torch, jax or numpy, got builtins.list"):
        Impl()(None, [1.0], None, None, None, None)


def test_optional_methods_say_that_they_are_not_there():
    with pytest.raises(NotImplementedError):
        Impl().do_kv_cache_update(None, None, None, None, None)
    with pytest.raises(NotImplementedError):
        AttentionBackend.logical_kv_cache(None)


def test_a_builder_keeps_what_it_is_given():
    class Builder(AttentionMetadataBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return common_prefix_len

    spec = KVCacheSpec(16, 2, 64, "float32")
    builder = Builder(spec, ["a", "b"], {"k": 1}, "cpu")
    assert (builder.kv_cache_spec, builder.layer_names, builder.config, builder.device) == (
        spec,
        ("a", "b"),
        {"k": 1},
        "cpu",
    )
    assert (Builder(spec).layer_names, Builder(spec).config, Builder(spec).device) == ((), None, None)
    with pytest.raises(TypeError, match="abstract"):
        AttentionMetadataBuilder(spec)
    with pytest.raises(FrozenInstanceError):
        spec.block_size = 32
    assert spec == KVCacheSpec(16, 2, 64, "float32", "auto", None, None) and hash(spec)


def test_refuse_carries_the_reasons(make_backend):
    backend = make_backend("FAKE", head_sizes=(64,))
    assert refuse(backend, Request(64, "float32")) is None
    with pytest.raises(UnsupportedError) as caught:
        refuse(backend, Request(80, "float64"))
    assert caught.value.reasons == ("head_size=80 (supports 64)", "dtype=float64 (supports float32, float16, bfloat16)")
    assert str(caught.value).startswith("FAKE does not serve head_size=80 dtype=float64: head_size=80 (supports 64); ")


# --- constructor arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1, 64), "num_heads=0 must be a positive int"),
        ((8, 0, 64), "num_kv_heads=0 must be a positive int"),
        ((8, 2, -1), "head_size=-1 must be a positive int"),
        ((8.0, 2, 64), "num_heads=8.0 must be a positive int"),
        ((True, 1, 64), "num_heads=True must be a positive int"),
        ((6, 4, 64), "num_heads=6 is not a multiple of num_kv_heads=4"),
        ((2, 4, 64), "num_heads=2 is not a multiple of num_kv_heads=4"),
    ],
)
def test_heads(arguments, words):
    with pytest.raises(ValueError) as caught:
        check_heads(*arguments)
    assert str(caught.value) == words
    assert check_heads(8, None, 64) == (8, 8, 64) and check_heads(8, 2, 64) == (8, 2, 64)
    sizes = check_heads(np.int64(8), np.int32(2), np.uint8(64))
    assert sizes == (8, 2, 64) and {type(size) for size in sizes} == {int}


@pytest.mark.parametrize("scale", [0, 0.0, math.nan, math.inf, -math.inf])
def test_scale(scale):
    with pytest.raises(ValueError, match="scale=.* must be finite and not zero"):
        check_scale(scale, 64)
    assert check_scale(None, 64) == 0.125 and check_scale(-0.5, 64) == -0.5 == check_scale(np.float32(-0.5), 64)


@pytest.mark.parametrize("wrong", ["0.5", [0.5], True, 1j, {}], ids=repr)
def test_what_is_no_number(wrong):
    for check in (lambda x: check_scale(x, 64), check_soft_cap):
        with pytest.raises(ValueError, match=r"(scale|logits_soft_cap)=.* must be a number"):
            check(wrong)
    if wrong != [0.5]:
        with pytest.raises(ValueError, match="sinks=.* must be a number, a list of numbers or an array"):
            rank_of_numbers("sinks", wrong)


def test_rank_of_numbers():
    values = (1, 0.5, [0.5, 2], (1.0,), np.ones(3), np.float32(1))
    assert [rank_of_numbers("k_scale", value) for value in values] == [0, 0, 1, 1, 1, 0]
    with pytest.raises(ValueError, match="k_scale="):
        rank_of_numbers("k_scale", [[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("cap", [-1.0, math.nan, math.inf])
def test_soft_cap(cap):
    with pytest.raises(ValueError, match="logits_soft_cap=.* must be finite and at least 0"):
        check_soft_cap(cap)
    assert check_soft_cap(None) is check_soft_cap(0) is None and check_soft_cap(30) == 30.0


def test_attn_type():
    assert check_attn_type("encoder") == "encoder"
    with pytest.raises(ValueError, match="attn_type='sideways' is unknown; known: decoder, encoder"):
        check_attn_type("sideways")


@pytest.mark.parametrize(
    ("window", "attn_type", "pair"),
    [
        (None, "decoder", (None, None)),
        (4, "decoder", (3, 0)),
        (1, "decoder", (0, 0)),
        (4, "encoder", (3, 3)),
        (4, "encoder_only", (3, 3)),
        ((2, None), "decoder", (2, None)),
        ((None, 0), "encoder", (None, 0)),
        ([2, 1], "encoder_decoder", (2, 1)),
        (np.int64(4), "decoder", (3, 0)),
        ((np.int32(2), 0), "decoder", (2, 0)),
    ],
)
def test_windows(window, attn_type, pair):
    assert window_pair(window, attn_type) == pair


@pytest.mark.parametrize("window", [0, -1, (-1, 0), (0, -1), (1,), (1, 2, 3), True, 1.5, "ab", (True, 0), (1.0, 0)], ids=repr)
def test_windows_that_mean_nothing(window):
    """-1 as "unbounded" is some vendors' word; it ends at their adapters."""
    with pytest.raises(ValueError, match="sliding_window"):
        window_pair(window, "decoder")


def test_layer_features():
    assert layer_features((None, None), None, None, None, None) == frozenset()
    assert layer_features((3, 0), None, None, None, None) == {"sliding_window"}
    assert layer_features((None, 2), None, None, None, None) == {"two_sided_window"}
    everything = layer_features((3, 3), 30.0, [0.5], [0.0], "layer.0")
    assert everything == {"sliding_window", "two_sided_window", "soft_cap", "alibi", "sinks", "kv_sharing"}


def test_only_layers_with_a_cache_have_a_block_size(make_backend):
    backend = make_backend(attn_types=("decoder", "encoder_only"))
    backend.block_sizes = (16,)
    asked = Request(64, "float32", block_size=24)
    assert backend.why_not(asked) == ["block_size=24 (supports 16)"]
    assert backend.why_not(replace(asked, attn_type="encoder_only")) == []
