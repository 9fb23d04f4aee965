"""Padded batches and packed sequences: no paged cache is made if the backend needs none; arguments that restrict what a row
sees are used or refused."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from transformers import AttentionInterface  # noqa: E402

from attn.errors import UnsupportedError  # noqa: E402
from attn.integrations import transformers as attn_transformers  # noqa: E402
from attn.integrations.transformers import packing  # noqa: E402
from attn.integrations.transformers.call import ModuleCall, Requested, visible  # noqa: E402
from attn.integrations.transformers.masks import Described  # noqa: E402
from attn.torch import kv_cache as caches  # noqa: E402
from attn.torch.backends._ragged import RaggedAttentionImpl  # noqa: E402
from attn.torch.layer import Attention  # noqa: E402
from tests.integrations.tiny_transformers import SMALL, VOCABULARY, batch, decoder, encoder, sharpened  # noqa: E402


@pytest.fixture
def pages(monkeypatch):
    """The calls that make a cache or write keys into one."""
    attn_transformers.register()
    calls, new, write = [], Attention.new_kv_cache, caches.write
    monkeypatch.setattr(Attention, "new_kv_cache", lambda *a, **k: calls.append("new") or new(*a, **k))
    monkeypatch.setattr(caches, "write", lambda *a, **k: calls.append("write") or write(*a, **k))
    return calls


@torch.no_grad()
def generated(model, implementation, padding, **options):
    model.set_attn_implementation(implementation)
    return model.generate(**batch(padding), max_new_tokens=6, do_sample=False, **options)


@pytest.mark.parametrize(
    ("backend", "padding", "options"),
    [
        ("", "none", {}),
        ("", "left", {}),
        ("", "left", {"cache_implementation": "static"}),
        ("", "left", {"prefill_chunk_size": 5}),
        (":TORCH_SDPA", "left", {}),
        (":CPU_ATTN", "left", {"cache_implementation": "static"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_generation_makes_no_paged_cache(kind, backend, padding, options, pages):
    model = decoder(kind)
    got = generated(model, f"attn{backend}", padding, **options)
    assert pages == []
    assert torch.equal(got, generated(model, "eager", padding, **options))


@torch.no_grad()
def test_rows_between_padding_are_put_back_where_they_were(monkeypatch):
    """Over pages as in place, with padding on either side; rows of padding are 0."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16), torch.randn(2, 2, 6, 16)
    present = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    seen = visible(True, None)
    call = ModuleCall(
        torch.nn.Identity(), q, k, v, None, seen, 0.25, requested=Requested("CPU_ATTN"), valid=Described(seen, present, 6)
    )
    in_place = packing.pack(call)
    assert in_place[~present].abs().max() == 0
    monkeypatch.setattr(packing, "RaggedAttentionImpl", type("AnotherImpl", (), {}))
    torch.testing.assert_close(packing.pack(call), in_place)


@pytest.mark.full  # compiles
def test_other_backends_keep_their_pages(pages):
    """The check of the test above finds the caches of a backend that has no other way."""
    model = decoder("gemma2")
    got = generated(model, "attn:FLEX_ATTENTION", "left")
    assert "new" in pages and "write" in pages
    assert torch.equal(got, generated(model, "eager", "left"))


@pytest.mark.parametrize("padding", ["none", "left"])
def test_keys_are_read_in_transformers_memory(padding, monkeypatch):
    attn_transformers.register()
    held, read, called, attend = set(), set(), AttentionInterface()["attn"], RaggedAttentionImpl.attend_keys

    def attention(module, query, key, value, *rest, **more):
        held.update(x.untyped_storage().data_ptr() for x in (key, value))
        return called(module, query, key, value, *rest, **more)

    def attended(self, query, key, value, *rest):
        read.update(x.untyped_storage().data_ptr() for x in (key, value))
        return attend(self, query, key, value, *rest)

    monkeypatch.setitem(AttentionInterface._global_mapping, "attn", attention)
    monkeypatch.setattr(RaggedAttentionImpl, "attend_keys", attended)
    generated(decoder("gpt_oss"), "attn", padding, cache_implementation="static")
    assert read and read <= held


LENS = (5, 9, 3)


@pytest.fixture(autouse=True, scope="module")
def registered():
    attn_transformers.register()


def boundaries(lens, dtype=torch.int32):
    return torch.tensor([0, *lens]).cumsum(0).to(dtype)


def packed_inputs(lens=LENS):
    torch.manual_seed(1)
    starts = boundaries(lens)
    ids = torch.randint(2, VOCABULARY, (1, sum(lens)))
    return ids, {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": max(lens), "max_length_k": max(lens)}


def apart(model, ids, lens=LENS):
    """eager's result for each sequence alone."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.cat([model(input_ids=part)[0] for part in ids.split(lens, 1)], 1)


@pytest.mark.parametrize("positions", [False, True], ids=["cu_seq_lens only", "with position_ids"])
@pytest.mark.parametrize("implementation", ["attn", "attn:TORCH_SDPA", "attn:FLEX_ATTENTION"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_packed_rows_are_those_of_each_sequence_alone(kind, implementation, positions, monkeypatch):
    """Without position_ids rotary positions run on, which shifts all positions of a sequence alike."""
    model, (ids, bounds) = decoder(kind), packed_inputs()
    if positions:
        bounds["position_ids"] = torch.cat([torch.arange(n) for n in LENS])[None]
    want, served = apart(model, ids), []
    real = packing.attend_packed
    monkeypatch.setattr(packing, "attend_packed", lambda *rest: served.append(1) or real(*rest))
    model.set_attn_implementation(implementation)
    got = model(input_ids=ids, use_cache=False, **bounds).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(served) == len(model.model.layers), "not computed sequence by sequence"
    lost = model(input_ids=ids, use_cache=False).logits
    assert (lost - want)[:, LENS[0] :].abs().max() > 0.01, "the model does not tell sequences apart"


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_packed_rows_of_an_encoder_in_graphs_with_gradients_weights_and_dropout(kind):
    model, (ids, bounds) = decoder(kind), packed_inputs()
    want = apart(model, ids)
    model.set_attn_implementation("attn")
    weights = model(input_ids=ids, use_cache=False, output_attentions=True, **bounds).attentions
    assert weights[0][..., LENS[0] :, : LENS[0]].abs().max() == 0
    torch.compiler.reset()
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        with torch.set_grad_enabled(run is model or kind == "llama"):  # caps have no gradients in a graph
            got = run(input_ids=ids, use_cache=False, **bounds).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    loss = model(input_ids=ids, use_cache=False, **bounds).logits[:, : LENS[0]].square().sum()
    embedded = model.get_input_embeddings().weight
    (own,) = torch.autograd.grad(loss, embedded)
    (alone,) = torch.autograd.grad(model(input_ids=ids[:, : LENS[0]]).logits.square().sum(), embedded)
    torch.testing.assert_close(own, alone, rtol=1e-3, atol=1e-3)
    bert, positions = encoder(), torch.cat([torch.arange(n) for n in LENS])[None]
    want = apart(bert, ids)
    bert.set_attn_implementation("attn")
    with torch.no_grad():
        got = bert(input_ids=ids, position_ids=positions, **bounds)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class Layer(torch.nn.Module):
    layer_idx, is_causal = 3, True


def attention(q_lens, k_lens, mask=None, **options):
    torch.manual_seed(0)
    q = torch.randn(1, 4, sum(q_lens), 16)
    k, v = (torch.randn(1, 2, sum(k_lens), 16) for _ in range(2))
    bounds = {"cu_seq_lens_q": boundaries(q_lens), "cu_seq_lens_k": boundaries(k_lens, torch.int64)}
    out, _ = attn_transformers._function(None)(Layer(), q, k, v, mask, **{**bounds, **options})
    return out, q, k, v


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_lens", "k_lens"), [((3, 2), (7, 2)), ((3, 0, 2), (4, 0, 6)), ((2, 3), (0, 4)), ((0, 3), (2, 4))])
def test_sequences_with_more_keys_than_rows_and_empty_ones(q_lens, k_lens, causal):
    """As in flash-attn: each sequence's last row is at its last key."""
    out, q, k, v = attention(q_lens, k_lens, is_causal=causal)
    parts = zip(q.split(q_lens, 2), k.split(k_lens, 2), v.split(k_lens, 2), strict=True)
    for got, (rows, keys, values) in zip(out.split(q_lens, 1), parts, strict=True):
        n, m = rows.shape[2], keys.shape[2]
        if not n or not m:
            assert not got.abs().max() if n else True
            continue
        seen = torch.ones(n, m, dtype=torch.bool).tril(m - n) if causal else None
        want = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, seen, enable_gqa=True)
        torch.testing.assert_close(got, want.transpose(1, 2))


@torch.inference_mode()
def test_boundaries_that_change_in_inference_mode_are_read_again():
    """Tensors have no version there."""
    bounds = boundaries((5, 3))
    same = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    for lens in ((5, 3), (2, 6)):
        bounds.copy_(boundaries(lens))
        torch.testing.assert_close(attention(lens, lens, **same)[0], attention(lens, lens)[0])


def test_a_mask_that_hides_more_is_used_too():
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    mask[..., 6] = False
    got, *_ = attention((5, 3), (5, 3), mask)
    whole, *_ = attention((5, 3), (5, 3))
    torch.testing.assert_close(got[:, :6], whole[:, :6])
    assert (got - whole)[:, 6:].abs().max() > 0.01


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cu_seq_lens_k": None}, r"Layer of layer 3: cu_seq_lens_k of NoneType not supported; pass cu_seq_lens_q and"),
        ({"cu_seq_lens_k": {"full_attention": boundaries((5, 3))}}, "cu_seq_lens_k of dict"),
        ({"cu_seq_lens_q": torch.tensor([0.0, 8.0])}, r"cu_seq_lens_q of torch.float32 \[2\]"),
        ({"cu_seq_lens_q": boundaries((8,))}, "1 sequences of rows and 2 of keys in a batch of 1"),
        ({"cu_seq_lens_q": boundaries((5, 2))}, r"cu_seq_lens_q = \[0, 5, 7\] over 8 rows .* increase from 0 to 8"),
        ({"cu_seq_lens_k": boundaries((9, -1))}, r"cu_seq_lens_k = \[0, 9, 8\] over 8 keys"),
        ({"cu_seq_lens_q": boundaries((5, 3)) + 1}, r"cu_seq_lens_q = \[1, 6, 9\]"),
        ({"sliding_window": 2, "is_causal": False}, "a non-causal window"),
        ({"block_indices": torch.zeros(1)}, "block_indices not supported"),
        ({"sinks": torch.zeros(1)}, "sinks not supported"),
        ({"indices": torch.zeros(1, 8, 2, dtype=torch.int32), "cache": object()}, "indices of keys in continuous batching"),
    ],
)
def test_what_cannot_be_used_is_refused(options, said):
    with pytest.raises(UnsupportedError, match=said):
        attention((5, 3), (5, 3), **options)


@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8, 8)])
def test_integer_masks_that_are_added_are_refused(shape):
    """Read as flags, an additive mask of integers would be inverted."""
    plain = {"cu_seq_lens_q": None, "cu_seq_lens_k": None}
    added = torch.zeros(shape, dtype=torch.long)
    added[..., :2] = -10000
    with pytest.raises(UnsupportedError, match=r"torch.int64.* not supported; pass a bool mask"):
        attention((8,), (8,), added, **plain)
    if len(shape) == 2:
        out, *_ = attention((8,), (8,), (added == 0).long(), **plain)
        torch.testing.assert_close(out, attention((8,), (8,), added == 0, **plain)[0])


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_the_keys_that_an_indexer_selects_are_the_only_ones_seen(compiled):
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("this transformers has no DeepSeek-V3.2")
    torch.manual_seed(0)
    config = transformers.DeepseekV32Config(
        **{**SMALL, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
        v_head_dim=10, first_k_dense_replace=2, index_topk=4, index_n_heads=2, index_head_dim=16,
    )  # fmt: skip
    model = sharpened(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    inputs = {"input_ids": torch.randint(2, VOCABULARY, (2, 17)), "use_cache": False}
    want = model(**inputs).logits
    model.set_attn_implementation("attn")
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    torch.testing.assert_close(run(**inputs).logits, want, rtol=1e-4, atol=1e-4)
    config.index_topk = 17
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = 17
    assert (model(**inputs).logits - want).abs().max() > 0.01, "the model does not depend on its indexer"
