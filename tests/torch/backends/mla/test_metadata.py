"""The plan of a prefill's context: how many turns it takes, how many rows each has, and where its keys are (below a second)."""

from typing import Any

import numpy as np
import pytest
import torch

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.torch import MLAAttention
from attn.torch.backends.mla._metadata import MLACommonMetadataBuilder, context_spans, is_short

PAGE = 16


def drawn(seed: int) -> tuple[Any, Any, int]:
    """Return query and context lengths of up to 200 requests, some of them decodes or without context, and a workspace."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 200))
    q_lens = np.exp(rng.uniform(0, np.log(300), count)).astype(int)
    context = np.exp(rng.uniform(0, np.log(5000), count)).astype(int) * (rng.random(count) < rng.random())
    return q_lens, context, int(np.exp(rng.uniform(np.log(30), np.log(20000))))


@pytest.mark.parametrize("before_a_call", [False, True])
@pytest.mark.parametrize("rows", [[1, 3], [1, 40]])
def test_lengths_that_are_assigned_to_a_batch_are_attended(rows: list[int], before_a_call: bool) -> None:
    layer = MLAAttention(2, 32, 16, 16, 16, torch.randn(32, 2, 32), block_size=PAGE, backend="TORCH_MLA")
    cache, query = layer.new_kv_cache(16).normal_(), torch.randn(sum(rows), 2, 32)
    tables = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    meta, other = (layer.build(CommonAttentionMetadata.from_lens(rows, lens, tables, PAGE)) for lens in ([30, 60], [20, 70]))
    want = layer(query, None, None, cache, other)
    if not before_a_call:
        assert not torch.allclose(layer(query, None, None, cache, meta), want)
    for name in ("seq_lens", "seq_lens_cpu", "max_seq_len", "block_table"):
        setattr(meta, name, getattr(other, name))
    torch.testing.assert_close(layer(query, None, None, cache, meta), want)


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_is_as_long_as_its_work(seed: int) -> None:
    """Turns are about context / workspace, and rows take part as often as their own context needs."""
    q_lens, context, workspace = drawn(seed)
    lens = q_lens + context
    tables = [list(range(1000 * r, 1000 * r + -(-m // PAGE))) for r, m in enumerate(lens.tolist())]
    batch = CommonAttentionMetadata.from_lens(q_lens.tolist(), lens.tolist(), tables, PAGE)
    metadata = MLACommonMetadataBuilder(KVCacheSpec(PAGE, 1, 40, "float32")).build(0, batch)
    long = q_lens > 16
    if metadata.prefill is None:
        assert not long.any()
        return
    plan, total = metadata.prefill.plan(workspace), int(context[long].sum())
    assert len(plan.chunks) <= 2 * total / workspace + 1
    rows = [chunk.rows.stop - chunk.rows.start for chunk in plan.chunks]
    assert sum(rows) == int((q_lens * -(-context // workspace))[long].sum())
    assert plan.once == bool((context[long] <= workspace).all())

    owner = np.repeat(np.arange(len(q_lens)), q_lens)  # the request of each row of the batch, then of the prefill
    packed = metadata.prefill.rows
    owner = owner[packed] if isinstance(packed, slice) else owner[packed.numpy()]
    seen: dict[int, list[int]] = {}
    for part in plan.chunks:
        meta, (chunk,) = part.meta, part.meta.chunks
        pages, offsets = (x.numpy() for x in part.places)
        assert 0 < chunk.num_keys == len(pages) <= workspace
        for mirror, tensor in (
            (meta.query_start_loc_cpu, meta.query_start_loc),
            (chunk.key_start_loc_cpu, chunk.key_start_loc),
        ):
            assert tensor.tolist() == mirror.tolist() and tensor.dtype == torch.int32
            assert tensor.storage_offset() % 4 == 0  # 16 bytes, for which kernels are compiled
        queries, keys = np.diff(meta.query_start_loc_cpu), np.diff(chunk.key_start_loc_cpu)
        assert (meta.num_reqs, meta.max_query_len, chunk.max_keys) == (len(queries), queries.max(), keys.max())
        requests = np.repeat(np.arange(len(keys)), keys)
        for i in range(meta.num_reqs):
            (r,) = set(owner[part.rows][meta.query_start_loc_cpu[i] : meta.query_start_loc_cpu[i + 1]].tolist())
            mine = requests == i
            assert mine.any() and set(pages[mine] // 1000) == {r}
            seen.setdefault(r, []).extend((pages[mine] % 1000 * PAGE + offsets[mine]).tolist())
    assert seen == {int(r): list(range(context[r])) for r in np.flatnonzero(long & (context > 0))}


def test_bounds_of_decodes_are_their_own() -> None:
    """Not the threshold, nor the longest request of the batch: kernels choose tiles and splits of keys by these bounds."""
    tables = [list(range(100 * r, 100 * r + 80)) for r in range(4)]
    batch = CommonAttentionMetadata.from_lens([1, 40, 3, 2], [70, 1200, 33, 2], tables, PAGE)
    decode = MLACommonMetadataBuilder(KVCacheSpec(PAGE, 1, 40, "float32")).build(0, batch).decode
    assert (decode.max_query_len, decode.max_seq_len) == (3, 70)


def test_cuts_of_a_request_do_not_depend_on_its_neighbours() -> None:
    def cuts(lens: list[int], r: int) -> list[int]:
        start = sum(lens[:r])
        ends = {span.end - start for span in context_spans(np.array(lens), 100)}
        return sorted(end for end in ends if 0 < end < lens[r])

    assert cuts([250], 0) == cuts([30, 250, 80], 1) == cuts([70, 0, 250], 2) == [100, 200]
    assert cuts([60, 60], 1) == []  # one that fits is never cut
    assert context_spans(np.array([0, 0]), 100) == []


def test_a_prompt_is_short_if_it_has_fewer_operations_absorbed() -> None:
    """By DeepSeek's sizes, 171 rows over a long context; the fewer, the shorter the context is."""
    rows, context = (x.ravel() for x in np.meshgrid(np.arange(1, 400), [0, 50, 200, 1000, 100_000]))
    pairs = rows * context + rows * rows / 2
    absorbed, expanded = 1088 * pairs, 320 * pairs + 512 * 256 * context
    found = is_short(rows, context, 171)
    assert (found == (absorbed <= expanded))[abs(absorbed / expanded - 1) > 0.01].all()
    assert is_short(np.array([171, 172]), np.array([10**6] * 2), 171).tolist() == [False, False]
    assert is_short(np.array([170, 1]), np.array([10**6, 0]), 171).tolist() == [True, False]
    assert not is_short(rows, context, 0).any()
