"""Record calls of layers to files, which `attn replay` runs on any backend of either framework.

With ATTN_RECORD set to a folder, layers keep a call whose output is not finite, one that raises, the calls requested by
`record_next`, and a share of all calls (ATTN_RECORD_SAMPLE). A layer reads the variables when it is created; without
ATTN_RECORD its calls cost one attribute check. With it, each call waits for the device, to check the output.

A file (safetensors) holds the layer's arguments, the batch, and the cache pages that the batch uses, renumbered. Pages are
copied after the call, not before it; a replay writes the new tokens again. The folder holds at most
`MAX_FILES` recordings of together `MAX_BYTES`. The oldest are kept: a non-finite value spreads to all later layers, and the
first recording is the one that shows its origin.

Traced calls have no values and are skipped with one warning: calls in a graph (`torch.compile`), while a CUDA graph is
captured, and under a transformation of JAX. Failing to record warns; it never raises.
"""

import itertools
import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attn import envs
from attn.arguments import positive_int
from attn.arrays import ops_of
from attn.capabilities import ENCODER_TYPES, AttentionType, Feature
from attn.errors import AttnError, UnsupportedError
from attn.imports import installed, resolve_obj_by_qualname
from attn.logger import fork_safe_lock, init_logger

if TYPE_CHECKING:
    import numpy.typing as npt

logger = init_logger(__name__)

MAX_FILES = 32
MAX_BYTES = 4 << 30
SUFFIX = ".safetensors"
#: Key and value of a file's metadata that mark a recording, and its format.
MARK = ("attn_recording", "1")

_lock = fork_safe_lock()
_requested = 0  # calls still to be recorded
_numbers = itertools.count(1)
_chance = random.Random()  # of its own: sampling must not change the caller's random numbers


class Arguments(NamedTuple):
    """A layer's call. key, value: of an MLA layer the latents and rotary keys; indices: the keys that an indexer selected."""

    query: Any
    key: Any
    value: Any
    kv_cache: Any
    attn_metadata: Any
    indices: Any = None


class Snapshot(NamedTuple):
    """A call on the host: the fields of an `attn.testing.Case`, and arrays as stored bits, with their dtypes' names."""

    case: dict[str, Any]
    arrays: dict[str, "npt.NDArray[Any]"]
    dtypes: dict[str, str]


def record_next(count: int = 1) -> None:
    """Record the next `count` calls, of any layers that were created with ATTN_RECORD set.

    Raises ValueError unless ATTN_RECORD is set and `count` is a positive int.
    """
    global _requested
    if not envs.read("ATTN_RECORD"):
        raise ValueError("record_next() needs a folder: set ATTN_RECORD before the layers are created")
    count = positive_int("count", count)
    with _lock():
        _requested = count


def _take_request() -> bool:
    global _requested
    with _lock():
        requested = _requested > 0
        # A bool counts as 0 or 1.
        _requested -= requested
    return requested


def recorder() -> "Recorder | None":
    """Return the recorder of a new layer, or None unless ATTN_RECORD is set.

    Raises ValueError for an invalid ATTN_RECORD_SAMPLE, and an ImportError if safetensors is missing.
    """
    folder = envs.read("ATTN_RECORD")
    if not folder:
        return None
    if not installed("safetensors"):
        raise ImportError("ATTN_RECORD needs safetensors: pip install safetensors")
    return Recorder(folder, envs.share("ATTN_RECORD_SAMPLE"))


@dataclass(frozen=True)
class Recorder:
    """Records a layer's calls in `folder`; `sample` is the share of all calls to record."""

    folder: str
    sample: float

    def call(self, layer: Any, run: Callable[[], Any], arguments: Arguments) -> Any:
        """Return run(), and record the call if it raises, if its output is not finite, or on request."""
        # Before a request is taken: `record_next` then still holds for the next call that has values.
        if why := valueless(layer, arguments):
            warn_valueless(why)
            return run()
        # Drawn before the call, so that a sampled call that fails is recorded once, with the failure as its reason.
        reason = "requested" if _take_request() else "sampled" if _chance.random() < self.sample else ""
        try:
            result = run()
        # A refusal of the arguments is the caller's mistake, anything else the backend's: the file's name says which.
        except Exception as error:
            self._record(layer, arguments, "refused" if isinstance(error, AttnError | TypeError) else "raised", error)
            raise
        # jax's call returns the new cache, and the old one may have been donated to it: its memory is gone.
        out, kv_cache = result if layer.framework == "jax" else (result, arguments.kv_cache)
        arguments = arguments._replace(kv_cache=kv_cache)
        meta = arguments.attn_metadata
        if meta is not None:
            # Padding rows are left as they were, so they may hold anything. `bool` below waits for the device: a
            # recorder is for finding a fault, not for serving.
            rows = (out[0] if isinstance(out, tuple) else out)[: int(meta.num_actual_tokens)]
            if not bool(ops_of(layer.framework).isfinite(rows).all()):
                reason = "non-finite"
        if reason:
            self._record(layer, arguments, reason)
        return result

    def _record(self, layer: Any, arguments: Arguments, reason: str, error: Exception | None = None) -> None:
        try:
            with _lock():
                path = self._save(layer, arguments, reason, error)
        except Exception as broken:  # a recorder must not break the call
            logger.warning("ATTN_RECORD: a %s call is not recorded: %s: %s", reason, type(broken).__name__, broken)
        else:
            if path is not None:
                logger.warning("ATTN_RECORD: a %s call of %s is in %s", reason, layer.selection.name, path)

    def _save(self, layer: Any, arguments: Arguments, reason: str, error: Exception | None) -> Path | None:
        """Return the path of the new file, or None if the folder is full."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        # The folder is read anew at each recording, because other processes (ranks, workers) write to it too.
        sizes = [path.stat().st_size for path in folder.glob(f"*{SUFFIX}")]
        if len(sizes) >= MAX_FILES:
            logger.warning_once("ATTN_RECORD: %s is full (%s files): later calls are not recorded", folder, str(MAX_FILES))
            return None
        copied = snapshot(layer, arguments)
        # Compared before the file is written: a disk that a recorder filled would stop the server.
        if sum(sizes) + sum(array.nbytes for array in copied.arrays.values()) > MAX_BYTES:
            logger.warning_once("ATTN_RECORD: a call does not fit in %s (%s bytes in all)", folder, str(MAX_BYTES))
            return None
        metadata = {"reason": reason, "error": f"{type(error).__name__}: {error}" if error else ""}
        metadata |= {"backend": layer.selection.name, "device": str(layer.selection.device)}
        # In a container every process may have the same id: a file of an earlier run keeps its name.
        name = f"{os.getpid()}-{layer.selection.name}-{reason}{SUFFIX}"
        path = next(path for number in _numbers if not (path := folder / f"{number:06d}-{name}").exists())
        write(path, copied, metadata)
        return path


def write(path: Path, recorded: Snapshot, metadata: dict[str, str]) -> None:
    """Write a recording, replacing the file atomically. Raises OSError."""
    save = resolve_obj_by_qualname("safetensors.numpy.save_file")
    described = {name: json.dumps(value) for name, value in (("case", recorded.case), ("dtypes", recorded.dtypes))}
    # Not *.safetensors until it is whole, so that a replay that lists the folder never reads half a file.
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save(recorded.arrays, temporary, {**metadata, **described, MARK[0]: MARK[1]})
    temporary.replace(path)


def warn_valueless(where: str) -> None:
    """Log once that calls `where`, such as "in a graph", are not recorded."""
    logger.warning_once("ATTN_RECORD: calls %s are not recorded: they have no values", where)


def valueless(layer: Any, arguments: Arguments) -> str:
    """Return the context in which a call has no values, such as "under a transformation of JAX", or ""."""
    return str(ops_of(layer.framework).valueless(*arguments))


def rows_of(x: Any, total: int, shape: tuple[int, ...]) -> Any:
    """Return the first `total` rows as [total, *shape]; rows of another size unchanged."""
    x = x[:total]
    # Hosts pass heads apart [T, H, D] or together [T, H * D].
    return x.reshape(-1, *shape) if math.prod(x.shape[1:]) == math.prod(shape) else x


def check_readable(layer: Any, meta: Any, user: str) -> None:
    """Raise `UnsupportedError` for a batch of decode context parallelism and for metadata of another library."""
    # A backend written for vLLM's interface may have metadata of its own, of which no field is known.
    missing = [name for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping") if not hasattr(meta, name)]
    if layer.impl.dcp_world_size > 1 or missing:
        batch = f"{type(meta).__name__} without {', '.join(missing)}" if missing else "decode context parallelism"
        raise UnsupportedError(f"{batch} not supported by {user}")


def bounds(layer: Any, meta: Any) -> "tuple[npt.NDArray[Any], npt.NDArray[Any]]":
    """Return (query_start_loc [R + 1], seq_lens [R]) of a batch on the host, int32, without padding."""
    count, ops = int(meta.num_reqs), ops_of(layer.framework)
    # Arrays of a captured graph or a bucket are longer than the batch; the rest holds lengths of 0 or of an earlier batch.
    start, lens = (ops.bits(x)[0].astype("int32") for x in (meta.query_start_loc[: count + 1], meta.seq_lens[:count]))
    return start, lens


def indices_of(layer: Any, arguments: Arguments) -> Any:
    """Return the keys [T, topk] that an indexer selected for a call, None for a layer without one."""
    if arguments.indices is not None:
        return arguments.indices
    return getattr(getattr(layer.impl, "indexer", None), "topk_indices", None)


def snapshot(layer: Any, arguments: Arguments) -> Snapshot:
    """Copy a call to the host: rows without padding, and the pages in use as 0, 1, 2, ...

    Raises `UnsupportedError` for a batch of decode context parallelism and for metadata of another library.
    """
    import numpy as np

    impl, spec, meta = layer.impl, layer.kv_cache_spec, arguments.attn_metadata
    ops, latent = ops_of(layer.framework), getattr(impl, "kv_lora_rank", None) is not None
    check_readable(layer, meta, "recordings")
    dtypes, arrays = dict[str, str](), dict[str, Any]()

    def keep(name: str, array: Any) -> None:
        if array is not None:
            stored, dtypes[name] = ops.bits(array)
            arrays[name] = np.ascontiguousarray(stored)

    count = int(meta.num_reqs)
    start, seq_lens = bounds(layer, meta)
    table, slots = ops.bits(meta.block_table[:count])[0], ops.bits(meta.slot_mapping)[0].astype(np.int64)
    total = int(start[-1])
    cross, encoder = impl.attn_type == AttentionType.ENCODER_DECODER, impl.attn_type in ENCODER_TYPES
    # in cross attention the new rows are the encoder's: they are recorded as cached, which they are after the call
    writes = not cross and impl.kv_sharing_target_layer_name is None and arguments.key is not None
    # A replay writes what the recording has new rows for; -1 writes nothing.
    slots = slots[:total] if writes and not encoder else np.full(total, -1, np.int64)
    heads = (impl.num_heads, impl.qk_head_dim) if latent else (impl.num_heads, impl.head_size)
    keep("query", rows_of(arguments.query, total, heads))
    if writes and latent:
        # Latent and rotary key become one row [T, 1, L + Dr], as the cache stores them; a model without rotary
        # dimensions passes k_pe as None, of size 0.
        sizes = zip(arguments[1:3], (impl.kv_lora_rank, impl.qk_rope_head_dim), strict=True)
        new = [rows_of(x, total, (size,)) for x, size in sizes if size]
        keep("key", ops.concat(new, -1)[:, None])
    elif writes:
        for name in ("key", "value"):
            keep(name, rows_of(getattr(arguments, name), total, (impl.num_kv_heads, impl.head_size)))
    page = spec.block_size
    if not encoder:
        extent = resolve_obj_by_qualname(f"attn.{layer.framework}.kv_cache.extent")
        pages = UsedPages(table, seq_lens, slots, page, extent(layer.backend, arguments.kv_cache)[0])
        table, slots = pages.table, pages.slots
        caches = ops.pages(layer, arguments.kv_cache, pages.ids)
        # A latent row is key and value: `logical_kv_cache` returns it twice, and it is stored once.
        for name, stored in zip(("key_cache", "value_cache")[: 1 if latent else 2], caches, strict=False):
            arrays[name] = np.ascontiguousarray(stored)
    tree = meta.mask.tree
    # Without the padding of the batch's requests and rows, as everything else in the file.
    for name, array in meta.mask.select(slice(count), slice(total))._asdict().items():
        keep("tree_mask" if name == "tree" else name, array)
    keep("alibi_slopes", getattr(impl, "alibi_slopes", None))
    keep("sinks", getattr(impl, "sinks", None))
    keep("up_projection", ops.up_projection(layer) if latent else None)
    indexer = indices_of(layer, arguments)
    keep("indices", None if indexer is None else indexer[:total])
    arrays |= {"query_start_loc": start, "seq_lens": seq_lens, "block_table": table, "slot_mapping": slots}
    scales = {f"{x}_scale": np.asarray(ops.bits(getattr(layer, f"_{x}_scale"))[0]).tolist() for x in "kv"}
    # A dict in two-column groups: the fields of `attn.testing.Case`, which a replay makes from it. The case is one of
    # real data: names and draws (`poison`, `name`) are constants.
    case = {
        **{"name": "recorded", "query_lens": np.diff(start).tolist(), "seq_lens": seq_lens.tolist()},
        **{"num_heads": impl.num_heads, "num_kv_heads": impl.num_kv_heads, "head_size": impl.head_size, "block_size": page},
        **{"dtype": dtypes["query"], "kv_cache_dtype": spec.kv_cache_dtype, **scales, "attn_type": impl.attn_type},
        **{"causal": "mixed" if "is_causal" in arrays else bool(meta.causal), "span_window": bool(impl.mask.span_window)},
        **{"spans": int("spans" in arrays), "prefix": int("prefix" in arrays), "chunk_size": impl.mask.chunk_size or 0},
        "sliding_window": None if latent or impl.window == (None, None) else impl.window,
        **{"logits_soft_cap": None if latent else impl.logits_soft_cap, "alibi": "alibi_slopes" in arrays},
        **{"sinks": "randn" if "sinks" in arrays else "", "tree": 0 if tree is None else int(tree.shape[1])},
        "mla": [impl.kv_lora_rank, impl.qk_nope_head_dim, impl.qk_rope_head_dim, impl.v_head_dim] if latent else [],
        "topk": 0 if indexer is None else int(indexer.shape[1]),
        **{"kv_sharing": impl.kv_sharing_target_layer_name is not None, "scale": impl.signed_scale},
        **{"lse": bool(impl.need_to_return_lse_for_decode), "poison": "zero"},
        "features": [Feature.BATCH_INVARIANT.value] if impl.batch_invariant else [],
    }
    return Snapshot(case, arrays, dtypes)


class UsedPages:
    """The pages that a batch uses (`ids`), and its table and slots with these numbered 0, 1, 2, ...

    A live id outside the cache stays outside: -1, or the number of pages.
    """

    def __init__(self, table: Any, seq_lens: Any, slots: Any, page: int, num_blocks: int) -> None:
        import numpy as np

        # Entries past a request's blocks may be any number, also a block of another request, and must not count as used.
        live = np.arange(table.shape[1]) < -(-seq_lens // page)[:, None]
        # Slots too: the batch may write to a page that none of its requests reads.
        used = np.concatenate([table[live], slots[slots >= 0] // page])
        inside = used[(used >= 0) & (used < num_blocks)].astype(np.int64)
        # Sorted, which `searchsorted` below needs; at least one page if there is any, because a cache without pages has
        # no shape to replay.
        self.ids = np.unique(inside) if len(inside) else np.arange(min(1, num_blocks))

        def compact(x: Any) -> Any:
            index = np.searchsorted(self.ids, x)
            # `searchsorted` returns len(ids) for a number above all, where -2 stands, which no id is.
            known = np.append(self.ids, -2)[index] == x
            return np.where(known, index, np.where(x < 0, -1, len(self.ids)))

        self.table = np.where(live, compact(table), -1).astype(np.int32)
        self.slots = np.where(slots >= 0, compact(slots // page) * page + slots % page, -1).astype(np.int64)
