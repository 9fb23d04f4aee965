"""A server's jitted step: compiled for every bucket before the first request, with a warning for each compilation after that.

A layer is one part of the program that XLA compiles, so what is warmed up is the server's own jitted step. `warmup` lowers and
compiles it (`jax.stages`) without running it: donated caches stay alive, and shapes are enough, of a TPU that is not present
too. Later calls go through `jax.jit`, which finds these programs.

Compilations are counted where JAX reports them (`jax.monitoring`), in the thread that calls the step. Neither a count of
traces nor the size of jit's cache gives their number: arrays with another sharding compile again without a trace, and a NumPy
array in place of a JAX array is another entry of the cache but the same program.
"""

import functools
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.monitoring

from attn.logger import init_logger

logger = init_logger(__name__)
_COMPILED = "/jax/core/compile/backend_compile_duration"
_call = threading.local()  #: `seconds`: of each compilation during this thread's call of a step


class CompilationWarning(RuntimeWarning):
    """A step was compiled after `ServingStep.warmup`: a request waited for it."""


class ServingStep:
    """A jitted step, which `warmup` compiles for all of its arguments' shapes.

        step = ServingStep(jax.jit(decode, donate_argnames="kv_cache"))
        programs = step.warmup((weights, kv_cache, *inputs(empty)) for empty in buckets.empty_steps())
        logits, kv_cache = step(weights, kv_cache, *inputs(buckets.pad(scheduler.schedule())))

    jitted: a function made by `jax.jit` or `nnx.jit`. Calls have its arguments and results. After `warmup`, a call that
    compiles warns with `CompilationWarning`, naming what differs from the arguments of `warmup`; in a test, make it an error
    by `warnings.simplefilter("error", CompilationWarning)`. `compilations` counts them.
    """

    def __init__(self, jitted: Any) -> None:
        if not hasattr(jitted, "lower"):
            raise TypeError(f"{jitted!r} cannot be lowered: must be a function made by jax.jit")
        self.jitted = jitted
        self.compilations = 0
        self._known: list[dict[str, str]] = []

    def warmup(self, arguments: Iterable[Sequence[Any]]) -> list[jax.stages.Compiled]:
        """Compile the step for each tuple of positional arguments, and return the programs in the same order.

        An array may be replaced by a `jax.ShapeDtypeStruct` of its shape, dtype and sharding. A program's
        `memory_analysis()` has the bytes that it needs. Logs the time of each at INFO; with `jax_compilation_cache_dir` set,
        the next process reads them from there.
        """
        programs = []
        for args in arguments:
            began = time.perf_counter()
            programs.append(self.jitted.lower(*args).compile())
            self._known.append(_described(args, {}))
            logger.info("program %d compiled in %.1f s", len(programs), time.perf_counter() - began)
        _listen()
        return programs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. Raises what it raises."""
        # A step may call another one: each counts its own, and the outer one's list is back even if this raises.
        outer, _call.seconds = getattr(_call, "seconds", None), []
        try:
            out = self.jitted(*args, **kwargs)
            seconds = _call.seconds
        finally:
            _call.seconds = outer
        # before `warmup` every compilation is expected
        if seconds and self._known:
            self.compilations += len(seconds)
            message = f"compiled for {sum(seconds):.1f} s after warmup(): {self._difference(_described(args, kwargs))}"
            warnings.warn(message, CompilationWarning, stacklevel=2)
        return out

    def _difference(self, call: dict[str, str]) -> str:
        """Return the differences between arguments and the most similar ones of `warmup`."""
        # names that one of the two lacks count as different
        least = min(([name for name in call | known if call.get(name) != known.get(name)] for known in self._known), key=len)
        if not least:
            return "shapes and dtypes as in warmup(), on other devices or with another sharding"
        return "no arguments of warmup() had " + ", ".join(f"{name}: {call.get(name, 'nothing')}" for name in least[:3])


def _described(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, str]:
    """Return the dtype and shape of every leaf by its path, and the static fields."""
    leaves, tree = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))
    # path[0] tells positional arguments from named ones, as the rest of a path does too
    described = {jax.tree_util.keystr(path[1:]): f"{getattr(x, 'dtype', x)}{[*getattr(x, 'shape', ())]}" for path, x in leaves}
    return described | {"static fields": str(tree)}


@functools.cache
def _listen() -> None:
    """Let JAX report every compilation of this process, once."""

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED and (seconds := getattr(_call, "seconds", None)) is not None:
            seconds.append(duration_secs)

    # JAX calls it in the thread that compiles, which is that of the call. One for all steps: each would hear every compilation.
    jax.monitoring.register_event_duration_secs_listener(heard)
