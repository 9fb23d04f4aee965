"""Write the demo model in the layout of a Hugging Face repository.

The tokenizer is a byte-level BPE without merges: token i is byte i, and two more ids mark where a text begins
and ends.
"""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

BOS, EOS = 256, 257
_MARKS = {BOS: "<|begin|>", EOS: "<|end|>"}

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "use_cache": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "bfloat16",
}
_GENERATION = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS, "do_sample": False}
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": _MARKS[BOS],
    "eos_token": _MARKS[EOS],
    "model_max_length": LLAMA["max_position_embeddings"],
    "clean_up_tokenization_spaces": False,
}

_CARD = """\
---
license: psf-2.0
language: en
pipeline_tag: text-generation
library_name: transformers
---

# A byte-level Llama that has read the Python documentation

The demo model of `attn`: small enough to keep in a repository and to run on a laptop, trained enough for its
output to be recognisable, and in the standard layout, so that any program that loads a Hugging Face model can
be compared on it. It continues text in the manner of the Python documentation; what it says is not true.

| | |
|---|---|
| architecture | `LlamaForCausalLM`: {layers} layers, hidden size {hidden}, {heads} query heads and \
{kv_heads} key/value heads of {size}, SwiGLU of {wide}, tied embeddings |
| parameters | {parameters:,}, stored in bfloat16 |
| tokens | the 256 bytes; {bos} = `{bos_mark}`, put before every text; {eos} = `{eos_mark}`, after each \
document |
| context | {length} tokens, the longest window in training |
| corpus | {corpus:,} bytes in {documents:,} documents: `pydoc_data.topics` and the docstrings of the \
standard library of Python {python}, each repeated docstring once |
| held out | {held_out:,} bytes in {held_out_documents:,} documents, chosen by a checksum of their names |
| training | {tokens:,} tokens ({passes:.1f} passes), Muon for matrices and AdamW for the rest, \
{minutes:.0f} minutes on a CPU |
| **validation loss** | **{loss:.3f} nats per byte** ({bits:.2f} bits): mean over the held-out bytes, in \
windows of 1024, of the bfloat16 weights computed in float32 |

Made by

    python -m examples.demo_model.train --out attn/tools/demo/model --tokens {budget} --seed {seed}

which gives a model like this one on another machine, though not the same bits.

The corpus is copyright (c) 2001 Python Software Foundation, all rights reserved, and is used under the
Python Software Foundation License Version 2 (https://docs.python.org/3/license.html). The weights, as a work
derived from it, come under the same licence.
"""


@dataclass(frozen=True)
class TrainingFacts:
    """The model card's facts about a training run; sizes in bytes, the loss in nats per byte."""

    budget: int
    tokens: int
    seed: int
    minutes: float
    loss: float
    corpus: int
    documents: int
    held_out: int
    held_out_documents: int


def save_checkpoint(out: Path, weights: Mapping[str, Tensor], facts: TrainingFacts | None = None) -> None:
    """Write weights, configuration and tokenizer to `out`, and the model card if `facts` are given."""
    out.mkdir(parents=True, exist_ok=True)
    partial = out / "model.safetensors.partial"
    partial.write_bytes(save({n: t.contiguous() for n, t in weights.items()}, metadata={"format": "pt"}))
    os.replace(partial, out / "model.safetensors")  # readers never see a partial file
    _write_json(out / "config.json", LLAMA)
    _write_json(out / "generation_config.json", _GENERATION)
    _write_json(out / "tokenizer.json", tokenizer())
    _write_json(out / "tokenizer_config.json", _TOKENIZER)
    if facts is not None:
        parameters = sum(tensor.numel() for tensor in weights.values())
        (out / "README.md").write_text(model_card(facts, parameters), encoding="utf-8")


def tokenizer() -> dict[str, Any]:
    """Return the content of `tokenizer.json`."""
    marks = [
        {"id": i, "content": mark, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, mark in _MARKS.items()
    ]
    begin = {"SpecialToken": {"id": _MARKS[BOS], "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": marks,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, second],
            "special_tokens": {_MARKS[BOS]: {"id": _MARKS[BOS], "ids": [BOS], "tokens": [_MARKS[BOS]]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """Return the character for each byte in byte-level vocabularies.

    Bytes printable in Latin-1 represent themselves; the others take the characters from U+0100 on, in order.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]


def model_card(facts: TrainingFacts, parameters: int) -> str:
    """Return the README of the checkpoint."""
    return _CARD.format(
        **vars(facts),
        layers=LLAMA["num_hidden_layers"],
        hidden=LLAMA["hidden_size"],
        heads=LLAMA["num_attention_heads"],
        kv_heads=LLAMA["num_key_value_heads"],
        size=LLAMA["head_dim"],
        wide=LLAMA["intermediate_size"],
        length=LLAMA["max_position_embeddings"],
        parameters=parameters,
        bos=BOS,
        eos=EOS,
        bos_mark=_MARKS[BOS].replace("|", "\\|"),  # an unescaped | would end the table cell
        eos_mark=_MARKS[EOS].replace("|", "\\|"),
        python=".".join(platform.python_version_tuple()[:2]),
        passes=facts.tokens / (facts.corpus - facts.held_out),
        bits=facts.loss / 0.6931471805599453,
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
