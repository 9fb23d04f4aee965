"""The selection and its data: capabilities, requests, devices, verdicts, selections."""

import copy
import json
import pickle

import numpy as np
import pytest

from attn.backend_enum import load_candidate
from attn.backends.abstract import AttentionBackend
from attn.capabilities import (
    UNSERVED,
    Candidate,
    Capabilities,
    Device,
    Feature,
    MultipleOf,
    Request,
    arch_matches,
    feature_name,
    supports_size,
)
from attn.dtypes import DTYPES, KV_CACHE_DTYPES, dtype_name, framework_of_dtype, kv_cache_element
from attn.errors import AttnError, BackendLoadError, DTypeError, MetadataError, ShapeError, UnsupportedError
from attn.selection.verdicts import Selection, Verdict, choose

CPU = Device("torch", "cpu", "test CPU", "x86_64")
H200 = Device("torch", "cuda", "NVIDIA H200", "sm_90")


def request(**changes):
    return Request(**{"head_size": 64, "dtype": "float32", **changes})


def test_an_empty_list_of_candidates_is_reported():
    selection = choose([], request(features={"mla"}), CPU)
    why = "no backend registered for this request on torch/cpu"
    assert why in str(selection) and why in selection._repr_html_() and selection.to_dict()["reasons"] == [why]
    with pytest.raises(UnsupportedError, match=why) as caught:
        selection.require()
    assert caught.value.reasons == (why,)


# --- sizes and architectures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "inside", "outside", "words"),
    [
        (MultipleOf(1), [1, 7, 4096], [0, -1, 1.0, "1"], "any"),
        (MultipleOf(16), [16, 32], [0, 8, 24, -16], "multiples of 16"),
        (MultipleOf(8, maximum=256), [8, 256], [264, 0], "multiples of 8 up to 256"),
        (MultipleOf(8, 64, 128), [64, 128], [56, 136], "multiples of 8 from 64 up to 128"),
    ],
    ids=repr,
)
def test_multiple_of(rule, inside, outside, words):
    assert all(size in rule for size in inside) and not any(size in rule for size in outside)
    assert repr(rule) == words
    assert rule == copy.copy(rule) and hash(rule) == hash(copy.copy(rule)) and rule != MultipleOf(3)
    assert supports_size(inside[0], (7, rule)) and supports_size(7, (7, rule)) and not supports_size(-3, (7, rule))


@pytest.mark.parametrize(
    ("arch", "rule", "matches"),
    [
        ("sm_90", "sm_90", True), ("sm_90", "sm_80+", True), ("sm_80", "sm_80+", True), ("sm_75", "sm_80+", False),
        ("sm_100", "sm_90+", True), ("sm_100", "sm_90", False), ("sm_90a", "sm_90+", True), ("gfx942", "gfx9*", True),
        ("gfx1100", "gfx9*", False), ("gfx942", "sm_80+", False), ("", "sm_80+", False), ("", "gfx9*", False),
        ("v6e", "v6e", True), ("sm_", "sm_80+", False),
    ],
)  # fmt: skip
def test_architectures(arch, rule, matches):
    assert arch_matches(arch, rule) is matches


# --- requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("head_size", 0, "a positive int"), ("head_size", -64, "a positive int"), ("head_size", 64.0, "a positive int"),
        ("head_size", True, "a positive int"), ("head_size", None, "a positive int"), ("head_size", "64", "a positive"),
        ("block_size", 0, "a positive int"), ("block_size", True, "a positive int"), ("num_heads", 0, "a positive int"),
        ("num_kv_heads", -1, "a positive int"), ("dtype", "float12", "bfloat16"), ("dtype", None, "bfloat16"),
        ("dtype", ["float32"], "bfloat16"), ("kv_cache_dtype", "int3", "fp8_e4m3"), ("kv_cache_dtype", [], "fp8_e4m3"),
        ("kv_cache_dtype", None, "auto"), ("attn_type", "sideways", "encoder_only"), ("attn_type", {}, "encoder_only"),
    ],
)  # fmt: skip
def test_nonsense_requests_name_field_value_and_allowed(field, value, allowed):
    with pytest.raises(ValueError) as caught:
        request(**{field: value})
    assert f"{field}={value!r}" in str(caught.value) and allowed in str(caught.value)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num_heads=6 is not a multiple of num_kv_heads=4"):
        request(num_heads=6, num_kv_heads=4)


@pytest.mark.parametrize("feature", ["wings", "", 3, None])
def test_unknown_features_list_the_known(feature):
    for build in (
        lambda: request(features=[feature]),
        lambda: capable(features=[feature]),
        lambda: feature_name(feature),
    ):
        with pytest.raises(ValueError, match=r"feature .* is unknown; known: non_causal, sliding_window"):
            build()


def test_a_request_is_a_value():
    one, two = request(features={"sinks"}, num_heads=8), request(features=[Feature.SINKS], num_heads=8)
    assert one == two and hash(one) == hash(two) and pickle.loads(pickle.dumps(one)) == one
    assert all(type(name) is str for name in one.features)
    assert str(one) == "head_size=64 dtype=float32 num_heads=8 features={sinks}"
    assert str(request()) == "head_size=64 dtype=float32"
    with pytest.raises(AttributeError):
        one.head_size = 3


# --- capabilities ------------------------------------------------------------------------------------------------


def capable(**changes):
    return Capabilities(**{"framework": "torch", "platforms": ("cpu", "cuda"), "dtypes": ("float32",), **changes})


@pytest.mark.parametrize(
    ("changes", "asked", "reasons"),
    [
        ({}, {}, []),
        ({"head_sizes": (64, 128)}, {"head_size": 96}, ["head_size=96 (supports 64, 128)"]),
        (
            {"head_sizes": (MultipleOf(8, maximum=256),)},
            {"head_size": 60},
            ["head_size=60 (supports multiples of 8 up to 256)"],
        ),
        ({}, {"dtype": "bfloat16"}, ["dtype=bfloat16 (supports float32)"]),
        ({}, {"kv_cache_dtype": "fp8"}, ["kv_cache_dtype=fp8 (supports auto)"]),
        ({}, {"attn_type": "encoder"}, ["attn_type=encoder (supports decoder)"]),
        ({}, {"features": {"sinks", "alibi"}}, ["alibi not supported", "sinks not supported"]),
        ({"features": {"sinks"}}, {"features": {"sinks"}}, []),
        ({"features": {"mla"}}, {}, ["serves mla only"]),
        ({"features": {"block_sparse"}}, {}, ["serves block_sparse only"]),
        ({"features": {"mla", "sparse_mla"}}, {"features": {"mla"}}, ["serves sparse_mla only"]),
        (
            {"head_sizes": (64,)},
            {"head_size": 96, "dtype": "float16", "features": {"sinks"}},
            ["head_size=96 (supports 64)", "dtype=float16 (supports float32)", "sinks not supported"],
        ),
    ],
)
def test_every_limit_is_a_reason(changes, asked, reasons):
    assert capable(**changes).reasons(request(**asked)) == reasons


@pytest.mark.parametrize("feature", Feature)
def test_a_feature_that_is_not_listed_is_refused(feature):
    [why] = [why for why in capable().reasons(request(features={feature})) if "not supported" in why]
    assert why == f"{feature.value} not supported" + ": no built-in backend serves it yet" * (feature in UNSERVED)
    assert not any("not supported" in r for r in capable(features={feature}).reasons(request(features={feature})))


def test_a_refusal_says_why_where_the_record_knows():
    record = capable(refusals=((Feature.SPANS, "the vendor has no kernel"),))
    assert record.reasons(request(features={"spans", "sinks"})) == [
        "sinks not supported",
        "spans not supported: the vendor has no kernel",
    ]
    with pytest.raises(ValueError, match="features and refusals both name spans"):
        capable(features={"spans"}, refusals=((Feature.SPANS, "why"),))
    with pytest.raises(ValueError, match="feature 'spam' is unknown"):
        capable(refusals=(("spam", "why"),))


@pytest.mark.parametrize(
    ("changes", "device", "reasons"),
    [
        ({}, CPU, []),
        ({"framework": "jax"}, CPU, ["framework=torch (supports jax)"]),
        ({"platforms": ("cuda", "rocm")}, CPU, ["platform=cpu (supports cuda, rocm)"]),
        ({"archs": (("cuda", ("sm_100+",)),)}, H200, ["arch=sm_90 (supports sm_100+)"]),
        ({"archs": (("cuda", ("sm_80", "sm_90")),)}, H200, []),
        ({"archs": (("cuda", ("sm_90",)),)}, CPU, []),
        ({"archs": (("cuda", ("sm_90",)),)}, Device("torch", "cuda"), ["arch=unknown (supports sm_90)"]),
    ],
)
def test_devices(changes, device, reasons):
    assert capable(**changes).reasons(request(), device) == reasons


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtypes", ("bf16",)),
        ("kv_cache_dtypes", ("auto", "fp9")),
        ("attn_types", ("decode",)),
        ("framework", "tinygrad"),
        ("platforms", ("cpuu",)),
    ],
)
def test_a_record_with_an_unknown_word_is_rejected(field, value):
    """A misspelt dtype would silently never match."""
    with pytest.raises(ValueError, match="unknown; known: "):
        capable(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("platforms", "cpu", r"must be a tuple: \('cpu',\)"),
        ("dtypes", "float32", r"must be a tuple: \('float32',\)"),
        ("features", "sinks", r"must be a tuple: \('sinks',\)"),
        ("packages", "flash_attn", "must be a tuple"),
        ("head_sizes", 64, r"must be a tuple: \(64,\)"),
        ("head_sizes", MultipleOf(8), r"must be a tuple: \(multiples of 8,\)"),
        ("head_sizes", ("64",), "each a positive int or a MultipleOf"),
        ("head_sizes", (-64,), "each a positive int or a MultipleOf"),
        ("priority", "high", "must be an int"),
        ("refusals", {"sinks": "why"}, "must be pairs"),
    ],
)
def test_a_record_of_another_form_is_rejected(field, value, allowed):
    """Where it is written: a priority that is no number would break every automatic choice, "cpu" would match "cp" too."""
    with pytest.raises(ValueError, match=f"{field}=.*{allowed}"):
        capable(**{field: value})


def test_a_record_of_lists_is_a_record_of_tuples():
    assert capable(dtypes=["float32"], head_sizes=[64]) == capable(dtypes=("float32",), head_sizes=(64,))
    assert hash(capable(platforms=["cpu"])) == hash(capable(platforms=("cpu",)))


def test_a_record_is_a_value():
    one = capable(features={Feature.SINKS})
    assert one == capable(features={"sinks"}) and hash(one) == hash(capable(features={"sinks"}))
    assert pickle.loads(pickle.dumps(one)) == one


# --- the backend's own judgement ---------------------------------------------------------------------------------


def test_the_backend_adds_block_size_and_lse(make_backend):
    backend = make_backend(features={"sinks"})
    impl = backend.impl_cls = type("Impl", (backend.impl_cls,), {})
    backend.block_sizes = (16, MultipleOf(32))
    assert backend.why_not(request(block_size=16)) == backend.why_not(request(block_size=96)) == []
    assert backend.why_not(request(block_size=48)) == ["block_size=48 (supports 16, multiples of 32)"]
    assert backend.why_not(request(block_size=None)) == []
    assert backend.why_not(request(features={"lse"})) == ["lse not supported"]
    impl.can_return_lse_for_decode = True
    assert backend.why_not(request(features={"lse", "sinks"})) == []


def test_block_size_does_not_matter_to_an_encoder(make_backend):
    backend = make_backend(attn_types=("decoder", "encoder", "encoder_only"))
    backend.block_sizes = (16,)
    assert backend.why_not(request(block_size=7))
    assert backend.why_not(request(block_size=7, attn_type="encoder")) == []


def test_a_class_without_capabilities_is_taken_at_its_word():
    class Bare(AttentionBackend):
        pass

    assert Bare.why_not(request(), CPU) == []


# --- choose ------------------------------------------------------------------------------------------------------


def candidate(backend, **changes):
    return Candidate(**{"name": backend.get_name(), "path": f"x.{backend.get_name()}", "backend": backend, **changes})


def test_the_first_that_serves_wins_and_everyone_has_a_verdict(make_backend):
    no, yes, also = make_backend("NO", dtypes=("float16",)), make_backend("YES"), make_backend("ALSO")
    selection = choose([candidate(no), candidate(yes), candidate(also)], request(), CPU)
    assert selection.name == "YES" and selection.backend is selection.require() is yes
    assert [v.ok for v in selection.trace] == [False, True, True]
    assert selection.trace[0].reasons == ("dtype=float32 (supports float16)",)
    assert str(selection) == (
        "YES for head_size=64 dtype=float32 on test CPU (torch)\n"
        "     NO    dtype=float32 (supports float16)\n"
        "  -> YES   ok\n"
        "     ALSO  ok"
    )


def test_another_device_is_only_another_argument(make_backend):
    backends = [make_backend("GPU", platforms=("cuda",)), make_backend("HOST", platforms=("cpu",))]
    for device, name in ((CPU, "HOST"), (H200, "GPU")):
        assert choose(list(map(candidate, backends)), request(), device).name == name


def test_no_backend_is_an_error_with_the_whole_table(make_backend):
    broken = Candidate("BROKEN", "x.y", problem="x.y cannot be imported: OSError: gone")
    vendor = make_backend("VENDOR", install="flash-attn", dtypes=("float16",), packages=("flash_attn", "einops"))
    missing = candidate(vendor, missing=("flash_attn", "einops"))
    selection = choose([broken, missing], request(features={"sinks"}), H200)
    assert selection.winner is selection.name is selection.backend is None
    with pytest.raises(UnsupportedError) as caught:
        selection.require()
    message = str(caught.value)
    assert message.startswith("Invalid attention backend for NVIDIA H200\nno backend for head_size=64")
    for words in (
        "x.y cannot be imported: OSError: gone",
        "flash_attn is not installed (pip install flash-attn)",
        "einops is not installed",
        "platform=cuda (supports cpu)",
        "dtype=float32 (supports float16)",
        "sinks not supported",
    ):
        assert words in message and any(words in reason for reason in caught.value.reasons)
    assert [r.partition(":")[0] for r in caught.value.reasons] == ["BROKEN", "VENDOR"]


def test_an_empty_list_gives_no_backend():
    with pytest.raises(UnsupportedError, match="no backend for head_size=64 dtype=float32 on test CPU"):
        choose([], request(), CPU).require()


def test_a_backend_asked_for_by_name_raises_what_hindered_its_loading():
    candidate = load_candidate("BROKEN", "no_such_module_anywhere.Backend")
    with pytest.raises(BackendLoadError, match="BROKEN") as caught:
        choose([candidate], request(), CPU, "argument").require()
    assert "requested by argument" in str(caught.value)
    assert isinstance(caught.value.__cause__, BackendLoadError)
    assert isinstance(caught.value.__cause__.__cause__, ModuleNotFoundError)
    with pytest.raises(UnsupportedError, match="no_such_module_anywhere"):
        choose([candidate], request(), CPU).require()


@pytest.mark.parametrize("method", ["why_not", "get_impl_cls"])
def test_a_backend_that_breaks_when_judged_loses_in_automatic_choice_and_raises_by_name(method, make_backend):
    """A vendor that is there but broken often shows only when its implementation is asked for."""

    def broken(*args):
        raise OSError("libvendor.so: undefined symbol")

    bad, good = make_backend("BAD"), make_backend("GOOD")
    setattr(bad, method, staticmethod(broken))
    selection = choose([candidate(bad), candidate(good)], request(block_size=16), CPU)
    assert selection.require() is good
    assert "OSError: libvendor.so: undefined symbol" in str(selection)
    with pytest.raises(BackendLoadError, match="undefined symbol") as caught:
        choose([candidate(bad)], request(block_size=16), CPU, "context").require()
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("returned", [None, "too large"])
def test_a_backend_that_returns_no_list_of_reasons_is_told_so(returned, make_backend):
    backend = make_backend("BAD")
    backend.why_not = staticmethod(lambda *args: returned)
    selection = choose([candidate(backend)], request(block_size=16), CPU)
    assert f"why_not() returned {returned!r}: must be a list of sentences" in str(selection)


def test_block_sizes_that_are_no_tuple_are_named(make_backend):
    backend = make_backend("BAD")
    backend.block_sizes = 16
    assert "block_sizes=16 must be a tuple: (16,)" in str(choose([candidate(backend)], request(block_size=16), CPU))


def test_a_missing_package_is_reported_as_missing(make_backend):
    vendor = make_backend("VENDOR", install="flash-attn")
    vendor.get_impl_cls = staticmethod(lambda: __import__("no_such_module_anywhere"))
    with pytest.raises(UnsupportedError, match=r"flash_attn is not installed \(pip install flash-attn\); ModuleNotFound"):
        choose([candidate(vendor, missing=("flash_attn",))], request(), CPU, "argument").require()


def test_a_selection_prints_travels_and_serialises(make_backend):
    selection = choose([candidate(make_backend("A<b>", dtypes=("float16",)))], request(features={"sinks"}), CPU, "context")
    assert "requested by context" in str(selection)
    assert "A&lt;b&gt;" in selection._repr_html_() and "A<b>" not in selection._repr_html_()
    data = json.loads(json.dumps(selection.to_dict()))
    assert data["backend"] is None and data["source"] == "context"
    reasons = ["dtype=float32 (supports float16)", "sinks not supported"]
    assert data["trace"] == [{"backend": "A<b>", "path": "x.A<b>", "ok": False, "reasons": reasons}]
    assert data["request"]["features"] == ["sinks"] and data["device"]["arch"] == "x86_64"
    loaded = pickle.loads(pickle.dumps(selection))
    assert loaded == selection and str(loaded) == str(selection)


def test_a_selection_of_a_failed_load_travels_too():
    selection = choose([load_candidate("BROKEN", "no_such_module_anywhere.Backend")], request(), CPU, "argument")
    assert pickle.loads(pickle.dumps(selection)) == selection


def test_verdicts_read_as_words():
    assert str(Verdict("A", "p")) == "ok" and str(Verdict("A", "p", ("x", "y"))) == "x; y"
    assert Selection(request(), CPU, ()).winner is None


# --- dtypes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_every_frameworks_dtype_has_one_name(name):
    ml_dtypes, torch, jnp = (
        pytest.importorskip("ml_dtypes"),
        pytest.importorskip("torch"),
        pytest.importorskip("jax.numpy"),
    )
    forms = [
        name,
        f"torch.{name}",
        np.dtype(getattr(ml_dtypes, name, name)),
        getattr(jnp, name + "_" * (name == "bool")),
    ]
    assert {dtype_name(form) for form in [*forms, getattr(torch, name)]} == {name}
    assert [framework_of_dtype(form) for form in forms] == [None, None, "jax", "jax"]
    assert framework_of_dtype(getattr(torch, name)) == "torch"


def test_scalar_types_and_short_names():
    assert dtype_name(np.float32) == "float32" and dtype_name(np.bool_) == "bool" and dtype_name(np.int8) == "int8"
    assert [dtype_name(alias) for alias in ("half", "float", "double", "bf16")] == [
        "float16",
        "float32",
        "float64",
        "bfloat16",
    ]


@pytest.mark.parametrize("thing", ["float12", "", None, 3, float, Ellipsis, [], "complex64", np.complex64], ids=repr)
def test_what_is_no_dtype_is_refused(thing):
    with pytest.raises(DTypeError, match="is unknown; known: float64, float32"):
        dtype_name(thing)


def test_kv_cache_elements():
    assert {kv_cache_element(kind, "bfloat16") for kind in KV_CACHE_DTYPES} <= set(DTYPES)
    assert kv_cache_element("auto", "float16") == kv_cache_element(None, "float16") == "float16"
    assert kv_cache_element("fp8", "float16") == "float8_e4m3fn"
    with pytest.raises(DTypeError, match="kv_cache_dtype 'int3' is unknown; known: auto"):
        kv_cache_element("int3", "float16")


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        AttnError("a"),
        ShapeError("s"),
        DTypeError("d"),
        MetadataError("seq_lens", 3, -1, "at least 0"),
        MetadataError("block_table", (1, 2), 9, "between 0 and 7"),
        MetadataError("max_seq_len", None, 1, "at least 2"),
        UnsupportedError("u", ["a", "b"]),
        BackendLoadError("l"),
    ],
    ids=repr,
)
def test_errors_are_value_errors_that_travel(error):
    assert isinstance(error, ValueError) and isinstance(error, AttnError)
    loaded = pickle.loads(pickle.dumps(error))
    assert type(loaded) is type(error) and str(loaded) == str(error) and vars(loaded) == vars(error)


def test_a_metadata_error_names_its_place():
    assert str(MetadataError("seq_lens", 3, -1, "at least 0")) == "seq_lens[3] = -1: must be at least 0"
    assert str(MetadataError("block_table", (1, 2), 9, "below 8")) == "block_table[1, 2] = 9: must be below 8"
    assert str(MetadataError("max_seq_len", None, 1, "2")) == "max_seq_len = 1: must be 2"
