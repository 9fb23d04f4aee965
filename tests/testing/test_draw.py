"""The arrays of a case: live data in place, poison everywhere else (about a second)."""

import numpy as np
import pytest

from attn.testing import Case, bits, draw
from attn.testing.expected import specified_cache
from tests.testing.mutants import positive_cases

CASE = Case("mixed", (1, 6, 18), (33, 9, 18), padding=2, lse=True)


def live_slots(case: Case) -> np.ndarray:
    """[N * P] whether some request reads the slot."""
    call = draw(case)
    live = np.zeros(call.key_cache.shape[0] * case.block_size, bool)
    for r, m in enumerate(case.seq_lens):
        j = np.arange(m if case.query_lens[r] else 0)
        live[call.batch.block_table[r, j // case.block_size] * case.block_size + j % case.block_size] = True
    return live


def test_the_same_case_is_the_same_call() -> None:
    one = draw(CASE)
    draw.cache_clear()
    two = draw(CASE)
    for name in ("query", "key", "value", "key_cache", "value_cache"):
        assert np.array_equal(bits.as_bytes(getattr(one, name)), bits.as_bytes(getattr(two, name)))
    assert np.array_equal(one.batch.block_table, two.batch.block_table)


def test_the_two_seeds_are_independent() -> None:
    base, moved, other = draw(CASE), draw(CASE.replace(geometry_seed=1)), draw(CASE.replace(data_seed=1))
    assert np.array_equal(base.query, moved.query, equal_nan=True)
    assert not np.array_equal(base.batch.block_table, moved.batch.block_table)
    assert not np.array_equal(base.query, other.query, equal_nan=True)
    assert np.array_equal(base.batch.block_table, other.batch.block_table)


def test_a_requests_data_do_not_depend_on_the_others() -> None:
    alone = draw(CASE.replace(query_lens=(1,), seq_lens=(33,), padding=0))
    assert np.array_equal(alone.query[0], draw(CASE).query[0])


def test_everything_unused_is_poison() -> None:
    call = draw(CASE)
    keys = bits.decode(call.key_cache, "float32").reshape(-1, 2 * 64)
    live = live_slots(CASE)
    written = np.zeros_like(live)
    written[call.batch.slot_mapping[call.batch.slot_mapping >= 0]] = True
    assert np.isfinite(keys[live & ~written]).all()
    unused = keys[~live | written]
    assert np.isnan(unused).any(axis=1).all()
    assert np.isnan(call.query[25:]).all() and np.isnan(call.key[25:]).all()
    assert (call.batch.slot_mapping[25:] == -1).all()


def test_keys_that_every_window_left_behind_are_poison() -> None:
    call = draw(CASE.replace(sliding_window=4))
    keys = call.key_cache.reshape(-1, 2 * 64)
    table = call.batch.block_table[0]
    dead = np.arange(29)  # of 33 keys the one query sees 29..32
    assert np.isnan(keys[table[dead // 16] * 16 + dead % 16]).any(axis=1).all()


def test_table_tails_are_stale() -> None:
    tail = draw(CASE).batch.block_table[1, 1:]
    assert (tail == -1).any() and (tail >= 0).any()


def test_a_shared_prefix_is_in_the_same_pages_with_the_same_content() -> None:
    call = draw(Case("shared", (1, 5, 2), (50, 37, 9), shared_prefix=32))
    table = call.batch.block_table
    assert np.array_equal(table[0, :2], table[1, :2])
    assert table[2, 0] not in table[:2, :3]
    assert len(set(table[0, :4]) & set(table[1, :3])) == 2


@pytest.mark.parametrize("case", [c for c in positive_cases() if c.name.startswith("grid")][::6], ids=str)
def test_values_are_exact_in_their_dtype_and_arrays_read_only(case: Case) -> None:
    call = draw(case)
    for array in (call.query, call.key, call.value):
        if array is not None:
            assert np.array_equal(bits.rounded(array, case.dtype), array, equal_nan=True)
            assert not array.flags.writeable
    call.batch.validate(case.block_size, None if call.key_cache is None else call.key_cache.shape[0])


def test_arrays_of_a_changed_call_are_read_only_too() -> None:
    call = draw(CASE)
    changed = call.but(query=call.query * 2).with_batch(prefix=np.zeros(call.batch.num_reqs, np.int32))
    arrays = [x for x in (*vars(changed).values(), *vars(changed.batch).values()) if isinstance(x, np.ndarray)]
    assert len(arrays) > 8 and not any(array.flags.writeable for array in arrays)


def test_queries_longer_than_their_keys_have_no_slot_for_the_rows_before_the_sequence() -> None:
    call = draw(Case("long query", (5, 3), (2, 0)))
    assert (call.batch.slot_mapping[:3] == -1).all() and (call.batch.slot_mapping[3:5] >= 0).all()
    assert (call.batch.slot_mapping[5:] == -1).all()


def test_the_specified_cache_writes_new_tokens_and_nothing_else() -> None:
    call = draw(CASE)
    before, after = call.key_cache, specified_cache(call)[0]
    changed = (bits.as_bytes(before) != bits.as_bytes(after)).any(axis=(2, 3)).reshape(-1)
    assert set(np.flatnonzero(changed)) == set(call.batch.slot_mapping[call.batch.slot_mapping >= 0])


def test_needles_point_at_keys() -> None:
    case = Case("needle", (18,), (40,), inputs="needle", num_heads=2, num_kv_heads=1)
    call = draw(case)
    scores = np.einsum("nhd,md->nhm", call.query, call.key[:, 0])[..., :] / 8
    assert np.median(scores.max(-1)) > 3  # against about 2.5 for the best of 18 randn keys, and mostly 8


def test_too_few_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=2"):
        draw(Case("small", (1,), (100,), num_blocks=2))
