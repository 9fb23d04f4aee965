"""The jax driver of the conformance suite: converts a NumPy `Call` to arrays, a layer and a cache, and the result back.

The layer is called without an outer jit: backends jit their computations and so share programs between layers that differ in
numbers only. `captured` compiles the whole layer. Rows that the builder adds contain NaN: no result may depend on them.

Interpreted backends (`interpreted_on`) run in TPU interpret mode, which simulates DMAs and semaphores, fills new memory
with NaN, raises for out-of-bounds accesses and reports races. A copy without a wait results in wrong values if DMAs are
executed as late as possible ("on_wait"), and in a race if they are executed at once ("eager"). Each mode misses bugs that
the other detects, so each is used for half of the requests, and `captured` repeats a case in the other mode.
"""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax._src import compiler
from jax.experimental.pallas import tpu as pltpu

from attn.capabilities import Device, Feature
from attn.dtypes import kv_cache_element
from attn.jax.ops import bits_of
from attn.jax.platforms import platform
from attn.testing import Call, Result, bits, cache_spec
from attn.testing.case import Case
from attn.testing.prefill import PrefillArrays, results
from attn.testing.runner import BaseRunner

Array = npt.NDArray[Any]

DMAMode = Literal["on_wait", "eager"]
DMA_MODES: tuple[DMAMode, ...] = ("on_wait", "eager")
#: Entries of the interpreter's vector clocks. Each copy takes one at random, and copies that share one seem ordered. By default
#: all copies share one, so that a wait for any of them hides that another one is not waited for.
_CLOCKS = 512
_RACE = "RACE DETECTED"  #: prefix of the interpreter's report of a race

#: XLA's options for interpreted programs. The older emitters compile in half of the time. The library of fused products
#: cannot execute "BF16 x BF16 = F32" if an operand is a masked transpose.
_OPTIONS: dict[str, str | bool] = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_experimental_ynn_fusion_type": ""}


class KernelRace(RuntimeError):
    """Two unordered accesses to the same simulated memory, at least one of them a write."""


def interpreter(dma_mode: DMAMode = "on_wait") -> pltpu.InterpretParams:
    """The interpreter at its strictest: races are reported, memory is NaN before it is written."""
    return pltpu.InterpretParams(
        detect_races=True,
        vector_clock_size=_CLOCKS,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
        dma_execution_mode=dma_mode,
    )


@contextlib.contextmanager
def watched(dma_mode: DMAMode) -> Iterator[None]:
    """Interpret the Pallas TPU kernels that are called in the context, strictly. Raises `KernelRace` after a race.

    Results must be ready (`block_until_ready`) before the context ends.
    """
    pltpu.reset_tpu_interpret_mode_state()  # state left by a kernel that raised
    printed, cause = io.StringIO(), None
    try:
        with compiling_fast(), pltpu.force_tpu_interpret_mode(interpreter(dma_mode)), contextlib.redirect_stdout(printed):
            yield
    except jax.errors.JaxRuntimeError as error:  # jax 0.12 raises for a race; earlier versions print
        if _RACE not in str(error):
            raise
        cause = error
    report = f"{printed.getvalue()}{cause or ''}"
    if _RACE in report:
        raise KernelRace(f"dma_execution_mode={dma_mode}: {report[report.index(_RACE) :][:2000]}") from cause


@contextlib.contextmanager
def compiling_fast() -> Iterator[None]:
    """Compile interpreted programs fast: they run a few times, so compilation takes most of the time.

    `_OPTIONS` are set where jax creates XLA's options: the options of `jax.jit` apply only to outermost programs, and a
    backend's are called by others. XLA_FLAGS would affect programs that are not interpreted too.
    """
    fast = {"jax_disable_most_optimizations": True, "jax_traceback_in_locations_limit": 0}  # a tenth of the time
    # restored even if a kernel raises: the next program may be one that is not interpreted
    usual, make = {name: jax.config.values[name] for name in fast}, compiler.get_compile_options

    def options(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        made.env_option_overrides = [*made.env_option_overrides, *known.items()]
        return made

    known = _known_options()  # this compiles a program, so it runs before the options apply
    for name, value in fast.items():
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
    """Return the options of `_OPTIONS` that this version of XLA supports."""
    return {name: value for name, value in _OPTIONS.items() if _is_known(name, value)}


def _is_known(name: str, value: str | bool) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


class JaxRunner(BaseRunner):
    __doc__ = BaseRunner.__doc__

    framework = "jax"

    def __init__(self, backend: Any, device: Device | None = None) -> None:
        self.backend, self.device = backend, device
        name = platform().name if device is None else device.platform
        self.is_interpreted = name in getattr(backend, "interpreted_on", ())
        # by the cache's shape, which all calls of a case share
        self._places: dict[tuple[int, ...], tuple[Array, Array]] = {}

    def _array(self, values: Any) -> jax.Array:
        return jnp.asarray(values)

    def _own_sinks(self, sinks: Array) -> jax.Array:
        return jnp.asarray(sinks)

    def _dtype(self, name: str) -> Any:
        return jnp.dtype(name)

    def _of_impl(self, call: Call) -> dict[str, Any]:
        return {} if call.sinks is None else {"sinks": jnp.asarray(call.sinks)}

    def _of_latent_layer(self, call: Call) -> dict[str, Any]:
        up = jnp.asarray(call.weights.reshape(call.case.mla[0], -1)).astype(call.case.dtype)
        return {"kv_b_proj": SimpleNamespace(kernel=up), "indexer": "given with the call" if call.case.topk else None}

    def __call__(self, call: Call) -> Result:
        with self._watch(call):
            return self._opened(call, *self._applied(call))(call)

    def captured(self, call: Call) -> Result:
        """Run the call with the layer jitted as a whole and its cache donated."""
        with self._watch(call, 1):
            apply, build = self._applied(call)
            # donated, as a server's cache is: a result may not depend on what was there before the call
            return self._opened(call, jax.jit(apply, donate_argnums=3), build)(call)

    def metadata(self, call: Call) -> Any:
        return self._builder(call).build(0, self._batch(call))

    def _builder(self, call: Call) -> Any:
        return self.backend.get_builder_cls()(cache_spec(call), ["layer"], None, None)

    def open(self, call: Call) -> Callable[..., Result]:
        """Create the call's layer and its cache, and return a function that runs calls on both, one after another.

        It takes a call, and the metadata of its batch, by default built for it.
        """
        step = self._opened(call, *self._applied(call))

        def watched_step(call: Call, metadata: Any = None) -> Result:
            with self._watch(call):
                return step(call, metadata)

        return watched_step

    def _applied(self, call: Call) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
        """Return (the layer as a function of a call's arrays, with MLA's weights bound; the builder of its batches)."""
        if call.case.through == "layer":
            layer = self.layer(call)
            if call.key_cache is not None:
                new_cache = layer.new_kv_cache(call.key_cache.shape[0])
                # the suite fills a cache of its own, which must be what the layer would have allocated
                assert (new_cache.shape, str(new_cache.dtype)) == (self._shape(call), _stored(call.case))

            def attend(*arrays: Any, k_scale: Any, v_scale: Any, indices: Any) -> Any:
                return layer(*arrays, indices) if call.case.mla else layer(*arrays)

            return attend, layer.build
        impl = self.build(call)
        build = functools.partial(self._builder(call).build, 0)
        if not call.case.mla:
            return (lambda *arrays, k_scale, v_scale, indices: impl.apply(*arrays, k_scale=k_scale, v_scale=v_scale)), build
        w_uk, w_uv = (w.astype(call.case.dtype) for w in impl.weights())

        def apply(*arrays: Any, k_scale: Any, v_scale: Any, indices: Any) -> Any:
            return impl.apply(*arrays, w_uk=w_uk, w_uv=w_uv, k_scale=k_scale, indices=indices)

        return apply, build

    def dma_mode(self, call: Call, other: int = 0) -> DMAMode:
        """Return the one of `DMA_MODES` for a call; calls that may share a program have the same one.

        It is that of the parity of the features, so that each feature meets both as soon as two requests have it of which one
        has a feature more.
        """
        # these features change values only
        ignored = {Feature.NAN_SAFE.value, Feature.KV_SHARING.value, *([Feature.LSE.value] if call.case.is_encoder else [])}
        return DMA_MODES[(len(call.case.request().features - ignored) + other) % 2]

    def _watch(self, call: Call, other: int = 0) -> contextlib.AbstractContextManager[None]:
        return watched(self.dma_mode(call, other)) if self.is_interpreted else contextlib.nullcontext()

    def _opened(self, call: Call, apply: Callable[..., Any], build: Callable[[Any], Any]) -> Callable[..., Result]:
        """Return a function that runs calls of `apply` on one cache, which starts with the contents of `call`."""
        # each call returns the next one's cache: the old array may be gone by then
        caches = [self._cache(call)]

        def step(call: Call, metadata: Any = None) -> Result:
            metadata = build(self._batch(call)) if metadata is None else metadata
            result, caches[0] = apply(*self._arrays(call, metadata), caches[0], metadata, **self._extras(call, metadata))
            return self._result(call, result, caches[0])

        return step

    def _extras(self, call: Call, metadata: Any) -> dict[str, Any]:
        """Return the cache's scales, and the keys that an indexer selected."""
        indices = None
        if call.case.topk:
            # rows of no request choose no key
            missing = metadata.slot_mapping.shape[0] - len(call.indices)
            indices = jnp.asarray(np.pad(call.indices, ((0, missing), (0, 0)), constant_values=-1))
        scales = {name: jnp.asarray(getattr(call.case, name), jnp.float32) for name in ("k_scale", "v_scale")}
        return {**scales, "indices": indices}

    def _arrays(self, call: Call, metadata: Any) -> list[Any]:
        """Return query, key and value (MLA: query, kv_c and k_pe), padded to the batch's rows, in the case's layout."""
        case, rows = call.case, metadata.slot_mapping.shape[0]
        fresh = (call.key, call.value)
        if case.mla and call.key is not None:
            fresh = (call.key[:, 0, : case.mla[0]], call.key[:, 0, case.mla[0] :])
        arrays = [None if x is None else self._rows(x, case.dtype, rows) for x in (call.query, *fresh)]
        return [x.reshape(rows, -1) if x is not None and case.layout == "flat" else x for x in arrays]

    def _result(self, call: Call, result: Any, kv_cache: Any) -> Result:
        case, count = call.case, call.query.shape[0]
        out, lse = result if isinstance(result, tuple) else (result, None)
        rows = out.shape[0]
        values = bits.decode(bits_of(np.asarray(out)), case.dtype).reshape(rows, *call.output_shape[1:])
        keys = vals = None
        # a NaN counts as spilled too, since it differs from 0
        spilled = bool(np.any(values[count:] != 0))
        if kv_cache is not None and call.key_cache is not None:
            if case.element in bits.SELF_SCALED:
                stored = [bits_of(np.asarray(rows)) for rows in self.backend.logical_kv_cache(kv_cache)]
            else:
                flat = bits_of(np.asarray(kv_cache)).reshape(-1)
                stored = [flat[index] for index in self._where(call)]
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
        # NaN where the builder added rows: no result may depend on them
        padded = np.full((rows, *values.shape[1:]), np.nan, np.float32)
        padded[: len(values)] = values
        return jnp.asarray(bits.encode(padded, dtype).view(jnp.dtype(dtype)))

    def _cache(self, call: Call) -> jax.Array | None:
        """Return a cache in the backend's layout, filled through its logical view; memory outside the view is poison."""
        if call.key_cache is None or call.value_cache is None:
            return None
        case = call.case
        if hasattr(self.backend, "kv_cache_of_rows") and case.element in bits.SELF_SCALED:  # a layout that shares bytes
            cache: jax.Array = self.backend.kv_cache_of_rows(jnp.asarray(call.key_cache), jnp.asarray(call.value_cache))
            return cache
        shape = self._shape(call)
        raw = bits.poisoned((int(np.prod(shape)),), case.element, case.poison)
        for index, stored in zip(self._where(call), (call.key_cache, call.value_cache), strict=True):
            raw[index] = 0  # a logical view may be wider than the head: its padding must be zeros
            raw[index[..., : stored.shape[-1]]] = stored
        return jnp.asarray(raw.view(jnp.dtype(_stored(case))).reshape(shape))

    def _shape(self, call: Call) -> tuple[int, ...]:
        assert call.key_cache is not None
        case, extent = call.case, call.key_cache.shape[:3]
        return tuple(self.backend.get_kv_cache_shape(*extent, case.head_size, case.kv_cache_dtype))

    def _where(self, call: Call) -> tuple[Array, Array]:
        """Return the index in the flat cache of each key and value element: `logical_kv_cache` of a cache of indices."""
        shape = self._shape(call)
        if shape not in self._places:
            index = jnp.arange(int(np.prod(shape)), dtype=jnp.int32).reshape(shape)
            keys, values = self.backend.logical_kv_cache(index)
            self._places[shape] = np.asarray(keys), np.asarray(values)
        return self._places[shape]


def _stored(case: Case) -> str:
    """The dtype of a cache's array."""
    return kv_cache_element(case.kv_cache_dtype, case.dtype)


def prefill(backend: Any, call: PrefillArrays) -> tuple[Array, list[tuple[Array, Array]]]:
    """Run an MLA prefill backend by `attn.testing.prefill.results`."""

    def rows(values: Array) -> jax.Array:
        return jnp.asarray(values, call.case.dtype)

    def pair(keys: Array, values: Array) -> tuple[jax.Array, jax.Array]:
        return rows(keys), rows(values)

    return results(backend, call, jnp.asarray, rows, pair, lambda x: np.asarray(x, np.float32))
