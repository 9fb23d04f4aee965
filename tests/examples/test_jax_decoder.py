"""The decoders on eight host devices generate the tokens of dense passes on one, and windows and caps matter (about 20 s)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.levels import sampled

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import dataclasses, sys, warnings
import jax, numpy as np
from attn.jax import CompilationWarning
from attn.serving import Scheduler
from examples.jax_decoder import GEMMA_SMALL, LLAMA_SMALL, Decoder, Server, dense

warnings.simplefilter("error", CompilationWarning)
mesh = jax.make_mesh((8,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
shape = {"llama": LLAMA_SMALL, "gemma": GEMMA_SMALL}[sys.argv[1]].smaller(num_layers=2)
scheduler = Scheduler(13, 16, token_budget=32, max_num_reqs=4, max_model_len=128, vocab_size=shape.vocab_size)
server, model = Server(shape, mesh, scheduler, num_tokens=[32]), Decoder(shape, jax.random.key(1))
assert len(server.warmup()) == 2
server.load(model)
random = np.random.default_rng(0)
shared = random.integers(0, shape.vocab_size, 33).tolist()
requests = [scheduler.submit([*shared, *random.integers(0, shape.vocab_size, n).tolist()], 12) for n in (1, 40, 9, 60, 25)]
before = server.caches
events = [event for tokens in server.serve() for event in tokens]
assert before.is_deleted() and len(server.caches.devices()) == 8, "donated, and distributed"
assert len(events) == 60 and scheduler.stats.preemptions and scheduler.stats.prefix_hit_tokens

def agreeing(shape):
    model.shape = shape
    rows = dense(model, [request.tokens[:-1] for request in requests])
    return sum(row[r.num_prompt_tokens - 1 :] == r.output for r, row in zip(requests, rows, strict=True))

assert agreeing(shape) == 5
assert len({token for _, token in events}) > 20, "the texts vary"
if shape.gemma:
    assert agreeing(shape.smaller(windows=(None, None))) < 5
    assert agreeing(shape.smaller(attn_cap=None)) < 5
else:
    assert agreeing(shape.smaller(rope_theta=100.0)) < 5
"""


@pytest.mark.parametrize("name", sampled(["llama", "gemma"], 1, "decoders"))
def test_tokens_are_those_of_dense_passes(name: str) -> None:
    quick = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false"
    flags = {"XLA_FLAGS": quick, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name], env={**os.environ, **flags}, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
