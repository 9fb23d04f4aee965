"""A model's attention layers, read from the `config.json` of transformers without importing transformers.

Fields keep transformers' meaning. `_MODELS` lists how a `model_type` departs from the usual fields; any other type is read by
the usual fields, as a decoder, and `ModelLayers.notes` says so. A field that cannot be read is a `CheckpointError` of one
line; every field read is in `ModelLayers.fields`, those that the file does not contain are marked as defaults.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from attn.capabilities import AttentionType, Feature
from attn.dtypes import DTYPES
from attn.fields import CheckpointError, Fields, read_json

CONFIG_FILE = "config.json"


class LatentSizes(NamedTuple):
    """Sizes of a latent (MLA) layer: the cached latent, the cached rotary part, and per head the rest of a key, and a value."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class LayerKind:
    """Equal layers of a model. A kind without heads is not attention; `name` says what it is.

    `head_size` is that of a cached key (of a latent layer: the whole cached row). A row sees the last `window` keys, itself
    included, or those of its own chunk of `chunk` tokens (None: all). `scale` None: 1/sqrt of the size of a key.
    """

    name: str
    count: int = 1
    num_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    attn_type: str = AttentionType.DECODER
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    sinks: bool = False
    alibi: bool = False
    position_bias: bool = False
    latent: LatentSizes | None = None
    topk: int | None = None

    @property
    def is_attention(self) -> bool:
        return self.num_heads > 0

    @property
    def features(self) -> frozenset[str]:
        """The features that the layer requires of a backend."""
        # Truth decides: 0 and None both mean that a config has no window, cap or chunk.
        required = {
            Feature.SLIDING_WINDOW: self.window,
            Feature.SOFT_CAP: self.soft_cap,
            Feature.SINKS: self.sinks,
            Feature.ALIBI: self.alibi,
            Feature.SPARSE_MLA: self.topk,
            Feature.MLA: self.latent and not self.topk,
            Feature.CHUNK_SIZE: self.chunk,
        }
        return frozenset(feature.value for feature, value in required.items() if value)


@dataclass(frozen=True)
class ModelLayers:
    """The layers of the model in `source`, by kind and in order, its dtype, the fields read, and remarks on the reading."""

    source: str
    model_type: str
    dtype: str
    kinds: tuple[LayerKind, ...]
    fields: tuple[str, ...]
    notes: tuple[str, ...]
    layers: tuple[LayerKind, ...]


_Layers = Callable[["_Reader", int], list[str]]


@dataclass(frozen=True, kw_only=True)
class _Model:
    """The differences of a model type from the usual fields.

    `names` maps the usual name of a field to the type's own; `defaults` are transformers' for optional fields; `layers`
    returns each layer's type (`_WORDS`) if the file has no `layer_types`; `change` adjusts a layer of attention.
    """

    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    layers: _Layers = lambda reader, count: ["full_attention"] * count
    change: Callable[["_Reader", LayerKind], LayerKind] = lambda reader, layer: layer
    read: Callable[["_Reader"], list[LayerKind]] | None = None  #: replaces all of the above but names and defaults


class _Reader:
    """The fields of one configuration, which remembers those that were read."""

    def __init__(self, fields: Fields, model: _Model, used: dict[str, str] | None = None, prefix: str = "") -> None:
        # A null in the file wins over the default: transformers writes null for a field that is off.
        self.fields = Fields({**model.defaults, **fields.values}, fields.source)
        self.explicit, self.model, self.prefix = fields.values, model, prefix
        self.used: dict[str, str] = {} if used is None else used

    def name(self, usual: str) -> str:
        """Return the name under which the file has a field, noting that it was read."""
        names = self.model.names.get(usual, (usual,))
        # The first name that has a value; an error about a missing field names the first of all.
        name = next((n for n in names if self.fields.has(n)), names[0])
        # Sections are read field by field, which are noted themselves.
        if name in self.fields.values and not isinstance(self.fields.values[name], dict):
            text = _shown(self.fields.values[name])
            self.used[self.prefix + name] = f"{self.prefix}{name}={text}" + ("" if name in self.explicit else " (default)")
        return name

    def section(self, usual: str, defaults: Mapping[str, Any]) -> "_Reader":
        """Return a reader of the object in a field, or of the defaults if the file does not have the field."""
        fields = self.fields.section(self.name(usual)) if self.has(usual) else Fields({}, f"{self.fields.source}: {usual}")
        return _Reader(fields, _Model(defaults=defaults), self.used, f"{usual}.")

    def has(self, usual: str) -> bool:
        return self.fields.has(self.name(usual))

    def value(self, usual: str) -> Any:
        return self.fields.values.get(self.name(usual))

    def integer(self, usual: str, minimum: int = 1) -> int:
        return self.fields.integer(self.name(usual), minimum)

    def boolean(self, usual: str) -> bool:
        return self.fields.boolean(self.name(usual), False)

    def number(self, usual: str) -> float | None:
        return self.fields.optional_number(self.name(usual))

    def wrong(self, usual: str, allowed: str) -> CheckpointError:
        return self.fields.wrong(self.name(usual), allowed)

    def integers(self, usual: str, count: int | None = None) -> list[int]:
        values = self.value(usual)
        if not isinstance(values, list) or not all(type(n) is int for n in values) or count not in (None, len(values)):
            raise self.wrong(usual, f"a list of {f'{count} ' if count is not None else ''}integers")
        return values


#: Names of layer types -> usual name; the others are not attention.
_WORDS = {
    **{name: name for name in ("full_attention", "sliding_attention", "chunked_attention", "mamba", "recurrent", "mlp", "moe")},
    **{"attention": "full_attention", "linear_attention": "linear attention", "conv": "convolution"},
}


def read_layers(source: str | Path | Mapping[str, Any] | Any) -> ModelLayers:
    """Return the layers of a configuration: a `config.json`, a folder with one, its fields, or transformers' object.

    Raises `CheckpointError` (a ValueError), with the file and the field, for what cannot be read.
    """
    top = _fields_of(source)
    fields, notes = top, list[str]()
    # Multimodal models keep the language model's fields in a section, its type included (gemma3 -> gemma3_text).
    if isinstance(top.values.get("text_config"), dict):
        fields = top.section("text_config")
        notes.append("text_config only: layers of vision and audio are not listed")
    model_type = _model_type(fields, top)
    model = _MODELS.get(model_type)
    if fields is not top and model_type in _NESTED:  # published with the fields that differ from the defaults only
        model = replace(_MODELS[model_type], defaults={**_NESTED[model_type], **_MODELS[model_type].defaults})
    if model is None:
        notes.append(f"model_type {model_type!r} is not known here: read by the usual fields, as a decoder")
        # What is unusual about an unknown type must be an error: a layer kind read wrongly would give wrong sizes
        # without a sign.
        _check_usual(top, fields, model_type)
    reader = _Reader(fields, model or _Model(layers=_unknown_windows))
    kinds = (reader.model.read or _decoder)(reader)
    # In order of appearance: equal layers are one row of the report, whatever lies between them.
    counted = Counter(kinds)
    dtype = _dtype(fields, top)
    notes += [] if dtype else ["neither dtype nor torch_dtype in the file: transformers' default is float32"]
    if any(layer.topk for layer in counted):
        notes.append("the indexer's cache is not counted")
    return ModelLayers(
        top.source,
        model_type,
        dtype or "float32",
        tuple(replace(layer, count=count) for layer, count in counted.items()),
        (f"model_type={model_type}", *reader.used.values()),
        tuple(notes),
        tuple(kinds),
    )


def _fields_of(source: Any) -> Fields:
    if isinstance(source, Fields):
        return source
    # A configuration object of transformers, which is not imported.
    if hasattr(source, "to_dict"):
        source = source.to_dict()
    if isinstance(source, Mapping):
        return Fields(source, "config")
    path = Path(source)
    path = path / CONFIG_FILE if path.is_dir() else path
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: pass a {CONFIG_FILE}, or a folder with one")
    return Fields(read_json(path), str(path))


def _model_type(fields: Fields, top: Fields) -> str:
    for section in (fields, top):
        if section.has("model_type"):
            if not isinstance(section.values["model_type"], str):
                raise section.wrong("model_type", "a string")
            return section.values["model_type"]
    raise top.wrong("model_type", "a string such as llama")


def _dtype(fields: Fields, top: Fields) -> str | None:
    for section in (fields, top):
        for name in ("dtype", "torch_dtype"):
            if section.has(name):
                value = section.values[name]
                dtype = str(value).removeprefix("torch.")
                # Floats of 8 bits name how weights are stored; no activations have them.
                if DTYPES.get(dtype) is None or DTYPES[dtype].kind != "float" or DTYPES[dtype].itemsize == 1:
                    raise section.wrong(name, "float32, float16 or bfloat16")
                return dtype
    return None


def _check_usual(top: Fields, fields: Fields, model_type: str) -> None:
    """Raise `CheckpointError` for a model of unknown type that is not a decoder, or whose fields override the usual ones."""
    names = top.values.get("architectures") or []
    if names and not any("CausalLM" in str(n) or "ConditionalGeneration" in str(n) for n in names):
        raise top.wrong("architectures", f"a ...ForCausalLM: model_type {model_type!r} is read as a decoder")
    for section in (top, fields):
        if section.boolean("is_encoder_decoder", False):
            raise section.wrong("is_encoder_decoder", f"false: model_type {model_type!r} is read as a decoder")
    for name in _UNUSUAL:
        if fields.has(name) and not fields.has("layer_types"):
            raise fields.wrong(name, f"null: what it means for model_type {model_type!r} is not known here")
    if fields.has("num_kv_shared_layers") and fields.integer("num_kv_shared_layers", 0):
        raise fields.wrong("num_kv_shared_layers", "0: layers that share a cache are not read")


#: Fields by which some layers differ from others, in a way that depends on the model type.
_UNUSUAL = ("local_attention", "full_attention_interval", "attn_layer_period", "attn_layer_indices")


def _decoder(reader: _Reader) -> list[LayerKind]:
    """Return a decoder's layers in order."""
    if reader.boolean("use_bidirectional_attention"):
        raise reader.wrong("use_bidirectional_attention", "false: the layers of a bidirectional decoder are not read")
    # Nemotron-H's pattern is the list of layers, one letter each; its length is their number.
    count = None if reader.has("hybrid_override_pattern") else reader.integer("num_hidden_layers")
    types = _layer_types(reader, count) if reader.has("layer_types") else reader.model.layers(reader, count or 0)
    # A model without attention need not have heads, which are read below.
    if all(_WORDS[word] not in _ATTENTION for word in types):
        return [LayerKind(_WORDS[word]) for word in types]
    base = _latent(reader) if reader.has("kv_lora_rank") else _heads(reader)
    base = reader.model.change(reader, replace(base, soft_cap=reader.number("attn_logit_softcapping")))
    # Once per type, so that a field is read, and complained of, once.
    by_word = {word: _layer_of(reader, base, _WORDS[word]) for word in dict.fromkeys(types)}
    return [by_word[word] for word in types]


_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


def _layer_types(reader: _Reader, count: int | None) -> list[str]:
    types = reader.value("layer_types")
    # The list may name layers that are not attention; a word that is not known could be either.
    known = isinstance(types, list) and all(isinstance(word, str) and word in _WORDS for word in types)
    if not known or count not in (None, len(types)):
        raise reader.wrong("layer_types", f"a list of {'' if count is None else f'{count} of '}{', '.join(_WORDS)}")
    return types


def _layer_of(reader: _Reader, base: LayerKind, word: str) -> LayerKind:
    if word == "sliding_attention":
        # The two fields contradict each other: neither reading is better than the other.
        if reader.value("use_sliding_window") is False:
            raise reader.wrong("layer_types", "full_attention throughout: use_sliding_window or sliding_window is off")
        return replace(base, name="sliding", window=reader.integer("sliding_window"))
    if word == "chunked_attention":
        return replace(base, name="chunked", chunk=reader.integer("attention_chunk_size"))
    return base if word == "full_attention" else LayerKind(word)


def _heads(reader: _Reader) -> LayerKind:
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads") if reader.has("num_key_value_heads") else heads
    if heads % kv_heads:
        raise reader.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    return LayerKind("full", 1, heads, kv_heads, _head_size(reader, heads))


def _head_size(reader: _Reader, heads: int) -> int:
    if reader.has("head_dim"):
        return reader.integer("head_dim")
    hidden = reader.integer("hidden_size")
    if hidden % heads:
        raise reader.wrong("hidden_size", f"a multiple of num_attention_heads = {heads} where head_dim is not given")
    return hidden // heads


def _latent(reader: _Reader) -> LayerKind:
    """Read a latent layer: all heads read one cached row, latent and rotary part together."""
    names = LatentSizes._fields
    sizes = LatentSizes(*(reader.integer(name, minimum) for name, minimum in zip(names, (1, 0, 1, 1), strict=True)))
    topk = reader.integer("index_topk") if reader.has("index_topk") else None
    heads = reader.integer("num_attention_heads")
    # The cached row, [latent | rotary key]; the scale is that of a key before absorption (docs/semantics.md §9).
    size = sizes.kv_lora_rank + sizes.qk_rope_head_dim
    scale = _yarn_scale(reader) / math.sqrt(sizes.qk_nope_head_dim + sizes.qk_rope_head_dim)
    return LayerKind("sparse_mla" if topk else "mla", 1, heads, 1, size, scale=scale, latent=sizes, topk=topk)


def _yarn_scale(reader: _Reader) -> float:
    """Return the factor by which DeepSeek scales scores beyond the trained context: mscale(factor, mscale_all_dim) squared."""
    # transformers 5 renamed the field; files of both versions are in use.
    rope = reader.section(next((n for n in ("rope_scaling", "rope_parameters") if reader.has(n)), "rope_scaling"), {})
    mscale, factor = rope.number("mscale_all_dim"), rope.number("factor")
    # As DeepSeek's modeling code, whose softmax_scale is multiplied by the square of 0.1 * mscale_all_dim * log(factor) + 1.
    return 1.0 if mscale is None or factor is None or factor <= 1 else (0.1 * mscale * math.log(factor) + 1) ** 2


# --- which layer is of which type ------------------------------------------------------------------------------------


def _unknown_windows(reader: _Reader, count: int) -> list[str]:
    # Which layers have the window depends on the type, and this one is not known.
    if reader.has("sliding_window") and reader.value("use_sliding_window") is not False:
        raise reader.wrong("sliding_window", "null, unless layer_types lists the layers that it applies to")
    return ["full_attention"] * count


def _all_sliding(reader: _Reader, count: int) -> list[str]:
    """All layers, if there is a window; `use_sliding_window` false turns it off."""
    on = reader.has("sliding_window") and reader.value("use_sliding_window") is not False
    return ["sliding_attention" if on else "full_attention"] * count


def _qwen(reader: _Reader, count: int) -> list[str]:
    if not reader.boolean("use_sliding_window") or not reader.has("sliding_window"):
        return ["full_attention"] * count
    reader.integer("sliding_window")  # raises for a value that is not a size, even if no layer has a window
    first = reader.integer("max_window_layers", 0)
    return ["full_attention" if i < first else "sliding_attention" for i in range(count)]


def _every(usual: str, word: str) -> _Layers:
    """Every n-th layer is full, n in the field `usual`; the others are of type `word`."""

    def layers(reader: _Reader, count: int) -> list[str]:
        n = reader.integer(usual)
        # Layers count from 1 here: the n-th, the 2n-th, ... are full.
        return [word if (i + 1) % n else "full_attention" for i in range(count)]

    return layers


def _llama4(reader: _Reader, count: int) -> list[str]:
    if not reader.has("attention_chunk_size"):
        return ["full_attention"] * count
    if reader.value("no_rope_layers"):
        # The field's entries are 1 where a layer does use rotary embeddings, and such layers attend in chunks.
        return ["chunked_attention" if rope else "full_attention" for rope in reader.integers("no_rope_layers", count)]
    return _every("no_rope_layer_interval", "chunked_attention")(reader, count)


def _jamba(reader: _Reader, count: int) -> list[str]:
    period, offset = reader.integer("attn_layer_period"), reader.integer("attn_layer_offset", 0)
    return ["attention" if i % period == offset else "mamba" for i in range(count)]


def _bamba(reader: _Reader, count: int) -> list[str]:
    attending = reader.integers("attn_layer_indices")
    return ["attention" if i in attending else "mamba" for i in range(count)]


def _nemotron_h(reader: _Reader, count: int) -> list[str]:
    pattern, words = reader.value("hybrid_override_pattern"), {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    # A letter that is not known could be a kind of attention.
    if not isinstance(pattern, str) or not set(pattern) <= set(words):
        raise reader.wrong("hybrid_override_pattern", f"a string of {' '.join(words)}")
    return [words[letter] for letter in pattern]


# --- what else a type changes ------------------------------------------------------------------------------------------


def _gemma(reader: _Reader, layer: LayerKind) -> LayerKind:
    scalar = reader.number("query_pre_attn_scalar")
    # Gemma divides by the root of this field instead of the head size's.
    return replace(layer, scale=scalar and scalar**-0.5)


def _having(**changes: Any) -> Callable[[_Reader, LayerKind], LayerKind]:
    return lambda reader, layer: replace(layer, **changes)


def _granite(reader: _Reader, layer: LayerKind) -> LayerKind:
    return replace(layer, scale=reader.number("attention_multiplier"))


def _falcon(reader: _Reader, layer: LayerKind) -> LayerKind:
    """num_kv_heads applies to the new architecture only; the old one has one kv head, or as many as query heads."""
    if reader.boolean("new_decoder_architecture"):
        kv_heads = reader.integer("num_kv_heads")
    else:
        # The old architecture ignores the field num_kv_heads, which files have all the same.
        kv_heads = 1 if reader.boolean("multi_query") else layer.num_heads
    return replace(layer, num_kv_heads=kv_heads, alibi=reader.boolean("alibi"))


def _mpt(reader: _Reader, layer: LayerKind) -> LayerKind:
    section = reader.section("attn_config", {"alibi": True, "attn_type": "multihead_attention"})
    kv_heads = {"multihead_attention": layer.num_heads, "multiquery_attention": 1}.get(section.value("attn_type"))
    if kv_heads is None and section.value("attn_type") != "grouped_query_attention":
        raise section.wrong("attn_type", "multihead_attention, multiquery_attention or grouped_query_attention")
    kv_heads = kv_heads or section.integer("kv_n_heads")
    return replace(layer, num_kv_heads=kv_heads, alibi=section.boolean("alibi"), scale=section.number("softmax_scale"))


def _gpt2(reader: _Reader, layer: LayerKind) -> LayerKind:
    # Layers with scales of their own would be as many kinds as layers.
    if reader.boolean("scale_attn_by_inverse_layer_idx"):
        raise reader.wrong("scale_attn_by_inverse_layer_idx", "false: every layer would have a scale of its own")
    return layer if reader.value("scale_attn_weights") is not False else replace(layer, scale=1.0)


def _bert(reader: _Reader, layer: LayerKind) -> LayerKind:
    if reader.value("position_embedding_type") not in (None, "absolute"):
        raise reader.wrong("position_embedding_type", "absolute: relative ones add to the scores")
    return layer if reader.boolean("is_decoder") else replace(layer, name="encoder", attn_type=AttentionType.ENCODER_ONLY)


def _sides(encoder: LayerKind, layers: int, decoder: LayerKind, decoder_layers: int) -> list[LayerKind]:
    """Return the layers of an encoder and of a decoder; each layer of the latter attends to itself and to the encoder."""
    return [
        *[replace(encoder, name="encoder", attn_type=AttentionType.ENCODER)] * layers,
        *[replace(decoder, name="full")] * decoder_layers,
        *[replace(decoder, name="cross", attn_type=AttentionType.ENCODER_DECODER, position_bias=False)] * decoder_layers,
    ]


def _t5(reader: _Reader) -> list[LayerKind]:
    """T5 adds a learned bias to the scores of self attention and does not scale them."""
    heads, layers = reader.integer("num_heads"), reader.integer("num_layers")
    encoder = LayerKind("", 1, heads, heads, reader.integer("d_kv"), scale=1.0, position_bias=True)
    decoder_layers = reader.integer("num_decoder_layers") if reader.has("num_decoder_layers") else layers
    return _sides(encoder, layers, encoder, decoder_layers)


def _bart(reader: _Reader) -> list[LayerKind]:
    width, layers = reader.integer("d_model"), []
    for side in ("encoder", "decoder"):
        heads = reader.integer(f"{side}_attention_heads")
        if width % heads:
            raise reader.wrong("d_model", f"a multiple of {side}_attention_heads = {heads}")
        layers.append(LayerKind("", 1, heads, heads, width // heads))
    return _sides(layers[0], reader.integer("encoder_layers"), layers[1], reader.integer("decoder_layers"))


def _mamba(reader: _Reader) -> list[LayerKind]:
    return [LayerKind("mamba")] * reader.integer("num_hidden_layers")


_GPT2 = {"num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",), "hidden_size": ("n_embd",)}
_BLOOM = {
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "hidden_size": ("hidden_size", "n_embed"),
}
_MPT = {"num_hidden_layers": ("n_layers",), "num_attention_heads": ("n_heads",), "hidden_size": ("d_model",)}
_HYBRID = {"layer_types": ("layer_types", "layers_block_type")}
_FALCON = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_kv_heads", "n_head_kv"),
}
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_SLIDING = _every("sliding_window_pattern", "sliding_attention")

_MODELS: dict[str, _Model] = {
    **dict.fromkeys(("llama", "olmo", "olmo2", "phi", "cohere", "stablelm", "gpt_neox", "opt", "glm4_moe"), _Model()),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), _Model()),
    "gemma": _Model(defaults={"head_dim": 256}),
    "glm4": _Model(defaults={"head_dim": 128}),
    "mistral": _Model(layers=_all_sliding, defaults={"sliding_window": 4096}),
    **dict.fromkeys(("mixtral", "phi3", "starcoder2"), _Model(layers=_all_sliding)),
    "qwen2": _Model(layers=_qwen, defaults=_QWEN),
    "qwen3": _Model(layers=_qwen, defaults={**_QWEN, "head_dim": 128}),
    "qwen2_moe": _Model(layers=_unknown_windows, defaults={"use_sliding_window": False}),
    "qwen3_moe": _Model(layers=_all_sliding, defaults={"use_sliding_window": False}),
    "smollm3": _Model(layers=_unknown_windows, defaults={"use_sliding_window": False}),
    "gemma2": _Model(
        layers=_SLIDING,
        change=_gemma,
        defaults={
            "head_dim": 256,
            "sliding_window_pattern": 2,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
        },
    ),
    "gemma3_text": _Model(
        layers=_SLIDING,
        change=_gemma,
        defaults={"head_dim": 256, "sliding_window_pattern": 6, "sliding_window": 4096, "query_pre_attn_scalar": 256},
    ),
    "gpt_oss": _Model(
        layers=_SLIDING,
        change=_having(sinks=True),
        defaults={"head_dim": 64, "sliding_window_pattern": 2, "sliding_window": 128},
    ),
    "cohere2": _Model(layers=_SLIDING, defaults={"sliding_window_pattern": 4, "sliding_window": 4096}),
    "olmo3": _Model(layers=_SLIDING, defaults={"sliding_window_pattern": 4, "sliding_window": 4096}),
    "llama4_text": _Model(
        layers=_llama4, defaults={"head_dim": 128, "attention_chunk_size": 8192, "no_rope_layer_interval": 4}
    ),
    **dict.fromkeys(("granite", "granitemoe"), _Model(change=_granite, defaults={"attention_multiplier": 1.0})),
    "granitemoehybrid": _Model(names=_HYBRID, defaults={"attention_multiplier": 1.0}, change=_granite),
    "qwen3_next": _Model(
        layers=_every("full_attention_interval", "linear_attention"), defaults={"head_dim": 256, "full_attention_interval": 4}
    ),
    "jamba": _Model(names=_HYBRID, defaults={"attn_layer_period": 8, "attn_layer_offset": 4}, layers=_jamba),
    "bamba": _Model(names=_HYBRID, layers=_bamba),
    "nemotron_h": _Model(names={**_HYBRID, "head_dim": ("head_dim", "attention_head_dim")}, layers=_nemotron_h),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _Model(read=_mamba)),
    "gpt2": _Model(names=_GPT2, change=_gpt2),
    "falcon": _Model(names=_FALCON, defaults={"multi_query": True}, change=_falcon),
    "bloom": _Model(names=_BLOOM, change=_having(alibi=True)),
    "mpt": _Model(names=_MPT, change=_mpt),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), _Model(change=_bert)),
    **dict.fromkeys(("t5", "mt5", "umt5"), _Model(read=_t5)),
    **dict.fromkeys(("bart", "mbart"), _Model(read=_bart)),
}

#: transformers' defaults of fields that a nested text_config often leaves out.
_NESTED = {
    "llama": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    "mistral": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    "gemma3_text": {"hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4},
}


def _shown(value: Any) -> str:
    """Format a field's value; a long list by its length."""
    if isinstance(value, list) and len(value) > 4:
        return f"[{len(value)} entries]"
    return json.dumps(value)
