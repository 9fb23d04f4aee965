"""transformers: each way to generate gives eager's tokens and logits through `attn`, whatever the architecture.

A way is a function of a model that returns tensors; it is run under eager and under `attn`. Two controls run the ways with a
wrong scale, and with the masks that once lost the keys of a cache, so that a way which cannot fail is found.

The suite runs a choice of ways and architectures (`cells`). Every pair, in about five minutes: ATTN_TEST_WAYS=all. Most ways
that compile cost seconds: `make test` draws one of them.
"""

import copy
import inspect
import os

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attn.errors import UnsupportedError  # noqa: E402
from attn.integrations import transformers as attn_transformers  # noqa: E402
from attn.integrations.transformers import batching, dispatch  # noqa: E402
from tests.integrations.tiny_transformers import CACHE, batch, model_of  # noqa: E402
from tests.levels import sampled  # noqa: E402

NEW = 8


def generated(model, inputs, **options):
    """(tokens, logits of every step) of one `generate`."""
    told = {"max_new_tokens": NEW, "do_sample": False, **options}
    out = model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **told)
    return out.sequences, torch.stack(out.logits)


def one(inputs):
    return {name: x[:1] for name, x in inputs.items()}


def greedy(model):
    return generated(model, batch("none"))


def sampling(model):
    torch.manual_seed(3)
    return generated(model, batch("left"), do_sample=True, temperature=0.7, top_k=20)


def beams(model):
    return generated(model, batch("left"), num_beams=3)


def left_padding(model):
    return generated(model, batch("left"))


def right_padding(model):
    """The rows without padding, whose output is undefined."""
    inputs = batch("right")
    return (model(**inputs).logits[inputs["attention_mask"].bool()],)


def states(model):
    """Of an encoder."""
    found = []
    for padding in ("none", "left", "right"):
        inputs = batch(padding)
        found.append(model(**inputs)[0][inputs["attention_mask"].bool()])
    return found


def prompt_lookup(model):
    """The prompt repeats itself, so that candidates are found."""
    ids = batch("none")["input_ids"][:1, :7].repeat(1, 3)
    return generated(
        model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, prompt_lookup_num_tokens=3, eos_token_id=-1
    )


def assistant(model):
    """A model that is nearly this one: some of its candidates are taken, some are not."""
    nearly = copy.deepcopy(model)
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in nearly.parameters():
            weight.add_(0.02 * weight.abs().mean() * torch.randn_like(weight))
    nearly.generation_config.num_assistant_tokens = 4
    nearly.generation_config.num_assistant_tokens_schedule = "constant"
    nearly.generation_config.assistant_confidence_threshold = 0.0
    return generated(model, one(batch("none")), assistant_model=nearly)


def chunked_prefill(model):
    return [x for padding in ("none", "left") for x in generated(model, batch(padding), prefill_chunk_size=5)]


def pieces(model):
    """Calls of several rows, of one, and of several again on a cache that grows past the window; no mask is given."""
    ids, cache = batch("none", rows=23)["input_ids"], transformers.DynamicCache(config=model.config)
    name, given = "input_ids", {}
    if model.config.is_encoder_decoder:
        name, given = "decoder_input_ids", batch("left")
        cache = transformers.EncoderDecoderCache(cache, transformers.DynamicCache())
    found = []
    for piece in ids.split([3, 1, 6, 4, 9], dim=1):
        found.append(model(**given, **{name: piece, CACHE: cache}).logits)
    return found


def whole_cache(model):
    """A cache that keeps all keys, of windows too: steps of one row see the last of them."""
    return [x for padding in ("none", "left") for x in generated(model, batch(padding), **{CACHE: transformers.DynamicCache()})]


def second_turn(model):
    """Text of the first turn and more of the user's, over the cache of the first."""
    found = []
    for padding in ("none", "left"):
        inputs = batch(padding)
        first = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, batch("none", rows=6)["input_ids"]], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, ids.shape[1] - 17, dtype=torch.long)], 1)
        found += generated(model, {"input_ids": ids, "attention_mask": mask}, **{CACHE: first[CACHE]})
    return found


def prefix_reuse(model):
    """Two continuations of one cached prefix."""
    ids = batch("none", rows=21)["input_ids"][:1]
    prefix = model(input_ids=ids[:, :12], **{CACHE: transformers.DynamicCache(config=model.config)})[CACHE]
    found = []
    for more in (ids, torch.cat([ids[:, :12], ids[:, 15:]], 1)):
        inputs = {"input_ids": more, "attention_mask": torch.ones_like(more)}
        found += generated(model, inputs, **{CACHE: copy.deepcopy(prefix)})
    return found


def static_cache(model):
    return generated(model, batch("left"), cache_implementation="static")


def static_cache_in_pieces(model):
    return generated(model, batch("left"), cache_implementation="static", prefill_chunk_size=5)


def offloaded_cache(model, kind="offloaded"):
    if not torch.accelerator.is_available():
        pytest.skip("an offloaded cache needs a device to be offloaded from")
    return generated(model, batch("left"), cache_implementation=kind)


def offloaded_static_cache(model):
    return offloaded_cache(model, "offloaded_static")


def quantised_cache(model, backend="fp8"):
    if backend == "fp8" and not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this transformers quantises caches by other packages alone")
    if backend == "quanto":
        pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    how = {"backend": backend} | ({} if backend == "fp8" else {"nbits": 4, "q_group_size": 16, "residual_length": 4})
    return generated(model, batch("left"), cache_implementation="quantized", cache_config=how)


def quanto_cache(model):
    return quantised_cache(model, "quanto")


def compiled(model, inputs, backend="aot_eager", **how):
    torch.compiler.reset()
    real = inputs["attention_mask"].bool()
    options = {"use_cache": False} if hasattr(model, "generate") else {}
    if model.config.is_encoder_decoder:
        options["decoder_input_ids"] = batch("none")["input_ids"][:, :9]
        real = slice(None)
    return torch.compile(model, fullgraph=True, backend=backend, **how)(**inputs, **options)[0][real]


def fullgraph(model):
    return (compiled(model, batch("left")),)


def dynamic(model):
    """Every extent is a symbol, from the first call on; without aot_eager's pass over symbols, which takes most of the time."""
    return (compiled(model, batch("left"), backend="eager", dynamic=True),)


def compiled_decode(model, backend="eager", **options):
    """`generate` compiles the steps over a static cache, and the prompt's pieces."""
    torch.compiler.reset()
    how = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    how._compile_all_devices = True
    told = {"prefill_chunk_size": 5, **options}
    return generated(model, batch("left"), cache_implementation="static", compile_config=how, **told)


#: Ways in which several rows meet a cache that holds keys already.
ON_A_CACHE = [prompt_lookup, assistant, chunked_prefill, pieces, second_turn, prefix_reuse, static_cache_in_pieces]
OTHERS = [
    greedy,
    sampling,
    beams,
    left_padding,
    right_padding,
    whole_cache,
    static_cache,
    offloaded_cache,
    offloaded_static_cache,
    quantised_cache,
    quanto_cache,
]
COMPILED = [fullgraph, dynamic, compiled_decode]
WINDOWED = {"gemma2", "gemma3", "gpt_oss", "mistral"}
DECODERS = ["llama", "qwen3", *sorted(WINDOWED), "phi3", "deepseek_v2", "deepseek_v3"]
_ENCODER_DECODERS = {greedy, beams, sampling, left_padding, prompt_lookup, assistant, pieces, static_cache, *COMPILED}


def there(way, kind):
    """Whether transformers itself has this way for this model."""
    if kind == "bert":
        return way in (states, fullgraph, dynamic)
    if kind in ("bart", "t5"):
        return way in _ENCODER_DECODERS
    return way is not states and not (way in (quantised_cache, quanto_cache) and kind in WINDOWED)


def cells():
    """All of them, or each way with llama, one model that has windows and one other, the last two by turns; compiled ones,
    which cost seconds, with the models named here."""
    kinds = [*DECODERS, "bart", "t5", "bert"]
    every = [(way, kind) for way in [*ON_A_CACHE, *OTHERS, states, *COMPILED] for kind in kinds if there(way, kind)]
    if os.environ.get("ATTN_TEST_WAYS") == "all":
        return every
    some = [
        (states, "bert"),
        (fullgraph, "bart"),
        (static_cache_in_pieces, "mistral"),
        (whole_cache, "gpt_oss"),
        (static_cache, "t5"),
        (pieces, "bart"),
        (pieces, "t5"),
    ]
    for turn, way in enumerate([*ON_A_CACHE, *OTHERS]):
        rest = [kind for kind in kinds if there(way, kind) and kind != "llama"]
        for group in ([k for k in rest if k in WINDOWED], [k for k in rest if k not in WINDOWED]):
            some += [(way, group[turn % len(group)])] if group else []
        some.append((way, "llama"))
    compiled = [pytest.param(dynamic, "llama"), pytest.param(dynamic, "gpt_oss"), pytest.param(compiled_decode, "mistral")]
    return [*dict.fromkeys(some), *sampled(compiled, 1, "compiled ways")]


@pytest.fixture(autouse=True, scope="module")
def registered():
    attn_transformers.register()


_models, _wanted = {}, {}


def run(way, kind, implementation):
    if kind not in _models:
        _models[kind] = model_of(kind)
    model = copy.deepcopy(_models[kind])
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return way(model)


def wanted(way, kind):
    if (way, kind) not in _wanted:
        try:
            _wanted[way, kind] = run(way, kind, "eager")
        except (RuntimeError, TypeError, ValueError) as error:
            if batching.installed() >= (5, 23):
                raise
            pytest.skip(f"this transformers cannot by itself: {error}")
    return _wanted[way, kind]


def agree(way, kind, implementation):
    want = wanted(way, kind)
    for mine, eagers in zip(run(way, kind, implementation), want, strict=True):
        torch.testing.assert_close(mine, eagers, rtol=1e-3, atol=1e-3)


def named(cell):
    return cell if isinstance(cell, str) else cell.__name__


@pytest.mark.parametrize(("way", "kind"), cells(), ids=named)
def test_each_way_is_eagers(way, kind):
    agree(way, kind, "attn")


@pytest.mark.parametrize("way", [left_padding, right_padding, beams, assistant, chunked_prefill, static_cache], ids=named)
def test_last_rows_of_a_models_masks(way):
    """Gemma 4 passes the rows whose logits are kept to its last layers, and these rows of its masks."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("no such model in this transformers")
    agree(way, "gemma4", "attn")


@pytest.mark.parametrize("way", [left_padding, chunked_prefill, static_cache], ids=named)
def test_keys_that_an_indexer_chose(way):
    """DeepSeek-V3.2 chooses among all slots of a static cache."""
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("no such model in this transformers")
    agree(way, "deepseek_v32", "attn")


@pytest.mark.parametrize("way", [greedy, left_padding, beams, chunked_prefill, static_cache], ids=named)
def test_masks_that_are_added(way):
    if "allow_is_causal_skip" not in inspect.signature(transformers.masking_utils.create_causal_mask).parameters:
        pytest.skip("the model adds to a mask that it cannot ask for in this transformers, and that is not always there")
    agree(way, "doge", "attn")


@pytest.mark.parametrize("kind", ["llama", *sampled(["qwen3", "gemma2", "gpt_oss"], 1, "kinds compiled once")])
def test_steps_over_a_static_cache_are_compiled_once(kind):
    """No later token compiles again, and `attn` makes no more graphs than sdpa (gpt_oss and gemma2: eager) does."""

    def graphs(implementation, tokens):
        made = []

        def backend(graph, inputs):
            made.append(len(graph.graph.nodes))
            return graph.forward

        run(lambda model: compiled_decode(model, backend, max_new_tokens=tokens, prefill_chunk_size=None), kind, implementation)
        return len(made)

    ours = graphs("attn", 12)
    assert 0 < ours == graphs("attn", 3)
    assert ours <= graphs("sdpa" if kind in ("llama", "qwen3") else "eager", 12)


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "CPU_ATTN"])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
@pytest.mark.parametrize("way", ON_A_CACHE, ids=named)
def test_rows_on_a_cache_are_eagers_by_a_backend_of_ones_choice(way, kind, backend):
    if (way, kind) == (assistant, "gpt_oss"):
        pytest.skip("transformers' mask for the assistant has gaps within the window, which no backend takes by name")
    agree(way, kind, f"attn:{backend}")


def lossy(attention, mask):
    """The name of an implementation that is `attn` but for these."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("attn_lossy", attention)
    AttentionMaskInterface.register("attn_lossy", mask)
    return "attn_lossy"


@pytest.mark.parametrize("way", [*ON_A_CACHE, *OTHERS, states], ids=named)
def test_each_way_shows_a_wrong_scale(way):
    whole = attn_transformers._function(None)

    def flat(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return whole(module, query, key, value, attention_mask, scaling=0.5 * query.shape[-1] ** -0.5, **kwargs)

    with pytest.raises(AssertionError):
        agree(way, "bert" if way is states else "llama", lossy(flat, attn_transformers.mask))


def plain_as_none(q_length, kv_length, attention_mask=None, **kwargs):
    """The masks of a former version: none for a plain pattern, wherever its rows stand among the keys."""
    if 1 < q_length < kv_length and (attention_mask is None or bool(attention_mask.all())):
        return None
    return attn_transformers.mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)


@pytest.mark.parametrize("way", [way for way in ON_A_CACHE if way is not static_cache_in_pieces], ids=named)
def test_rows_of_unknown_position_are_rejected(way, monkeypatch):
    name = lossy(attn_transformers._function(None), plain_as_none)
    with pytest.raises(UnsupportedError, match=r"causal rows over \d+ keys without a mask not supported"):
        run(way, "llama", name)
    read = dispatch.read

    def cropped(call, draw=False):
        if call.mask is None and call.seen.layer.causal and call.query.shape[2] > 1:
            rows = call.query.shape[2]
            call.key, call.value = call.key[:, :, :rows], call.value[:, :, :rows]
        read(call, draw)

    monkeypatch.setattr(dispatch, "read", cropped)
    with pytest.raises(AssertionError):
        agree(way, "llama", name)
