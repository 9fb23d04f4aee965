"""The jax driver of the conformance suite: a `Call` in NumPy becomes arrays, a jitted layer and a cache, and comes back.

The layer is called as it is, not under a jit of its own: a backend jits what it computes, and so shares programs between
layers whose numbers alone differ. `captured` is the whole layer compiled. Rows that the builder adds hold NaN here:
nothing may depend on them.

A backend whose kernels an interpreter executes here (`interpreted_on`) is watched: TPU interpret mode simulates DMAs and
semaphores, fills fresh memory with NaN, raises for what is out of bounds and reports races. A copy that nobody waits for
shows as wrong values when DMAs happen as late as they may ("on_wait"), and as a race when they happen at once ("eager"):
either mode misses what the other sees, so half of the requests are held to each, and `captured` repeats its case in the
other one.
"""

import contextlib
import dataclasses
import functools
import io
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax._src import compiler
from jax.experimental.pallas import tpu as pltpu

from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.mla.prefill.abstract import MLAContextChunk, MLAPrefillMetadata
from attn.capabilities import AttentionType, Device, Feature
from attn.jax.layer import Attention, MLAAttention
from attn.testing import Call, Case, Result, bits, cache_spec, layer_arguments
from attn.testing.case import Scale
from attn.testing.prefill import PrefillCall

Array = npt.NDArray[Any]

DMAMode = Literal["on_wait", "eager"]
DMA_MODES: tuple[DMAMode, ...] = ("on_wait", "eager")
_RACE = "RACE DETECTED"  #: how the interpreter's report of a race begins

#: XLA's options for programs of the interpreter. The older emitters compile in half of the time. The library of fused
#: products leaves one that it cannot execute, "BF16 x BF16 = F32", where an operand is a masked transpose.
_OPTIONS: dict[str, str | bool] = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_experimental_ynn_fusion_type": ""}


class KernelRace(RuntimeError):
    """Two accesses to one place of a simulated memory, one of them a write, that nothing orders."""


@contextlib.contextmanager
def watched(dma_mode: DMAMode) -> Iterator[None]:
    """Interpret the Pallas TPU kernels that are called inside, strictly. Raises `KernelRace` after one that races.

    Results must be waited for inside.
    """
    params = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", dma_execution_mode=dma_mode
    )
    pltpu.reset_tpu_interpret_mode_state()  # what a kernel that raised has left
    said, cause = io.StringIO(), None
    try:
        with compiling_in_haste(), pltpu.force_tpu_interpret_mode(params), contextlib.redirect_stdout(said):
            yield
    except jax.errors.JaxRuntimeError as error:  # jax 0.12 raises where it finds a race; before, it printed
        if _RACE not in str(error):
            raise
        cause = error
    report = f"{said.getvalue()}{cause or ''}"
    if _RACE in report:
        raise KernelRace(f"dma_execution_mode={dma_mode}: {report[report.index(_RACE) :][:2000]}") from cause


@contextlib.contextmanager
def compiling_in_haste() -> Iterator[None]:
    """Compile what is called inside for the interpreter: it runs a few times, and compiling is what takes the time.

    `_OPTIONS` go where jax makes XLA's options: those of `jax.jit` are for a program that no other one calls, and a
    backend's own are called by others. XLA_FLAGS would bind what is not interpreted too.
    """
    hasty = {"jax_disable_most_optimizations": True, "jax_traceback_in_locations_limit": 0}  # locations take a tenth
    usual, make = {name: jax.config.values[name] for name in hasty}, compiler.get_compile_options

    def options(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        made.env_option_overrides = [*made.env_option_overrides, *known.items()]
        return made

    known = _known_options()  # compiles, so before its own options are asked for
    for name, value in hasty.items():
        jax.config.update(name, value)
    compiler.get_compile_options = options
    try:
        yield
    finally:
        compiler.get_compile_options = make
        for name, value in usual.items():
            jax.config.update(name, value)


@functools.cache
def _known_options() -> dict[str, str | bool]:
    """Those of `_OPTIONS` that this version of XLA knows."""
    return {name: value for name, value in _OPTIONS.items() if _is_known(name, value)}


def _is_known(name: str, value: str | bool) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


class Runner:
    """`Runner(backend, device)(call)` runs a call on a backend class; `build` alone constructs the layer's implementation,
    `layer` the layer as a person does, `open` both a layer and a cache that serve several calls."""

    def __init__(self, backend: Any, device: Device | None = None) -> None:
        self.backend, self.device = backend, device
        platform = jax.default_backend() if device is None else device.platform
        self.is_interpreted = platform in getattr(backend, "interpreted_on", ())
        self._places: dict[tuple[int, ...], tuple[Array, Array]] = {}

    def build(self, call: Call) -> Any:
        """The implementation of the call's layer. Raises what its constructor raises."""
        sinks = {} if call.sinks is None else {"sinks": jnp.asarray(call.sinks)}
        impl = self.backend.get_impl_cls()(**layer_arguments(call), **sinks)
        impl.need_to_return_lse_for_decode = call.case.lse
        if (record := self.backend.capabilities) is not None:  # one choice of prefill, whatever the poison
            impl.prefill_features = record.features & {Feature.NAN_SAFE}
        return impl

    def layer(self, call: Call, **changes: Any) -> Any:
        """The layer of the call as a person builds it, some arguments changed. Raises what its constructor raises."""
        case = call.case
        arguments = {
            "num_heads": case.num_heads,
            "scale": case.scale,
            "kv_cache_dtype": case.kv_cache_dtype,
            "dtype": jnp.dtype(case.dtype),
            "block_size": case.block_size,
            "backend": self.backend.get_name(),
            "features": sorted(case.request().features & self.backend.capabilities.features),
            "return_lse": case.lse,
            "k_scale": self._scale(case, case.k_scale),
        }
        if case.mla:
            rank, nope, rope, value = case.mla
            up = jnp.asarray(call.weights.reshape(rank, -1)).astype(case.dtype)
            arguments |= {
                "kv_lora_rank": rank,
                "qk_nope_head_dim": nope,
                "qk_rope_head_dim": rope,
                "v_head_dim": value,
                "kv_b_proj": SimpleNamespace(kernel=up),
                "indexer": "given with the call" if case.topk else None,
            }
        else:
            plain = layer_arguments(call)
            names = ("head_size", "num_kv_heads", "alibi_slopes", "sliding_window", "logits_soft_cap", "attn_type")
            arguments |= {key: plain[key] for key in (*names, "kv_sharing_target_layer_name")}
            arguments |= {"sinks": None if call.sinks is None else jnp.asarray(call.sinks)}
            arguments |= {"v_scale": self._scale(case, case.v_scale)}
        return (MLAAttention if case.mla else Attention)(**{**arguments, **changes})

    def _scale(self, case: Case, scale: Scale) -> Any:
        """A scale as a person has it: a number, a list, or an array on the device."""
        return jnp.asarray(scale) if case.data_seed % 2 else list(scale) if isinstance(scale, tuple) else scale

    def __call__(self, call: Call) -> Result:
        with self._watch(call):
            return self._opened(call, *self._applied(call))(call)

    def captured(self, call: Call) -> Result:
        """The same with the layer jitted as a whole and its cache donated."""
        with self._watch(call, 1):
            apply, build = self._applied(call)
            return self._opened(call, jax.jit(apply, donate_argnums=3), build)(call)

    def open(self, call: Call) -> Callable[[Call], Result]:
        """The call's layer and its cache, as the call finds it: what is returned runs calls on both, one after another."""
        step = self._opened(call, *self._applied(call))

        def watched_step(call: Call) -> Result:
            with self._watch(call):
                return step(call)

        return watched_step

    def _applied(self, call: Call) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
        """The layer as a function of what every call has, MLA's weights bound; and what builds its batches."""
        if call.case.through == "layer":
            layer = self.layer(call)
            if call.key_cache is not None:
                own = layer.new_kv_cache(call.key_cache.shape[0])
                assert (own.shape, str(own.dtype)) == (self._shape(call), call.case.element)

            def attend(*arrays: Any, k_scale: Any, v_scale: Any, indices: Any) -> Any:
                return layer(*arrays, indices) if call.case.mla else layer(*arrays)

            return attend, layer.build
        impl = self.build(call)
        builder = self.backend.get_builder_cls()(cache_spec(call), ["layer"], None, None)
        build = functools.partial(builder.build, 0)
        if not call.case.mla:
            return (lambda *arrays, k_scale, v_scale, indices: impl.apply(*arrays, k_scale=k_scale, v_scale=v_scale)), build
        w_uk, w_uv = (w.astype(call.case.dtype) for w in impl.weights())

        def apply(*arrays: Any, k_scale: Any, v_scale: Any, indices: Any) -> Any:
            return impl.apply(*arrays, w_uk=w_uk, w_uv=w_uv, k_scale=k_scale, indices=indices)

        return apply, build

    def dma_mode(self, call: Call, other: int = 0) -> DMAMode:
        """Which of `DMA_MODES` a call is held to; calls that may share a program have the same one."""
        case, request = call.case, call.case.request()
        # names of one cache or one kind of encoder are one program; values tell what is not in use and what is not written
        told = {Feature.NAN_SAFE.value, Feature.KV_SHARING.value, *([Feature.LSE.value] if case.is_encoder else [])}
        kind = AttentionType.ENCODER if case.is_encoder else case.attn_type
        alike = dataclasses.replace(request, kv_cache_dtype="auto", attn_type=kind, features=request.features - told)
        key = f"{alike} {'' if case.is_encoder else case.element}"
        return DMA_MODES[(zlib.crc32(key.encode()) + other) % 2]

    def _watch(self, call: Call, other: int = 0) -> contextlib.AbstractContextManager[None]:
        return watched(self.dma_mode(call, other)) if self.is_interpreted else contextlib.nullcontext()

    def _opened(self, call: Call, apply: Callable[..., Any], build: Callable[[Any], Any]) -> Callable[[Call], Result]:
        """Calls of `apply` on one cache, which starts as the call finds it."""
        held = [self._cache(call)]

        def step(call: Call) -> Result:
            metadata = build(self._batch(call))
            result, held[0] = apply(*self._arrays(call, metadata), held[0], metadata, **self._extras(call, metadata))
            return self._result(call, result, held[0])

        return step

    def _extras(self, call: Call, metadata: Any) -> dict[str, Any]:
        """A cache's scales, and the keys that an indexer chose."""
        indices = None
        if call.case.topk:
            missing = metadata.slot_mapping.shape[0] - len(call.indices)
            indices = jnp.asarray(np.pad(call.indices, ((0, missing), (0, 0)), constant_values=-1))
        scales = {name: jnp.asarray(getattr(call.case, name), jnp.float32) for name in ("k_scale", "v_scale")}
        return {**scales, "indices": indices}

    def _arrays(self, call: Call, metadata: Any) -> list[Any]:
        """Query, key and value (MLA: query, kv_c and k_pe), padded to the batch's rows and laid out as the case says."""
        case, rows = call.case, metadata.slot_mapping.shape[0]
        fresh = (call.key, call.value)
        if case.mla and call.key is not None:
            fresh = (call.key[:, 0, : case.mla[0]], call.key[:, 0, case.mla[0] :])
        arrays = [None if x is None else self._rows(x, case.dtype, rows) for x in (call.query, *fresh)]
        return [x.reshape(rows, -1) if x is not None and case.layout == "flat" else x for x in arrays]

    def _batch(self, call: Call) -> CommonAttentionMetadata:
        """The call's batch with arrays of its own, NumPy's or jax's."""
        batch, arrays = call.writable_batch(), call.case.arrays
        if arrays == "numpy":
            return batch
        names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "tree_mask")
        held = {name: getattr(batch, name) for name in names}
        there = {name: None if x is None else jnp.asarray(x) for name, x in held.items()}
        mirrors = {} if arrays == "device" else {"query_start_loc_cpu": None, "seq_lens_cpu": None}
        return batch.replace(**there, **mirrors)

    def _result(self, call: Call, result: Any, kv_cache: Any) -> Result:
        case, count = call.case, call.query.shape[0]
        out, lse = result if isinstance(result, tuple) else (result, None)
        rows = out.shape[0]
        values = bits.decode(_bits(out), case.dtype).reshape(rows, *call.output_shape[1:])
        keys = vals = None
        spilled = bool(np.any(values[count:] != 0))
        if kv_cache is not None and call.key_cache is not None:
            flat = _bits(kv_cache).reshape(-1)
            stored = [flat[place] for place in self._where(call)]
            size = call.key_cache.shape[3]
            keys, vals = (view[..., :size] for view in stored)
            spilled |= any(bool(view[..., size:].any()) for view in stored)  # what pads a head must stay zero
        return Result(
            values[:count],
            None if lse is None else np.asarray(lse)[:, :count],
            keys,
            vals,
            str(out.dtype),
            padding=0.0,
            spilled=spilled,
        )

    def _rows(self, values: Array, dtype: str, rows: int) -> jax.Array:
        padded = np.full((rows, *values.shape[1:]), np.nan, np.float32)
        padded[: len(values)] = values
        return jnp.asarray(bits.encode(padded, dtype).view(jnp.dtype(dtype)))

    def _cache(self, call: Call) -> jax.Array | None:
        """A cache in the backend's own layout, filled through the places of its logical view; poison where that has none."""
        if call.key_cache is None or call.value_cache is None:
            return None
        case = call.case
        shape = self._shape(call)
        raw = bits.poisoned((int(np.prod(shape)),), case.element, case.poison)
        for place, stored in zip(self._where(call), (call.key_cache, call.value_cache), strict=True):
            raw[place] = 0  # a logical view may be wider than the head: its padding is zeros by contract
            raw[place[..., : stored.shape[-1]]] = stored
        return jnp.asarray(raw.view(jnp.dtype(case.element)).reshape(shape))

    def _shape(self, call: Call) -> tuple[int, ...]:
        assert call.key_cache is not None
        num_blocks, block_size, num_kv_heads, head_size = call.key_cache.shape
        return tuple(self.backend.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, call.case.kv_cache_dtype))

    def _where(self, call: Call) -> tuple[Array, Array]:
        """Where in a flat cache each key and value element lies, by asking `logical_kv_cache` about a cache of indices."""
        shape = self._shape(call)
        if shape not in self._places:
            index = jnp.arange(int(np.prod(shape)), dtype=jnp.int32).reshape(shape)
            keys, values = self.backend.logical_kv_cache(index)
            self._places[shape] = np.asarray(keys), np.asarray(values)
        return self._places[shape]


def _bits(array: jax.Array) -> Array:
    """An array as `attn.testing.bits` stores its dtype."""
    host = np.asarray(array)
    return host.view(bits.raw(str(host.dtype)))


def prefill(backend: Any, call: PrefillCall) -> tuple[Array, list[tuple[Array, Array]]]:
    """An MLA prefill backend's answers: the new tokens' output alone, then (out, lse) of them and of each chunk, NumPy."""
    case, starts = call.case, call.query_start_loc
    chunks = tuple(
        MLAContextChunk(jnp.asarray(at), at, int(at[-1]), int(np.diff(at).max(initial=0))) for *_, at in call.parts[1:]
    )
    meta = MLAPrefillMetadata(jnp.asarray(starts), starts, len(starts) - 1, int(np.diff(starts).max(initial=0)), chunks)
    impl = backend(case.num_heads, *case.sizes, call.scale)
    query = jnp.asarray(call.query, case.dtype)
    new, *context = [tuple(jnp.asarray(x, case.dtype) for x in part[:2]) for part in call.parts]

    def host(state: Any) -> tuple[Array, Array]:
        out, lse = (np.asarray(x, np.float32) for x in state)
        return out, lse

    alone = impl.run_prefill_new_tokens(query, *new, meta, False)
    assert alone.dtype == query.dtype
    states = [host(impl.run_prefill_new_tokens(query, *new, meta, True))]
    states += [host(impl.run_prefill_context_chunk(i, query, *part, meta)) for i, part in enumerate(context)]
    return np.asarray(alone, np.float32), states
