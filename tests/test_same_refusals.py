"""The same bad input gets the same kind of error from every backend, and nothing is clamped, cast or dropped on the way."""

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attn
import attn.jax
import attn.torch
from attn import CommonAttentionMetadata, distributed, reference
from attn.backends.abstract import KVCacheSpec
from attn.backends.registry import AttentionBackendEnum
from attn.errors import AttnError, DTypeError, MetadataError, ShapeError, UnsupportedError
from attn.imports import resolve_obj_by_qualname

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")

BACKENDS = {"CPU_ATTN": "torch", "TORCH_SDPA": "torch", "XLA_ATTN": "jax"}
Batch = CommonAttentionMetadata


class World:
    """A layer of one backend with a cache of 8 blocks of 16, and how arrays are made for it."""

    def __init__(self, name: str, **changes: Any) -> None:
        self.framework = BACKENDS[name]
        self.layer = resolve_obj_by_qualname(f"attn.{self.framework}.layer.Attention")(
            4, 16, num_kv_heads=2, backend=name, **changes
        )
        self.cache = self.layer.new_kv_cache(8)

    def array(self, values: Any, dtype: str = "float32") -> Any:
        host = np.asarray(values)
        return torch.from_numpy(host).to(getattr(torch, dtype)) if self.framework == "torch" else jnp.asarray(host, dtype)

    def foreign(self, values: Any) -> Any:
        """An array of the framework that the layer does not belong to."""
        host = np.asarray(values, np.float32)
        return jnp.asarray(host) if self.framework == "torch" else torch.from_numpy(host)

    def build(self, batch: Any) -> Any:
        return self.layer.build(batch)

    def call(
        self, metadata: Any, rows: int = 5, cache: Any = None, query: Any = None, key: Any = None, dtype: str = "float32"
    ) -> Any:
        rows = metadata.slot_mapping.shape[0] if self.framework == "jax" and hasattr(metadata, "slot_mapping") else rows
        query = self.array(np.ones((rows, 4, 16)), dtype) if query is None else query
        key = self.array(np.ones((rows, 2, 16)), dtype) if key is None else key
        out = self.layer(query, key, key, self.cache if cache is None else cache, metadata)
        return out[0] if self.framework == "jax" else out


GOOD = lambda: Batch.from_lens([5], [5], [[1]], 16)  # noqa: E731

BAD: dict[str, tuple[type[Exception], str, Callable[[World], Any]]] = {
    "an unbuilt batch": (TypeError, "build it from a batch", lambda w: w.call(GOOD())),
    "a batch of another block size": (
        MetadataError, "block_size = 8: must be 16", lambda w: w.build(Batch.from_lens([5], [5], [[1, 2]], 8))),
    "a cache of another block size": (
        ShapeError, "blocks of 8 tokens", lambda w: w.call(
            w.build(GOOD()), cache=w.array(np.zeros(w.layer.backend.get_kv_cache_shape(8, 8, 2, 16))))),
    "a block that is not there": (
        MetadataError, r"block_table\[0, 0\] = 99: must be between 0 and 7",
        lambda w: w.build(Batch.from_lens([5], [5], [[99]], 16))),
    "a length beyond the table": (
        MetadataError, r"seq_lens\[0\] = 100: must be at most 16", lambda w: w.build(
            GOOD().replace(seq_lens=np.array([100], np.int32), seq_lens_cpu=None, max_seq_len=100))),
    "a slot below -1": (
        MetadataError, r"slot_mapping\[0\] = -4294967296", lambda w: w.build(
            GOOD().replace(slot_mapping=np.array([-(2**32), 1, 2, 3, 4])))),
    "a query of another head size": (
        ShapeError, "query has shape", lambda w: w.call(w.build(GOOD()), query=w.array(np.ones((8, 4, 15))))),
    "a key of other heads": (ShapeError, "key has shape", lambda w: w.call(w.build(GOOD()), key=w.array(np.ones((8, 3, 16))))),
    "a key of another dtype": (
        DTypeError, "key has dtype", lambda w: w.call(w.build(GOOD()), rows=8, key=w.array(np.ones((8, 2, 16)), "bfloat16"))),
    "a cache of another dtype": (
        DTypeError, "kv_cache has dtype", lambda w: w.call(
            w.build(GOOD()), cache=w.array(np.zeros(w.layer.backend.get_kv_cache_shape(8, 16, 2, 16)), "bfloat16"))),
    "a query of another framework": (
        TypeError, "query is an array of (torch|jax): must be of (torch|jax), the layer's framework", lambda w: w.call(
            w.build(GOOD()), query=w.foreign(np.ones((8, 4, 16))))),
    "a key of another framework": (
        TypeError, "key is an array of (torch|jax): must be of (jax|torch), the layer's framework", lambda w: w.call(
            w.build(GOOD()), rows=8, key=w.foreign(np.ones((8, 2, 16))))),
    "a query that is no array": (
        TypeError, "query is a list: must be an array of (jax|torch)", lambda w: w.call(w.build(GOOD()), query=[[1.0]])),
    "a query of another dtype than the layer": (
        DTypeError, r"query has dtype bfloat16, the layer float32: .*dtype=", lambda w: w.call(
            w.build(GOOD()), rows=8, dtype="bfloat16")),
    "a cache of other heads": (
        ShapeError, "kv_cache", lambda w: w.call(
            w.build(GOOD()), cache=w.array(np.zeros(w.layer.backend.get_kv_cache_shape(8, 16, 4, 16))))),
}  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "allowed"), [("alibi_slopes", "finite"), ("sinks", "a number, or -inf for a head without a sink")]
)
@pytest.mark.parametrize("make", [list, np.array], ids=["list", "array"])
@pytest.mark.parametrize("name", BACKENDS)
def test_numbers_a_head_that_would_spoil_it_are_refused_alike(name: str, make: Any, argument: str, allowed: str) -> None:
    """They were accepted, and that head's output was NaN in every call."""
    q = np.ones((1, 4, 16), np.float32)
    for wrong in (math.nan, *((math.inf, -math.inf) if argument == "alibi_slopes" else ())):
        values = {argument: make([0.5, 0.25, wrong, 0.1])}
        for call in (lambda: World(name, **values), lambda: attn.attention(q, q, q, **values)):  # noqa: B023
            with pytest.raises(ValueError, match=re.escape(f"{argument}[2] = {wrong}: must be {allowed}")):
                call()
    if argument == "sinks":
        World(name, sinks=make([0.5, -math.inf, math.inf, 0.1]))


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_bad_call_is_refused_alike(name: str, what: str) -> None:
    kind, message, call = BAD[what]
    with pytest.raises(kind, match=message):
        call(World(name))


@pytest.mark.parametrize(
    ("message", "tree"),
    [(r"tree_mask\[0, 0, 1\] = True", np.ones((1, 2, 2), bool)), (r"tree_mask\[0, 0, 0\] = False", np.zeros((1, 2, 2), bool))],
)
def test_a_tree_attends_itself_and_what_comes_before(message: str, tree: Any) -> None:
    with pytest.raises(MetadataError, match=message):
        Batch.from_lens([2], [4], [[1]], 16, tree_mask=tree)


def test_two_requests_cannot_write_one_block() -> None:
    with pytest.raises(MetadataError, match="written by one token only"):
        Batch.from_lens([3, 3], [3, 3], [[1], [1]], 16)


@pytest.mark.parametrize("name", BACKENDS)
def test_context_parallelism_is_refused_where_it_is_not_served(name: str) -> None:
    distributed.set_dcp_group(distributed.DCPGroup(2, 1))
    with pytest.raises(UnsupportedError, match="dcp not supported"):
        World(name)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_empty_sequence_gives_zeros(name: str) -> None:
    world = World(name)
    out = world.call(world.build(Batch.from_lens([5], [0], [[]], 16, strict=False)))
    assert not np.asarray(out).any()


@pytest.mark.parametrize("name", BACKENDS)
def test_padding_rows_write_nothing_whatever_their_slots(name: str) -> None:
    world = World(name)
    slots = np.concatenate([GOOD().slot_mapping, [0, 100, 101]])
    metadata = world.build(GOOD().replace(slot_mapping=slots))
    if world.framework == "torch":
        world.call(metadata, rows=8)
        after = world.cache
    else:
        key = world.array(np.ones((8, 2, 16)))
        after = world.layer(world.array(np.ones((8, 4, 16))), key, key, world.cache, metadata)[1]
    keys, _ = world.layer.backend.logical_kv_cache(after)
    written = np.asarray(keys).any((2, 3))
    assert written[1, :5].all() and written.sum() == 5


def test_lengths_fetched_from_a_device_are_checked() -> None:
    """Without host mirrors a looping backend fetches the lengths; what it fetched must make sense."""
    world = World("CPU_ATTN")
    bad = GOOD().replace(
        query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
        seq_lens=torch.tensor([100], dtype=torch.int32),
        query_start_loc_cpu=None,
        seq_lens_cpu=None,
        max_seq_len=100,
    )
    with pytest.raises(MetadataError, match=r"seq_lens\[0\] = 100"):
        world.call(world.build(bad))


def test_without_mirrors_a_page_that_no_column_names_gives_nan_under_jax() -> None:
    """Values cannot be checked there without waiting for the device: the answer must not look like one."""
    world = World("XLA_ATTN")
    fields = {
        n: jnp.asarray(v, jnp.int32) for n, v in (("query_start_loc", [0, 5]), ("seq_lens", [100]), ("block_table", [[0]]))
    }
    bad = GOOD().replace(**fields, query_start_loc_cpu=None, seq_lens_cpu=None, max_seq_len=100)
    assert np.isnan(np.asarray(world.call(world.build(bad)))[:5]).all()


def test_the_device_is_asked_when_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "device")
    for name in BACKENDS:
        world = World(name)
        bad = GOOD().replace(block_table=world.array([[99]], "int32"))
        with pytest.raises(MetadataError, match=r"block_table\[0, 0\] = 99"):
            world.build(bad)


def test_an_output_buffer_must_be_like_the_query() -> None:
    world = World("CPU_ATTN")
    query, key, metadata = torch.ones(5, 4, 16), torch.ones(5, 2, 16), world.build(GOOD())
    for buffer, kind in ((torch.zeros(5, 4, 16).double(), DTypeError), (torch.zeros(4, 4, 16), ShapeError)):
        with pytest.raises(kind, match="output has"):
            world.layer.impl.forward(world.layer, query, key, key, world.cache, metadata, buffer)


def test_scales_are_not_cast_with_the_module() -> None:
    layer = World("CPU_ATTN", kv_cache_dtype="int8", k_scale=1e-8, v_scale=[0.1, 0.2]).layer.half()
    assert layer._k_scale.dtype == layer._v_scale.dtype == torch.float32
    assert float(layer._k_scale) == pytest.approx(1e-8) and layer._v_scale.tolist() == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_latent_layers_name_what_is_wrong_too(framework: str) -> None:
    up = np.ones((32, 4, 32), np.float32)
    layer = resolve_obj_by_qualname(f"attn.{framework}.MLAAttention")(
        4, 32, 16, 8, 16, torch.from_numpy(up) if framework == "torch" else jnp.asarray(up)
    )
    cache, shapes = layer.new_kv_cache(2), ((8, 4, 24), (8, 32), (8, 8))
    metadata = layer.build(Batch.from_lens([8], [8], [[1]], 64))
    make = {"torch": lambda x, dtype: torch.ones(x, dtype=getattr(torch, dtype)), "jax": jnp.ones}
    ours, other = (make[name] for name in (("torch", "jax") if framework == "torch" else ("jax", "torch")))
    with pytest.raises(TypeError, match=rf"query is an array of \w+: must be of {framework}, the layer's framework"):
        layer(*(other(shape, "float32") for shape in shapes), cache, metadata)
    with pytest.raises(DTypeError, match=r"query has dtype bfloat16, the layer float32: .*dtype="):
        layer(*(ours(shape, "bfloat16") for shape in shapes), cache, metadata)


def test_every_refusal_is_an_attn_error() -> None:
    assert all(issubclass(kind, AttnError | TypeError) for kind, _, _ in BAD.values())


def _arrays(framework: str, *shape: int) -> Any:
    host = np.ones(shape, np.float32)
    return {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}[framework](host)


def _doors() -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """Every public call with a flag: (the argument's name, the call that is given it)."""
    numpy, ours, jaxs = (_arrays(name, 1, 4, 2, 16) for name in ("numpy", "torch", "jax"))
    path = "attn.{}.diffusion.layer.DiffusionAttention"
    dense = {name: resolve_obj_by_qualname(path.format(name)) for name in ("torch", "jax")}
    return {
        **{f"attention, {x}": ("causal", lambda flag, a=a: attn.attention(a, a, a, causal=flag))
           for x, a in (("numpy", numpy), ("torch", ours), ("jax", jaxs))},
        "attention's lse": ("return_lse", lambda flag: attn.attention(numpy, numpy, numpy, return_lse=flag)),
        "oracle": ("causal", lambda flag: reference.attention(numpy[0], numpy[0], numpy[0], causal=flag)),
        **{f"torch's door, {flag}": (flag, lambda value, flag=flag: attn.torch.scaled_dot_product_attention(
            ours, ours, ours, **{flag: value})) for flag in ("is_causal", "enable_gqa")},
        "jax's door": ("is_causal", lambda flag: attn.jax.dot_product_attention(jaxs, jaxs, jaxs, is_causal=flag)),
        "jax's lse": ("return_residual", lambda flag: attn.jax.dot_product_attention(jaxs, jaxs, jaxs, return_residual=flag)),
        **{f"dense, {flag}, {framework}": (flag, lambda value, flag=flag, cls=cls: cls(2, 16, **{flag: value}))
           for flag in ("causal", "key_mask") for framework, cls in dense.items()},
    }  # fmt: skip


@pytest.mark.parametrize("door", _doors())
def test_a_flag_is_true_or_false(door: str) -> None:
    """Words and lists are true to Python, "no" and [False] among them: they would ask for the opposite of what was meant."""
    name, call = _doors()[door]
    for flag in ("no", [False], 0, None):
        with pytest.raises(ValueError, match=f"{name}=.* must be True or False"):
            call(flag)
    call(np.True_)


#: Batches that contradict themselves or the cache of 8 blocks of 16.
BAD_BATCHES: dict[str, tuple[str, Callable[[], Any]]] = {
    "a word for a flag": ("causal = no: must be True or False", lambda: GOOD().replace(causal="no")),
    "a list for a flag": (r"causal = \[False\]: must be True or False", lambda: GOOD().replace(causal=[False])),
    "another block size": ("block_size = 8: must be 16", lambda: Batch.from_lens([5], [5], [[1, 2]], 8)),
    "a block that is not there": (
        r"block_table\[0, 0\] = 8: must be between 0 and 7",
        lambda: Batch.from_lens([5], [5], [[8]], 16),
    ),
    "a slot that is not there": (
        r"slot_mapping\[4\] = 128",
        lambda: GOOD().replace(slot_mapping=np.array([16, 17, 18, 19, 128])),
    ),
    "a slot written twice": ("written by one token only", lambda: GOOD().replace(slot_mapping=np.array([16, 17, 18, 19, 19]))),
}


def _builders() -> dict[str, Any]:
    """The metadata builder of every backend whose class can be imported here, vendors' packages present or not."""
    found = {}
    for member in AttentionBackendEnum:
        backend = member.candidate().backend
        if backend is not None and getattr(backend, "capabilities", None) is not None:
            found[member.name] = backend.get_builder_cls()
    return found


@pytest.mark.parametrize("what", BAD_BATCHES)
def test_a_bad_batch_is_refused_by_every_builder(what: str) -> None:
    message, batch = BAD_BATCHES[what]
    builders = _builders()
    assert {*BACKENDS, "TORCH_MLA", "XLA_MLA", "FLEX_ATTENTION", "FLASHINFER", "PALLAS", "PALLAS_MLA"} <= set(builders)
    for name, builder in builders.items():
        with pytest.raises(MetadataError, match=message):
            builder(KVCacheSpec(16, 2, 64, "float32", num_blocks=8)).build(0, batch())
            pytest.fail(f"{name} builds it")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_shared_layer_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="kv_sharing_target_layer_name=False must be the name of a layer, or None"):
        World(name, kv_sharing_target_layer_name=False)


def _entries(framework: str) -> dict[str, tuple[list[tuple[int, ...]], set[tuple[int, int]], Any]]:
    """Public functions of query, key and value: shapes of a call, the (array, dimension)s that are free, and the function."""
    layer = getattr(attn, framework).DiffusionAttention(4, 16, num_kv_heads=2)
    tokens = [(2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16)]
    found: dict[str, Any] = {
        "attention": (tokens, {(0, 1), (2, 3)}, functools.partial(attn.attention, layout="BSHD")),
        "attention, packed": ([shape[1:] for shape in tokens], {(0, 0), (2, 2)}, attn.attention),
        "DiffusionAttention": (tokens, {(0, 1)}, layer),
    }
    if framework == "jax":
        found["attention_fn"] = ([(2, 5, 4, 16), (2, 7, 4, 16), (2, 7, 4, 16)], {(0, 1)}, attn.jax.attention_fn)
    return found


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_another_size_of_one_dimension_is_refused_at_every_entry(framework: str) -> None:
    """Sizes that differ in one array alone, except the number of rows and the width of values."""
    zeros: Any = torch.zeros if framework == "torch" else jnp.zeros
    for name, (shapes, free, call) in _entries(framework).items():
        call(*map(zeros, shapes))
        for which, shape in enumerate(shapes):
            for place, more in itertools.product(range(len(shape)), (1, -1)):
                changed = [list(given) for given in shapes]
                changed[which][place] += more
                arrays = [zeros(tuple(given)) for given in changed]
                if (which, place) in free:
                    call(*arrays)
                    continue
                with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is checked below)
                    call(*arrays)
                assert str(changed[which][place]) in str(caught.value), (name, changed, caught.value)


@pytest.mark.parametrize("window", [(None, 3), (3, None), 4])
def test_spans_beside_a_window_need_to_know_whether_it_cuts_them(window: Any) -> None:
    batch = Batch.from_lens([5], [5], [[1]], 16, spans=np.full((5, 2), -1))
    for name in BACKENDS:
        world = World(name, sliding_window=window)
        with pytest.raises(UnsupportedError, match="models differ in whether a window cuts a span"):
            world.call(world.build(batch))
