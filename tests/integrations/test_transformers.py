"""transformers: tiny models with sharpened random weights give eager's logits and text through `attn`.

The ways to generate, over many more architectures, are in `transformers/test_ways.py`.
"""

import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import library  # noqa: E402

import attn  # noqa: E402
from attn.errors import BackendLoadError, UnsupportedError  # noqa: E402
from attn.integrations import transformers as attn_transformers  # noqa: E402
from attn.integrations.transformers import dispatch, packing  # noqa: E402
from attn.integrations.transformers.batching import WINDOWS_IN_PAGES  # noqa: E402
from tests.integrations.tiny_transformers import CACHE, batch, batching, decoder, encoder, model_of  # noqa: E402
from tests.levels import full, sampled  # noqa: E402

GRAPHS = (("llama", "attn"), ("gemma2", "attn"), ("gpt_oss", "attn:TORCH_SDPA"), ("bert", "attn:CPU_ATTN"))
CORE = ["llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"]


@pytest.fixture(autouse=True, scope="module")
def registered():
    attn_transformers.register()


@torch.no_grad()
def logits(model, implementation, inputs):
    model.set_attn_implementation(implementation)
    return model(**inputs).logits


def text(model, implementation, inputs, **options):
    model.set_attn_implementation(implementation)
    return model.generate(**inputs, max_new_tokens=12, do_sample=False, **options)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("kind", CORE)
def test_logits_are_eagers(kind, padding):
    model, inputs = decoder(kind), batch(padding)
    real = inputs["attention_mask"].bool()
    want, got = (logits(model, name, inputs)[real] for name in ("eager", "attn"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_bfloat16_is_no_further_from_the_truth_than_eagers(kind):
    model, inputs = decoder(kind), batch("left")
    real = inputs["attention_mask"].bool()
    truth = logits(model, "eager", inputs)[real]
    model = model.to(torch.bfloat16)
    eager, mine = ((logits(model, name, inputs)[real].float() - truth).square().mean().sqrt() for name in ("eager", "attn"))
    assert mine <= 1.5 * eager


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"softcap": 3.0}, {"dropout": 1e-9}, {"mask": True}])
def test_autocast_is_followed(options, compiled):
    """Norms of queries and keys can keep them in float32, beside values in bfloat16: dense, packed, by the formula, by SDPA."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 12, 16) for heads in (4, 2, 2))
    module, options = torch.nn.Module(), dict(options)
    drawn = torch.rand(2, 1, 12, 12) > 0.3 if options.pop("mask", False) else None
    run = attn_transformers._function(None)
    want = run(module, *(x.bfloat16() for x in (q, k, v)), drawn, **options)[0]
    if compiled:
        run = torch.compile(run, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        got = run(module, q, k, v.bfloat16(), drawn, **options)[0]
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", CORE)
def test_greedy_text_is_eagers(kind, cache):
    model, inputs = decoder(kind), batch("left")
    options = {} if cache is None else {"cache_implementation": cache}
    assert torch.equal(text(model, "attn", inputs, **options), text(model, "eager", inputs, **options))


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}])
def test_a_backend_by_name_serves_the_whole_model(cache):
    model, inputs = decoder("gemma2"), batch("left")
    assert torch.equal(text(model, "attn:TORCH_SDPA", inputs, **cache), text(model, "eager", inputs, **cache))


@pytest.mark.parametrize(
    ("kind", "lost"), [("gemma2", "softcap"), ("gemma2", "scaling"), ("gpt_oss", "s_aux"), ("gemma3", "attention_mask")]
)
def test_a_lost_argument_would_show(kind, lost):
    """Negative controls: the same models tell when a term is dropped."""
    from transformers import AttentionInterface

    whole = attn_transformers._function(None)

    def without(module, query, key, value, attention_mask, **kwargs):
        if lost == "attention_mask":
            attention_mask = None
        kwargs = {name: value for name, value in kwargs.items() if name != lost}
        return whole(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("attn_lossy", without)
    transformers.masking_utils.AttentionMaskInterface.register("attn_lossy", attn_transformers.mask)
    model, inputs = decoder(kind), batch("left")
    real = inputs["attention_mask"].bool()
    want, got = (logits(model, name, inputs)[real] for name in ("eager", "attn_lossy"))
    assert (got - want).abs().max() > 0.01


def test_an_encoder_and_its_padding():
    model = encoder()
    for padding in ("none", "right"):
        inputs = batch(padding)
        real = inputs["attention_mask"].bool()
        states = []
        for name in ("eager", "attn", "attn:TORCH_SDPA"):
            model.set_attn_implementation(name)
            with torch.no_grad():
                states.append(model(**inputs).last_hidden_state[real])
        for got in states[1:]:
            torch.testing.assert_close(got, states[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_encoder_decoders(kind):
    model = model_of(kind)
    inputs = batch("right")
    whole = {**inputs, "decoder_input_ids": batch("none")["input_ids"][:, :9]}
    want, got = (logits(model, name, whole) for name in ("eager", "attn"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(text(model, "attn", inputs), text(model, "eager", inputs))


@pytest.mark.parametrize(("kind", "compiled"), [("llama", False), ("llama", True), ("gpt_oss", False)])
def test_training_goes_through(kind, compiled):
    model, inputs = decoder(kind), batch("left")
    real, grads = inputs["attention_mask"].bool(), []
    torch.compiler.reset()
    for name in ("eager", "attn"):
        model.set_attn_implementation(name)
        model.zero_grad()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled and name == "attn" else model
        run(**inputs, use_cache=False).logits[real].square().mean().backward()
        grads.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-5)


def test_training_in_a_graph_past_what_is_differentiable_there_is_refused():
    torch.compiler.reset()
    model, inputs = decoder("gemma2"), batch("left")
    model.set_attn_implementation("attn")
    with pytest.raises(Exception, match=r"Gemma2Attention of layer 0: gradients in a graph .* not supported"):
        torch.compile(model, fullgraph=True, backend="eager")(**inputs, use_cache=False)


@pytest.mark.parametrize(
    "kind", [*sampled(["llama", "qwen3"], 1, "batching"), *sampled(["gemma2", "gpt_oss"], 1, "batching of windows")]
)
def test_continuous_batching_is_its_dense_text(kind):
    """Chunked prompts, more requests than fit at once, pages of 16 shared by prefix."""
    from transformers import GenerationConfig

    if kind in ("gemma2", "gpt_oss") and attn_transformers.installed() < WINDOWS_IN_PAGES:
        pytest.skip("this transformers hands out wrong keys of windows: refused")
    model = decoder(kind)
    torch.manual_seed(2)
    shared = torch.randint(2, 64, (20,)).tolist()
    prompts = [shared + [3, 4], shared + [9], torch.randint(2, 64, (5,)).tolist(), torch.randint(2, 64, (33,)).tolist()]
    greedy = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with attn_transformers.paged(model):
        answers = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=batching())
    assert model.config._attn_implementation == "eager"
    by_prompt = {tuple(answer.prompt_ids): answer for answer in answers.values()}
    for prompt in prompts:
        answer = by_prompt[tuple(prompt)]
        assert answer.error is None
        want = text(model, "eager", {"input_ids": torch.tensor([prompt])})[0, len(prompt) :][:10].tolist()
        assert answer.generated_tokens == want


def test_continuous_batching_that_cannot_be_is_refused_before_it_runs(monkeypatch):
    model = decoder("llama")
    for name, error, said in (
        ("TORCH_SPDA", ValueError, "Did you mean TORCH_SDPA"),
        ("XLA_ATTN", UnsupportedError, "LlamaForCausalLM: XLA_ATTN has no torch layer with a paged cache .* TORCH_SDPA"),
        ("TORCH_MLA", UnsupportedError, "TORCH_MLA has no torch layer with a paged cache"),
        ("FLASHINFER", UnsupportedError, r"(?s)LlamaForCausalLM: .*FLASHINFER  .*flashinfer"),
    ):
        with pytest.raises(error, match=said), attn_transformers.paged(model, name):
            pass
    with pytest.raises(UnsupportedError, match=r"latent attention \(kv_lora_rank=16\) not supported"):
        attn_transformers.paged(decoder("deepseek_v3")).__enter__()
    monkeypatch.setattr("attn.integrations.transformers.batching.installed", lambda: (5, 15))
    with pytest.raises(UnsupportedError, match=r"sliding window .* transformers 5\.15 .*'transformers>=5\.16'"):
        attn_transformers.paged(decoder("gemma2")).__enter__()
    with attn_transformers.paged(model, "TORCH_SDPA"):
        pass
    monkeypatch.setattr(attn_transformers, "installed", lambda: (5, 3))
    with pytest.raises(BackendLoadError, match=r"transformers 5\.3 .*'transformers>=5\.4'"):
        attn_transformers.register()


@torch.no_grad()
@pytest.mark.parametrize("compiled", [full(False), True])  # eager calls compile FLEX_ATTENTION
def test_a_backend_per_kind_of_layer(compiled, monkeypatch):
    model, inputs, made, make = decoder("gemma2"), batch("left"), [], packing._first_size
    real = inputs["attention_mask"].bool()
    monkeypatch.setattr(packing, "_first_size", lambda *rest: made.append(make(*rest)) or made[-1])
    want = model(**inputs).logits[real]
    attn_transformers.register()
    model.set_attn_implementation("attn")
    call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    with attn.backend_per_kind_context_manager({"full": "FLEX_ATTENTION", "sliding": "TORCH_SDPA"}):
        torch.testing.assert_close(call(**inputs).logits[real], want, rtol=1e-4, atol=1e-4)
    assert {(layer.impl.window == (None, None), layer.selection.name) for layer in made} == {
        (True, "FLEX_ATTENTION"),
        (False, "TORCH_SDPA"),
    }
    made.clear()
    model.set_attn_implementation("attn:CPU_ATTN")
    with attn.backend_per_kind_context_manager({"full": "FLEX_ATTENTION", "sliding": "TORCH_SDPA"}):
        model(**inputs)
    assert {layer.selection.name for layer in made} == {"CPU_ATTN"}


@torch.no_grad()
def test_a_backend_per_kind_that_cannot_serve_is_refused(monkeypatch):
    attn_transformers.register()
    model = decoder("gemma2")
    model.set_attn_implementation("attn")
    monkeypatch.setenv("ATTN_BACKEND_PER_KIND", "full=PALLAS")
    refused = r"(?s)Gemma2Attention of layer 1 \(ATTN_BACKEND_PER_KIND\['full'\]=PALLAS\).*framework=torch"
    with pytest.raises(UnsupportedError, match=refused):
        model(**batch("left"))
    model = decoder("llama")  # the oldest transformers has no continuous batching for windows
    model.set_attn_implementation("attn")
    with pytest.raises(UnsupportedError, match=r"\['full'\]=PALLAS\): PALLAS has no torch layer with a paged cache"):
        attn_transformers.paged(model).__enter__()
    with attn_transformers.paged(model, "TORCH_SDPA"):
        pass


@torch.no_grad()
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "nemotron"])
def test_requested_weights_are_eagers(kind, padding):
    """Weights without the sink's share (gpt_oss), within windows (gemma2) and of layers that do not pass the request on
    (nemotron), in a prompt and in a step over a cache."""
    model, inputs = decoder(kind), batch(padding)
    real = inputs["attention_mask"].bool()
    found = {}
    for name in ("eager", "attn", "attn:TORCH_SDPA"):
        model.set_attn_implementation(name)
        first = model(**inputs, output_attentions=True, use_cache=True)
        step = {"input_ids": inputs["input_ids"][:, :1], CACHE: first[CACHE]}
        longer = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones(len(real), 1)], 1)
        second = model(**step, attention_mask=longer, output_attentions=True)
        found[name] = [w.transpose(1, 2)[real] for w in first.attentions] + list(second.attentions)
    want = found.pop("eager")
    for name, got in found.items():
        assert len(got) == len(want) == 4
        for one, other in zip(got, want, strict=True):
            assert one.shape == other.shape, name
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_weights_that_cannot_be_computed_are_refused(monkeypatch):
    model = attention_dropout(decoder("llama"), 0.25)
    model.set_attn_implementation("attn")
    with pytest.raises(UnsupportedError, match="LlamaAttention of layer 0: output_attentions .* or dropout not supported"):
        model(**batch("none"), output_attentions=True)
    monkeypatch.setattr("attn.weights.MAX_ELEMENTS", 100)
    with pytest.raises(UnsupportedError, match="2312 attention weights: must be at most 100"):
        model.eval()(**batch("none"), output_attentions=True)


def attention_dropout(model, p):
    """Put the model in training mode with dropout of attention weights and no other."""
    for name, module in model.train().named_modules():
        for option in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, option, None), float):
                setattr(module, option, p if type(module).__name__.endswith("Attention") else 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = p if name.endswith("attention.self.dropout") else 0.0
    return model


@pytest.mark.parametrize(
    ("kind", "padding", "compiled"),
    [
        *((kind, padding, False) for kind in ("bert", "llama", "mistral", "bart", "t5") for padding in ("left", "right")),
        ("llama", "none", False),
        *sampled([pytest.param("bert", "right", True), pytest.param("llama", "left", True)], 1, "dropout in a graph"),
    ],
)
def test_dropout_of_weights_is_eagers_from_the_same_seed(kind, padding, compiled):
    model, inputs = attention_dropout(model_of(kind), 0.5), batch(padding)
    real = inputs["attention_mask"].bool()
    if kind in ("bart", "t5"):
        inputs, real = {**inputs, "decoder_input_ids": batch("none")["input_ids"][:, :9]}, slice(None)
    weight = next(weight for name, weight in model.named_parameters() if any(part in name for part in ("k_proj", "key", ".k.")))
    torch.compiler.reset()

    def run(implementation, seed):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        through = compiled and implementation == "attn"
        whole = torch.compile(model, fullgraph=True, backend="eager") if through else model
        torch.manual_seed(seed)
        out = whole(**inputs)[0][real]
        out.square().mean().backward()
        return out, weight.grad.clone()

    want, got, other = run("eager", 5), run("attn", 5), run("attn", 6)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(other[0], got[0], rtol=1e-3, atol=1e-4)


def test_dropout_beside_what_torch_lacks_is_called_what_the_config_calls_it():
    model = encoder().train()
    model.config.attention_probs_dropout_prob = 0.25
    for layer in model.encoder.layer:
        layer.attention.self.dropout.p = 0.25
    model.set_attn_implementation("attn:TORCH_SDPA")
    with pytest.raises(
        UnsupportedError, match=r"weights \(0\.25\) .* set attention_probs_dropout_prob to 0 in the model's config"
    ):
        model(**batch("none"))
    model = attention_dropout(decoder("gemma2"), 0.25)
    model.set_attn_implementation("attn")
    with pytest.raises(UnsupportedError, match=r"weights \(0\.25\) with a cap, sinks or a backend by name not supported"):
        model(**batch("none"))


def test_what_is_not_understood_names_the_layer():
    model, inputs = decoder("llama"), batch("none")
    model.set_attn_implementation("attn")
    with pytest.raises(UnsupportedError, match=r"LlamaAttention of layer 0: alibi not supported; .*TRITON_ATTN.* support it"):
        model(**inputs, alibi=torch.zeros(1))
    odd = torch.tril(torch.ones(1, 1, 17, 17, dtype=torch.bool))
    odd[0, 0, 5, 2] = False
    model.set_attn_implementation("attn:TORCH_SDPA")
    for name in ("TORCH_SDPA", "CUDNN_ATTN"):  # dense backends that have masks
        with pytest.raises(UnsupportedError, match=rf"attn:TORCH_SDPA.*causal or windowed pattern.* uses .*{name}"):
            model(input_ids=inputs["input_ids"], attention_mask=odd.expand(2, 1, 17, 17))


def test_a_backend_that_cannot_serve_names_layer_feature_and_those_that_can():
    """Never another one in its place."""
    model, inputs = decoder("gpt_oss"), batch("left")
    for name, lacks in (("ROCM_AITER_FA", "sinks not supported"), ("FLASHINFER", "platform=cpu")):
        model.set_attn_implementation(f"attn:{name}")
        with pytest.raises(UnsupportedError) as found, torch.no_grad():
            model(**inputs)
        said = str(found.value)
        assert said.startswith(f'GptOssAttention of layer 0 (attn_implementation="attn:{name}"): ')
        assert f" {name} " in said and lacks in said
        assert "Backends that support sliding_window, sinks: " in said and "TRITON_ATTN" in said
        assert said.endswith("on this machine: CPU_ATTN, TORCH_SDPA, FLEX_ATTENTION"), said


@pytest.mark.parametrize(
    ("kind", "implementation"),
    sampled([pytest.param(*case) for case in GRAPHS], 2, "one graph"),
)
def test_a_compiled_model_is_one_graph(kind, implementation):
    """fullgraph=True: what torch can trace is traced, the rest is one operator for each layer; padding included."""
    torch.compiler.reset()
    model, inputs = (encoder(), batch("right")) if kind == "bert" else (decoder(kind), batch("left"))
    real, options = inputs["attention_mask"].bool(), {} if kind == "bert" else {"use_cache": False}
    with torch.no_grad():
        want = model(**inputs, **options)[0][real]
        model.set_attn_implementation(implementation)
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs, **options)[0][real]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@library.custom_op("attn_tests::row", mutates_args=())
def formula_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, cap: float, sinks: torch.Tensor | None,
    mask: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As `attn.torch.kernels.dense_decode.row`."""
    arrays = (x.transpose(1, 2) for x in (query, key, value))
    return attn.attention(
        *arrays, scale=scale, logits_soft_cap=cap or None, sinks=sinks, mask=mask[:, None, None], layout="BSHD"
    ).clone()


@formula_row.register_fake
def _(query, *rest):
    return query.transpose(1, 2).contiguous()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_single_rows_in_a_graph_are_captured_where_a_backend_has_an_operator_for_them(kind, monkeypatch):
    """With a static cache, as `generate` compiles it on a GPU, padding included."""

    torch.compiler.reset()
    stand_in = ModuleType("attn.torch.kernels.dense_decode")
    stand_in.row = lambda *given: formula_row(*given[:7])
    stand_in.run_of = lambda mask: [mask]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(dispatch, "_has_row_operator", lambda *facts: True)
    model, inputs = decoder(kind), batch("left")
    attn_transformers.register()
    graphs, outputs = [], {}

    def compiler(made, example):
        graphs.append(str(made.code))
        return made

    for name in ("eager", "attn"):
        model.set_attn_implementation(name)
        cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        step = torch.compile(model, fullgraph=True, backend=compiler) if name == "attn" else model
        given = {**inputs, CACHE: cache}
        found = [model(**given).logits[:, -1:]]
        for _ in range(3):
            there = torch.cat([given["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
            place = there.cumsum(1)[:, -1:] - 1
            given = {**given, "attention_mask": there, "input_ids": torch.full((2, 1), 5), "position_ids": place}
            found.append(step(**given).logits)
        outputs[name] = torch.cat(found, 1)
    torch.testing.assert_close(outputs["attn"], outputs["eager"], rtol=1e-4, atol=1e-4)
    assert len(graphs) <= 2, "one of the first length of the padding mask, one of any"
    assert all("attn_tests.row" in code and "attn.transformers" not in code for code in graphs)
    assert not any("sinks_.float()" in code for code in graphs), "a kernel of each layer and token"


def test_a_drawn_mask_that_is_a_pattern_is_known_again():
    """A backend by name takes it then; a row that attends to others is not padding, though no row attends to it."""
    model, inputs = decoder("gemma2"), batch("left")
    present = inputs["attention_mask"].bool()
    ahead = torch.arange(17) - torch.arange(17)[:, None]
    causal = (ahead <= 0) & present[:, None, :] & present[:, :, None]
    both = {"full_attention": causal[:, None], "sliding_attention": (causal & (ahead > -6))[:, None]}
    call = {"input_ids": inputs["input_ids"], "attention_mask": both, "position_ids": (present.cumsum(1) - 1).clamp(min=0)}
    want = logits(model, "eager", inputs)[present]
    for name in ("attn", "attn:TORCH_SDPA"):
        torch.testing.assert_close(logits(model, name, {**inputs, **call})[present], want, rtol=1e-4, atol=1e-4)
    both["full_attention"][:, :, 7:, 6] = False
    both["full_attention"][:, :, 6, 6] = False  # row 6 still sees those before it
    with pytest.raises(UnsupportedError, match="other than a causal or windowed pattern"):
        logits(model, "attn:TORCH_SDPA", {**inputs, **call})


def test_a_mask_of_the_callers_own():
    model, inputs = decoder("llama"), batch("none")
    drawn = torch.tril(torch.ones(17, 17, dtype=torch.bool)).repeat(2, 1, 1, 1)
    drawn[:, 0, 5:, 2] = False
    added = torch.zeros(drawn.shape).masked_fill(~drawn, torch.finfo(torch.float32).min)
    want = logits(model, "eager", {"input_ids": inputs["input_ids"], "attention_mask": added})
    got = logits(model, "attn", {"input_ids": inputs["input_ids"], "attention_mask": added})
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
