"""The block table of a batch: how callers' rows become pages, and the slots of tokens in them."""

import copy
import pickle
import re

import numpy as np
import pytest

from attn.backends import block_table
from attn.backends.block_table import INT32_MAX, slots_of
from attn.backends.metadata import CommonAttentionMetadata
from attn.errors import DTypeError, MetadataError, ShapeError

BLOCK = 4


def batch():
    """Three requests: a decode, a prefill, a chunk."""
    return CommonAttentionMetadata.from_lens([1, 5, 3], [9, 5, 7], [[4, 2, 0], [1, 3], [5, 6]], BLOCK)


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        np.array,
        lambda row: range(row[0], row[-1] + 1),
        lambda row: np.array(row, np.uint8),
        lambda row: [*map(np.int64, row)],
    ],
)
def test_rows_of_a_table_may_be_any_integers(kind):
    """Ragged, one array, or of different kinds: the same table, and the caller's own is neither kept nor changed."""
    rows = [[4, 5, 6], [1], [], [2, 3]]
    made = CommonAttentionMetadata.from_lens([1, 1, 0, 2], [9, 3, 0, 7], [kind(row) if row else [] for row in rows], BLOCK)
    assert made.block_table.tolist() == [[4, 5, 6], [1, -1, -1], [-1, -1, -1], [2, 3, -1]]
    whole = np.array([[4, 5], [2, 3]], np.int64)
    made = CommonAttentionMetadata.from_lens([1, 1], [8, 7], whole, BLOCK)
    assert made.block_table.tolist() == whole.tolist() and made.block_table.dtype == np.int32
    made.block_table[0, 0] = 9
    assert whole[0, 0] == 4


def test_a_table_is_padded_when_it_is_first_read():
    """Before the first read, a batch uses the rows passed to `from_lens`. After it, a caller may have changed the table, so the
    batch uses the table."""
    made = batch()
    assert made.pages.ids.tolist() == [4, 2, 0, 1, 3, 5, 6] and made.pages.shape == (3, 3) and made.pages.largest == 6
    assert made.validate(BLOCK, 7) is made and made.pages is not None
    with pytest.raises(MetadataError, match=r"block_table\[2, 1\] = 6: must be between 0 and 5"):
        copy.copy(made).validate(BLOCK, 6)
    again = [copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made.replace(max_seq_len=10), made.select(0, 3)]
    assert all(one.pages is not None for one in again)
    made.block_table[2, 1] = 9
    assert made.pages is None and made.block_table.tolist() == [[4, 2, 0], [1, 3, -1], [5, 9, -1]]
    with pytest.raises(MetadataError, match=r"block_table\[2, 1\] = 9"):
        made.validate(BLOCK, 7)
    assert made.replace(max_seq_len=10).pages is None
    for one in again:
        assert one.validate(BLOCK, 7).block_table.tolist() == [[4, 2, 0], [1, 3, -1], [5, 6, -1]]
    with pytest.raises(AttributeError, match="no attribute 'table'"):
        made.table  # noqa: B018


def test_rows_of_pages_are_those_of_the_table():
    made = CommonAttentionMetadata.from_lens([1, 1, 0, 2], [9, 3, 0, 7], [[4, 5, 6], [1], [], [2, 3]], BLOCK)
    for first, last in ((0, 4), (1, 4), (1, 3), (2, 3), (2, 2)):
        own, table = made.select(first, last), copy.copy(made).block_table[first:last]
        assert own.pages is not None and own.pages.shape[1] <= 3
        columns = own.block_table.shape[1]
        assert own.block_table.tolist() == table[:, :columns].tolist() and (table[:, columns:] < 0).all()
    assert made.pages[np.array([0, 3, 3]), np.array([2, 0, 1])].tolist() == [6, 2, 3]


@pytest.mark.parametrize("last", [0, 1, 70])
@pytest.mark.parametrize("wide", [0, 5])
def test_rows_of_pages_that_were_read_by_chunks(last, wide, monkeypatch):
    """What is between the rows in the table's memory is neither an id nor the largest one."""
    monkeypatch.setattr(block_table, "LONG", 64)
    counts = np.array([3, 0, 64, 1, 0, 65, last])
    memory = np.full((7, 150 + wide), 9999, np.int32)
    table = memory[:, :150]
    table[:] = -1
    rng = np.random.default_rng(0)
    for row, n in zip(table, counts, strict=True):
        row[:n] = rng.permutation(300)[:n]
    used = np.arange(150) < counts[:, None]
    made = CommonAttentionMetadata.from_lens(np.minimum(counts, 1), counts * 8, table, 8)
    assert made.pages is not None and not made.pages.packed and made.pages.largest == table.max()
    for first, end in ((0, 7), (1, 5), (4, 5), (5, 7), (6, 7), (3, 3)):
        own = made.pages[first:end]
        assert own.shape == (end - first, 150) and (own.padded() == np.where(used, table, -1)[first:end]).all()
        assert own.largest == max(0, table[first:end].max(initial=0))
        assert own.hold(counts[first:end] * 8, 8) and own.hold(counts[first:end] * 8 + 1, 8) == (first == end)


@pytest.mark.parametrize("after", [-1, 1000])
def test_ids_after_a_row_may_be_anything_until_they_are_in_use(after):
    made = CommonAttentionMetadata.from_lens([1, 1], [4, 7], [[2, after], [4, 3]], BLOCK)
    assert made.validate(BLOCK, 5) is made
    made.seq_lens[0] = 5
    with pytest.raises(MetadataError, match=rf"block_table\[0, 1\] = {after}: must be between 0 and 4"):
        made.validate(BLOCK, 5)
    short = CommonAttentionMetadata.from_lens([1, 1], [4, 7], [[2], [4, 3]], BLOCK)
    short.seq_lens[0] = 5
    with pytest.raises(MetadataError, match=r"block_table\[0, 1\] = -1: must be between 0 and 4"):
        short.validate(BLOCK, 5)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_a_table_that_is_mostly_padding_is_read_as_rows(dtype, monkeypatch):
    """Its shape is the table's own, and the caller's array is neither kept nor changed."""
    monkeypatch.setattr(block_table, "LONG", 64)
    lens, table = [8, 3, 0, 8 * 20], np.full((4, 64), -1).astype(dtype)
    table[:, 0], table[3, :20] = np.array([7, 6, -1, 0]).astype(dtype), range(20)
    made = CommonAttentionMetadata.from_lens([1, 1, 0, 1], lens, table, 8)
    if dtype == np.uint8:  # 255 may be a block
        assert made.pages is None and made.block_table.tolist() == table.tolist()
        return
    assert made.pages[np.repeat([0, 1, 3], [1, 1, 20]), np.r_[0, 0, :20]].tolist() == [7, 6, *range(20)]
    assert made.pages.shape == (4, 64) and made.pages.largest == 19
    table[0, 0] = 9
    assert made.select(0, 2).block_table.tolist() == [[7, *[-1] * 63], [6, *[-1] * 63]]
    assert made.block_table.shape == (4, 64) and made.block_table[:, 0].tolist() == [7, 6, -1, 0]


def test_which_tables_are_mostly_padding(monkeypatch):
    monkeypatch.setattr(block_table, "LONG", 64)
    of, table, lens = block_table.Pages.of, np.full((4, 64), -1, np.int32), np.array([8, 8, 8, 8 * 64], np.int32)
    table[:, 0] = table[3] = 3
    assert of(table, lens, 8).counts.tolist() == [1, 1, 1, 64] == of(table, lens * 2, 16).counts.tolist()
    assert of(np.full((4, 64), 3, np.int32), lens, 8) is None  # rows go on
    assert of(table, np.full(4, 8 * 33), 8) is None  # more than half is in use
    assert of(table, np.array([8, 8, 8, 8 * 65]), 8) is None  # a row lacks blocks
    assert of(table[:, :63], np.array([8, 8, 8, 8 * 63]), 8) is None  # few columns
    assert of(table, lens[:3], 8) is None and of(table, None, 8) is None
    assert of(table.astype(np.int64), lens, 8).largest == 3
    far = table.astype(np.int64)
    far[0, 0] = 2**40
    with pytest.raises(MetadataError, match=re.escape(f"block_table[0, 0] = {2**40}")):
        CommonAttentionMetadata.from_lens([1] * 4, lens, far, 8)
    assert of(table.astype(np.int16), lens, 8) is None  # short integers are not worth a case of their own
    monkeypatch.setattr(block_table, "LONG", 1 << 15)
    assert of(table, lens, 8) is None


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([[0.5, 1]], DTypeError, "block_table has dtype float64: must be integers"),
        ([[True]], DTypeError, "block_table has dtype bool: must be integers"),
        ([["1"]], DTypeError, "block_table has dtype <U1: must be integers"),
        (np.ones((1, 2)), DTypeError, "block_table has dtype float64: must be integers"),
        ([np.array([0, 2**40])], MetadataError, "block_table[0, 1] = 1099511627776: must be between"),
        (np.array([[0, -(2**40)]]), MetadataError, "block_table[0, 1] = -1099511627776: must be between"),
        ([[0, 2**31]], MetadataError, "block_table[0, 1] = 2147483648: must be between -2147483648 and 2147483647"),
        (
            [[-1, 0]],
            MetadataError,
            "block_table[0, 0] = -1: must be between 0 and 2147483647 (1 blocks of 4 hold 3 tokens)",
        ),
        ([[]], MetadataError, "seq_lens[0] = 3: must be at most 0 (0 blocks of 4 in its table row)"),
        ([[0, 1], [2, 3]], ShapeError, "block_table has shape [2, 2]: must be [1, *]"),
        ([], ShapeError, "block_table has shape [0, 0]: must be [1, *]"),
        ([[[0], [1]]], ShapeError, "block_table[0] has shape [2, 1]: must be [B]"),
    ],
)
def test_tables_that_make_no_batch(rows, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        CommonAttentionMetadata.from_lens([1], [3], rows, BLOCK)


def test_a_row_too_short_for_its_sequence_is_not_filled_up():
    """The widest row sets the table's width; what is missing from a shorter one must not become slot -1."""
    with pytest.raises(MetadataError, match=r"block_table\[1, 1\] = -1: .* \(2 blocks of 4 hold 5 tokens\)"):
        CommonAttentionMetadata.from_lens([1, 1], [5, 5], [[0, 1], [2]], BLOCK)


def test_slots():
    table = np.array([[4, 2, 0], [1, 3, -1]], np.int32)
    slots = slots_of(table, np.array([0, 0, 1, 1]), np.array([0, 9, 5, -1]), BLOCK)
    assert slots.tolist() == [16, 1, 13, -1] and slots.dtype == np.int64
    assert slots_of(table[:0], np.zeros(0, int), np.zeros(0, int), BLOCK).shape == (0,)
    assert slots_of(np.full((1, 1), INT32_MAX, np.int32), np.zeros(1, int), np.ones(1, int), 16).item() == INT32_MAX * 16 + 1
