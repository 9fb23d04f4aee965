"""The torch metadata: the neutral batch on a device, from arrays of any framework, checked."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from attn.backends import block_table
from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.errors import DTypeError, MetadataError, ShapeError
from attn.torch import alignment, metadata
from attn.torch.metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder

SPEC = KVCacheSpec(block_size=8, num_kv_heads=2, head_size=16, dtype="float32", num_blocks=10)
NAMES = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")


def common(**changes: Any) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lens([1, 5, 3], [17, 5, 30], [[1, 2, 3], [4], [9, 8, 7, 6]], 8).replace(**changes)


def build(batch: CommonAttentionMetadata, fast: bool = False, device: Any = None) -> PagedAttentionMetadata:
    return PagedAttentionMetadataBuilder(SPEC, device=device).build(0, batch, fast)


def as_jax(array: Any) -> Any:
    return pytest.importorskip("jax").numpy.asarray(array, np.int32)


def frozen(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("convert", [np.asarray, frozen, torch.from_numpy, as_jax])
def test_a_batch_of_anybodys_arrays(convert: Any) -> None:
    batch = common()
    got = build(batch.replace(**{name: convert(getattr(batch, name)) for name in NAMES}))
    for name in NAMES:
        tensor = getattr(got, name)
        assert tensor.dtype == (torch.int64 if name == "slot_mapping" else torch.int32)
        assert tensor.tolist() == getattr(batch, name).tolist()
    assert (got.num_reqs, got.num_actual_tokens, got.max_query_len, got.max_seq_len) == (3, 9, 5, 30)
    assert got.causal and got.mask.is_plain


def test_mirrors_are_kept_or_fetched_once() -> None:
    batch = common()
    got = build(batch)
    assert got.host_lens() == (batch.query_start_loc_cpu, batch.seq_lens_cpu)
    got = build(batch.replace(query_start_loc_cpu=None, seq_lens_cpu=None))
    starts, lengths = got.host_lens()
    assert starts.tolist() == [0, 1, 6, 9] and lengths.tolist() == [17, 5, 30]
    assert got.host_lens()[0] is starts
    got = build(batch)
    got.seq_lens_cpu = None
    assert [x.tolist() for x in got.host_lens()] == [starts.tolist(), lengths.tolist()]


def test_lengths_that_were_refused_are_refused_again() -> None:
    batch = common()
    starts = batch.query_start_loc.copy()
    starts[1] = 100
    got = build(batch.replace(query_start_loc=torch.from_numpy(starts), query_start_loc_cpu=None, seq_lens_cpu=None))
    for _ in range(2):
        with pytest.raises(MetadataError, match="query_start_loc"):
            got.host_lens()


def test_rows_have_keys_if_the_host_knows_so_now() -> None:
    meta = build(common())
    assert meta.has_own_keys
    meta.seq_lens_cpu = np.array([17, 4, 30], np.int32)  # five new tokens of which one has no key in the cache
    assert not meta.has_own_keys
    meta.seq_lens_cpu[1] = 5  # written in place, as an engine writes its next step's lengths
    assert meta.has_own_keys
    meta.seq_lens_cpu = None
    assert not meta.has_own_keys


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize(("first", "last"), [(0, 2), (1, 3), (2, 3), (0, 3), (1, 1)])
def test_a_part_is_what_a_builder_makes_of_these_requests(
    convert: Any, first: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At addresses of 16 bytes, which tensors of a GPU have: slices of the whole batch's begin anywhere."""
    monkeypatch.setattr(alignment, "VECTOR_DEVICES", ("cpu",))
    spans = np.array([[-1, -1]] * 6 + [[27, 29]] * 3, np.int32)
    batch = common(spans=spans, prefix=np.array([0, 2, 3], np.int32))
    batch = batch.replace(**{name: convert(getattr(batch, name)) for name in NAMES})
    builder = PagedAttentionMetadataBuilder(SPEC)
    got, expected = builder.slice_of(builder.build(0, batch), batch, first, last), builder.build(0, batch.select(first, last))
    for tensor, other in zip(got.tensors(), expected.tensors(), strict=True):
        assert (tensor is None) == (other is None)
        if tensor is not None and other is not None:
            assert torch.equal(tensor, other) and tensor.dtype == other.dtype and tensor.data_ptr() % 16 == 0
    for name in ("query_start_loc_cpu", "seq_lens_cpu"):
        assert np.array_equal(getattr(got, name), getattr(expected, name))
    for mirror, other in zip(got.mask_cpu, expected.mask_cpu, strict=True):
        assert (mirror is None and other is None) or np.array_equal(mirror, other)
    names = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "causal", "block_size")
    assert all(getattr(got, name) == getattr(expected, name) for name in names)


def test_tree_mask_and_device() -> None:
    got = build(common(tree_mask=np.tril(np.ones((3, 5, 5), bool))), device="meta")
    tree = got.mask.tree
    assert tree is not None and tree.shape == (3, 5, 5) and tree.dtype == torch.bool
    assert {x.device.type for x in (*(getattr(got, name) for name in NAMES), tree)} == {"meta"}


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_what_rows_see_is_dense_on_the_device(convert: Any) -> None:
    """Kernels compute addresses in these arrays from their shapes; the transpose of (first keys, last keys) is not dense."""
    ends = np.array([[-1, 0, 0, 0, -1, -1, 3, 3, -1], [-1, 2, 2, 2, -1, -1, 8, 8, -1]], np.int32)
    tree = np.tril(np.ones((3, 5, 5), bool)).transpose(0, 2, 1).copy().transpose(0, 2, 1)
    got = build(common(spans=convert(ends).T, tree_mask=convert(tree))).mask
    assert got.spans.is_contiguous() and got.spans.tolist() == ends.T.tolist()
    assert got.tree.is_contiguous() and got.tree.tolist() == tree.tolist()


def test_mirrors_of_the_mask_are_kept_or_fetched_once() -> None:
    spans, prefix = np.full((9, 2), -1, np.int32), np.array([1, 0, 2], np.int32)
    got = build(common(spans=spans, prefix=prefix))
    assert got.host_mask().spans is spans and got.host_mask().prefix is prefix
    got = build(common(spans=spans).replace(prefix=torch.from_numpy(prefix)))
    assert got.mask_cpu.spans is spans and got.mask_cpu.prefix is None
    fetched = got.host_mask().prefix
    assert isinstance(fetched, np.ndarray) and fetched.tolist() == [1, 0, 2] and got.host_mask().prefix is fetched


def test_contradictions_are_refused() -> None:
    with pytest.raises(MetadataError, match=r"block_table\[2, 1\] = 10: must be between 0 and 9"):
        build(CommonAttentionMetadata.from_lens([1, 5, 3], [17, 5, 30], [[1, 2, 3], [4], [9, 10, 7, 6]], 8))
    with pytest.raises(MetadataError, match=r"slot_mapping\[3\] = 80: must be -1 or between 0 and 79"):
        build(common(slot_mapping=np.array([0, 1, 2, 80, 4, 5, 6, 7, 8])))
    with pytest.raises(MetadataError, match="max_seq_len = 29: must be at least 30"):
        build(common(max_seq_len=29))
    with pytest.raises(ShapeError, match="block_table has shape"):
        build(common(block_table=np.zeros((2, 4), np.int32)))
    with pytest.raises(DTypeError, match="seq_lens has dtype int64"):
        build(common(seq_lens=np.zeros(3, np.int64)))


def test_values_on_a_device_are_looked_at_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = np.array([0, 1, 2, 80, 4, 5, 6, 7, 8])
    assert build(common(slot_mapping=slots), fast=True).slot_mapping.tolist() == slots.tolist()
    on_device = common(slot_mapping=torch.from_numpy(slots))
    assert build(on_device).slot_mapping.tolist() == slots.tolist()
    monkeypatch.setenv("ATTN_DEBUG", "device")
    with pytest.raises(MetadataError, match=r"slot_mapping\[3\] = 80"):
        build(on_device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"block_table": (1, 0, 10)},
            r"block_table\[1, 0\] = 10: must be between 0 and 9 \(positions 0 on of request 1",
        ),
        ({"block_table": (2, 3, -1)}, r"block_table\[2, 3\] = -1: .*positions 24 on of request 2, 30 tokens long"),
        ({"block_table": (1, 2, 99)}, ""),
        ({"slot_mapping": (3, 80)}, r"slot_mapping\[3\] = 80: must be -1 or between 0 and 79 \(a token of request 1\)"),
        ({"slot_mapping": (0, -2)}, r"slot_mapping\[0\] = -2: .*a token of request 0"),
        ({"slot_mapping": (0, -1)}, ""),
        ({"slot_mapping": (8, 36)}, r"slot_mapping\[8\] = 36: must be written by one token only \(a token of request 2\)"),
        ({"seq_lens": (1, 33)}, r"seq_lens\[1\] = 33: must be at most 32 \(4 blocks of 8"),
    ],
)
def test_ids_are_checked_where_they_are_when_asked(change: dict[str, Any], message: str) -> None:
    """What changes on the device after the batch was built is found by the call, under ATTN_DEBUG=device."""
    batch = build(common())
    batch.check_ids(10, 8)
    ((name, (*at, value)),) = change.items()
    getattr(batch, name)[tuple(at)] = value
    if not message:
        return batch.check_ids(10, 8)
    with pytest.raises(MetadataError, match=message):
        batch.check_ids(10, 8)
    return None


def test_a_call_checks_ids_under_attn_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn.torch import Attention

    layer = Attention(2, 16, num_kv_heads=2, dtype=torch.float32, block_size=8, backend="TORCH_SDPA")
    cache, batch, x = layer.new_kv_cache(10), build(common()), torch.zeros(9, 2, 16)
    batch.block_table[0, 2] = 1000
    monkeypatch.setenv("ATTN_DEBUG", "device")
    with pytest.raises(MetadataError, match=r"block_table\[0, 2\] = 1000"):
        layer(x, x, x, cache, batch)


@pytest.mark.parametrize("slots", [np.int64, np.int32])
def test_arrays_reach_another_device_in_one_copy(slots: Any) -> None:
    """Their values, shapes and dtypes are those of four copies, and each part is aligned."""
    given = common()
    wide = np.zeros((3, 7), np.int32)
    wide[:, :4] = given.block_table
    for batch in (
        given.replace(slot_mapping=given.slot_mapping.astype(slots)),
        given.replace(block_table=wide[:, :4], slot_mapping=np.repeat(given.slot_mapping, 2).astype(slots)[::2]),
        given.replace(block_table=np.zeros((3, 0), np.int32), slot_mapping=np.zeros(0, slots)),
    ):
        arrays = [getattr(batch, name) for name in NAMES]
        got, pages = metadata._copies(arrays, batch.seq_lens, 8, torch.device("cpu"))
        assert pages is None
        for i, (name, array) in enumerate(zip(NAMES, arrays, strict=True)):
            tensor = got[i]
            assert tensor.dtype == (torch.int64 if name == "slot_mapping" else torch.int32)
            assert tensor.is_contiguous() and tensor.storage_offset() * tensor.element_size() % 16 == 0
            assert tensor.shape == array.shape and tensor.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "table"),
    [
        ([1, 5, 3], [17, 5, 30], [[1, 2, 3], [4], [9, 8, 7, 6]]),
        ([1, 1], [9, 16], [[3, 1], [4, 0]]),
        ([1, 1], [9, 16], np.array([[3, 1], [4, 0]], np.int32)),
        ([2], [2], [[5]]),
        ([0, 1], [0, 3], [[], [5]]),
        ([], [], []),
        ([0], [0], [[]]),
    ],
)
def test_what_from_lens_has_put_together_reaches_the_device(query_lens: Any, seq_lens: Any, table: Any) -> None:
    """The same as of a batch of separate arrays."""
    batch = CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, 8)
    known = batch.known()
    assert known is not None
    given = [batch.query_start_loc, batch.seq_lens, batch.pages or batch.block_table, batch.slot_mapping]
    want, _ = metadata._copies([*map(copy.copy, given)], batch.seq_lens, 8, torch.device("cpu"))
    got, _ = metadata._copies(given, batch.seq_lens, 8, torch.device("cpu"), known)
    for name, one, other in zip(NAMES, got, want, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist(), name
        assert one.storage_offset() * one.element_size() % 16 == 0
    device = PagedAttentionMetadataBuilder(SPEC, device="meta").build(0, batch)
    rows, columns = want[2].shape
    want[2] = want[2].new_zeros(rows, max(1, columns))  # backends may read an entry past the last one
    assert [getattr(device, name).shape for name in NAMES] == [one.shape for one in want]


@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("kind", ["dense", "listed", "wide", "transposed", "preallocated", "short"])
def test_a_long_table_is_copied_without_its_padding(kind: str, strided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device makes the rows again, with the entries in use. A table with rows that go on after them is copied whole."""
    monkeypatch.setattr(block_table, "LONG", 64)
    monkeypatch.setattr(block_table, "_CHUNK", 3)
    monkeypatch.setattr(metadata, "_STRIDED", ("cpu",) if strided else ())
    rows, seq_lens = [[1, 2, 3], [4], [], [*range(5, 30)], [30, 31], [0] if kind == "short" else []], [24, 1, 0, 200 - 7, 16, 0]
    if kind == "short":
        seq_lens[-1] = 8
    batch = CommonAttentionMetadata.from_lens([1, 1, 0, 1, 1, 0], seq_lens, rows, 8)
    if kind == "preallocated":
        batch.block_table[1, 1] = 77
    elif kind == "wide":
        wide = np.full((6, 30), 99, np.int32)
        wide[:, :25] = batch.block_table
        batch.block_table = wide[:, :25]
    elif kind == "transposed":
        batch.block_table = batch.block_table.T.copy().T
    listed, whole = batch.pages if kind == "listed" else None, kind in ("preallocated", "transposed")
    arrays: list[Any] = [getattr(batch, name) for name in NAMES]
    sizes, together = list[int](), metadata.put_together

    def record(parts: Any, device: Any) -> Any:
        sizes.extend(part.size for part in parts)
        return together(parts, device)

    monkeypatch.setattr(metadata, "put_together", record)
    given = [listed if listed and name == "block_table" else array for name, array in zip(NAMES, arrays, strict=True)]
    got, pages = metadata._copies(given, np.array(seq_lens), 8, torch.device("cpu"))
    for i, (name, array) in enumerate(zip(NAMES, arrays, strict=True)):
        tensor = got[i]
        assert tensor.dtype == (torch.int64 if name == "slot_mapping" else torch.int32)
        assert tensor.is_contiguous() and tensor.shape == array.shape
        if name != "block_table" or whole:
            assert tensor.tolist() == array.tolist()
        else:
            assert [row[: len(used)] for row, used in zip(tensor.tolist(), rows, strict=True)] == rows
            assert set(tensor.flatten().tolist()) <= {*range(32), -1, 99}
    # of a table, the chunks of 8 that have rows, and the last row
    assert max(sizes) == (150 if whole else 31 + 25 if kind == "listed" else 8 * 8 + 25)
    assert (pages is None) == whole
    assert pages is None or (pages.largest == 31 and pages.counts.tolist() == [*map(len, rows)])


@pytest.mark.parametrize("wrong", [-1, 31])
@pytest.mark.parametrize("at", [(3, 24), (0, 1), (4, 0)])
def test_blocks_of_a_long_table_are_checked_as_they_were_copied(
    wrong: int, at: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_table, "LONG", 64)
    monkeypatch.setattr(block_table, "_CHUNK", 3)
    spec = KVCacheSpec(block_size=8, num_kv_heads=2, head_size=16, dtype="float32", num_blocks=31)
    builder = PagedAttentionMetadataBuilder(spec, device="meta")
    table = [[1, 2, 3], [4], [0], [*range(5, 30)], [30]]
    batch = CommonAttentionMetadata.from_lens([1, 1, 1, 1, 1], [24, 1, 8, 193, 3], table, 8)
    assert builder._arrays(batch)[1] is batch.pages is not None  # they count until the table may be written to
    assert builder.build(0, batch).block_table.shape == (5, 25)
    batch.block_table[at] = batch.block_table[at]
    assert builder._arrays(batch)[1].largest == 30
    batch.block_table[at] = wrong
    with pytest.raises(MetadataError, match=rf"block_table\[{at[0]}, {at[1]}\] = {wrong}: must be between 0 and 30"):
        builder.build(0, batch)
    assert builder.build(0, batch, fast_build=True).num_reqs == 5
    empty = batch.replace(
        seq_lens=np.zeros(5, np.int32), seq_lens_cpu=np.zeros(5, np.int32), block_table=np.full((5, 25), -1, np.int32)
    )
    assert builder._arrays(empty)[1].largest == 0 and builder.build(0, empty).num_reqs == 5


def test_tensors_on_the_device_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, copied = common(), list[tuple[int, ...]]()
    there = {name: torch.from_numpy(getattr(batch, name)).to("meta") for name in ("block_table", "slot_mapping")}
    together = metadata.put_together
    monkeypatch.setattr(metadata, "put_together", lambda *given: copied.extend(x.shape for x in given[0]) or together(*given))
    got = build(batch.replace(**there), device=torch.device("meta"))
    assert got.block_table is there["block_table"] and got.slot_mapping is there["slot_mapping"]
    assert copied == [(4,), (3,)] and got.seq_lens.device.type == "meta"
