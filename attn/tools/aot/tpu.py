"""The TPU kernels' declared grid, compiled and estimated for chips that are not present: `attn aot` for jax.

A kernel is an entry of `KERNELS`. Batches are small, since the simulator executes every loop: the grid tests code paths, not
the times of large shapes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn.capabilities import Device, Feature, Request
from attn.dtypes import kv_cache_element
from attn.jax.backends.mla.pallas_mla import PallasMLABackend
from attn.jax.backends.pallas import PallasAttentionBackend
from attn.tables import Column
from attn.tools.aot import libtpu as _libtpu
from attn.tools.aot.command import Choice, CompileCase, Kernel, grids, request_of, switches
from attn.tools.aot.libtpu import PallasProgram
from attn.visibility import CAUSAL, PLAIN, BatchMask, LayerMask, Visibility, Window

STEPS = ("compile", "estimate")
COLUMNS = (
    *(Column("VMEM MiB", key="vmem_mib", form=".1f"), Column("SMEM KiB", key="smem_kib", form=".0f")),
    *(Column("spills", key="spills"), Column("bundles", key="bundles"), Column("cycles", key="cycles")),
    *(Column("est us", key="us", form=".1f"), Column("HBM us", key="hbm_us", form=".2f")),
    *(Column("MXU us", key="mxu_us", form=".2f"), Column("ratio", key="ratio", form=".1f")),
)

AT_HBM = "est us is the time of the bytes at HBM's peak: the simulator does not saturate HBM, and its cycles take less"
COMPUTE_ALONE = "estimated without its copies, which this chip's simulator does not follow: the time to compute"


def cases(target: str) -> list[CompileCase]:
    """Every case of every kernel for a target."""
    return grids(KERNELS, _chip(target))


def environment(target: str, step: str, dump: str) -> dict[str, str]:
    """See `attn.tools.aot.command`."""
    return _libtpu.environment(_chip(target), dump, estimate=step == "estimate")


def measure(case: CompileCase, target: str, step: str, dump: str) -> dict[str, Any]:
    """See `command`. Omits the estimate's memory figures: it is compiled with other flags than a user's program."""
    chip, kernel = _chip(target), KERNELS[case.kernel]
    program = kernel.make(dict(case.choice), chip)
    floors = {name: round(us, 3) for name, us in program.floors(chip).items()}
    if step == "compile":
        parts = _libtpu.compile_program(program, chip, dump)
        for part in parts:
            part |= {"vmem_mib": part["vmem"] / 2**20, "smem_kib": part["smem"] / 2**10}
        return {"parts": parts, **floors}
    copies = chip not in kernel.no_copies
    parts = _libtpu.estimate_program(program, chip, dump, copies)
    total = sum(part["us"] for part in parts)
    # The simulator models each copy's latency, but not a saturated HBM: below the time of the bytes its sum is no bound.
    scaling = max(1.0, floors["hbm_us"] / total)
    # `cycles` stays as the simulator counted it.
    scaled = [{"name": part["name"], "cycles": part["cycles"], "us": part["us"] * scaling} for part in parts]
    # A loop whose count the simulator cannot evaluate counts once (`libtpu._unsigned_division`): no kernel is faster than its
    # products.
    if total < floors["mxu_us"]:
        raise RuntimeError(f"{total:.2f} us is less than its products need: the simulator missed a loop")
    notes = ([] if copies else [COMPUTE_ALONE]) + ([AT_HBM] if scaling > 1 else [])
    return {"parts": scaled, "ratio": round(total * scaling / max(floors.values()), 2), "notes": notes}


def _chip(target: str) -> str:
    return target.removeprefix("tpu-")


# --- ragged paged attention -----------------------------------------------------------------------------------------

#: New tokens and lengths of each batch's requests.
BATCHES = {
    # Lengths on both sides of a page and of a block of keys, one of a single key.
    "decode": ((1, 1, 1, 1, 1), (700, 33, 512, 1, 256)),
    "mixed": ((1, 77, 5, 1), (600, 300, 40, 129)),
    "prefill": ((200, 60), (456, 60)),
}
MASKS = {
    "causal": CAUSAL,
    "bidirectional": LayerMask(causal=False),
    "window": LayerMask(window=(127, None)),
    "two-sided": LayerMask(causal=False, window=(64, 32)),
    "tree": CAUSAL,
    "chunks": LayerMask(chunk_size=256),
    "spans": LayerMask(window=(127, None), span_window=True),
    "reach": LayerMask(causal=False, chunk_size=512),
}

RAGGED: dict[str, Sequence[Any]] = {
    "batch": tuple(BATCHES),
    "heads": ((8, 2), (4, 4), (16, 1), (6, 2), (32, 8)),
    "head_size": (64, 80, 96, 128, 192, 256, 512),
    "block_size": (16, 64, 128, 256),
    "dtype": ("bfloat16", "float32"),
    "kv": ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "int4_per_token_head"),
    "mask": tuple(MASKS),
    **switches("soft_cap", "alibi", "sinks", "lse", "kv_sharing", "per_head_scales"),
}


def _stored(choice: Choice) -> str:
    return str(kv_cache_element(choice["kv"], choice["dtype"]))


def _shape(extents: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, jnp.dtype(dtype))


def _batch(query_lens: Sequence[int], seq_lens: Sequence[int], block_size: int, columns: int) -> tuple[list[np.ndarray], int]:
    """([query_start_loc, seq_lens, block_table, slot_mapping], blocks), with consecutive pages in the cache."""
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    # Consecutive pages: where pages are makes no difference to a static estimate, only how many there are.
    used = [-(-length // block_size) for length in seq_lens]
    first = np.concatenate([[0], np.cumsum(used)])
    table = np.zeros((len(query_lens), columns), np.int32)
    for r, count in enumerate(used):
        table[r, :count] = first[r] + np.arange(count)
    position = np.concatenate([np.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)])
    request = np.repeat(np.arange(len(query_lens)), query_lens)
    slots = (table[request, position // block_size] * block_size + position % block_size).astype(np.int32)
    return [starts, np.array(seq_lens, np.int32), table, slots], int(first[-1]) + 1


def _normalise_ragged(choice: Choice) -> Choice:
    # The same array as "auto", which would be compiled twice.
    if choice["kv"] == choice["dtype"]:
        choice["kv"] = "auto"
    if choice["kv"] in ("auto", "bfloat16"):
        choice["per_head_scales"] = False
    if choice["kv"] == "int4_per_token_head":  # the sizes that there are of it
        choice |= {"block_size": 128, "head_size": 256 if choice["head_size"] > 128 else 128}
    return choice


def _refuse_ragged(choice: Choice, arch: str) -> str:
    """PALLAS's reasons against such a layer, or "" (joined)."""
    return "; ".join(PallasAttentionBackend.why_not(request_of(choice), Device("jax", "tpu", arch=arch)))


def _ragged_program(choice: Choice, chip: str) -> PallasProgram:
    mask, same = choice["mask"], ("heads", "head_size", "block_size", "dtype", "alibi", "sinks", "lse", "per_head_scales")
    call = Ragged(
        *BATCHES[choice["batch"]],
        **{name: choice[name] for name in same},
        stored=_stored(choice),
        # A table for 1,024 tokens at every page size, longer than any request of `BATCHES`.
        columns=1024 // choice["block_size"],
        mask=MASKS[mask],
        seen=_seen(mask, *BATCHES[choice["batch"]]),
        soft_cap=30.0 if choice["soft_cap"] else None,
        tree=8 if mask == "tree" else 0,
        write=not choice["kv_sharing"],
    )
    return ragged(chip, call)


def _seen(mask: str, query_lens: Sequence[int], seq_lens: Sequence[int]) -> BatchMask:
    """The mask of a batch: spans of 16 rows, and with "reach" every other mask but trees."""
    if mask not in ("spans", "reach"):
        return PLAIN
    spans = images(query_lens, seq_lens, 16, 40)
    if mask == "spans":
        return BatchMask(spans=spans)
    # Every other request is causal; a third of each is a prefix.
    flags = np.arange(len(query_lens)) % 2 == 0
    return BatchMask(None, spans, np.array(seq_lens, np.int32) // 3, flags)


def images(query_lens: Sequence[int], seq_lens: Sequence[int], size: int, every: int) -> np.ndarray:
    """Spans [T, 2] int32: in every `every` positions from each request's first row on, the last `size` see each other."""
    spans = []
    for count, length in zip(query_lens, seq_lens, strict=True):
        row = np.arange(count)
        first = row // every * every + every - size
        # An image that the request's end would cut is left out: `validate` refuses a span beyond the sequence.
        inside = (row >= first) & (first + size <= count)
        context = length - count
        spans.append(np.where(inside[:, None], np.stack([first, first + size - 1], axis=1) + context, -1))
    return np.concatenate(spans).astype(np.int32)


class Ragged(NamedTuple):
    """A call of `ragged_paged_attention`. heads: (H, K); columns: of the block table; stored: the cache's dtype, "": `dtype`;
    tree: nodes of a draft tree, 0 without one; seen: what else the batch lets its rows see; write: whether the kernel writes
    the new tokens."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    heads: tuple[int, int]
    head_size: int
    block_size: int
    columns: int
    dtype: str = "bfloat16"
    stored: str = ""
    mask: LayerMask = CAUSAL
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    tree: int = 0
    seen: BatchMask = PLAIN
    lse: bool = False
    write: bool = True
    per_head_scales: bool = False


def ragged(chip: str, shape: Ragged) -> PallasProgram:
    """`ragged_paged_attention` on a batch."""
    from attn.jax.kernels.tpu import ragged_paged_attention as kernel

    (num_heads, kv_heads), num_requests, num_tokens = shape.heads, len(shape.query_lens), sum(shape.query_lens)
    head_size, dtype, stored = shape.head_size, shape.dtype, shape.stored or shape.dtype
    batch, num_blocks = _batch(shape.query_lens, shape.seq_lens, shape.block_size, shape.columns)

    packed = stored == "uint8"  # int4_per_token_head
    query, row = _shape((num_tokens, num_heads, head_size), dtype), head_size // 2 + 4 if packed else head_size
    new = _shape((num_tokens, kv_heads, row), stored)
    cache = _shape(kernel.cache_shape(num_blocks, shape.block_size, kv_heads, head_size, packed), stored)
    # (shape, dtype) of each array that the call may take, in the order in which `call` receives them.
    optional = {
        "alibi_slopes": ((num_heads,), "float32") if shape.alibi else None,
        "sinks": ((num_heads,), "float32") if shape.sinks else None,
        "tree": ((num_requests, shape.tree, shape.tree), "bool") if shape.tree else None,
        "k_scale": ((kv_heads,) if shape.per_head_scales else (), "float32") if stored != dtype else None,
        "v_scale": ((kv_heads,) if shape.per_head_scales else (), "float32") if stored != dtype else None,
    }
    rules = {name: _shape(*array) for name, array in optional.items() if array}
    arrays = [query, cache, *([new, new] if shape.write else []), *rules.values()]
    # Spans, prefixes and flags have values, as lengths have: they decide which blocks of keys are read.
    known = {name: array for name, array in shape.seen._asdict().items() if array is not None}

    def call(query: jax.Array, cache: jax.Array, *others: jax.Array) -> Any:
        # `others` holds new keys, rules, the batch's four arrays and the mask's, in the order of `PallasProgram`'s lists.
        key, value, *passed = others if shape.write else (None, None, *others)
        more: dict[str, Any] = dict(zip(rules, passed, strict=False))
        passed = passed[len(rules) :]
        of_batch = dict(zip(known, passed[4:], strict=False))
        batch_mask = BatchMask(more.pop("tree", None), **of_batch)
        return kernel.ragged_paged_attention(
            query,
            key,
            value,
            cache,
            *passed[:4],  # type: ignore[arg-type]
            **more,
            scale=head_size**-0.5,
            max_query_len=max(shape.query_lens),
            chip=chip,
            mask=shape.mask,
            batch_mask=batch_mask,
            logits_soft_cap=shape.soft_cap,
            return_lse=shape.lse,
            interpret=False,
        )

    flops, traffic = cost(shape.query_lens, shape.seq_lens, num_heads, head_size, mask=shape.mask, seen=shape.seen)
    traffic = traffic * kv_heads * 2 * row * jnp.dtype(stored).itemsize
    traffic += num_tokens * num_heads * 2 * head_size * jnp.dtype(dtype).itemsize
    # Argument 1, the cache, is donated: a program that copies it would need twice its memory.
    return PallasProgram(call, arrays, [*batch, *known.values()], (1,), flops, traffic, dtype)


def cost(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_heads: int,
    head_size: int,
    value_size: int | None = None,
    mask: LayerMask = CAUSAL,
    seen: BatchMask = PLAIN,
) -> tuple[float, float]:
    """(flops of the two products over visible scores, number of key rows that some query row of their request sees)."""
    scores = rows = first = 0
    for r, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        # [n, m]: counted from the definition, not from the kernel's blocks, so that the floor is no kernel's own.
        allowed = Visibility(mask, seen).select(r, slice(first, first + count)).as_array(count, length)
        scores, rows, first = scores + int(allowed.sum()), rows + int(allowed.any(axis=0).sum()), first + count
    return 2.0 * num_heads * (head_size + (value_size or head_size)) * scores, float(rows)


# --- multi-head latent attention ------------------------------------------------------------------------------------

LATENT: dict[str, Sequence[Any]] = {
    "batch": tuple(BATCHES),
    "num_heads": (16, 32, 128),
    "block_size": (16, 64, 128, 256),
    "dtype": ("bfloat16", "float32"),
    "kv": ("auto", "fp8_e4m3", "fp8_e5m2"),
    **switches("lse", "kv_sharing"),
}
RANK, ROPE = 512, 64


def _refuse_latent(choice: Choice, arch: str) -> str:
    """PALLAS_MLA's reasons against such a layer, joined."""
    request = Request(RANK + ROPE, choice["dtype"], choice["kv"], choice["block_size"], features=frozenset({Feature.MLA}))
    return "; ".join(PallasMLABackend.why_not(request, Device("jax", "tpu", arch=arch)))


def _latent_program(choice: Choice, chip: str) -> PallasProgram:
    same = {name: choice[name] for name in ("num_heads", "block_size", "dtype", "lse")}
    columns, write = 1024 // choice["block_size"], not choice["kv_sharing"]
    return latent(chip, Latent(*BATCHES[choice["batch"]], **same, columns=columns, stored=_stored(choice), write=write))


class Latent(NamedTuple):
    """A call of `mla_attention`; fields as in `Ragged`."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    num_heads: int
    block_size: int
    columns: int
    dtype: str = "bfloat16"
    stored: str = ""
    lse: bool = False
    write: bool = True


def latent(chip: str, shape: Latent) -> PallasProgram:
    """`mla_attention` on a batch, absorbed: rows of 512 + 64 are keys, and their first 512 elements are values."""
    from attn.jax.kernels.tpu import mla_attention as kernel
    from attn.jax.kernels.tpu._plan import Batch

    num_heads, num_tokens = shape.num_heads, sum(shape.query_lens)
    dtype, stored = shape.dtype, shape.stored or shape.dtype
    batch, num_blocks = _batch(shape.query_lens, shape.seq_lens, shape.block_size, shape.columns)
    new = [_shape((num_tokens, RANK), stored), _shape((num_tokens, ROPE), stored)]
    arrays = [
        _shape((num_tokens, num_heads, RANK), dtype),
        _shape((num_tokens, num_heads, ROPE), dtype),
        _shape((num_blocks, shape.block_size, kernel.row_lanes(RANK + ROPE)), stored),
        *(new if shape.write else []),
        *([_shape((), "float32")] if stored != dtype else []),
    ]

    def call(nope: jax.Array, rope: jax.Array, cache: jax.Array, *others: jax.Array) -> Any:
        new, more = (jnp.concatenate(others[:2], -1), list(others[2:])) if shape.write else (None, list(others))
        scale = more.pop(0) if stored != dtype else 1.0
        query, of_batch = jnp.concatenate([nope, rope], -1), Batch(*more)  # type: ignore[arg-type]
        rules = kernel.MLAParams(RANK, 0.1, max(shape.query_lens), return_lse=shape.lse)
        return kernel.mla_attention(query, new, cache, of_batch, rules, k_scale=scale, chip=chip, interpret=False)

    flops, rows = cost(shape.query_lens, shape.seq_lens, num_heads, RANK + ROPE, value_size=RANK)
    traffic = rows * (RANK + ROPE) * jnp.dtype(stored).itemsize
    # A query row of 512 + 64 is read, an output of 512 written.
    traffic += num_tokens * num_heads * (2 * RANK + ROPE) * jnp.dtype(dtype).itemsize
    return PallasProgram(call, arrays, batch, (2,), flops, traffic, dtype)


# --- the same over selected keys ------------------------------------------------------------------------------------

SPARSE: dict[str, Sequence[Any]] = {"batch": ("decode", "mixed"), "num_heads": (16, 128), "topk": (64, 200, 2048)}


class Sparse(NamedTuple):
    """A call of `mla_sparse_attention` in which each row names `topk` keys spread over its request, or all that it has."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    num_heads: int
    topk: int
    block_size: int = 64


def _sparse_program(choice: Choice, chip: str) -> PallasProgram:
    return sparse(chip, Sparse(*BATCHES[choice["batch"]], **{name: choice[name] for name in ("num_heads", "topk")}))


def sparse(chip: str, shape: Sparse) -> PallasProgram:
    """`mla_sparse_attention` on a batch, absorbed, over rows of 512 + 64."""
    from attn.jax.kernels.tpu import mla_sparse_attention as kernel
    from attn.jax.kernels.xla import Requests

    columns = -(-max(shape.seq_lens) // shape.block_size)
    (starts, lens, table, slots), num_blocks = _batch(shape.query_lens, shape.seq_lens, shape.block_size, columns)
    indices = np.full((len(slots), shape.topk), -1, np.int32)
    for t, r in enumerate(np.repeat(np.arange(len(lens)), shape.query_lens)):
        # Keys at or before row t's position: its request's length less the rows that follow it.
        past = int(lens[r] - starts[r + 1] + t + 1)
        count = min(past, shape.topk)
        # Evenly spread: neighbours in a list are in different pages, as an indexer's choice usually is.
        indices[t, :count] = np.arange(count) * past // count
    cache = _shape((num_blocks, shape.block_size, *kernel.row_shape(RANK + ROPE)), "bfloat16")
    query = _shape((len(slots), shape.num_heads, RANK + ROPE), "bfloat16")

    def call(query: jax.Array, cache: jax.Array, indices: jax.Array, *requests: jax.Array) -> Any:
        rules: dict[str, Any] = {"kv_lora_rank": RANK, "scale": 0.1}
        return kernel.mla_sparse_attention(query, cache, indices, Requests(*requests), **rules, chip=chip, interpret=False)

    # Each row reads its keys from HBM itself, also those that another row of the request reads.
    keys = float((indices >= 0).sum())
    traffic = 2 * (keys * (RANK + ROPE) + len(slots) * shape.num_heads * (2 * RANK + ROPE))
    flops = 2.0 * shape.num_heads * (2 * RANK + ROPE) * keys
    return PallasProgram(call, [query, cache], [indices, starts, lens, table], (), flops, traffic, "bfloat16")


# --- dense attention ------------------------------------------------------------------------------------------------

DENSE: dict[str, Sequence[Any]] = {
    "lengths": ((256, 256), (70, 300), (512, 640)),
    "heads": ((4, 2), (2, 2), (8, 1), (6, 2)),
    "head_sizes": ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
    "dtype": ("bfloat16", "float32"),
    "mask": ("causal", "bidirectional", "window", "two-sided"),
    **switches("segments", "kv_lens", "soft_cap", "alibi", "sinks", "lse", "backward"),
}


def _dense_program(choice: Choice, chip: str) -> PallasProgram:
    mask = MASKS[choice["mask"]]
    same = {name: value for name, value in choice.items() if name not in ("mask", "soft_cap")}
    soft_cap = 30.0 if choice["soft_cap"] else None
    return dense(chip, Dense(causal=mask.causal, window=mask.window, soft_cap=soft_cap, **same))


class Dense(NamedTuple):
    """A call of `flash_attention` of one sequence. lengths: rows and keys; heads: (H, K); head_sizes: of keys and of values."""

    lengths: tuple[int, int]
    heads: tuple[int, int]
    head_sizes: tuple[int, int]
    dtype: str = "bfloat16"
    causal: bool = True
    window: Window = (None, None)
    segments: bool = False
    kv_lens: bool = False
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    backward: bool = False


def dense(chip: str, shape: Dense) -> PallasProgram:
    """`flash_attention` of one sequence; with `backward` also its gradient with respect to q, k, v (and sinks)."""
    from attn.jax.kernels.tpu.flash_attention import Extras, FlashParams, flash_attention

    (rows, keys), (num_heads, kv_heads), (size, value_size) = shape.lengths, shape.heads, shape.head_sizes
    dtype, sinks, alibi = shape.dtype, shape.sinks, shape.alibi
    arrays = [
        _shape((1, rows, num_heads, size), dtype),
        _shape((1, keys, kv_heads, size), dtype),
        _shape((1, keys, kv_heads, value_size), dtype),
        *([_shape((num_heads,), "float32")] if sinks else []),
        *([_shape((num_heads,), "float32")] if alibi else []),
    ]
    known: dict[str, Any] = {}
    if shape.segments:
        known["q_segment_ids"] = (np.arange(rows, dtype=np.int32) // 64)[None]
        known["kv_segment_ids"] = (np.arange(keys, dtype=np.int32) // 64)[None]
    if shape.kv_lens:
        known["kv_lens"] = np.array([keys - 5], np.int32)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> Any:
        logits, others = (others[0], others[1:]) if sinks else (None, others)
        slopes, others = (others[0], others[1:]) if alibi else (None, others)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, logits: jax.Array | None) -> Any:
            rules = FlashParams(LayerMask(shape.causal, shape.window), logits_soft_cap=shape.soft_cap)
            extras = Extras(sinks=logits, alibi_slopes=None if slopes is None else jax.lax.stop_gradient(slopes))
            extras = extras._replace(**dict(zip(known, others, strict=True)))
            return flash_attention(q, k, v, rules, extras, return_lse=shape.lse, chip=chip, interpret=False)

        if not shape.backward:
            return attend(q, k, v, logits)
        # The output stands in for its own gradient, which has its shape and dtype.
        out, pull = jax.vjp(attend, q, k, v, logits)
        return pull(out)

    flops, _ = cost([rows], [keys], num_heads, size, value_size, LayerMask(shape.causal, shape.window))
    traffic = rows * num_heads * (size + value_size) + keys * kv_heads * (size + value_size)
    if shape.backward:  # scores again, and four products; all inputs and the output's gradient are read, the gradients written
        flops += flops + 2.0 * flops * size / (size + value_size) + flops * value_size / (size + value_size)
        traffic += 2 * traffic + rows * num_heads * value_size
    return PallasProgram(call, arrays, list(known.values()), (), flops, traffic * jnp.dtype(dtype).itemsize, dtype)


KERNELS = {
    "ragged_paged_attention": Kernel(RAGGED, _ragged_program, _normalise_ragged, _refuse_ragged, no_copies=("v7x",)),
    "mla_attention": Kernel(LATENT, _latent_program, refusal=_refuse_latent, no_copies=("v7x",)),
    "mla_sparse_attention": Kernel(SPARSE, _sparse_program),
    "flash_attention": Kernel(DENSE, _dense_program),
}
