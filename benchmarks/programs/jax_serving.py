"""Serve a Llama and a Gemma 2 by JAX on eight devices, or compile their steps at full size for TPUs that are not present.

    python -m benchmarks.programs.jax_serving                          # small shapes on eight devices of this host's CPU
    python -m benchmarks.programs.jax_serving --compile v6e v7x        # Llama 3.1 8B and Gemma 2 9B by libtpu
    python -m benchmarks.programs.jax_serving --json FILE              # also write the rows, of either

Served: continuous batches with shared prefixes and preemption, heads over a mesh of eight devices; every program is compiled
before the first request, and a later compilation is an error. Every token is compared with a dense pass with plain softmax,
without a cache, on one device. The exit code is 1 if one differs.

Compiled: a decode of 64 requests, a mixed step of 512 rows and prompts of 2,048, by libtpu, each chip in its own process. For
each program: bytes per device (weights and caches, temporaries), collectives, kernel launches, and the copies of a whole cache,
which must be 0: then the caches are updated in place. The exit code is 1 if there is one. Nothing is executed. `--rows` selects
other sizes than 512 and 2,048.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from attn.errors import BackendLoadError
from attn.tools.aot import command as aot

DEVICES = 8
MODELS = ("llama", "gemma")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

#: What may have all caches as its result without copying them: the kernel, and names for what is there already.
IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "custom-call"}


def serve(name: str, num_requests: int, max_new_tokens: int) -> dict[str, Any]:
    """Serve requests with a small model on all devices and judge every token; returns a row."""
    import jax
    import numpy as np

    from attn.jax import CompilationWarning
    from attn.serving import Scheduler
    from examples.jax_decoder import GEMMA_SMALL, LLAMA_SMALL, Decoder, Server, dense

    warnings.simplefilter("error", CompilationWarning)
    shape = {"llama": LLAMA_SMALL, "gemma": GEMMA_SMALL}[name]
    mesh = jax.make_mesh((DEVICES,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    scheduler = Scheduler(28, 16, token_budget=64, max_num_reqs=8, max_model_len=256, vocab_size=shape.vocab_size)
    server, model = Server(shape, mesh, scheduler), Decoder(shape, jax.random.key(1))
    began = time.perf_counter()
    programs = server.warmup()
    warm = time.perf_counter() - began
    server.load(model)
    random = np.random.default_rng(0)
    shared = random.integers(0, shape.vocab_size, 40).tolist()
    lengths = random.integers(1, 60, num_requests)
    prompts = [[*shared[: 40 * (i % 2)], *random.integers(0, shape.vocab_size, n).tolist()] for i, n in enumerate(lengths)]
    requests = [scheduler.submit(prompt, max_new_tokens) for prompt in prompts]
    began = time.perf_counter()
    for _ in server.serve():
        pass
    seconds = time.perf_counter() - began
    likeliest = dense(model, [request.tokens[:-1] for request in requests])
    expected = [row[request.num_prompt_tokens - 1 :] for row, request in zip(likeliest, requests, strict=True)]
    stats = scheduler.stats
    return {
        "model": name,
        "backend": server.selection.name,
        "programs": len(programs),
        "warmup_s": round(warm, 1),
        "tokens": stats.generated_tokens,
        "tokens_per_s": round(stats.generated_tokens / seconds, 1),
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "preemptions": stats.preemptions,
        "requests": num_requests,
        "agreeing": sum(request.output == row for request, row in zip(requests, expected, strict=True)),
    }


def compile_for(chip: str, name: str, sizes: Sequence[int], dump: Path) -> list[dict[str, Any]]:
    """Compile the steps of a model at full size for all devices of a machine with `chip`; returns a row for each.

    libtpu writes the compiled programs to `dump`.
    """
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    from attn.serving import Scheduler
    from attn.tools.aot.libtpu import CHIPS
    from examples.jax_decoder import GEMMA_9B, LLAMA_8B, Server

    shape = {"llama": LLAMA_8B, "gemma": GEMMA_9B}[name]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology).devices
    scheduler = Scheduler(512, 128, token_budget=max(sizes), max_num_reqs=64, max_model_len=8192)
    mesh = Mesh(np.array(devices), ("heads",))
    server = Server(shape, mesh, scheduler, dtype="bfloat16", backend="PALLAS", num_tokens=sizes)
    programs = server.warmup()
    texts = [file.read_text(encoding="utf-8") for file in sorted(dump.glob("*jit_step*after_optimizations.txt"))]
    rows = []
    for bucket, program, text in zip(server.buckets, programs, texts, strict=True):
        step = "decode" if bucket.max_query_len == 1 else "prompts" if bucket.num_tokens == max(sizes) else "mixed"
        row = {"chip": chip, "devices": len(devices), "model": name, "step": step, "rows": bucket.num_tokens}
        rows.append(row | figures(program, text, server.cache_shape()))
    return rows


def figures(program: Any, text: str, caches: Any) -> dict[str, Any]:
    """Return a program's memory per device, what its text calls, and how often it copies the array of all caches."""
    memory = program.memory_analysis()
    local = caches.sharding.shard_shape(caches.shape)
    made = re.findall(rf"= \(*\w+\[{','.join(map(str, local))}\].*? ([a-z][\w-]*)\(", text)
    called = Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text))
    size = caches.dtype.itemsize
    for extent in local:
        size *= extent
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "cache_bytes": size,
        "shared_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "collectives": dict(called),
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "cache_copies": sum(opcode not in IN_PLACE for opcode in made),
    }


def in_process(chip: str, name: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """`compile_for` in a process of its own, which libtpu needs for each chip."""
    path = os.pathsep.join(x for x in (*sys.path, aot.compiler_path(f"tpu-{chip}")) if x)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.programs.jax_serving", "--one", chip, name, "--json", str(file)]
        command += ["--rows", *map(str, sizes)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{chip}, {name}: the compiler failed: {done.stderr[-2000:]}")
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--compile", nargs="+", choices=("v5e", "v6e", "v7x"), metavar="CHIP", help="v5e, v6e, v7x")
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[512, 2048], help="rows of the steps to compile that read prompts"
    )
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.one:
        from attn.tools.aot.libtpu import environment

        with tempfile.TemporaryDirectory() as folder:
            os.environ.update(environment(options.one[0], folder, estimate=False))
            del os.environ["LIBTPU_INIT_ARGS"]  # it requests the code of every operation
            # the programs' text: jaxlib does not parse all that a newer libtpu returns
            os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
            rows = compile_for(*options.one, options.rows, Path(folder))
    elif options.compile:
        try:
            rows = [row for chip in options.compile for name in options.models for row in in_process(chip, name, options.rows)]
        except BackendLoadError as error:
            sys.exit(str(error))
        for row in rows:
            sizes = [f"{name} {row[f'{name}_bytes'] / 2**30:.2f}" for name in ("argument", "cache", "shared", "temporary")]
            called = ", ".join(f"{count} {name}" for name, count in row["collectives"].items()) or "none"
            print(
                f"{row['devices']} x {row['chip']}, {row['model']}, {row['step']} of {row['rows']}: GiB per device: "
                f"{', '.join(sizes)}; collectives: {called}; kernels {row['kernels']}; copies of caches {row['cache_copies']}"
            )
    else:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES} {os.environ.get('XLA_FLAGS', '')}"
        os.environ["JAX_PLATFORMS"] = "cpu"
        for name in options.models:
            rows.append(serve(name, options.requests, options.max_new_tokens))
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        versions = {name: metadata.version(name) for name in ("jax", "flax")}
        if options.compile:
            versions["libtpu"] = aot.compiler_here(f"tpu-{options.compile[0]}").partition("==")[2]
        facts = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": platform.machine(),
            "versions": versions,
            "rows": rows,
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if any(row.get("cache_copies") or row.get("agreeing", 0) != row.get("requests", 0) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
