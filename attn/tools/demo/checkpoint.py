"""Read a decoder from a Hugging Face directory with NumPy only: configuration, weights, tokenizer.

    config = load_config("attn/tools/demo/model")
    weights = load_weights("attn/tools/demo/model", config)  # {"model.embed_tokens.weight": float32 array, ...}
    tokenizer = load_tokenizer("attn/tools/demo/model")

Weights are read tensor by tensor and converted to float32, which represents every bfloat16 and float16 exactly.
The file format is read by this module instead of the `safetensors` package, whose NumPy reader needs another
package for bfloat16. A tensor that the configuration does not require is an error, not a warning: the checkpoint
is then of a different model.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from attn.fields import CheckpointError, read_json
from attn.tools.demo.config import ModelConfig, checkpoint_directory, load_config
from attn.tools.demo.rope import RopeScaling, rope_frequencies

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "CheckpointError",
    "ModelConfig",
    "RopeScaling",
    "load_config",
    "load_tokenizer",
    "load_weights",
    "read_tensors",
    "rope_frequencies",
    "weight_shapes",
]

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_WEIGHT_SUFFIXES = {".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".safetensors"}
_LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
_IGNORED = ".rotary_emb.inv_freq"  # older programs saved this; it follows from the configuration
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor; matrices are [out, in]. `lm_head` only if it is not tied."""
    hidden, wide = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    matrices = {
        "self_attn.q_proj": (query, hidden, config.attention_bias),
        "self_attn.k_proj": (kv, hidden, config.attention_bias),
        "self_attn.v_proj": (kv, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (hidden,))
    for name, (rows, columns, bias) in matrices.items():
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_size,)
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes if config.tie_word_embeddings else shapes | {_HEAD: (config.vocab_size, hidden)}


def load_weights(directory: str | Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """Load every tensor of `weight_shapes(config)` as float32.

    With tied embeddings there is no `lm_head.weight` in the result, though the file may have one; that must
    equal `model.embed_tokens.weight`.
    """
    shapes = weight_shapes(config)
    # Some files store the tied head again.
    tied = {} if _HEAD in shapes else {_HEAD: shapes[_EMBEDDING]}
    tensors = read_tensors(directory, shapes, optional=tied, ignored=(_IGNORED,), architecture=config.architecture)
    if config.tie_word_embeddings and not np.array_equal(tensors.pop(_HEAD, tensors[_EMBEDDING]), tensors[_EMBEDDING]):
        root = checkpoint_directory(directory)
        raise CheckpointError(f"{root}: tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}")
    return tensors


def read_tensors(
    directory: str | Path,
    required: Mapping[str, tuple[int, ...]],
    *,
    optional: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ignored: tuple[str, ...] = (),
    architecture: str = "that model",
) -> dict[str, np.ndarray]:
    """Read the tensors of `required`, by name and shape, as float32, and those of `optional` that exist.

    Raises `CheckpointError` for one that is missing, has another shape, or is neither listed nor ends with `ignored`;
    `architecture` is named in the message.
    """
    root = checkpoint_directory(directory)
    known = {**optional, **required}
    tensors: dict[str, np.ndarray] = {}
    unexpected: list[str] = []
    for path, members in _shards(root):
        for name, entry, file in _tensors(path, members):
            if name in known:
                # Before it is read: a wrong shape may be a tensor of gigabytes.
                if tuple(entry["shape"]) != known[name]:
                    expected = f"config.json asks for {list(known[name])}"
                    raise CheckpointError(f"{path}: {name} has shape {entry['shape']}: {expected}")
                tensors[name] = _read(path, name, entry, file)
            elif not name.endswith(ignored):
                unexpected.append(name)
    # Both lists in one message, since a renamed tensor is in each.
    missing = sorted(required.keys() - tensors.keys())
    if missing or unexpected:
        both = {"missing": missing, "unexpected": unexpected}
        parts = "; ".join(f"{word} {_listed(names)}" for word, names in both.items() if names)
        raise CheckpointError(f"{root}: the tensors are not those of config.json ({architecture}): {parts}")
    return tensors


def load_tokenizer(directory: str | Path) -> "Tokenizer":
    """Load `tokenizer.json` as an object of the `tokenizers` library."""
    path = checkpoint_directory(directory) / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: other tokenizer formats are not supported")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{path}: reading it needs the package tokenizers: pip install tokenizers") from error
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises Exception itself for a file that it cannot parse
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error


def _shards(root: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Yield the files to read, each with its tensor names in the index (None: all)."""
    if (root / WEIGHTS_FILE).is_file():
        yield root / WEIGHTS_FILE, None
        return
    index = root / INDEX_FILE
    if not index.is_file():
        others = sorted(path.name for path in root.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
        also = f" (found {_listed(others)}, which is not supported)" if others else ""
        raise CheckpointError(f"{root} has neither {WEIGHTS_FILE} nor {INDEX_FILE}{also}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{index}: weight_map must be an object of tensor name: file name")
    for file in sorted(set(places.values())):
        # An index must not lead outside the directory.
        if Path(file).name != file or not (root / file).is_file():
            raise CheckpointError(f"{index}: names the file {file!r}, which is not in {root}")
        yield root / file, sorted(name for name, shard in places.items() if shard == file)


def _tensors(path: Path, members: list[str] | None) -> Iterator[tuple[str, dict[str, Any], BinaryIO]]:
    """Yield `(name, header entry, open file)` of each tensor; offsets are checked and count from byte 0."""
    with path.open("rb") as file:
        header, start = _header(path, file)
        if members is not None and (absent := [name for name in members if name not in header]):
            raise CheckpointError(f"{path}: the index lists {_listed(absent)}, but the file does not contain it")
        # Of the data: a download that was cut short has a complete header.
        size = path.stat().st_size - start
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size:
                raise CheckpointError(f"{path}: cut short or damaged: {name} is at bytes {begin} to {end} of {size}")
            yield name, {**entry, "data_offsets": (start + begin, start + end)}, file


def _header(path: Path, file: BinaryIO) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the entries of the file, `{name: {dtype, shape, data_offsets}}`, and the offset of its data."""
    # A little-endian length of the header, the header in JSON, the data: https://github.com/huggingface/safetensors.
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _LARGEST_HEADER + 1
    # Before so many bytes are read: a pointer file of git-lfs begins with text, which is a huge number.
    if length > min(_LARGEST_HEADER, path.stat().st_size - 8):
        raise CheckpointError(f"{path}: cut short, or not a safetensors file (or a pointer to one)")
    try:
        entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        for entry in entries.values():
            begin, end = entry["data_offsets"]
            if not all(isinstance(i, int) and i >= 0 for i in (begin, end, *entry["shape"])):
                raise ValueError(f"entry {entry}")
            str(entry["dtype"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: the header is not that of a safetensors file: {error}") from error
    return entries, 8 + length


def _read(path: Path, name: str, entry: dict[str, Any], file: BinaryIO) -> np.ndarray:
    """Read one tensor as float32, in its shape."""
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(f"{path}: {name} is stored as {entry['dtype']}: must be one of {', '.join(_DTYPES)}")
    begin, end = entry["data_offsets"]
    # `reshape` would fail otherwise, or the tensor would take a part of the next one.
    if end - begin != math.prod(entry["shape"]) * dtype.itemsize:
        stated = f"{entry['dtype']} {entry['shape']}"
        raise CheckpointError(f"{path}: {name} takes {end - begin} bytes, which is not {stated}")
    file.seek(begin)
    stored = np.fromfile(file, dtype=dtype, count=math.prod(entry["shape"])).reshape(entry["shape"])
    if entry["dtype"] == "BF16":  # the upper half of a float32
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)


def _listed(names: list[str], most: int = 4) -> str:
    suffix = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + suffix
