"""A step that was warmed up compiles nothing while it serves; one that was not says what was missing."""

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn.jax import Attention, CompilationWarning, ServingStep
from attn.serving import Buckets, Scheduler, Step


class Server:
    """One layer behind a scheduler; without its attention it compiles faster."""

    def __init__(self, attention: bool = False) -> None:
        self.scheduler = Scheduler(16, 16, token_budget=32, max_num_reqs=4)
        self.buckets = Buckets(self.scheduler)
        self.layer = Attention(2, 16, num_kv_heads=1, block_size=16)
        self.cache = self.layer.new_kv_cache(16)
        self.table = jax.random.normal(jax.random.key(0), (50, 4, 16))
        self.traces = 0

        def step(table: jax.Array, cache: jax.Array, token_ids: jax.Array, metadata: Any, sample_rows: jax.Array) -> Any:
            self.traces += 1
            rows = table[token_ids] + metadata.positions()[:, None, None] / 10
            out = rows[:, :2]
            if attention:
                out, cache = self.layer(out, rows[:, 2:3], rows[:, 3:], cache, metadata)
            return (out[sample_rows].reshape(-1, 32) @ table.reshape(50, -1)[:, :32].T).argmax(-1), cache

        self.step = ServingStep(jax.jit(step, donate_argnames="cache"))

    def inputs(self, step: Step) -> tuple[Any, ...]:
        metadata = self.layer.build(step.attn_metadata)
        return metadata.pad(step.token_ids), metadata, step.sample_rows

    def warmup(self) -> list[Any]:
        return self.step.warmup((self.table, self.cache, *self.inputs(empty)) for empty in self.buckets.empty_steps())

    def serve(self, pad: bool = True) -> list[list[int]]:
        random = np.random.default_rng(1)
        requests = [self.scheduler.submit(random.integers(0, 50, n).tolist(), 5) for n in (40, 3, 17, 1, 9, 30)]
        while (step := self.scheduler.schedule()) is not None:
            inputs = self.inputs(self.buckets.pad(step) if pad else step)
            tokens, self.cache = self.step(self.table, self.cache, *inputs)
            self.scheduler.commit(np.asarray(tokens[: len(step.sampled)]).tolist())
        return [request.output for request in requests]


@pytest.fixture
def strict() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompilationWarning)
        yield


def test_nothing_is_compiled_while_a_warm_server_serves(strict: None) -> None:
    server = Server(attention=True)
    before = np.asarray(server.cache)
    programs = server.warmup()
    assert len(programs) == len(server.buckets) == server.traces == 3
    assert all(program.memory_analysis().alias_size_in_bytes >= before.nbytes for program in programs), "caches are donated"
    np.testing.assert_array_equal(server.cache, before)
    outputs = server.serve()
    assert server.traces == 3 and server.step.compilations == 0
    assert len({*map(tuple, outputs)}) > 3


def test_a_bucket_that_was_not_compiled_is_reported() -> None:
    server = Server()
    empty = list(server.buckets.empty_steps())
    server.step.warmup((server.table, server.cache, *server.inputs(step)) for step in empty[:-1])
    with pytest.warns(
        CompilationWarning, match=r"compiled for [\d.]+ s after warmup\(\): no arguments of .*int32\[32\]"
    ) as seen:
        server.serve()
    assert len(seen) == 1 == server.step.compilations, "once, not at every step"


def test_unpadded_steps_are_reported() -> None:
    server = Server()
    server.warmup()
    with pytest.warns(CompilationWarning):
        server.serve(pad=False)
    assert server.step.compilations > 1


def test_without_a_warmup_there_is_no_warning(strict: None) -> None:
    server = Server()
    server.serve()
    assert server.step.compilations == 0 and server.traces > 1


ANOTHER_SHARDING = """
import warnings
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from attn.jax import CompilationWarning, ServingStep

mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
whole, parts = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("x",)))
traces = []
step = ServingStep(jax.jit(lambda x, y: traces.append(1) or x + y))
x = jax.device_put(jnp.ones(8), whole)
shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
step.warmup([(shape, shape)])
with warnings.catch_warnings():
    warnings.simplefilter("error")
    step(x, x)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    step(x, jax.device_put(x, parts))
(warning,) = seen
assert warning.category is CompilationWarning and len(traces) == 1, (warning, traces)
assert "shapes and dtypes as in warmup(), on other devices or with another sharding" in str(warning.message), warning
"""


def test_a_new_sharding_is_reported_though_nothing_is_traced() -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", ANOTHER_SHARDING], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_else_the_process_compiles_does_not_count(strict: None) -> None:
    step = ServingStep(jax.jit(lambda x: x * 2))
    step.warmup([(jnp.ones(3),)])
    compiled = threading.Event()

    def elsewhere() -> None:
        jax.jit(lambda x: x + 41)(np.ones(5))
        compiled.set()

    def slow(x: Any) -> Any:
        threading.Thread(target=elsewhere).start()
        assert compiled.wait(30)
        return np.asarray(x)

    jax.jit(lambda x: x + 40)(np.ones(6))
    step(jnp.ones(3))
    step(np.ones(3, np.float32))  # another entry of jit's cache, the same program
    waiting = ServingStep(jax.jit(lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct((2,), jnp.float32), x)))
    waiting.warmup([(jnp.ones(2),)])
    waiting(jnp.ones(2)).block_until_ready()
    assert step.compilations == waiting.compilations == 0


def test_steps_of_nnx_modules(strict: None) -> None:
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    step = ServingStep(nnx.jit(lambda model, x: model(x)))
    step.warmup([(model, jnp.ones((n, 4))) for n in (1, 8)])
    assert step(model, jnp.ones((8, 4))).shape == (8, 3) and step.compilations == 0


def test_a_plain_function_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be lowered: must be a function made by jax.jit"):
        ServingStep(lambda x: x)
