"""The MLA template under torch: chunked context, drafts, context parallelism, weights, refusals (about 10 s).

Cases of lengths, dtypes and caches are the conformance suite's (`tests/test_conformance.py`).
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum
from attn.distributed import DCPGroup, set_dcp_group
from attn.errors import DeviceError, DTypeError, MetadataError, ShapeError, UnsupportedError
from attn.reference import dcp_local_lens, mla_unabsorbed, pack_fp8_ds_mla, unpack_fp8_ds_mla
from attn.testing import Case, run_case
from attn.testing.rules import BUDGETS, Score
from attn.torch import MLAAttention
from attn.torch import kv_cache as caches
from attn.torch.backends.mla import _mla, _rows
from attn.torch.backends.mla.torch_mla import TorchMLABackend
from attn.torch.backends.mla.torch_mla_sparse import TorchMLASparseBackend
from attn.torch.merge import merge_attn_states

H, L, DN, DR, DV, P = 4, 32, 24, 16, 40, 8
SCALE = (DN + DR) ** -0.5
ONE = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))


def weights(seed=0):
    return torch.randn(L, H, DN + DV, generator=torch.Generator().manual_seed(seed)) / L**0.5


def implementation(kv_b_proj=None, backend=TorchMLABackend, lse=True, **changes):
    arguments = {
        "num_heads": H, "head_size": L + DR, "scale": SCALE, "num_kv_heads": 1, "alibi_slopes": None, "sliding_window": None,
        "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder", "kv_sharing_target_layer_name": None,
        "q_lora_rank": None, "kv_lora_rank": L, "qk_nope_head_dim": DN, "qk_rope_head_dim": DR, "qk_head_dim": DN + DR,
        "v_head_dim": DV, "kv_b_proj": weights() if kv_b_proj is None else kv_b_proj,
    }  # fmt: skip
    impl = backend.get_impl_cls()(**{**arguments, **changes})
    impl.need_to_return_lse_for_decode = lse
    return impl


class Sequences:
    """Requests with their tokens, a cache that holds the context, and what the oracle says."""

    def __init__(self, q_lens, seq_lens, seed=1):
        g = torch.Generator().manual_seed(seed)
        self.q_lens, self.seq_lens = q_lens, seq_lens
        used = [-(-m // P) for m in seq_lens]
        self.blocks = sum(used) + 2
        ids = torch.randperm(self.blocks, generator=g).tolist()
        self.table = [[ids.pop() for _ in range(n)] for n in used]
        self.batch = CommonAttentionMetadata.from_lens(q_lens, seq_lens, self.table, P)
        self.query = torch.randn(sum(q_lens), H, DN + DR, generator=g)
        self.rows = [torch.randn(m, L + DR, generator=g) for m in seq_lens]
        self.cache = torch.full((self.blocks, P, L + DR), torch.nan)
        for table, rows, n in zip(self.table, self.rows, q_lens, strict=True):
            for j in range(len(rows) - n):
                self.cache[table[j // P], j % P] = rows[j]
        fresh = torch.cat([rows[len(rows) - n :] for rows, n in zip(self.rows, q_lens, strict=True)])
        self.kv_c, self.k_pe = fresh[:, :L], fresh[:, L:]

    def run(self, impl, threshold=16, short=0, **changes):
        ours = {"decode_threshold": threshold, "short_rows": lambda self: short}
        builder = type("Builder", (impl.backend.get_builder_cls(),), ours)
        metadata = builder(KVCacheSpec(P, 1, L + DR, "float32")).build(0, self.batch)
        call = {"query": self.query, "kv_c": self.kv_c, "k_pe": self.k_pe, "cache": self.cache, "metadata": metadata, **changes}
        return impl.forward(ONE, call["query"], call["kv_c"], call["k_pe"], call["cache"], call["metadata"], call.get("output"))

    def expected(self, up=None):
        up = (weights() if up is None else up).double().numpy()
        outs, lses, start = [], [], 0
        for rows, n in zip(self.rows, self.q_lens, strict=True):
            q, c = self.query[start : start + n].double().numpy(), rows.double().numpy()
            out, lse = mla_unabsorbed(q[..., :DN], q[..., DN:], c[:, :L], c[:, L:], up[..., :DN], up[..., DN:], scale=SCALE)
            outs.append(out)
            lses.append(lse)
            start += n
        return torch.from_numpy(np.concatenate(outs)).float(), torch.from_numpy(np.concatenate(lses, 1)).float()


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("threshold", [None, 16, 4, 0])
def test_absorbed_and_expanded_forms_agree(threshold):
    sequences = Sequences([1, 20, 3, 33, 16], [40, 75, 3, 33, 50])
    close(sequences.run(implementation(), threshold), sequences.expected())


@pytest.mark.parametrize("workspace", [1, 64 * H * (L + DR + L) * 4, 1 << 20])
@pytest.mark.parametrize("invariant", [False, True])
def test_short_prompts_over_long_contexts_are_absorbed(monkeypatch, workspace, invariant):
    """In parts of bounded memory, among decodes and long prompts in any order; the answer is the same."""
    monkeypatch.setattr(_mla, "_WORKSPACE", workspace)
    sequences = Sequences([20, 1, 30, 18, 40, 17, 20], [90, 7, 300, 20, 200, 60, 21])
    absorbed, expanded = [], []
    impl = implementation()
    impl.batch_invariant = invariant
    decode, prefill = type(impl)._decode, MLAPrefillBackendEnum["TORCH_SDPA"].get_class()
    expand = prefill.run_prefill_new_tokens
    monkeypatch.setattr(type(impl), "_decode", lambda self, call: absorbed.append(call.meta.num_tokens) or decode(self, call))
    monkeypatch.setattr(
        prefill, "run_prefill_new_tokens", lambda self, q, *rest: expanded.append(len(q)) or expand(self, q, *rest)
    )
    close(sequences.run(impl, short=32), sequences.expected())
    most = max(1, workspace // (H * (L + DR + L) * 4))
    short = [20, 30, 17]  # not 18 and 20, whose context is short, nor 40
    if invariant or most < 37:
        assert absorbed == [1, *short]
    else:
        assert absorbed == [1, 50, 17] if most == 64 else absorbed == [1, 67]
    assert sum(expanded) == 18 + 40 + 20


@pytest.mark.parametrize("workspace", [1, 9 * H * (DN + DR + DV) * 4, 100 * H * (DN + DR + DV) * 4])
def test_context_comes_in_chunks_of_bounded_size(monkeypatch, workspace):
    monkeypatch.setattr(_mla, "_WORKSPACE", workspace)
    sequences = Sequences([20, 1, 30, 18], [61, 7, 30, 20])
    gathered = []
    real = _rows.gather
    monkeypatch.setattr(_rows, "gather", lambda cache, pages, at: gathered.append(len(pages)) or real(cache, pages, at))
    close(sequences.run(implementation()), sequences.expected())
    chunks = gathered[1:]  # the first is the decode's
    assert max(chunks) * H * (DN + DR + DV) * 4 <= max(workspace, 2 * H * (DN + DR + DV) * 4)
    assert sum(chunks) == 41 + 2


@pytest.mark.parametrize("workspace", [16, 64])
def test_only_rows_whose_context_is_expanded_attend_it(monkeypatch, workspace):
    """Not every row in every turn, nor as many turns as the longest context takes beside the shares of all others."""
    q_lens, context = [18, 3, 20, 17, 25, 19], [41, 9, 0, 3, 64, 12]
    monkeypatch.setattr(_mla, "_WORKSPACE", workspace * H * (DN + DR + DV) * 4)
    sequences = Sequences(q_lens, [n + m for n, m in zip(q_lens, context, strict=True)])
    calls = []
    prefill = MLAPrefillBackendEnum["TORCH_SDPA"].get_class()
    real = prefill.run_prefill_context_chunk
    monkeypatch.setattr(
        prefill, "run_prefill_context_chunk", lambda self, i, q, *rest: calls.append(len(q)) or real(self, i, q, *rest)
    )
    close(sequences.run(implementation()), sequences.expected())
    turns = [-(-m // workspace) for m in context]
    assert sum(calls) == sum(n * often for n, often in zip(q_lens, turns, strict=True) if n > 16)
    assert len(calls) <= 2 * sum(context) / workspace + 1


def test_parts_may_come_in_any_order_and_share_their_plan():
    sequences = Sequences([30, 1, 25, 4], [41, 30, 25, 4])
    impl = implementation()
    metadata = TorchMLABackend.get_builder_cls()(KVCacheSpec(P, 1, L + DR, "float32")).build(0, sequences.batch)
    close(sequences.run(impl, metadata=metadata), sequences.expected())
    assert metadata.decode.rows.tolist() == [30, *range(56, 60)]
    assert len(metadata.prefill.plans) == 1
    plan = next(iter(metadata.prefill.plans.values()))
    sequences.run(implementation(weights(3)), metadata=metadata)
    assert next(iter(metadata.prefill.plans.values())) is plan


@pytest.mark.parametrize("form", ["linear", "weight", "kernel", "array"])
def test_the_up_projection_comes_in_any_layout(form):
    up = weights()
    linear = nn.Linear(L, H * (DN + DV), bias=False)
    linear.weight.data = up.reshape(L, -1).T.contiguous()
    given = {
        "linear": linear,
        "weight": SimpleNamespace(weight=linear.weight.detach()),
        "kernel": SimpleNamespace(kernel=up.reshape(L, -1)),
        "array": up,
    }[form]
    sequences = Sequences([1, 20], [30, 20])
    close(sequences.run(implementation(given)), sequences.expected())


def test_weights_are_absorbed_once_until_reset():
    linear = nn.Linear(L, H * (DN + DV), bias=False)
    impl, sequences = implementation(linear), Sequences([1, 20], [30, 20])
    before = sequences.run(impl)
    linear.weight.data = weights(5).reshape(L, -1).T.contiguous()
    close(sequences.run(impl), before)
    impl.process_weights_after_loading(torch.float32)
    close(sequences.run(impl), sequences.expected(weights(5)))
    assert impl._w_uk_t.is_contiguous() and impl._w_uv.is_contiguous()
    assert impl._w_up.data_ptr() == linear.weight.data_ptr()  # no copy of the whole


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (2, 4), (3, 2), (4, 16)])
def test_ranks_of_a_context_parallel_group_merge_to_the_whole(world, interleave):
    """Each rank keeps its tokens only; a request shorter than the group leaves some ranks without a key."""
    sequences = Sequences([1, 4, 18, 1], [40, 9, 33, 1])
    want, outs, lses = sequences.expected(), [], []
    try:
        for rank in range(world):
            set_dcp_group(DCPGroup(world, rank, interleave))
            impl = implementation()
            assert impl.need_to_return_lse_for_decode
            local = [int(n) for n in dcp_local_lens(sequences.seq_lens, world, rank, interleave)]
            cache, slots = torch.full_like(sequences.cache, torch.nan), []
            for table, rows, n in zip(sequences.table, sequences.rows, sequences.q_lens, strict=True):
                owned = [j for j in range(len(rows)) if j // interleave % world == rank]
                for i, j in enumerate(owned):
                    if j < len(rows) - n:
                        cache[table[i // P], i % P] = rows[j]
                for j in range(len(rows) - n, len(rows)):
                    i = owned.index(j) if j in owned else -1
                    slots.append(table[i // P] * P + i % P if i >= 0 else -1)
            batch = sequences.batch.replace(
                dcp_local_seq_lens=np.array(local, np.int32), slot_mapping=np.array(slots, np.int64)
            )
            metadata = TorchMLABackend.get_builder_cls()(KVCacheSpec(P, 1, L + DR, "float32")).build(0, batch)
            out, lse = sequences.run(impl, metadata=metadata, cache=cache)
            outs.append(out)
            lses.append(lse)
    finally:
        set_dcp_group(None)
    close(merge_attn_states(outs, lses), want)


def test_packed_rows_are_the_oracles_bytes():
    rng = np.random.default_rng(0)
    kv_c = (rng.standard_normal((40, 512)) * 10.0 ** rng.integers(-6, 6, (40, 1))).astype(np.float32)
    kv_c[3], kv_c[4, :128], kv_c[5, 7] = 0, 0, 1e-40
    k_pe = rng.standard_normal((40, 64)).astype(np.float32)
    packed = pack_fp8_ds_mla(kv_c, k_pe)
    assert np.array_equal(_rows.pack(torch.from_numpy(kv_c), torch.from_numpy(k_pe)).numpy(), packed)
    want = np.concatenate(unpack_fp8_ds_mla(packed), 1)
    assert np.allclose(_rows.unpack(torch.from_numpy(packed)).numpy(), want, rtol=1e-6)


def test_an_output_buffer_is_filled_in_place():
    sequences = Sequences([1, 20], [30, 20])
    want = sequences.expected()[0]
    for shape in ((21, H, DV), (21, H * DV)):
        buffer = torch.full(shape, torch.nan)
        assert sequences.run(implementation(lse=False), output=buffer) is buffer
        close([buffer.view(21, H, DV)], [want])
    with pytest.raises(ShapeError, match="output has shape"):
        sequences.run(implementation(), output=torch.empty(21, H, DV + 1))
    with pytest.raises(DTypeError, match="output has dtype"):
        sequences.run(implementation(), output=torch.empty(21, H, DV, dtype=torch.bfloat16))


def test_a_profiling_run_is_zeros():
    out = implementation().forward(ONE, torch.ones(3, H, DN + DR), torch.ones(3, L), torch.ones(3, 1, DR), None, None)
    assert out.shape == (3, H, DV) and not out.any()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"query": torch.zeros(21, H, DN)}, r"query has shape \[21, 4, 24\]"),
        ({"kv_c": torch.zeros(21, L + 1)}, "kv_c_normed has shape"),
        ({"kv_c": torch.zeros(20, L)}, "kv_c_normed has 20 rows"),
        ({"k_pe": torch.zeros(21, DR, dtype=torch.bfloat16)}, "k_pe has dtype"),
        ({"cache": torch.zeros(5, P, L)}, r"kv_cache has shape \[5, 8, 32\]: must be \[N, P, 48\]"),
        ({"cache": torch.zeros(5, P, L + DR, dtype=torch.bfloat16)}, "kv_cache has dtype"),
        ({"cache": torch.zeros(5, 2 * P, L + DR)}, "kv_cache has blocks of 16 tokens"),
        ({"query": torch.zeros(21, H, DN + DR, requires_grad=True)}, "requires grad"),
        ({"metadata": object()}, "build it from a batch"),
    ],
)
def test_what_does_not_fit_is_named(changes, says):
    with pytest.raises((ShapeError, DTypeError, UnsupportedError, TypeError), match=says):
        Sequences([1, 20], [30, 20]).run(implementation(), **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads=2 must be 1"),
        ({"head_size": 40}, "head_size=40 must be kv_lora_rank"),
        ({"qk_head_dim": 7}, "qk_head_dim=7 must be"),
        ({"sliding_window": 4}, "sliding_window not supported"),
        ({"logits_soft_cap": 2.0}, "soft_cap not supported"),
        ({"alibi_slopes": [1.0] * H}, "alibi not supported"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype=int8"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "fp8_ds_mla"),
        ({"kv_sharing_target_layer_name": "a"}, "kv_sharing not supported"),
        ({"attn_type": "encoder"}, "attn_type=encoder"),
    ],
)
def test_the_constructor_refuses_what_it_does_not_serve(changes, says):
    with pytest.raises(ValueError, match=says):
        implementation(**changes)


def test_weights_of_another_size_or_kind_are_named():
    sequences = Sequences([1], [3])
    with pytest.raises(ShapeError, match="kv_b_proj"):
        sequences.run(implementation(torch.zeros(L, H, 3)))
    with pytest.raises(TypeError, match="must hold torch tensors"):
        sequences.run(implementation(np.zeros((L, H, DN + DV), np.float32)))
    with pytest.raises(DeviceError, match="kv_b_proj is on meta"):
        sequences.run(implementation(torch.zeros(L, H, DN + DV, device="meta")))


def test_limits_of_dimensions_are_data():
    class Narrow(TorchMLABackend):
        latent_dims, v_head_dims = ((512, 64),), (128,)

    class Impl(TorchMLABackend.get_impl_cls(), backend=Narrow):
        pass

    with pytest.raises(UnsupportedError) as caught:
        implementation(backend=Narrow)
    assert caught.value.reasons == (
        "kv_lora_rank + qk_rope_head_dim = 32 + 16 (supports 512 + 64)",
        "v_head_dim=40 (supports 128)",
    )


def test_a_named_prefill_backend_is_obeyed_or_refused():
    impl = implementation()
    impl.prefill_backend = "TRITON"
    with pytest.raises(UnsupportedError, match="platform=cpu"):
        impl.process_weights_after_loading(torch.float32)
    impl.prefill_backend = "TORCH_SDPA"
    impl.process_weights_after_loading(torch.float32)
    assert impl._prefill.get_name() == "TORCH_SDPA"


def test_a_dtype_that_no_prefill_backend_serves_leaves_the_absorbed_weights():
    impl, sequences = implementation(), Sequences([1, 20], [30, 20])
    want = sequences.run(impl)
    impl.prefill_backend = "TRITON"
    with pytest.raises(UnsupportedError, match="platform=cpu"):
        impl.process_weights_after_loading(torch.float64)
    close(sequences.run(impl), want)


def test_tokens_that_are_cached_already_come_as_none():
    """Decodes and prefills, with context and without; half of a pair is a mistake."""
    sequences, impl = Sequences([1, 20, 3, 33], [40, 75, 3, 33]), implementation()
    close(sequences.run(impl), sequences.expected())
    written = sequences.cache.clone()
    close(sequences.run(impl, kv_c=None, k_pe=None), sequences.expected())
    torch.testing.assert_close(sequences.cache, written, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ShapeError, match="pass both, or neither"):
        sequences.run(impl, kv_c=None)


@pytest.mark.parametrize("absent", [True, False])
def test_a_layer_without_rotary_dimensions(absent):
    up = weights()
    layer = MLAAttention(H, L, DN, 0, DV, up, block_size=P, dtype=torch.float32)
    assert layer.impl.scale == pytest.approx(DN**-0.5) and layer.new_kv_cache(6).shape == (6, P, L)
    lens, q, latent = [1, 20], torch.randn(21, H, DN), torch.randn(21, L)
    batch = CommonAttentionMetadata.from_lens(lens, lens, [[1, 2, 3], [0, 4, 5]], P)
    metadata = layer.backend.get_builder_cls()(layer.kv_cache_spec).build(0, batch)
    with torch.no_grad():
        out = layer(q, latent, None if absent else latent[:, :0], layer.new_kv_cache(6), metadata)
    none = np.zeros((20, 0))
    want, _ = mla_unabsorbed(q[1:], np.zeros((20, H, 0)), latent[1:], none, up[..., :DN], up[..., DN:], scale=DN**-0.5)
    torch.testing.assert_close(out[1:], torch.from_numpy(want).float(), rtol=1e-4, atol=2e-5)
    with pytest.raises(ValueError, match="qk_rope_head_dim=-1 must be an int of at least 0"):
        MLAAttention(H, L, DN, -1, DV, up)


def test_the_layer_chooses_and_serves():
    linear = nn.Linear(L, H * (DN + DV), bias=False)
    layer = MLAAttention(H, L, DN, DR, DV, linear, block_size=P, dtype=torch.float32, k_scale=0.5, kv_cache_dtype="fp8")
    assert layer.selection.name == "TORCH_MLA" and layer.impl.scale == pytest.approx(SCALE)
    layer.process_weights_after_loading(torch.float32)
    cache = layer.new_kv_cache(6)
    assert cache.shape == (6, P, L + DR) and cache.dtype == torch.float8_e4m3fn
    sequences = Sequences([1, 20], [1, 20])
    metadata = layer.backend.get_builder_cls()(layer.kv_cache_spec).build(0, sequences.batch)
    with torch.no_grad():
        out = layer(sequences.query, sequences.kv_c, sequences.k_pe, cache, metadata)
    up = linear.weight.detach().T.reshape(L, H, -1)
    for rows in sequences.rows:
        rows.copy_((rows / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.5)
    close([out], [sequences.expected(up)[0]])
    sparse = MLAAttention(H, L, DN, DR, DV, linear, dtype=torch.float32, indexer=SimpleNamespace(topk_indices=None))
    assert sparse.selection.name == "TORCH_MLA_SPARSE"


def test_many_chosen_keys_are_dense_attention(monkeypatch):
    sequences = Sequences([1, 20, 3], [30, 41, 3])
    lens = zip(sequences.q_lens, sequences.seq_lens, strict=True)
    visible = [m - n + i + 1 for n, m in lens for i in range(n)]
    chosen = torch.full((24, 50), -1, dtype=torch.int32)
    for row, count in enumerate(visible):
        chosen[row, torch.randperm(50)[:count]] = torch.randperm(count).int()
    indexer = SimpleNamespace(topk_indices=chosen)
    impl = implementation(backend=TorchMLASparseBackend, indexer=indexer)
    close(sequences.run(impl, None), sequences.expected())
    monkeypatch.setenv("ATTN_DEBUG", "device")
    for position in (1, 0):
        indexer.topk_indices = chosen.clone()
        indexer.topk_indices[5, :2] = position
        with pytest.raises(MetadataError, match=rf"topk_indices\[5\] = {position}: must be listed at most once per row"):
            sequences.run(impl, None)
    for wrong, error in ((None, DTypeError), (chosen.long(), DTypeError), (chosen[:3], ShapeError)):
        indexer.topk_indices = wrong
        with pytest.raises(error, match="topk_indices"):
            sequences.run(impl, None)


def test_putting_rows_keeps_what_no_slot_names():
    cache = torch.arange(4 * P * 3, dtype=torch.float32).view(4, P, 3)
    before = cache.clone()
    caches.put([(torch.full((3, 3), -1.0), cache)], torch.tensor([-1, 9, -1]))
    before[9 // P, 9 % P] = -1.0
    assert torch.equal(cache, before)


def test_dequantized_latents_are_not_rounded_before_they_are_expanded():
    """On a CPU. Rounding code times scale to 16 bits first adds an error to every key and value of a prompt."""
    sizes = {"mla": (136, 33, 30, 65), "head_size": 166, "num_heads": 4, "num_kv_heads": 1}
    codes = {"dtype": "float16", "kv_cache_dtype": "fp8_e5m2", "k_scale": 0.00435, "v_scale": 0.00435}
    score = Score()
    assert run_case(TorchMLABackend, Case("prompt", (40,), (40,), data_seed=6, **sizes, **codes), score=score) == []
    assert score.row < 0.8 * BUDGETS["float16"].hard
