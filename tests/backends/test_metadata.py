"""The neutral batch: what it rejects and the messages, and that reading it does not synchronise a device."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch

from attn.backends.block_table import INT32_MAX
from attn.backends.metadata import CommonAttentionMetadata, spans_of
from attn.errors import AttnError, DTypeError, MetadataError, ShapeError

BLOCK = 4


def batch(**changes):
    """Three requests: a decode, a prefill, a chunk. Query lengths 1, 5, 3; sequence lengths 9, 5, 7; blocks of 4."""
    made = CommonAttentionMetadata.from_lens([1, 5, 3], [9, 5, 7], [[4, 2, 0], [1, 3], [5, 6]], BLOCK)
    return made.replace(**changes)


def ints(*values, dtype=np.int32):
    return np.array(values, dtype)


# --- a batch from lengths ------------------------------------------------------------------------------------------


def test_from_lens():
    made = batch()
    assert made.query_start_loc.tolist() == [0, 1, 6, 9] and made.seq_lens.tolist() == [9, 5, 7]
    assert made.block_table.tolist() == [[4, 2, 0], [1, 3, -1], [5, 6, -1]]
    # token 8 of request 0 sits in its third block (0), tokens 0..4 of request 1 in blocks 1 and 3, 4..6 of 2 in block 6
    assert made.slot_mapping.tolist() == [0, 4, 5, 6, 7, 12, 24, 25, 26]
    assert (made.num_reqs, made.num_actual_tokens, made.max_query_len, made.max_seq_len) == (3, 9, 5, 9)
    assert made.query_lens_cpu().tolist() == [1, 5, 3]
    kinds = {name: str(getattr(made, name).dtype) for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")}
    assert kinds == {"query_start_loc": "int32", "seq_lens": "int32", "block_table": "int32", "slot_mapping": "int64"}
    assert made.validate(BLOCK, 7) is made and made.validate(BLOCK, 7, strict=True) is made


def _refusal(of, *blocks):
    """What `validate` says of a batch, and of a copy of which nothing is known."""
    said = []
    for one in (of, copy.copy(of)):
        try:
            one.validate(BLOCK, *blocks)
        except AttnError as error:
            said.append(str(error))
    assert len(said) in (0, 2) and len(set(said)) <= 1
    return said[0] if said else None


def test_what_from_lens_has_checked_is_not_checked_again(monkeypatch):
    made, changed = batch(), batch()
    assert made.known() is None and copy.copy(made).known() is None  # the fixture's copy
    made = CommonAttentionMetadata.from_lens([1, 5, 3], [9, 5, 7], [[4, 2, 0], [1, 3], [5, 6]], BLOCK)
    assert made.known() is not None and copy.copy(made).known() is None and pickle.loads(pickle.dumps(made)).known() is None
    for name in ("_check_static", "_check_query_start_loc", "_check_seq_lens", "_check_blocks", "_check_slots"):
        monkeypatch.setattr(CommonAttentionMetadata, name, lambda *_: pytest.fail("checked again"))
    assert made.validate(BLOCK, 7) is made
    monkeypatch.undo()
    assert "block_table[2, 1] = 6" in _refusal(made, 6)
    with pytest.raises(MetadataError, match="block_size"):
        made.validate(2 * BLOCK)
    assert changed.validate(BLOCK) is changed


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.seq_lens.__setitem__(1, 99),
        lambda made: made.seq_lens.__setitem__(1, -1),
        lambda made: made.query_start_loc.__setitem__(1, 8),
        lambda made: made.slot_mapping.__setitem__(2, 4),
        lambda made: made.slot_mapping.__setitem__(2, 28),
        lambda made: made.block_table.__setitem__((2, 1), 9),
        lambda made: setattr(made, "block_table", ints(1, 2, 3)[:, None]),
        lambda made: setattr(made, "seq_lens_cpu", ints(9, 5, 77)),
        lambda made: setattr(made, "slot_mapping", made.slot_mapping[:4]),
        lambda made: setattr(made, "max_seq_len", 8),
        lambda made: setattr(made, "num_reqs", 2),
        lambda made: setattr(made, "causal", "yes"),
        lambda made: setattr(made, "prefix", ints(10, 0, 0)),
        lambda made: setattr(made, "tree_mask", np.zeros((3, 5, 5), np.bool_)),
        lambda made: setattr(made, "spans", ints(*[3, 99] * 9).reshape(9, 2)),
        lambda made: setattr(made, "block_size", 8),
    ],
)
def test_a_changed_batch_is_checked_again(change):
    """Whether a field was assigned or an array written to, the message is that of a batch of which nothing is known."""
    made = CommonAttentionMetadata.from_lens([1, 5, 3], [9, 5, 7], [[4, 2, 0], [1, 3], [5, 6]], BLOCK)
    assert _refusal(made, 7) is None
    change(made)
    assert made.known() is None and _refusal(made, 7)


@pytest.mark.parametrize("arguments", [{"causal": [True] * 3}, {"prefix": [2, 0, 0]}, {"spans": [(-1, -1)] * 9}])
def test_nothing_is_known_of_a_batch_with_masks(arguments):
    """The values of their arrays are not compared."""
    made = CommonAttentionMetadata.from_lens([1, 5, 3], [9, 5, 7], [[4, 2, 0], [1, 3], [5, 6]], BLOCK, **arguments)
    assert made.known() is None


def test_strictness_is_checked_again():
    made = CommonAttentionMetadata.from_lens([5], [3], [[1]], BLOCK, strict=False)
    assert made.known() is not None and made.validate(BLOCK, 2) is made
    with pytest.raises(MetadataError, match="at least query_lens"):
        made.validate(BLOCK, 2, strict=True)


def test_a_batch_that_writes_nothing():
    """Keys that are cached already, or another layer's: requests may share every page, the last one too."""
    rows = [[4, 2], [4, 2], [4, 2]]
    with pytest.raises(MetadataError, match="written by one token only"):
        CommonAttentionMetadata.from_lens([1, 1, 2], [7, 7, 6], rows, BLOCK)
    made = CommonAttentionMetadata.from_lens([1, 1, 2], [7, 7, 6], rows, BLOCK, writes=False)
    assert made.slot_mapping.tolist() == [-1] * 4 and made.slot_mapping.dtype == np.int64
    assert made.validate(BLOCK, 5) is made
    with pytest.raises(MetadataError, match=r"block_table\[1, 1\] = 9: must be between 0 and 4"):
        CommonAttentionMetadata.from_lens([1, 1], [7, 7], [[4, 2], [4, 9]], BLOCK, writes=False).validate(BLOCK, 5)


@pytest.mark.parametrize(
    ("seq_lens", "rows", "options", "apart"),
    [
        ([5, 33], [[3], [4, 0, 2]], {}, True),
        ([16, 17], [[3], [4, 0]], {}, True),
        ([20, 33], [[4, 1], [4, 0, 2]], {}, True),  # a prefix that both have
        ([20, 33], [[4, 1, 7], [4, 0, 2, 6]], {}, True),  # and pages for tokens to come
        ([5, 6], [[3], [3]], {}, False),  # drafts of one text
        ([16, 17], [[3, 5], [3, 5]], {}, False),
        ([20, 33], [[4, 0], [4, 0, 2]], {}, False),  # the page is full for the other one
        ([20, 33], [[4, 2], [2, 0, 1]], {}, False),
        ([20, 40], [[4, 1], [6, 0, 6]], {}, False),  # twice in a row of its own
        ([20, 33], [[4, 0], [4, 0, 2]], {"writes": False}, False),
        ([0, 33], [[4], [0, 1, 2]], {"strict": False}, False),
    ],
)
def test_whether_a_request_may_see_what_another_writes(seq_lens, rows, options, apart):
    batch = CommonAttentionMetadata.from_lens([1, 1], seq_lens, rows, 16, **options)
    assert batch.writes_apart(16) is apart
    table = batch.block_table  # from now on it counts, padded
    assert batch.pages is None and batch.writes_apart(16) is apart
    if apart:
        assert batch.replace(slot_mapping=batch.slot_mapping.astype(np.int32)).writes_apart(16)
        assert batch.replace(slot_mapping=np.array([-1, batch.slot_mapping[1]])).writes_apart(16)
        assert not batch.replace(slot_mapping=batch.slot_mapping[::-1].copy()).writes_apart(16)
        assert not batch.replace(slot_mapping=batch.slot_mapping - 1).writes_apart(16)
        assert not batch.replace(block_table=np.where(table == rows[0][(seq_lens[0] - 1) // 16], 9, table)).writes_apart(16)
        for unknown in ({"slot_mapping": object()}, {"block_table": object()}, {"seq_lens_cpu": None, "seq_lens": object()}):
            assert not batch.replace(**unknown).writes_apart(16)
        assert not batch.replace(num_actual_tokens=3, slot_mapping=np.append(batch.slot_mapping, 7)).writes_apart(16)


@pytest.mark.parametrize(
    ("q_lens", "seq_lens", "rows", "options", "apart"),
    [
        ([4, 2], [18, 33], [[3, 5], [4, 0, 2]], {}, True),  # the first in two pages
        ([4, 40], [18, 40], [[3, 5], [4, 0, 2]], {}, True),
        ([4, 0, 1], [18, 16, 33], [[3, 5], [3], [4, 0, 2]], {}, False),
        ([4, 0, 1], [18, 16, 33], [[3, 5], [1], [4, 0, 2]], {}, True),
        ([4, 2], [18, 33], [[3, 5], [3, 0, 2]], {}, False),  # the page of its first tokens is another's
        ([2, 2], [18, 33], [[3, 5], [3, 0, 2]], {}, True),
        ([4, 2], [18, 33], [[3, 5], [5, 0, 2]], {}, False),
        ([4, 2], [18, 35], [[3, 5], [0, 4, 0]], {}, False),  # twice in a row of its own
        ([4, 2], [18, 1], [[3, 5], [0]], {"strict": False}, False),
        ([4, 2], [18, 33], [[3, 5], [4, 0, 2]], {"writes": False}, True),
    ],
)
def test_whether_requests_of_several_tokens_are_apart(q_lens, seq_lens, rows, options, apart):
    batch = CommonAttentionMetadata.from_lens(q_lens, seq_lens, rows, 16, **options)
    assert batch.writes_apart(16) is apart
    if apart and not options:
        slots = batch.slot_mapping
        assert batch.replace(slot_mapping=np.append(slots[:-1], -1)).writes_apart(16)
        assert not batch.replace(slot_mapping=np.append(slots[:-1], slots[0])).writes_apart(16)
        assert not batch.replace(slot_mapping=slots[::-1].copy()).writes_apart(16)


def test_empty_batches_and_long_tables_are_not_looked_at():
    assert not CommonAttentionMetadata.from_lens([], [], [], 16).writes_apart(16)
    ids = np.arange(1 << 16, dtype=np.int32)
    for n, apart in ((1 << 15, True), (1 << 16, False)):
        assert CommonAttentionMetadata.from_lens([1], [16 * n], [ids[:n]], 16).writes_apart(16) is apart


@pytest.mark.parametrize("table", [np.zeros((0, 4), np.int32), []], ids=["array", "list"])
def test_an_empty_batch(table):
    made = CommonAttentionMetadata.from_lens([], [], table, BLOCK)
    assert made.query_start_loc.tolist() == [0] and made.slot_mapping.shape == (0,) and made.max_seq_len == 0
    assert made.validate(BLOCK, 0) is made


def test_requests_without_new_tokens_and_without_any_tokens():
    made = CommonAttentionMetadata.from_lens([0, 2, 0], [3, 2, 0], [[1], [0], []], BLOCK)
    assert made.query_start_loc.tolist() == [0, 0, 2, 2] and made.slot_mapping.tolist() == [0, 1]
    assert made.validate(BLOCK, 2, strict=True) is made


def test_more_queries_than_keys_is_refused_unless_asked_for():
    """The commonest mistake is a context length for a total one; who means it says so, and leading rows see nothing."""
    bound = "at least query_lens[0] = 5 (seq_lens counts the new tokens too)"
    with pytest.raises(MetadataError) as caught:
        CommonAttentionMetadata.from_lens([5], [0], [[2, 3]], BLOCK)
    assert str(caught.value) == f"seq_lens[0] = 0: must be {bound}"
    assert vars(caught.value) == {"field": "seq_lens", "index": 0, "value": 0, "bound": bound}
    made = CommonAttentionMetadata.from_lens([3], [1], [[2]], BLOCK, strict=False)
    assert made.slot_mapping.tolist() == [-1, -1, 8] and made.validate(BLOCK) is made
    with pytest.raises(MetadataError, match=r"seq_lens\[0\] = 1: must be at least query_lens\[0\] = 3"):
        made.validate(BLOCK, strict=True)
    assert made.replace(causal=False).validate(BLOCK, strict=True)
    assert CommonAttentionMetadata.from_lens([3], [1], [[2]], BLOCK, causal=False).slot_mapping.tolist() == [-1, -1, 8]


@pytest.mark.parametrize("value", [[False], "no", "False", 0, 1, None, np.array(False), 0.0])
def test_flags_are_true_or_false(value):
    """A list or a word is true to Python, whatever it says."""
    with pytest.raises(MetadataError) as caught:
        batch(causal=value).validate(BLOCK)
    message = f"causal = {value}: must be True or False" + ", not a string" * isinstance(value, str)
    assert str(caught.value) == message and caught.value.field == "causal"
    for name in ("causal", "strict", "writes"):
        if name == "causal" and value == [False]:  # one per request
            continue
        with pytest.raises(MetadataError, match=f"^{name} = .*: must be True or False"):
            CommonAttentionMetadata.from_lens([1], [3], [[0]], BLOCK, **{name: value})
    assert batch(causal=np.False_).validate(BLOCK) and batch(causal=np.True_).validate(BLOCK)


def test_causality_of_each_request():
    made = CommonAttentionMetadata.from_lens([1, 2], [3, 2], [[0], [1]], BLOCK, causal=[True, False])
    assert made.mask.is_causal.tolist() == [True, False] and not made.all_causal
    same = CommonAttentionMetadata.from_lens([1, 2], [3, 2], [[0], [1]], BLOCK, causal=[True, True])
    assert same.mask.is_causal is None and same.all_causal
    assert CommonAttentionMetadata.from_lens([3], [1], [[2]], BLOCK, causal=[False]).all_causal is False
    for wrong in ([True], [True, 0], ["no", True]):
        with pytest.raises(MetadataError, match="True, False, or a list of 2 of them, one per request"):
            CommonAttentionMetadata.from_lens([1, 2], [3, 2], [[0], [1]], BLOCK, causal=wrong)
    with pytest.raises(ShapeError, match=r"causal has shape \[3\]: must be \[2\]"):
        made.replace(causal=np.ones(3, np.bool_)).validate(BLOCK)
    with pytest.raises(MetadataError, match=r"seq_lens\[1\] = 2: must be at least query_lens\[1\] = 3"):
        CommonAttentionMetadata.from_lens([3, 3], [1, 2], [[0], [1]], BLOCK, causal=[False, True])


REACH = [
    ({"spans": [[0, 1]]}, ShapeError, "spans has 1 rows: must be at least num_actual_tokens=3"),
    ({"spans": [0, 1, 2]}, ShapeError, "spans has shape [3]: must be [T, 2]"),
    ({"spans": [[0.5, 1]] * 3}, DTypeError, "spans has dtype float64: must be integers"),
    ({"spans": [[0, 2], [2, 1], [-1, -1]]}, MetadataError, "spans[1] = [2, 1]: must be (first, last) with 0 <= first <= last"),
    ({"spans": [[0, 2], [-1, 1], [-1, -1]]}, MetadataError, "spans[1] = [-1, 1]: must be (first, last) with 0 <= first"),
    ({"spans": [[0, 2], [1, 1], [1, 3]]}, MetadataError, "schedule the tokens up to position 3 in this step"),
    ({"prefix": [1]}, ShapeError, "prefix has shape [1]: must be [2]"),
    ({"prefix": [1, 4]}, MetadataError, "prefix[1] = 4: must be between 0 and seq_lens[1] = 3"),
    ({"prefix": [-1, 0]}, MetadataError, "prefix[0] = -1: must be between 0 and"),
]


@pytest.mark.parametrize(("given", "error", "message"), REACH)
def test_spans_and_prefixes_are_within_the_cached_tokens(given, error, message):
    with pytest.raises(error) as caught:
        CommonAttentionMetadata.from_lens([1, 2], [5, 3], [[0, 3], [1]], BLOCK, **given)
    assert message in str(caught.value)


def test_spans_of_groups():
    image, text = [4] * 3, [-1]
    spans = spans_of([text + image + [5, 5] + text, image], [5, 3])
    assert spans.tolist() == [[1, 3], [1, 3], [4, 5], [4, 5], [-1, -1], [0, 2], [0, 2], [0, 2]]
    assert spans_of([], []).shape == (0, 2) and spans_of([[]], [0]).shape == (0, 2)
    made = CommonAttentionMetadata.from_lens([5, 3], [7, 3], [[0, 3], [1]], BLOCK, spans=spans)
    assert made.spans.dtype == np.int32
    with pytest.raises(ShapeError, match="groups has 1 entries: must be 2"):
        spans_of([[1]], [1, 1])
    with pytest.raises(MetadataError, match=r"query_lens\[0\] = 2: must be between 0 and"):
        spans_of([[1]], [2])
    with pytest.raises(DTypeError, match=r"groups\[0\]"):
        spans_of([[0.5]], [1])


FROM_LENS = [
    ([1, -2], [3, 3], MetadataError, "query_lens[1] = -2: must be between 0 and 2147483647"),
    ([-2], [3], MetadataError, "query_lens[0] = -2: must be between 0 and 2147483647"),
    ([1, 1], [3, -3], MetadataError, "seq_lens[1] = -3: must be between 0 and 2147483647"),
    ([2**31], [1], MetadataError, "query_lens[0] = 2147483648: must be between 0 and 2147483647"),
    ([1], [2**31], MetadataError, "seq_lens[0] = 2147483648: must be between 0 and 2147483647"),
    ([1], [2**63], MetadataError, "seq_lens[0] = 9223372036854775808: must be between 0 and 2147483647"),
    ([2**30, 2**30], [1, 1], MetadataError, "query_start_loc[2] = 2147483648: must be at most 2147483647"),
    ([1.5], [3], DTypeError, "query_lens has dtype float64: must be integers"),
    ([1], ["3"], DTypeError, "seq_lens has dtype <U1: must be integers"),
    ([True], [3], DTypeError, "query_lens has dtype bool: must be integers"),
    ([1, 1], [3], ShapeError, "seq_lens has shape [1]: must be [2]"),
    ([[1, 1]], [3, 3], ShapeError, "query_lens has shape [1, 2]: must be [R]"),
    (3, [3], ShapeError, "query_lens has shape []: must be [R]"),
    ([1], [13], MetadataError, "seq_lens[0] = 13: must be at most 8 (2 blocks of 4 in its table row)"),
]


@pytest.mark.parametrize(("query_lens", "seq_lens", "error", "message"), FROM_LENS)
def test_lengths_that_make_no_batch(query_lens, seq_lens, error, message):
    rows = [[0, 1]] * (len(query_lens) if isinstance(query_lens, list) else 1)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        CommonAttentionMetadata.from_lens(query_lens, seq_lens, rows, BLOCK)


# --- V0: static facts, arrays of any kind-------------------------------------------------------------------------

STATIC = [
    ({"query_start_loc": ints(0, 1, 6)}, ShapeError, "query_start_loc has shape [3]: must be [4]"),
    ({"query_start_loc": ints(0, 1, 6, 9)[None]}, ShapeError, "query_start_loc has shape [1, 4]: must be [4]"),
    (
        {"query_start_loc": ints(0, 1, 6, 9, dtype=np.int64)},
        DTypeError,
        "query_start_loc has dtype int64: must be int32",
    ),
    ({"seq_lens": ints(9, 5)}, ShapeError, "seq_lens has shape [2]: must be [3]"),
    ({"seq_lens": ints(9, 5, 7, dtype=np.float32)}, DTypeError, "seq_lens has dtype float32: must be int32"),
    ({"seq_lens": [9, 5, 7]}, DTypeError, "seq_lens is a list: must be an array of int32"),
    ({"seq_lens": None}, DTypeError, "seq_lens is a NoneType: must be an array of int32"),
    ({"block_table": ints(1, 2, 3)}, ShapeError, "block_table has shape [3]: must be [3, *]"),
    ({"block_table": np.zeros((2, 3), np.int32)}, ShapeError, "block_table has shape [2, 3]: must be [3, *]"),
    ({"block_table": np.zeros((3, 3), np.int64)}, DTypeError, "block_table has dtype int64: must be int32"),
    ({"slot_mapping": np.zeros((9, 1), np.int64)}, ShapeError, "slot_mapping has shape [9, 1]: must be [*]"),
    ({"slot_mapping": np.zeros(9, np.int16)}, DTypeError, "slot_mapping has dtype int16: must be int32 or int64"),
    (
        {"slot_mapping": np.zeros(8, np.int64)},
        ShapeError,
        "slot_mapping has 8 entries: must be at least num_actual_tokens=9",
    ),
    ({"tree_mask": np.ones((3, 2), bool)}, ShapeError, "tree_mask has shape [3, 2]: must be [3, *, *]"),
    ({"tree_mask": np.ones((3, 2, 4), bool)}, ShapeError, "tree_mask has shape [3, 2, 4]: must be [R, W, W]"),
    ({"tree_mask": np.ones((3, 2, 2), np.uint8)}, DTypeError, "tree_mask has dtype uint8: must be bool"),
    ({"dcp_local_seq_lens": ints(1, 2)}, ShapeError, "dcp_local_seq_lens has shape [2]: must be [3]"),
    ({"dcp_local_seq_lens": np.ones(3)}, DTypeError, "dcp_local_seq_lens has dtype float64: must be int32"),
    ({"query_start_loc_cpu": ints(0, 1)}, ShapeError, "query_start_loc_cpu has shape [2]: must be [4]"),
    ({"seq_lens_cpu": ints(9, 5)}, ShapeError, "seq_lens_cpu has shape [2]: must be [3]"),
    ({"seq_lens_cpu": np.ones(3)}, DTypeError, "seq_lens_cpu has dtype float64: must be int32 or int64"),
    ({"seq_lens_cpu": [9, 5, 7]}, DTypeError, "seq_lens_cpu is a list: must be a NumPy array"),
]
SCALARS = [
    (name, value)
    for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len")
    for value in (-1, 2**31, 2.0, "3", None, True)
]


@pytest.mark.parametrize(("changes", "error", "message"), STATIC)
def test_static_facts(changes, error, message):
    with pytest.raises(error) as caught:
        batch(**changes).validate(BLOCK)
    assert str(caught.value) == message and isinstance(caught.value, AttnError)


@pytest.mark.parametrize(("name", "value"), SCALARS)
def test_host_numbers(name, value):
    with pytest.raises(MetadataError) as caught:
        batch(**{name: value}).validate(BLOCK)
    found = caught.value
    bound = f"an int between 0 and {INT32_MAX}" + ", not a string" * isinstance(value, str)
    assert (found.field, found.index, found.bound) == (name, None, bound)
    assert found.value is value


@pytest.mark.parametrize("block_size", [0, -16, 2.0, None, True])
def test_block_size(block_size):
    with pytest.raises(MetadataError) as caught:
        batch().validate(block_size)
    assert (caught.value.field, caught.value.value) == ("block_size", block_size)


def test_numpy_integers_are_host_numbers():
    assert batch(num_reqs=np.int64(3), max_seq_len=np.int32(9)).validate(np.int64(BLOCK))


# --- V1: values on the host ----------------------------------------------------------------------------------------

HOST = [
    ({"query_start_loc_cpu": ints(1, 1, 6, 9)}, "query_start_loc", 0, 1, "0"),
    ({"query_start_loc_cpu": ints(-1, 1, 6, 9)}, "query_start_loc", 0, -1, "0"),
    ({"query_start_loc_cpu": ints(0, 6, 1, 9)}, "query_start_loc", 2, 1, "at least 6, the entry before it"),
    ({"query_start_loc_cpu": ints(0, 1, 9, 6)}, "query_start_loc", 3, 6, "at least 9, the entry before it"),
    ({"query_start_loc_cpu": ints(0, 1, 6, 10)}, "query_start_loc", 3, 10, "at most num_actual_tokens=9"),
    (
        {"query_start_loc_cpu": ints(0, INT32_MAX, -(2**31), 0), "max_query_len": INT32_MAX},
        "query_start_loc",
        2,
        -(2**31),
        f"at least {INT32_MAX}, the entry before it",
    ),
    ({"max_query_len": 4}, "max_query_len", None, 4, "at least 5, the longest query"),
    ({"max_seq_len": 8}, "max_seq_len", None, 8, "at least 9, the longest sequence"),
    ({"seq_lens_cpu": ints(9, -5, 7)}, "seq_lens", 1, -5, "at least 0"),
    (
        {"seq_lens_cpu": ints(9, 5, 13), "max_seq_len": 13},
        "seq_lens",
        2,
        13,
        "at most 12 (3 blocks of 4 in its table row)",
    ),
    (
        {"seq_lens_cpu": ints(9, 5, INT32_MAX), "max_seq_len": INT32_MAX},
        "seq_lens",
        2,
        INT32_MAX,
        "at most 12 (3 blocks of 4 in its table row)",
    ),
]


@pytest.mark.parametrize(("changes", "field", "index", "value", "bound"), HOST)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_host_values(changes, field, index, value, bound, dtype):
    changes = {name: x.astype(dtype) if isinstance(x, np.ndarray) else x for name, x in changes.items()}
    with pytest.raises(MetadataError) as caught:
        batch(**changes).validate(BLOCK)
    assert vars(caught.value) == {"field": field, "index": index, "value": value, "bound": bound}
    assert type(caught.value.value) is int


def test_bounds_may_be_larger_than_the_truth():
    """Fit for a captured graph; and padding tokens after the real ones belong to no request."""
    padded = batch(max_query_len=64, max_seq_len=4096, num_actual_tokens=12, slot_mapping=np.full(16, -1, np.int64))
    assert padded.validate(BLOCK, 7, strict=True) is padded


def test_without_mirrors_no_length_is_looked_at():
    """A device's lengths are not fetched; NumPy's are their own mirrors."""
    away = {
        name: torch.from_numpy(ints(*values)) for name, values in (("query_start_loc", (9, 0, -1, 3)), ("seq_lens", (1, 2, 3)))
    }
    wrong = batch(**away, query_start_loc_cpu=None, seq_lens_cpu=None, max_query_len=0)
    assert wrong.validate(BLOCK) is wrong and wrong.query_lens_cpu() is None
    with pytest.raises(MetadataError, match=r"query_start_loc\[0\] = 9"):
        batch(query_start_loc=ints(9, 0, -1, 3), query_start_loc_cpu=None).validate(BLOCK)


IDS = [
    (
        {"block_table": ints(4, 7, 0, 1, 3, -1, 5, 6, -1).reshape(3, 3)},
        "block_table",
        (0, 1),
        7,
        "between 0 and 6 (3 blocks of 4 hold 9 tokens)",
    ),
    (
        {"block_table": ints(4, 2, -1, 1, 3, -1, 5, 6, -1).reshape(3, 3)},
        "block_table",
        (0, 2),
        -1,
        "between 0 and 6 (3 blocks of 4 hold 9 tokens)",
    ),
    ({"slot_mapping": np.r_[28, 4:12].astype(np.int64)}, "slot_mapping", 0, 28, "-1 or between 0 and 27"),
    ({"slot_mapping": np.r_[-2, 4:12].astype(np.int64)}, "slot_mapping", 0, -2, "-1 or between 0 and 27"),
    ({"slot_mapping": np.r_[4:12, 6].astype(np.int64)}, "slot_mapping", 8, 6, "written by one token only"),
    ({"slot_mapping": np.r_[0, 5:12, 0].astype(np.int64)}, "slot_mapping", 8, 0, "written by one token only"),
]


@pytest.mark.parametrize(("changes", "field", "index", "value", "bound"), IDS)
def test_block_ids_and_slots(changes, field, index, value, bound):
    wrong = batch(**changes)
    assert wrong.validate(BLOCK) is wrong, "the cache's extent is not known yet"
    with pytest.raises(MetadataError) as caught:
        wrong.validate(BLOCK, 7)
    assert vars(caught.value) == {"field": field, "index": index, "value": value, "bound": bound}


def test_entries_that_are_never_read_may_be_anything():
    table = batch().block_table.copy()
    table[1, 2], table[2, 2] = 999_999, -77
    slots = np.r_[batch().slot_mapping, [999_999, 0, 0]]
    assert batch(block_table=table, slot_mapping=slots).validate(BLOCK, 7)
    skipped = batch(slot_mapping=np.full(9, -1, np.int64))
    assert skipped.validate(BLOCK, 7) is skipped, "-1 may come any number of times"


def test_nothing_is_repaired():
    """A refused batch is as the caller made it: no clamp, no cast, no copy."""
    wrong = batch(slot_mapping=np.r_[28, 4:12].astype(np.int64), max_seq_len=9)
    before = {name: np.copy(x) if isinstance(x, np.ndarray) else x for name, x in vars(wrong).items()}
    with pytest.raises(MetadataError):
        wrong.validate(BLOCK, 7)
    for name, x in before.items():
        np.testing.assert_array_equal(getattr(wrong, name), x)


# --- arrays of devices ---------------------------------------------------------------------------------------------


class OnDevice:
    """An array whose shape and dtype may be read, and nothing else: every other access would synchronise."""

    def __init__(self, like, dtype=None):
        self.shape, self.dtype = like.shape, dtype or like.dtype

    def _synchronises(self, *args, **kwargs):
        raise AssertionError("a device array was read")

    __array__ = __len__ = __iter__ = __getitem__ = __bool__ = __int__ = __eq__ = __lt__ = _synchronises
    __hash__ = None
    cpu = numpy = item = tolist = __dlpack__ = __array_interface__ = property(_synchronises)


DEVICE_FIELDS = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")


def test_device_arrays_are_never_read():
    made = batch()
    on_device = made.replace(
        **{name: OnDevice(getattr(made, name)) for name in DEVICE_FIELDS},
        tree_mask=OnDevice(np.ones((3, 2, 2), bool)),
        dcp_local_seq_lens=OnDevice(made.seq_lens),
    )
    assert on_device.validate(BLOCK, 7, strict=True) is on_device
    with pytest.raises(MetadataError, match="seq_lens"):
        on_device.replace(seq_lens_cpu=ints(9, 5, 13), max_seq_len=13).validate(BLOCK, 7)
    with pytest.raises(ShapeError, match="block_table"):
        on_device.replace(block_table=OnDevice(np.ones((2, 3), np.int32))).validate(BLOCK)
    with pytest.raises(DTypeError, match="seq_lens has dtype int64: must be int32"):
        on_device.replace(seq_lens=OnDevice(made.seq_lens, "torch.int64")).validate(BLOCK)


@pytest.mark.parametrize("framework", ["torch", "jax.numpy"])
def test_every_frameworks_arrays_are_taken(framework):
    """slot_mapping is int32 under jax, whose integers are 32 bits wide unless told otherwise."""
    module, made = pytest.importorskip(framework), batch()
    convert = module.from_numpy if framework == "torch" else lambda x: module.asarray(x.astype(np.int32))
    converted = made.replace(**{name: convert(getattr(made, name)) for name in DEVICE_FIELDS})
    assert converted.validate(BLOCK, 7, strict=True) is converted
    with pytest.raises(DTypeError, match="seq_lens_cpu is a .*: must be a NumPy array"):
        converted.replace(seq_lens_cpu=convert(made.seq_lens)).validate(BLOCK)
    with pytest.raises(DTypeError, match="seq_lens has dtype float32: must be int32"):
        converted.replace(seq_lens=module.ones(3)).validate(BLOCK)


def test_numpy_arrays_that_replace_lengths_are_their_own_mirrors():
    """A mirror of the earlier lengths would be checked in place of the new ones."""
    changed = batch().replace(seq_lens=ints(9, 5, 100))
    assert changed.seq_lens_cpu.tolist() == [9, 5, 100]
    with pytest.raises(MetadataError, match="max_seq_len = 9: must be at least 100"):
        changed.validate(BLOCK)
    assert batch().replace(query_start_loc=ints(0, 1, 6, 8)).query_lens_cpu().tolist() == [1, 5, 2]
    mirror = ints(9, 5, 7)
    assert batch().replace(seq_lens=ints(1, 1, 1), seq_lens_cpu=mirror).seq_lens_cpu is mirror
    assert batch().replace(seq_lens=torch.ones(3)).seq_lens_cpu.tolist() == [9, 5, 7]


@pytest.mark.parametrize("causal", [np.True_, np.False_])
def test_a_batch_whose_flag_is_numpys_is_divided(causal):
    part = batch(causal=causal).select(1, 3)
    assert part.num_reqs == 2 and part.causal is causal


def test_every_stated_extent_of_an_array_is_checked():
    with pytest.raises(ShapeError, match=r"spans has shape \[9, 3\]: must be \[\*, 2\]"):
        batch(spans=np.full((9, 3), -1, np.int32)).validate(BLOCK)


@pytest.mark.parametrize(("first", "last"), [(0, 4), (-1, 2), (2, 1)])
def test_a_part_that_is_not_of_the_batch_is_refused(first, last):
    with pytest.raises(MetadataError, match=rf"requests = \({first}, {last}\): must be first, last with 0 <= first <= last"):
        batch().select(first, last)


def test_arguments_of_a_wrong_type_are_named():
    with pytest.raises(ShapeError, match="block_table is None: must be rows of block ids"):
        CommonAttentionMetadata.from_lens([5], [5], None, 16)
    with pytest.raises(MetadataError, match="block_size = 16: must be an int between 1 and .*, not a string"):
        CommonAttentionMetadata.from_lens([5], [5], [[1]], "16")
