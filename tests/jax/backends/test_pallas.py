"""The PALLAS backend: serving TPUs, its limits in words, and one call of the layer in interpret mode (about 15 s)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attn import reference
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import Device, Request
from attn.errors import MetadataError, ShapeError
from attn.jax import Attention
from attn.jax.backends.pallas import PallasAttentionBackend
from attn.jax.kernels.tpu import ragged_paged_attention as kernel
from attn.jax.kernels.tpu._chips import blocks_for, fixed_blocks
from attn.jax.kernels.tpu._refs import PagedShape
from attn.jax.platforms import TpuPlatform, compiling_for
from attn.testing.case import Case
from attn.testing.conformance import run_case
from attn.visibility import LayerMask
from tests.levels import sampled

H, K, D, P, N = 4, 2, 80, 16, 12
INT4 = "int4_per_token_head"
TPU = Device("jax", "tpu", "TPU v6 lite", "v6e")


def batch(query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
    ids = iter(np.random.default_rng(0).permutation(N))
    tables = [[int(next(ids)) for _ in range(-(-length // P))] for length in seq_lens]
    return CommonAttentionMetadata.from_lens(query_lens, seq_lens, tables, P)


def new_layer(**more: Any) -> Attention:
    return Attention(H, D, num_kv_heads=K, block_size=P, backend="PALLAS", **more)


def build(layer: Attention, common: CommonAttentionMetadata) -> Any:
    return layer.backend.get_builder_cls()(layer.kv_cache_spec).build(0, common)


@pytest.mark.parametrize("head_size", [128, 512])
def test_it_serves_a_tpu_and_comes_first(head_size: int) -> None:
    request = Request(head_size, "bfloat16", block_size=128, features=frozenset({"sinks", "alibi", "lse"}))
    assert TpuPlatform().priorities(request, TPU) == ("PALLAS", "XLA_ATTN")
    assert PallasAttentionBackend.why_not(request, TPU) == []


@pytest.mark.parametrize(
    ("request_", "device", "reason"),
    [
        (Request(72, "bfloat16"), TPU, "head_size=72 (supports multiples of 16 from 64 up to 256, 512)"),
        (Request(128, "float16"), TPU, "dtype=float16 (supports float32, bfloat16)"),
        (Request(128, "bfloat16", block_size=24), TPU, "block_size=24 (supports 16, 32, 64, 128, 256)"),
        (Request(128, "bfloat16"), Device("jax", "gpu", "H200", "sm_90"), "platform=gpu (supports tpu, cpu)"),
        (
            Request(128, "bfloat16"),
            Device("jax", "gpu", "H200", "sm_90"),
            "its kernels are for TPUs (a CPU interprets them, for tests); use XLA_ATTN on GPUs",
        ),
        (Request(64, "bfloat16", INT4, 128), TPU, "head_size=64 (kv_cache_dtype=int4_per_token_head supports 128, 256)"),
        (Request(128, "bfloat16", INT4, 64), TPU, "block_size=64 (kv_cache_dtype=int4_per_token_head supports 128)"),
        (Request(128, "bfloat16"), Device("jax", "tpu", "TPU v4", "v4"), "arch=v4 (supports v5e, v5p, v6e, v7x)"),
    ],
)
def test_what_it_refuses(request_: Request, device: Device, reason: str) -> None:
    assert reason in PallasAttentionBackend.why_not(request_, device)


def test_int4_on_a_tpu() -> None:
    assert PallasAttentionBackend.why_not(Request(128, "bfloat16", INT4, 128), TPU) == []


@pytest.mark.parametrize(("heads", "size"), [(1, 128), (8, 128), (17, 128), (3, 256)])
def test_pages_of_int4_hold_their_rows(heads: int, size: int) -> None:
    """Bit for bit, codes that no write makes and any scale among them; a token is written where its slot is, alone."""
    rng = np.random.default_rng(0)
    row = (heads, size // 2 + 4)
    rows = [jnp.asarray(rng.integers(0, 256, (3, 128, *row)), jnp.uint8) for _ in range(2)]
    cache = PallasAttentionBackend.kv_cache_of_rows(*rows)
    assert cache.shape == PallasAttentionBackend.get_kv_cache_shape(3, 128, heads, size, INT4)
    for got, want in zip(PallasAttentionBackend.logical_kv_cache(cache), rows, strict=True):
        np.testing.assert_array_equal(got, want)
    slots = np.array([130, 5, -1, 383, 127])
    new = [jnp.asarray(rng.integers(0, 256, (5, *row)), jnp.uint8) for _ in range(2)]
    written = kernel.write(*new, cache, jnp.asarray(slots))
    for got, before, fresh in zip(PallasAttentionBackend.logical_kv_cache(written), rows, new, strict=True):
        want = np.array(before).reshape(-1, *row)
        want[slots[slots >= 0]] = np.array(fresh)[slots >= 0]
        np.testing.assert_array_equal(np.array(got).reshape(-1, *row), want)


_SOME = Case(
    "",
    (1, 18, 6, 1, 9),
    (300, 18, 150, 9, 40),
    4,
    2,
    head_size=128,
    block_size=128,
    dtype="bfloat16",
    kv_cache_dtype=INT4,
    lse=True,
)
_INT4_CASES = [
    _SOME.replace(name="mixed"),
    _SOME.replace(name="float32, heads of 256", dtype="float32", head_size=256, num_heads=3, num_kv_heads=3),
    _SOME.replace(name="joined heads", num_heads=16, num_kv_heads=8, query_lens=(1, 2), seq_lens=(140, 129)),
    _SOME.replace(name="two scale heads", num_heads=17, num_kv_heads=17, query_lens=(1, 2), seq_lens=(140, 129)),
    _SOME.replace(name="decodes", query_lens=(1,) * 20, seq_lens=tuple(1 + 37 * i for i in range(20))),
    _SOME.replace(name="prompts", query_lens=(300, 1, 140), seq_lens=(300, 270, 500)),
    _SOME.replace(name="window, sinks, cap", sliding_window=130, sinks="randn", logits_soft_cap=30.0),
    _SOME.replace(name="ALiBi, not causal", alibi=True, causal=False, dtype="float32"),
    _SOME.replace(name="spans, prefix", spans=4, prefix=7, sliding_window=40),
    _SOME.replace(name="tree", tree=6, query_lens=(6, 4, 18, 1, 6), seq_lens=(200, 4, 18, 9, 40)),
    _SOME.replace(name="chunks", chunk_size=100),
    _SOME.replace(name="shared pages", new="shared"),
    _SOME.replace(name="poison", check="poison"),
    _SOME.replace(name="layer", through="layer"),
    _SOME.replace(name="cross attention", attn_type="encoder_decoder", causal=False),
]


@pytest.mark.parametrize("case", sampled(_INT4_CASES, 3, "PALLAS int4"), ids=str)
def test_int4_is_the_oracles(case: Case) -> None:
    """Interpreted, races watched: the output, the log-sum-exp, and every byte of the cache."""
    assert run_case(PallasAttentionBackend, case) == []


def test_a_layer_under_jit() -> None:
    """A padded head, a mixed batch in a bucket: the oracle's output, LSE and cache; padding rows are 0."""
    rng = np.random.default_rng(1)
    layer = new_layer()
    layer.impl.need_to_return_lse_for_decode = True
    common = batch([1, 5, 20], [33, 40, 20])
    meta, rows = build(layer, common), common.num_actual_tokens
    q, k, v = (rng.standard_normal((rows, heads, D), np.float32) for heads in (H, K, K))
    held = (jnp.asarray(rng.standard_normal((N * P, K, D), np.float32)) for _ in range(2))
    before = layer.impl._write(*held, layer.new_kv_cache(N), jnp.arange(N * P), 1.0, 1.0)
    step = jax.jit(layer.__call__, donate_argnums=3)
    keys, values = (np.array(x[..., :D]) for x in layer.backend.logical_kv_cache(before))
    (out, lse), after = step(meta.pad(q), meta.pad(k), meta.pad(v), before, meta)
    written = reference.write_kv(k, v, keys, values, common.slot_mapping)
    for got, want in zip(layer.backend.logical_kv_cache(after), written, strict=True):
        np.testing.assert_array_equal(got[..., :D], want)
    want_out, want_lse = reference.paged_attention(
        q, *written, query_start_loc=common.query_start_loc, seq_lens=common.seq_lens, block_table=common.block_table
    )
    np.testing.assert_allclose(out[:rows], want_out, atol=1e-5)
    np.testing.assert_allclose(lse[:, :rows], want_lse, atol=1e-5)
    assert not out[rows:].any()


def test_slots_that_the_kernel_would_not_write() -> None:
    layer, common = new_layer(), batch([1, 5], [33, 40])
    slots = np.array(common.slot_mapping)
    for change, at in (({2: int(slots[2]) + 1}, 2), ({3: -1}, 3)):
        wrong = slots.copy()
        for token, slot in change.items():
            wrong[token] = slot
        with pytest.raises(MetadataError, match=rf"slot_mapping\[{at}\]"):
            build(layer, common.replace(slot_mapping=wrong))
    first_held_back = slots.copy()
    first_held_back[1] = -1
    build(layer, common.replace(slot_mapping=first_held_back))


def test_slots_of_other_kinds_of_batches() -> None:
    """A batch that is not causal is the kernel's to write too; under cross attention slots are the encoder's."""
    layer, common = new_layer(), batch([1, 5], [33, 40])
    elsewhere = common.replace(slot_mapping=np.array(common.slot_mapping)[::-1].copy(), causal=False)
    with pytest.raises(MetadataError, match="slot_mapping"):
        build(layer, elsewhere)
    build(new_layer(attn_type="encoder_decoder"), elsewhere)


def test_slots_on_the_device_are_checked_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, common = new_layer(), batch([1, 5], [33, 40])
    slots = np.array(common.slot_mapping)
    slots[[1, 2]] = slots[[2, 1]]
    on_device = common.replace(slot_mapping=jnp.asarray(slots, jnp.int32))
    build(layer, on_device)
    monkeypatch.setenv("ATTN_DEBUG", "device")
    with pytest.raises(MetadataError, match=r"slot_mapping\[1\]"):
        build(layer, on_device)


def test_export_for_a_tpu() -> None:
    """The artifact holds the kernel, compiled when it is loaded; without a chip to compile for, JAX refuses."""
    pytest.importorskip("flatbuffers", reason="jax.export needs it and does not depend on it")
    layer, common = new_layer(), batch([1, 5], [33, 40])
    meta = build(layer, common)
    q, k, v = (jnp.zeros((meta.slot_mapping.shape[0], heads, D)) for heads in (H, K, K))
    arguments = (q, k, v, layer.new_kv_cache(N), meta)
    with compiling_for("v6e"):
        exported = export.export(jax.jit(layer.__call__, donate_argnums=3), platforms=("tpu",))(*arguments)
    text = exported.mlir_module()
    assert "tpu_custom_call" in text and "callback" not in text
    assert "output_operand_alias<" in text  # the kernel's cache, and the step's
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text
    loaded = export.deserialize(exported.serialize())
    assert loaded.platforms == ("tpu",) and loaded.in_avals == exported.in_avals
    with pytest.raises(ValueError, match="different from the lowering platform tpu"):
        export.export(jax.jit(layer.__call__), platforms=("tpu",))(*arguments)


def test_a_cache_of_another_layout_or_a_wide_tree() -> None:
    layer, common = new_layer(), batch([1], [5])
    q = jnp.zeros((1, H, D))
    with pytest.raises(ShapeError, match="holds"):
        layer(q, q[:, :K], q[:, :K], jnp.zeros((N, 2, K + 1, P, 128)), build(layer, common))
    wide = build(layer, common.replace(tree_mask=np.ones((1, 129, 129), bool)))
    with pytest.raises(ShapeError, match="129 wide: must be at most 128"):
        layer(q, q[:, :K], q[:, :K], layer.new_kv_cache(N), wide)


def test_a_request_has_the_same_bits_in_any_batch() -> None:
    """A decode beside a chunk, alone under a wider table, where blocks would be larger, and behind one that shares them."""
    lens, heads, kv_heads, size = ((20, 50), (1, 1500), (1, 40)), 4, 2, 64
    rng = np.random.default_rng(3)
    drawn = [
        [rng.standard_normal((n, h, size), np.float32) for n, h in ((q, heads), (m, kv_heads), (m, kv_heads))] for q, m in lens
    ]

    def states(requests: list[int], columns: int, **more: Any) -> list[Any]:
        """The output and the log-sum-exp of the last request, by a layer over the keys of these."""
        layer = Attention(heads, size, num_kv_heads=kv_heads, block_size=P, backend="PALLAS", return_lse=True, **more)
        owned = [lens[r] for r in requests]
        ends = np.cumsum([-(-m // P) for _, m in owned])
        tables = [list(range(end - -(-m // P), end)) for end, (_, m) in zip(ends, owned, strict=True)]
        cache = layer.new_kv_cache(128)
        for table, r in zip(tables, requests, strict=True):
            pages = [np.zeros((len(table) * P, kv_heads, size), np.float32) for _ in range(2)]
            for page, rows in zip(pages, drawn[r][1:], strict=True):
                page[: len(rows)] = rows
            cache = layer.load_pages(cache, table, *(page.reshape(-1, P, kv_heads, size) for page in pages))
        wide = np.array([table + [-1] * (columns - len(table)) for table in tables], np.int32)
        common = CommonAttentionMetadata.from_lens(*zip(*owned, strict=True), wide, P, writes=False)
        meta = build(layer, common)
        query = meta.pad(np.concatenate([drawn[r][0] for r in requests]))
        (out, lse), _ = layer(query, None, None, cache, meta)
        rows = sum(q for q, _ in owned)
        return [np.asarray(out)[rows - 1], np.asarray(lse)[:, rows - 1]]

    asked = {"features": ["batch_invariant"]}
    alone = states([1], 120, **asked)
    for others in ([0], [2]):
        for one, other in zip(states([*others, 1], 94, **asked), alone, strict=True):
            np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "v7x"])
@pytest.mark.parametrize("window", [None, 200])
def test_blocks_of_such_a_layer_are_those_of_no_batch(chip: str, window: int | None) -> None:
    """By default they follow the longest request and the table's columns."""
    of_heads = {"planes": 2, "num_kv_heads": 2, "page": 16, "lanes": 128, "group": 4, "itemsize": 2, "cache_itemsize": 2}
    shapes = [
        PagedShape(rows, requests, columns, longest, **of_heads, mask=LayerMask(True, (window, None)))
        for rows, requests, columns, longest in ((8, 8, 1, 1), (64, 8, 4, 2), (4096, 64, 64, 64), (8192, 2, 4096, 8192))
    ]
    by_default, fixed = [[rule(chip, shape) for shape in shapes] for rule in (blocks_for, fixed_blocks)]
    assert len({blocks.kv_block for blocks in by_default}) > 1 and len({blocks.large for blocks in by_default}) > 2
    assert fixed[0] == fixed[1]._replace(large=0) and fixed[1] == fixed[2] == fixed[3]


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
def test_requests_of_an_encoder_share_blocks(attn_type: str) -> None:
    asked = {"attn_type": attn_type, "features": frozenset({"batch_invariant"})}
    assert PallasAttentionBackend.why_not(Request(128, "bfloat16", **asked), TPU) == [
        f"batch_invariant for {attn_type}: requests share blocks of keys (supports decoder, encoder_decoder)"
    ]
    assert PallasAttentionBackend.why_not(Request(128, "bfloat16", block_size=16, features=asked["features"]), TPU) == []
