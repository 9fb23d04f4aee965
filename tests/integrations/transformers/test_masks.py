"""Chunks, and blocks of tokens that see each other, are recognised exactly: masks and models against eager's."""

import inspect
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.16")

from transformers import masking_utils as mu  # noqa: E402

import attn.torch  # noqa: E402
from attn.errors import UnsupportedError  # noqa: E402
from attn.integrations import transformers as attn_transformers  # noqa: E402
from attn.integrations.transformers import dispatch, packing  # noqa: E402
from attn.integrations.transformers.call import CAUSAL, ModuleCall, replaced  # noqa: E402
from attn.integrations.transformers.masks import as_bool, read, translated  # noqa: E402
from attn.visibility import BatchMask, LayerMask  # noqa: E402
from tests.integrations.tiny_transformers import CACHE, KINDS, SMALL, batch, decoder, image_model, sharpened  # noqa: E402

IMAGES = [[-1, 0, 0, 0, 0, 0, 0, 0, -1, 1, 1, 1, 1, -1, -1, -1, -1], [0, 0, 0, 0, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1]]


def blockwise(order, ids, window=4):
    block = mu.blockwise_overlay(ids)
    if order == "full":
        return mu.or_masks(mu.causal_mask_function, block)
    if order == "window before blocks":
        return mu.or_masks(mu.sliding_window_causal_mask_function(window), block)
    return mu.and_masks(mu.or_masks(mu.causal_mask_function, block), mu.sliding_window_overlay(window))


def computed(described, drawn, valid, rows, keys):
    """(output under the description, output under the drawn mask) at rows that are not padding."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, rows, 16) * 4, torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)
    live = valid[:, -rows:]
    return tuple(dispatch.attend(ModuleCall(torch.nn.Identity(), q, k, v, x, CAUSAL, 0.25))[live] for x in (described, drawn))


@pytest.mark.parametrize("order", ["full", "window before blocks", "window after blocks"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(("rows", "first", "kept"), [(17, 0, 0), (6, 5, 0), (5, 12, 7), (1, 11, 5)], ids=str)
def test_blocks_are_spans(order, padding, rows, first, kept):
    """Whole prompts, a chunk that cuts an image, and caches that have dropped keys."""
    valid, end = batch(padding)["attention_mask"].bool()[:, : first + rows], first + rows
    options = {
        "batch_size": 2,
        "q_length": rows,
        "kv_length": end - kept,
        "q_offset": first,
        "kv_offset": kept,
        "mask_function": blockwise(order, torch.tensor(IMAGES)),
        "attention_mask": valid,
    }
    described = attn_transformers.mask(**options, allow_is_causal_skip=False, use_vmap=order == "window after blocks")
    assert described.shape == (2, 1, 0, end - kept)
    drawn = mu.sdpa_mask(**options, allow_is_causal_skip=False)
    got, want = computed(described, drawn, valid, rows, end - kept)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    if rows == 17:  # the control: without spans, rows lose the rest of their image
        described.attn_described.seen = CAUSAL
        assert (computed(described, drawn, valid, rows, end)[0] - want).abs().max() > 0.1


def test_a_mask_of_numbers_is_added_to_scores():
    q, k, v = torch.randn(1, 4, 4, 16), torch.randn(1, 2, 4, 16), torch.randn(1, 2, 4, 16)
    added = torch.full((1, 1, 4, 4), torch.finfo(torch.float32).min).triu(1)
    added[..., 0] = -0.5
    call = ModuleCall(torch.nn.Identity(), q, k, v, added, CAUSAL, 0.25)
    want = attn.torch.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(dispatch.attend(call), want.transpose(1, 2), rtol=2e-5, atol=2e-5)
    with pytest.raises(UnsupportedError, match="position_bias with a cap, sinks or a backend by name not supported"):
        dispatch.attend(replaced(call, soft_cap=2.0))
    # a graph does not read values, so it takes the mask as one of flags, and looks when it runs
    with pytest.raises(
        UnsupportedError, match="a mask with values other than 0 and -inf not supported; pass it as position_bias"
    ):
        as_bool(call, added)


def test_a_window_that_hides_one_key_is_one():
    for window, want in ((6, None), (5, 4)):
        found = attn_transformers.mask(
            batch_size=1, q_length=6, kv_length=6, mask_function=mu.sliding_window_causal_mask_function(window)
        )
        assert (None if found is None else found.attn_described.seen.layer.window[0]) == want


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(("rows", "first", "kept"), [(17, 0, 0), (6, 5, 0), (5, 12, 3), (1, 11, 0)], ids=str)
def test_chunks(padding, rows, first, kept):
    valid, end = batch(padding)["attention_mask"].bool()[:, : first + rows], first + rows
    left = (valid.cumsum(-1) == 0).sum(-1)
    options = {
        "batch_size": 2,
        "q_length": rows,
        "kv_length": end - kept,
        "q_offset": first,
        "kv_offset": kept,
        "mask_function": mu.chunked_causal_mask_function(6, left),
        "attention_mask": valid,
    }
    described = attn_transformers.mask(**options)
    assert described.shape == (2, 1, 0, end - kept)
    got, want = computed(described, mu.sdpa_mask(**options, allow_is_causal_skip=False), valid, rows, end - kept)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_chunks_leave_the_callers_mask_as_it_is():
    """Later masks are made of it, such as those of layers without chunks."""
    valid = torch.ones(2, 17, dtype=torch.bool)
    function = mu.chunked_causal_mask_function(6, torch.zeros(2, dtype=torch.long))
    attn_transformers.mask(batch_size=2, q_length=4, kv_length=17, q_offset=13, mask_function=function, attention_mask=valid)
    assert valid.all()


def test_a_mask_of_both_directions_is_one_in_a_causal_layer_too():
    valid = batch("left")["attention_mask"].bool()
    options = {
        "batch_size": 2,
        "q_length": 17,
        "kv_length": 17,
        "attention_mask": valid,
        "mask_function": mu.bidirectional_mask_function,
    }
    described = attn_transformers.mask(**options)
    assert described.shape == (2, 17)
    got, want = computed(described, mu.sdpa_mask(**options, allow_is_causal_skip=False), valid, 17, 17)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def own_function(batch, head, q, k):
    return (q < 3) & (k < 3)


BLOCKS, LEFT = torch.tensor(IMAGES), torch.zeros(2, dtype=torch.long)
BLOCK, WINDOW = mu.blockwise_overlay(BLOCKS), mu.sliding_window_overlay(4)


@pytest.mark.parametrize(
    ("function", "layer", "blocks"),
    [
        (mu.causal_mask_function, LayerMask(), None),
        (mu.bidirectional_mask_function, LayerMask(causal=False), None),
        (mu.sliding_window_causal_mask_function(4), LayerMask(window=(3, None)), None),
        (mu.and_masks(mu.causal_mask_function, WINDOW), LayerMask(window=(3, None)), None),
        (mu.chunked_causal_mask_function(6, LEFT), LayerMask(chunk_size=6), None),
        (blockwise("full", BLOCKS), LayerMask(), BLOCKS),
        (blockwise("window before blocks", BLOCKS), LayerMask(window=(3, None), span_window=False), BLOCKS),
        (blockwise("window after blocks", BLOCKS), LayerMask(window=(3, None), span_window=True), BLOCKS),
    ],
)
def test_functions_of_transformers_are_translated(function, layer, blocks):
    pattern = translated(function)
    assert pattern.layer == layer and pattern.blocks is blocks
    assert (pattern.left_padding is LEFT) == (layer.chunk_size is not None)


@pytest.mark.parametrize(
    "function",
    [
        own_function,
        WINDOW,
        BLOCK,
        mu.and_masks(mu.causal_mask_function, own_function),
        mu.or_masks(mu.causal_mask_function, own_function),
        mu.or_masks(mu.causal_mask_function, WINDOW),
        mu.and_masks(blockwise("full", BLOCKS), mu.causal_mask_function),  # causality cuts the blocks
        mu.and_masks(blockwise("window before blocks", BLOCKS), WINDOW),
        mu.and_masks(mu.chunked_causal_mask_function(6, LEFT), WINDOW),
        mu.or_masks(mu.chunked_causal_mask_function(6, LEFT), BLOCK),
        mu.or_masks(mu.bidirectional_mask_function, BLOCK),
        mu.and_masks(WINDOW, mu.bidirectional_mask_function),
        mu.sliding_window_bidirectional_mask_function(4),
    ],
)
def test_functions_of_which_a_part_or_the_order_is_unknown_are_not(function):
    assert translated(function) is None


def test_blocks_that_are_no_span_are_drawn():
    """Two images of one block, text between them (Molmo 2); a block over chunks; a function that is not known."""
    apart = torch.where(torch.tensor(IMAGES) >= 0, 0, -1)
    chunks = mu.chunked_causal_mask_function(6, torch.zeros(2, dtype=torch.long))
    own = mu.or_masks(mu.causal_mask_function, lambda b, h, q, k: (q < 3) & (k < 3))
    for function in (blockwise("full", apart), mu.or_masks(chunks, mu.blockwise_overlay(torch.tensor(IMAGES))), own):
        options = {"batch_size": 2, "q_length": 17, "kv_length": 17, "mask_function": function}
        got = attn_transformers.mask(**options)
        want = mu.sdpa_mask(**options, allow_is_causal_skip=False).expand(2, 1, 17, 17)
        assert torch.equal(got, want)


def without_chunks(call, draw=False):
    read(call, draw)
    call.seen = call.seen._replace(layer=call.seen.layer._replace(chunk_size=None))


def llama4():
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **{
            **SMALL,
            "head_dim": 16,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": 6,
            "no_rope_layers": [1, 0],
            "interleave_moe_layer_step": 2,
            "attn_implementation": "eager",
        }
    )
    return sharpened(transformers.Llama4ForCausalLM(config))


@torch.no_grad()
def tokens(model, implementation, padding, **options):
    model.set_attn_implementation(implementation)
    out = model.generate(
        **batch(padding), max_new_tokens=9, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 5}], ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["in place", "paged"])
def test_llama4(padding, options, paged, monkeypatch):
    if paged:
        monkeypatch.setattr(packing, "RaggedAttentionImpl", type("Another", (), {}))
    attn_transformers.register()
    model = llama4()
    want, logits = tokens(model, "eager", padding, **options)
    got, near = tokens(model, "attn", padding, **options)
    assert torch.equal(got, want)
    torch.testing.assert_close(near, logits, rtol=1e-3, atol=1e-3)
    if not options:  # the control: without chunks
        monkeypatch.setattr(dispatch, "read", without_chunks)
        assert (tokens(model, "attn", padding)[1] - logits).abs().max() > 0.01


def test_chunks_in_continuous_batching_are_rejected():
    with pytest.raises(UnsupportedError, match=r"attention_chunk_size=6"), attn_transformers.paged(llama4()):
        pass


def image_text(kind):
    """A decoder of text and a tiny tower, whose images are not used: types of tokens alone make the masks."""
    torch.manual_seed(0)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    text = {**SMALL, "head_dim": 16}
    if kind == "hrm_text":  # a decoder of text with a prefix, and its own kinds of tokens
        text.pop("num_key_value_heads")
        model = transformers.HrmTextForCausalLM(transformers.HrmTextConfig(**text))
    elif kind == "gemma4":
        text |= {
            "global_head_dim": 16,
            "sliding_window": 6,
            "use_bidirectional_attention": "vision",
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        }
        vision |= {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
        names = ("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id")
        ids = {name: 63 + i for i, name in enumerate((*names, "eoa_token_index"))}
        config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **ids)
        model = transformers.Gemma4ForConditionalGeneration(config)
    elif kind == "gemma3":
        text |= {"sliding_window": 6, "query_pre_attn_scalar": 40, "layer_types": ["sliding_attention", "full_attention"]}
        config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=63)
        model = transformers.Gemma3ForConditionalGeneration(config)
    else:
        text["model_type"] = "gemma"
        config = transformers.PaliGemmaConfig(
            text_config=text,
            vision_config={**vision, "model_type": "siglip_vision_model", "projection_dim": 32},
            image_token_index=63,
            projection_dim=32,
        )
        model = transformers.PaliGemmaForConditionalGeneration(config)
    model.set_attn_implementation("eager")
    return sharpened(model)


@torch.no_grad()
@pytest.mark.parametrize("paged", [False, True], ids=["in place", "paged"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "paligemma", "hrm_text"])
def test_image_text_models(kind, padding, paged, monkeypatch):
    """A prompt with two images (a prefix for PaliGemma and HRM), then steps of one token over its cache."""
    attn_transformers.register()
    if paged:  # as for backends that read keys from pages only
        monkeypatch.setattr(packing, "RaggedAttentionImpl", type("Another", (), {}))
    model, inputs, spans, pack = image_text(kind), batch(padding), [], dispatch.pack
    inputs["input_ids"] = inputs["input_ids"].clamp(max=62)
    kinds = (torch.tensor(IMAGES) >= 0).long()
    if kind == "paligemma":  # 0 is the prefix
        kinds = (torch.arange(17) >= 11).long().expand(2, 17)
    if kind == "hrm_text":  # 1 is the prefix
        kinds = (torch.arange(17) < 9).long().expand(2, 17)
    live = inputs["attention_mask"].bool()
    first = {"mm_token_type_ids" if kind == "gemma4" else "token_type_ids": kinds}

    def ran(implementation):
        model.set_attn_implementation(implementation)
        out = model(**inputs, **first, use_cache=True)
        found, mask, cache = [out.logits[live]], inputs["attention_mask"], out[CACHE]
        for token in (5, 9, 7):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            ids = torch.full((2, 1), token)
            found.append(model(input_ids=ids, attention_mask=mask, **{CACHE: cache}).logits.flatten(0, 1))
        return torch.cat(found)

    def packed(call, keep=True):
        spans.append(call.seen.batch.spans is not None)
        return pack(call if keep else replaced(call, seen=call.seen._replace(batch=BatchMask())))

    want = ran("eager")
    monkeypatch.setattr(dispatch, "pack", packed)
    torch.testing.assert_close(ran("attn"), want, rtol=1e-4, atol=1e-4)
    assert spans.count(True) >= (1 if kind == "gemma4" else 2)  # Gemma 4's full layers are causal
    monkeypatch.setattr(dispatch, "pack", lambda call: packed(call, keep=False))
    assert (ran("attn") - want).abs().max() > 0.001


def found_by(model, run, implementations=("eager", "attn")):
    """What `run(model)` gives with each implementation; skips if this transformers has no such model."""
    if model is None:
        pytest.skip(f"no such model in transformers {transformers.__version__}")
    attn_transformers.register()
    found = []
    for implementation in implementations:
        model.set_attn_implementation(implementation)
        torch.manual_seed(2)
        with torch.no_grad():
            found.append(run(model))
    return found


def without_spans(monkeypatch):
    pack = dispatch.pack
    monkeypatch.setattr(dispatch, "pack", lambda call: pack(replaced(call, seen=call.seen._replace(batch=BatchMask()))))


@pytest.mark.parametrize("padding", ["none", "left"])
def test_molmo2_with_two_images(padding):
    """All image tokens are one block, which is in pieces: no span, so the mask is materialised."""
    inputs = batch(padding)
    live, image = inputs["attention_mask"].bool(), {"mm_token_type_ids": KINDS}

    def run(model, kinds=image):
        tokens = model.generate(**inputs, **kinds, max_new_tokens=8, do_sample=False)
        return model(**inputs, **kinds).logits[live], tokens

    model = image_model("molmo2")
    (want, tokens), (got, same) = found_by(model, run)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(same, tokens)
    one = {"mm_token_type_ids": torch.where(torch.arange(17) < 10, KINDS, 0)}  # the control: the first image alone
    assert (run(model, one)[0] - want).abs().max() > 0.001


@pytest.mark.parametrize("padding", [False, True])
def test_pi0(padding, monkeypatch):
    """Actions see the images, the prompt, the robot's state and each other; the state does not see actions."""
    torch.manual_seed(1)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, 11:] = 0 if padding else 1
    given = {"state": torch.randn(2, 4), "noise": torch.randn(2, 5, 4), "pixel_values": torch.randn(2, 2, 3, 8, 8)}
    given |= {"attention_mask": mask, "pixel_attention_mask": torch.ones(2, 2, dtype=torch.bool)}
    ids = torch.randint(2, 60, (2, 13))

    def run(model):
        ids[:, :8] = model.config.vlm_config.image_token_id
        return model.sample_actions(input_ids=ids, **given)

    model = image_model("pi0")
    want, got = found_by(model, run)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    without_spans(monkeypatch)
    assert (found_by(model, run, ["attn"])[0] - want).abs().max() > 0.001


def test_deepseek_ocr2s_encoder(monkeypatch):
    """Patches of the image see each other, queries after them are causal."""
    torch.manual_seed(1)
    x = torch.randn(2, 18, 32)

    def run(model):
        return model.model.vision_tower.vision_encoder(inputs_embeds=x, num_patches=9).last_hidden_state

    model = image_model("deepseek_ocr2")
    want, got = found_by(model, run)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    without_spans(monkeypatch)
    assert (found_by(model, run, ["attn"])[0] - want).abs().max() > 0.01


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(
    "cache",
    [
        {},
        {"cache_implementation": "static", "disable_compile": True},
        pytest.param({"cache_implementation": "static"}, marks=pytest.mark.full),
    ],
    ids=["dynamic", "static", "compiled"],
)
def test_diffusion_gemma(padding, cache):
    """The canvas sees the whole cache and itself; its layers pass the window all the same. Eager does not generate
    (transformers 5.23: `torch.finfo` of a mask's dtype), so text is compared with sdpa's."""
    inputs = batch(padding)
    inputs["input_ids"] = inputs["input_ids"].clamp(max=59)
    canvas = torch.randint(2, 59, (2, 8))
    beside = torch.cat([inputs["attention_mask"], torch.ones(2, 8, dtype=torch.long)], 1)

    def run(model):
        return model(**inputs, decoder_input_ids=canvas, decoder_attention_mask=beside).logits

    model = image_model("diffusion_gemma")
    want, got = found_by(model, run)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    more = {"max_new_tokens": 16, "mm_token_type_ids": KINDS, **cache}
    tokens = [x.sequences for x in found_by(model, lambda model: model.generate(**inputs, **more), ("sdpa", "attn"))]
    assert torch.equal(*tokens) and tokens[0].shape[1] > 17


@pytest.mark.parametrize("padding", ["none", "left"])
def test_block_diffusion_with_a_causal_decoder(padding, monkeypatch):
    """Blocks of 4 tokens see each other and all before (SDAR, Fast-dLLM): a prompt, then a block over its cache."""
    if "block_sequence_ids" not in inspect.signature(mu.create_causal_mask).parameters:
        pytest.skip(f"transformers {transformers.__version__} takes no blocks")
    inputs = batch(padding, rows=16)
    live, whole = inputs["attention_mask"].bool(), torch.cat([inputs["attention_mask"], torch.ones(2, 4, dtype=torch.long)], 1)
    blocks = (torch.arange(20) // 4).expand(2, 20)

    def run(model):
        cache, found = transformers.DynamicCache(config=model.config), []
        for ids, mask in ((inputs["input_ids"], inputs["attention_mask"]), (torch.tensor([[5, 9, 7, 3]] * 2), whole)):
            rows = model.get_input_embeddings()(ids)
            seen = mu.create_causal_mask(model.config, rows, mask, cache, block_sequence_ids=blocks[:, : mask.shape[1]])
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            found.append(model(inputs_embeds=rows, attention_mask=seen, position_ids=positions, **{CACHE: cache}).logits)
        return torch.cat([found[0][live], found[1].flatten(0, 1)])

    model = decoder("qwen3")
    want, got = found_by(model, run)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    without_spans(monkeypatch)
    assert (found_by(model, run, ["attn"])[0] - want).abs().max() > 0.01


@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_static_caches_prompt_has_spans(padding, monkeypatch):
    """Its mask is materialised for a graph, and described for kernels."""
    inputs, model = batch(padding), image_model("gemma3")
    inputs["input_ids"] = inputs["input_ids"].clamp(max=59)
    more = {"token_type_ids": KINDS, "cache_implementation": "static", "disable_compile": True, "max_new_tokens": 3}

    def run(model):
        out = model.generate(**inputs, **more, do_sample=False, output_logits=True, return_dict_in_generate=True)
        return torch.stack(out.logits)

    spans, pack = [], dispatch.pack
    monkeypatch.setattr(dispatch, "by_formula", None)
    monkeypatch.setattr(dispatch, "pack", lambda call: (spans.append(call.seen.batch.spans), pack(call))[1])
    want, got = found_by(model, run)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len([x for x in spans if x is not None]) == 2  # both layers of the prompt
    without_spans(monkeypatch)
    assert (found_by(model, run, ["attn"])[0] - want).abs().max() > 0.001


def test_a_graph_without_padding_has_no_mask():
    """Causality among the rows alone is known when a graph is traced; padding is not."""
    model, inputs, graphs = decoder("llama"), batch("left"), []

    def kept(graph, example_inputs):
        graphs.append(graph.code)
        return graph

    for padded in (False, True):
        given = inputs if padded else {"input_ids": inputs["input_ids"]}
        want = found_by(model, lambda model, given=given: model(**given).logits)[1]
        torch._dynamo.reset()
        with torch.no_grad():
            got = torch.compile(model, backend=kept, fullgraph=True)(**given).logits
        live = inputs["attention_mask"].bool() if padded else slice(None)
        torch.testing.assert_close(got[live], want[live], rtol=1e-4, atol=1e-4)
        assert ("attn_mask = None, is_causal = True" in graphs[-1]) != padded


def test_gradients_and_weights_under_spans_are_eagers():
    attn_transformers.register()
    model, inputs = image_text("gemma3"), batch("left")
    inputs["input_ids"] = inputs["input_ids"].clamp(max=62)
    kinds, live = (torch.tensor(IMAGES) >= 0).long(), inputs["attention_mask"].bool()
    found = []
    for implementation in ("eager", "attn"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**inputs, token_type_ids=kinds).logits[live].square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            weights = model(**inputs, token_type_ids=kinds, output_attentions=True).attentions
        found.append((grads, [w.transpose(1, 2)[live] for w in weights]))
    (grads, weights), (own_grads, own_weights) = found
    assert len(grads) == len(own_grads) > 10 and len(weights) == len(own_weights) == 2
    for want, got in zip([*grads, *weights], [*own_grads, *own_weights], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * max(1.0, float(want.abs().max())))


def test_a_copy_of_a_described_mask_is_rejected():
    """A copy, such as that of another device, has no description; causal attention instead would be wrong without a word."""
    valid = torch.ones(2, 17, dtype=torch.bool)
    options = {"batch_size": 2, "q_length": 17, "kv_length": 17, "q_offset": 0, "kv_offset": 0, "attention_mask": valid}
    described = attn_transformers.mask(
        **options, mask_function=blockwise("full", torch.tensor(IMAGES)), allow_is_causal_skip=False, use_vmap=False
    )
    with pytest.raises(UnsupportedError, match="has no description"):
        computed(described.clone(), described, valid, 17, 17)


OWN = {
    "BigBirdPegasus": {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "attention_type": "original_full",
    },
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "CodeGen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "XGLM": {"d_model": 32, "ffn_dim": 32, "num_layers": 2, "attention_heads": 4},
    "Git": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("padding", ["none", "left"])
def test_models_that_compute_attention_themselves_are_rejected(kind, padding):
    """They would take no mask for no causality, without a word. Those that a newer transformers has changed equal eager."""
    attn_transformers.register()
    config = getattr(transformers, f"{kind}Config")(vocab_size=64, pad_token_id=0, **OWN[kind])
    made = "eager" if kind == "Git" else "attn"  # transformers itself rejects the others in set_attn_implementation
    with warnings.catch_warnings():  # see the next test
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=made).eval()
    inputs = batch(padding)
    if model._supports_attention_backend:  # CodeGen from 5.24 on
        live = inputs["attention_mask"].bool()
        want, got = found_by(sharpened(model), lambda model: model(**inputs).logits[live])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        return
    model.set_attn_implementation("attn")
    with pytest.raises(UnsupportedError, match=rf'{kind}Model: attn_implementation="attn" not supported.*"eager"'):
        model(**inputs)


@pytest.mark.parametrize(("kind", "name"), [("DebertaV2", "attn"), ("OpenAIGPT", "attn:TORCH_SDPA")])
def test_models_that_never_ask_say_so_when_they_are_made(kind, name):
    """They make no mask of transformers, so nothing of this package runs, and transformers checks its own names only."""
    attn_transformers.register()
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    config = getattr(transformers, f"{kind}Config")(hidden_size=32, vocab_size=64, bos_token_id=1, eos_token_id=2, **sizes)
    with pytest.warns(UserWarning, match=f'{kind}Model: attn_implementation="{name}" has no effect: its layers compute'):
        transformers.AutoModel.from_config(config, attn_implementation=name)
    transformers.AutoModel.from_config(config, attn_implementation="eager")


@torch.no_grad()
@pytest.mark.parametrize("name", ["attn", "attn:TORCH_SDPA"])
@pytest.mark.parametrize("kind", ["GPTNeo", "Falcon"])
def test_models_that_look_implementations_up_among_their_own_are_rejected_when_they_are_made(kind, name):
    """Where transformers' own way to say it is a KeyError."""
    attn_transformers.register()
    layers = {"attention_types": [[["global"], 1]], "num_heads": 2, "num_layers": 1, "hidden_size": 32}
    layers = layers if kind == "GPTNeo" else {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32}
    config = getattr(transformers, f"{kind}Config")(vocab_size=64, bos_token_id=1, eos_token_id=2, **layers)
    with warnings.catch_warnings():  # no "has no effect" beside it
        warnings.simplefilter("error")
        with pytest.raises(UnsupportedError, match=rf'{kind}Model: attn_implementation="{name}" not supported.*"eager"'):
            transformers.AutoModel.from_config(config, attn_implementation=name)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    assert model(torch.arange(1, 9)[None])[0].shape == (1, 8, 32)


@torch.no_grad()
def test_a_part_that_looks_implementations_up_among_its_own_may_have_another():
    """SAM's image encoder has such a table in the module of its other parts, which call the implementation."""
    attn_transformers.register()
    image = {"hidden_size": 32, "image_size": 32, "patch_size": 8}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 32, "window_size": 2, "global_attn_indexes": []}
    parts = {
        "vision_config": {**image, **layers, "output_channels": 32, "num_pos_feats": 16},
        "prompt_encoder_config": image,
        "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 32, "num_attention_heads": 2},
    }

    def made(implementation):
        return transformers.SamModel._from_config(transformers.SamConfig(**parts), attn_implementation=implementation)

    with pytest.raises(UnsupportedError, match=r'SamVisionEncoder: attn_implementation="attn" not supported.*"eager"'):
        made("attn")
    model = made({"": "attn", "vision_config": "eager"})
    pixels, point = torch.randn(1, 3, 32, 32), torch.tensor([[[[5.0, 9.0]]]])
    want, got = found_by(sharpened(model), lambda model: model(pixel_values=pixels, input_points=point).pred_masks)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


UNSAID = {
    "Splinter": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_attention_heads": 4},
    "NllbMoe": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "num_experts": 2,
        "dropout": 0.0,
        "decoder_start_token_id": 1,
    },
}


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("kind", UNSAID)
def test_models_whose_layers_do_not_say_whether_they_are_causal(kind, padding):
    """An encoder without `is_causal`, and a decoder where it is False: None for a mask would mean the other."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **{"hidden_size": 32, "intermediate_size": 48, **UNSAID[kind]}, vocab_size=64
    )
    model = sharpened(transformers.AutoModel.from_config(config, attn_implementation="eager"))
    inputs = batch(padding)
    live = inputs["attention_mask"].bool()
    if kind == "NllbMoe":
        inputs["decoder_input_ids"], live = batch("none")["input_ids"][:, :9], slice(None)
    want, got = found_by(model, lambda model: model(**inputs)[0][live])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
