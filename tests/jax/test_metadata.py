"""The jax metadata: buckets, padding that reads and writes nothing, and the checks of values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.errors import MetadataError, ShapeError
from attn.jax import metadata
from attn.jax.metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder

SPEC = KVCacheSpec(block_size=8, num_kv_heads=2, head_size=16, dtype="float32", num_blocks=10)


def common(**changes: Any) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lens([1, 5, 3], [17, 5, 30], [[1, 2, 3], [4], [9, 8, 7, 6]], 8).replace(**changes)


def build(batch: CommonAttentionMetadata, spec: KVCacheSpec = SPEC, **config: Any) -> PagedAttentionMetadata:
    return PagedAttentionMetadataBuilder(spec, config=config or None).build(0, batch)


def test_a_batch_is_padded_to_powers_of_two() -> None:
    got = build(common(tree_mask=np.tril(np.ones((3, 5, 5), bool))))
    assert got.query_start_loc.tolist() == [0, 1, 6, 9, 9]
    assert got.seq_lens.tolist() == [17, 5, 30, 0]
    assert got.block_table.tolist() == [[1, 2, 3, -1], [4, -1, -1, -1], [9, 8, 7, 6], [0, 0, 0, 0]]
    assert got.slot_mapping.tolist() == [24, 32, 33, 34, 35, 36, 51, 52, 53, *[-1] * 7]
    assert (got.num_reqs, got.num_actual_tokens, got.max_query_len, got.max_seq_len) == (3, 9, 8, 32)
    tree = got.mask.tree
    assert tree is not None and tree.shape == (4, 5, 5) and not tree[3].any()
    assert all(leaf.dtype in (jnp.int32, jnp.bool_) and isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got))


def test_exact_extents_on_request() -> None:
    got = build(common(), bucket=False)
    assert got.slot_mapping.shape == (9,) and got.seq_lens.shape == (3,) and got.block_table.shape == (3, 4)
    assert (got.max_query_len, got.max_seq_len) == (5, 30)


@pytest.mark.parametrize("bucket", [True, False])
def test_positions_are_those_of_the_host(bucket: bool) -> None:
    for batch in (common(), CommonAttentionMetadata.from_lens([1, 4], [9, 4], [[1, 2], [3, 0]], 8)):
        got = jax.jit(lambda built: built.positions())(build(batch, bucket=bucket))
        want = np.concatenate([np.arange(s - q, s) for q, s in zip(batch.query_lens_cpu(), batch.seq_lens, strict=True)])
        np.testing.assert_array_equal(batch.positions(), want)
        np.testing.assert_array_equal(got, [*want, *[0] * (len(got) - len(want))])
        assert got.dtype == jnp.int32 and batch.positions().dtype == np.int32


def test_an_empty_batch() -> None:
    batch = CommonAttentionMetadata.from_lens([], [], [], 8)
    got = build(batch)
    assert got.query_start_loc.tolist() == [0, 0] and got.slot_mapping.tolist() == [-1]
    exact = build(batch, bucket=False)
    assert exact.seq_lens.shape == exact.positions().shape == (0,)


@pytest.mark.parametrize("mirrors", [True, False])
def test_arrays_on_the_device_stay_there(mirrors: bool) -> None:
    batch = common()
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    arrays = {name: jnp.asarray(getattr(batch, name), jnp.int32) for name in names}
    none = {} if mirrors else {"query_start_loc_cpu": None, "seq_lens_cpu": None}
    for got, want in zip(jax.tree.leaves(build(batch.replace(**arrays, **none))), jax.tree.leaves(build(batch)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_callers_buffers_may_be_reused() -> None:
    for config in ({"bucket": False}, {"bucket": True}):
        batch = CommonAttentionMetadata.from_lens([4096], [4096], [list(range(512))], 8)
        got = build(batch, KVCacheSpec(8, 2, 16, "float32"), **config)
        batch.slot_mapping[:], batch.block_table[:] = -1, -1
        assert got.slot_mapping[5] == 5 and got.block_table[0, 5] == 5


def test_a_slot_beyond_int32_is_refused() -> None:
    slots = np.arange(9, dtype=np.int64)
    slots[4] = 2**31
    with pytest.raises(MetadataError, match=r"slot_mapping\[4\] = 2147483648: must be between -1 and 2147483647 under jax"):
        build(common(slot_mapping=slots), KVCacheSpec(8, 2, 16, "float32"))


def test_values_are_checked_on_the_host_or_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    table = common().block_table
    table[2, 3] = 10
    with pytest.raises(MetadataError, match=r"block_table\[2, 3\] = 10: must be between 0 and 9"):
        build(common(block_table=table))
    on_device = common(block_table=jnp.asarray(table))
    build(on_device)
    monkeypatch.setenv("ATTN_DEBUG", "device")
    with pytest.raises(MetadataError, match=r"block_table\[2, 3\] = 10: must be between 0 and 9"):
        build(on_device)


@pytest.mark.parametrize(
    ("field", "at", "value", "said"),
    [
        ("block_table", (2, 3), 10, "block_table: a live entry"),
        ("block_table", (1, 0), -1, "block_table: a live entry"),
        ("slot_mapping", (3,), 80, "slot_mapping: an entry"),
        ("slot_mapping", (3,), -2, "slot_mapping: an entry"),
        ("slot_mapping", (3,), 24, "slot_mapping: a slot is written"),
        ("block_table", (1, 1), -7, None),
    ],
)
def test_values_are_checked_under_jit(field: str, at: tuple[int, ...], value: int, said: str | None) -> None:
    got = build(common())
    arrays = {**vars(got), field: getattr(got, field).at[at].set(value)}
    error, _ = checked(PagedAttentionMetadata(**arrays))
    if said is None:
        error.throw()
    else:
        with pytest.raises(checkify.JaxRuntimeError, match=said):
            error.throw()


@jax.jit
@checkify.checkify
def checked(batch: PagedAttentionMetadata) -> jax.Array:
    metadata.check_ids(batch, 8, 10)
    return batch.num_reqs


def test_pad() -> None:
    got = build(common())
    x = np.arange(18, dtype=np.float32).reshape(9, 2)
    padded = got.pad(x)
    assert padded.shape == (16, 2) and not padded[9:].any()
    np.testing.assert_array_equal(padded[:9], x)
    with pytest.raises(ShapeError, match="x has 17 rows: must be at most 16"):
        got.pad(np.zeros((17, 2)))


def test_it_is_a_pytree_whose_numbers_are_dynamic() -> None:
    traces = []

    @jax.jit
    def step(batch: PagedAttentionMetadata) -> jax.Array:
        traces.append(batch.max_query_len)
        return batch.num_actual_tokens

    assert step(build(common())) == 9
    longer = CommonAttentionMetadata.from_lens([1, 7, 2, 6], [17, 7, 30, 6], [[1, 2, 3], [4], [9, 8, 7, 6], [5]], 8)
    assert step(build(longer)) == 16
    assert len(traces) == 1
    step(build(common(causal=False)))
    assert len(traces) == 2
