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
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax._src import compiler
from jax.experimental.pallas import tpu as pltpu

from attn.backends.mla.prefill.abstract import MLAContextChunk, MLAPrefillMetadata
from attn.capabilities import AttentionType, Device, Feature
from attn.testing import Call, Result, bits, cache_spec, layer_arguments
from attn.testing.prefill import PrefillCall

Array = npt.NDArray[Any]

DMAMode = Literal["on_wait", "eager"]
DMA_MODES: tuple[DMAMode, ...] = ("on_wait", "eager")


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
    said = io.StringIO()  # the interpreter tells of races in print alone
    with _compiling_in_haste(), pltpu.force_tpu_interpret_mode(params), contextlib.redirect_stdout(said):
        yield
    if "RACE DETECTED" in said.getvalue():
        raise KernelRace(f"dma_execution_mode={dma_mode}: {said.getvalue()[:2000]}")


@contextlib.contextmanager
def _compiling_in_haste() -> Iterator[None]:
    """A program runs a few times: compiling is what takes the time. XLA's older emitters need half of what its new ones do.

    They are named where jax makes XLA's options: those of `jax.jit` are for a program that no other one calls, and a
    backend's own are called by others. XLA_FLAGS would bind what is not interpreted too.
    """
    hasty = {"jax_disable_most_optimizations": True, "jax_traceback_in_locations_limit": 0}  # locations take a tenth
    usual, make = {name: jax.config.values[name] for name in hasty}, compiler.get_compile_options

    def options(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        made.env_option_overrides = [*made.env_option_overrides, *_older_emitters().items()]
        return made

    _older_emitters()  # compiles, so before its own options are asked for
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
def _older_emitters() -> dict[str, str | bool]:
    """The option that asks for them; none of an XLA that does not know it."""
    option: dict[str, str | bool] = {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=option)
    except jax.errors.JaxRuntimeError:
        return {}
    return option


class Runner:
    """`Runner(backend, device)(call)` runs a call on a backend class; `build` alone constructs the layer."""

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

    def __call__(self, call: Call) -> Result:
        with self._watch(call):
            return self._run(call, self._applied(call))

    def captured(self, call: Call) -> Result:
        """The same with the layer jitted as a whole and its cache donated."""
        with self._watch(call, 1):
            return self._run(call, jax.jit(self._applied(call), donate_argnums=3))

    def _applied(self, call: Call) -> Any:
        """The layer as a function of what every call has; MLA's weights and chosen keys are bound."""
        impl = self.build(call)
        if not call.case.mla:
            return impl.apply
        w_uk, w_uv = (w.astype(call.case.dtype) for w in impl.weights())

        def apply(*arrays: Any, k_scale: Any, v_scale: Any) -> Any:
            indices = None
            if call.case.topk:
                missing = arrays[0].shape[0] - len(call.indices)
                indices = jnp.asarray(np.pad(call.indices, ((0, missing), (0, 0)), constant_values=-1))
            return impl.apply(*arrays, w_uk=w_uk, w_uv=w_uv, k_scale=k_scale, indices=indices)

        return apply

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

    def _run(self, call: Call, apply: Any) -> Result:
        case, count = call.case, call.query.shape[0]
        metadata = self.backend.get_builder_cls()(cache_spec(call), ["layer"], None, None).build(0, call.writable_batch())
        rows = metadata.slot_mapping.shape[0]
        fresh = (call.key, call.value)
        if case.mla and call.key is not None:
            fresh = (call.key[:, 0, : case.mla[0]], call.key[:, 0, case.mla[0] :])
        arrays = [None if x is None else self._rows(x, case.dtype, rows) for x in (call.query, *fresh)]
        scales = {"k_scale": jnp.asarray(case.k_scale, jnp.float32), "v_scale": jnp.asarray(case.v_scale, jnp.float32)}
        result, kv_cache = apply(*arrays, self._cache(call), metadata, **scales)
        out, lse = result if isinstance(result, tuple) else (result, None)
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
