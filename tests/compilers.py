"""Processes that compile with Triton, for tests: the environment's own, or that of a folder beside the environment.

`compilers` (make compilers) has Triton with an older NumPy that its interpreter needs; `gpu` (make test-newest) has Triton, and
jaxlib's plugin for NVIDIA GPUs, which compiles for a GPU that is not present. They are not installed in the environment, where
jax would look for a GPU in every process.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Folders that have Triton.
PLACES = [place for name in ("gpu", "compilers") if ((place := Path(sys.prefix) / name) / "triton").is_dir()]
WITH_TRITON = importlib.util.find_spec("triton") is not None

#: Marks a test that starts such a process.
needs_triton = pytest.mark.skipif(
    not (WITH_TRITON or PLACES) or os.environ.get("TRITON_INTERPRET") == "1",
    reason="triton is neither installed nor in a folder of the environment (make compilers), or it interprets",
)

#: An H100 as XLA's compiler knows it: what it asks of a device (figures: those of
#: xla/backends/gpu/target_config/specs/h100_sxm.txtpb of openxla/xla, and NVIDIA's data sheet).
H100 = """
gpu_device_info {
  name: "H100" device_vendor: "NVIDIA Corporation" core_count: 132 fpus_per_core: 128 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  memory_bandwidth: 3350000000000 device_memory_size: 80000000000 device_address_bits: 64
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 4 }
"""


def needs_plugin() -> None:
    """Skip a test that compiles for a GPU that is not present, where jaxlib's plugin for NVIDIA GPUs is not."""
    from attn.jax.kernels.gpu.launch import why_not

    folders = [*map(str, PLACES), *sys.path]
    if why_not() or not any((Path(place) / "jax_plugins" / "xla_cuda13").is_dir() for place in folders):
        pytest.skip(f"needs jaxlib's plugin for NVIDIA GPUs (make test-newest) {why_not()}")


def output(script: str, cache: Path, **variables: str) -> str:
    """Return what a Python process prints that runs `script` with Triton. cache: a folder for what it compiles."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", ""), *([] if WITH_TRITON else [str(PLACES[0])])]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    env = {**os.environ, **own, "JAX_PLATFORMS": "cpu", **variables}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def without_barriers(text: str) -> str:
    """Return StableHLO in which what an optimization barrier returns is called what it was given."""
    barrier = re.compile(r"\n *(%\w+)(:\d+)? = stablehlo\.optimization_barrier ([^:]+) : [^\n]*")
    while found := barrier.search(text):
        name, many, operands = found.groups()
        text = text[: found.start()] + text[found.end() :]
        for i, operand in enumerate(operands.split(", ")):
            text = re.sub(re.escape(name) + (f"#{i}" if many else "") + r"(?![\w#:])", operand, text)
    return text
