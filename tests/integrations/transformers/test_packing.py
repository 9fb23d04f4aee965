"""Keys are attended where transformers keeps them: no paged cache is made if the backend needs none."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from transformers import AttentionInterface  # noqa: E402

from attn.integrations import transformers as attn_transformers  # noqa: E402
from attn.integrations.transformers import packing  # noqa: E402
from attn.integrations.transformers.call import Call  # noqa: E402
from attn.torch import kv_cache as caches  # noqa: E402
from attn.torch.backends._ragged import RaggedAttentionImpl  # noqa: E402
from attn.torch.layer import Attention  # noqa: E402
from tests.integrations.tiny_transformers import batch, decoder  # noqa: E402


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
    q, k, v = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 2, 16), torch.randn(2, 6, 2, 16)
    call = Call(torch.nn.Identity(), q, k, v, True, 0.25, None, None, None, "CPU_ATTN")
    present = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    in_place = packing.pack(call, present, [4, 4], [4, 4], [2, 0])
    assert in_place[~present].abs().max() == 0
    monkeypatch.setattr(packing, "RaggedAttentionImpl", type("AnotherImpl", (), {}))
    torch.testing.assert_close(packing.pack(call, present, [4, 4], [4, 4], [2, 0]), in_place)


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
