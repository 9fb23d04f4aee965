"""Test tpu-inference 0.32 on a CPU with `attn` as its attention backend, in an environment that contains it.

    python benchmarks/tpu_inference_cpu.py --tests FOLDER                run all checks and print a table of the results
    python benchmarks/tpu_inference_cpu.py --tests FOLDER --record FILE.json

The environment (Python 3.12 or later) contains `vllm-tpu` 0.32.0, tpu-inference 0.32.0 and their pinned versions of jax and
flax, and this package with its entry points. FOLDER contains tpu-inference's tests, which its wheel has beside the package.

The engine does not start on a CPU by itself: `on_cpu` replaces four functions that query TPUs, none of them part of
attention. The script makes tiny models with sharpened random weights (large query and key projections, so that attention
affects the text). Greedy text, with chunked prompts and shared prefixes, must equal transformers' eager text token for token,
and that of the engine with the reference of its own kernels (`ref_ragged_paged_attention`), and must differ with another scale.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS, FEW_TOKENS, LENGTHS, SHARP = 24, 6, (3, 17, 40, 70, 130), 12.0
COMMON = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "dtype": "float32",
}  # fmt: skip
#: JAX models of the engine: (transformers' configuration, its arguments). With vLLM's models it (0.32) stops on a CPU at
#: `layer.weight.untyped_storage().resize_(0)` (layers/vllm/quantization/unquantized.py, line 380).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 64}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
}
REFERENCE = "reference"
Row = dict[str, Any]


def make_models(place: Path) -> dict[str, list[list[int]]]:
    """Write the models and return transformers' greedy tokens for the prompts."""
    import torch
    import transformers

    answers = {}
    for name, (config, own) in MODELS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, config)(**{**COMMON, **own}), attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            for weight_name, weight in model.named_parameters():
                if "q_proj.weight" in weight_name or "k_proj.weight" in weight_name:
                    weight.mul_(SHARP)
        model.save_pretrained(place / name)
        greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        answers[name] = [
            model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **greedy)[0, len(ids) :].tolist()
            for ids in prompts()
        ]
    return answers


def prompts() -> list[list[int]]:
    """Return prompts of several lengths as token ids; the last two share a prefix."""
    import numpy as np

    draw = np.random.default_rng(1)
    shared = draw.integers(2, 128, 64).tolist()
    return [(shared if n > 64 else []) + draw.integers(2, 128, n - 64 if n > 64 else n).tolist() for n in LENGTHS]


# --- the engine -------------------------------------------------------------------------------------------------------


def on_cpu() -> None:
    """Replace what the engine (0.32) queries of TPUs: their coordinates (`utils.make_optimized_mesh`), their memory
    (`utils.hbm_usage_bytes`), and the TPU compiler's options of the step and of sampling."""
    import jax
    import numpy as np
    from jax.sharding import Mesh
    from tpu_inference.models.common import compiler_options

    compiler_options.get_step_fn_compiler_options = dict
    compiler_options.get_sampling_compiler_options = dict
    from tpu_inference import utils
    from tpu_inference.runner import tpu_runner

    def mesh(axis_shapes: Any, axis_names: Any, *, devices: Any = None) -> Mesh:
        return Mesh(np.array(jax.devices() if devices is None else devices).reshape(axis_shapes), axis_names)

    utils.make_optimized_mesh = tpu_runner.make_optimized_mesh = mesh
    utils.hbm_usage_bytes = lambda devices: [(0, 1 << 34) for _ in devices]


def register_reference() -> None:
    """Register the references of the engine's kernels, which run outside of jit, as its backend "reference"."""
    import jax
    import jax.numpy as jnp
    from tpu_inference.kernels.ragged_paged_attention.v3.kernel import ref_ragged_paged_attention
    from tpu_inference.kernels.ragged_paged_attention.v3.kernel_hd64 import ref_ragged_paged_attention_hd64
    from tpu_inference.layers.common import attention_backend, attention_interface

    class Reference(attention_backend.RPAAttentionBackend):
        def attention(self, kv_cache: Any, q: Any, k: Any, v: Any, md: Any, shared_md: Any, mesh: Any, **given: Any) -> Any:
            of_64 = q.shape[2] == 64
            options = {
                "sm_scale": given["sm_scale"], "sliding_window": given["attention_chunk_size"],
                "soft_cap": given["attn_logits_soft_cap"],
            }  # fmt: skip

            def run(*arrays: Any) -> Any:
                q, k, v, kv_cache, lens, tables, starts, distribution = map(jnp.asarray, arrays)
                if not int(starts[distribution[2]]):  # the engine's warm-up
                    return jnp.zeros_like(q), kv_cache
                function = ref_ragged_paged_attention_hd64 if of_64 else ref_ragged_paged_attention
                out, kv_cache = function(q, k, v, kv_cache, lens, tables, starts, distribution, **options)
                return jnp.pad(out.astype(q.dtype), ((0, len(q) - len(out)), (0, 0), (0, 0))), kv_cache

            shapes = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype)
            arrays = (
                q, k, v, kv_cache, shared_md.seq_lens, md.block_tables, shared_md.query_start_loc,
                shared_md.request_distribution,
            )  # fmt: skip
            out, kv_cache = jax.pure_callback(run, shapes, *arrays)
            return kv_cache, out

    from tpu_inference.layers.vllm.backends import flash_attn

    class Impl(flash_attn.PallasAttentionBackendImpl):
        attention_backend = REFERENCE

    class Backend(flash_attn.PallasAttentionBackend):
        @staticmethod
        def get_impl_cls() -> Any:
            return Impl

    flash_attn.ReferenceBackend = Backend
    path = f"{flash_attn.__name__}.ReferenceBackend"
    attention_backend.register_attention_backend(REFERENCE, attention=Reference, vllm_backend=path)
    attention_interface.RPAAttentionBackend = Reference  # for JAX models, which name no backend


def text(place: str, name: str, backend: str, lost: str) -> list[list[int]]:
    """Return greedy tokens of all prompts, twice: prompts are processed in chunks of up to 64 tokens; the second time they are
    in the prefix cache. lost: a mistake that must change the results."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", SKIP_JAX_PRECOMPILE="1", MODEL_IMPL_TYPE="flax_nnx")
    on_cpu()
    if backend == REFERENCE:
        register_reference()
    from vllm import LLM, SamplingParams

    if lost == "scale":
        from attn.integrations import _tpu_inference

        real = _tpu_inference._implementation
        _tpu_inference._implementation = lambda *args, **given: real(*args, **{**given, "scale": 2 * given["scale"]})
    llm = LLM(
        f"{place}/{name}", attention_backend=backend, dtype="float32", skip_tokenizer_init=True, max_model_len=256,
        max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks_override=128, disable_log_stats=True,
    )  # fmt: skip
    slow = backend == REFERENCE  # it runs operation by operation
    asked = [{"prompt_token_ids": ids} for ids in prompts()][: 3 if slow else None]
    tokens = FEW_TOKENS if slow else NEW_TOKENS
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answers = [r for _ in range(1 if slow else 2) for r in llm.generate(asked, params, use_tqdm=False)]
    return [list(r.outputs[0].token_ids) for r in answers]


def separately(place: Path, name: str, backend: str, ours: str = "", lost: str = "") -> list[list[int]]:
    """Run `text` in a process of its own."""
    out = place / "tokens.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--engine", str(place), name, backend, lost, str(out)]
    # With asynchronous dispatch one of two runs gave other text: presumably the engine overwrites arrays of a step.
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0"}
    if ours:
        environ["ATTN_BACKEND"] = ours
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    if not out.exists():
        raise RuntimeError(f"{name}, {backend} {ours}: {done.stderr[-3000:]}")
    found: list[list[int]] = json.loads(out.read_text())
    return found


def start_unchanged(place: Path) -> Row:
    """The line at which the engine stops without `on_cpu`."""
    code = (
        "import os, sys\nos.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING='0')\nfrom vllm import LLM\n"
        f"LLM({str(place / 'llama')!r}, skip_tokenizer_init=True, max_model_len=256)"
    )
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    lines = re.findall(r'File ".*(tpu_inference/.*)", line (\d+), in (.*)\n.*?  +(\S.*)', done.stderr)
    found = " ".join(lines[-1]) if lines else "it started"
    return row("engine, unchanged: does not start on a CPU", done.returncode != 0, found)


# --- the checks -------------------------------------------------------------------------------------------------------


def row(what: str, held: bool, found: str) -> Row:
    return {"what": what, "held": held, "found": found}


def same(what: str, got: Any, want: Any, equal: bool = True) -> Row:
    count = sum(a == b for a, b in zip(got, want, strict=True))
    return row(what, count == len(want) if equal else count < len(want), f"{count} of {len(want)} answers equal")


def run_engine(place: Path) -> Iterator[Row]:
    eager = make_models(place)
    yield start_unchanged(place)
    for name in MODELS:
        got = separately(place, name, "attn")
        yield same(f"engine, {name}: text is transformers' eager", got, 2 * eager[name])
        few = [tokens[:FEW_TOKENS] for tokens in got[:3]]
        yield same(f"engine, {name}: text is the reference's of RPA", few, separately(place, name, REFERENCE))
        yield same(
            f"engine, {name}: with another scale it is not", separately(place, name, "attn", lost="scale"), got, equal=False
        )


def run_interface() -> Iterator[Row]:
    from attn.integrations import tpu_inference as integration
    from tests.integrations import tpu_interface

    found = tpu_interface.drift()
    yield row("interface: as documented in tests/standins", not found, "; ".join(found) or "no difference")
    integration.register()
    for ours in ("XLA_ATTN", "PALLAS"):
        os.environ["ATTN_BACKEND"] = ours
        for what, difference, allowed, control in tpu_interface.batches():
            held = difference <= allowed < control
            yield row(f"layer, {ours}: {what}", held, f"difference {difference:.1e} (control {control:.1e})")
    del os.environ["ATTN_BACKEND"]


def run_models() -> Iterator[Row]:
    """Tiny Gemma 3 with images and Llama 4, whose attention is the engine's layer for vLLM's models: greedy text against
    transformers' eager, by `attn` and, as a control, by the references of the engine's own kernels."""
    import torch
    import torchax
    from torchax.interop import jax_view, torch_view
    from tpu_inference.layers.common.attention_backend import create_attention_backend
    from tpu_inference.layers.vllm.backends.flash_attn import PallasAttentionBackendImpl
    from tpu_inference.models.vllm import vllm_model_wrapper_context as contexts

    from attn.integrations import tpu_inference as integration
    from attn.integrations._tpu_inference import TPUAttnImpl
    from tests.integrations import tpu_models

    integration.register()
    register_reference()

    class Own(PallasAttentionBackendImpl):
        attention_backend = REFERENCE

    def of(impl_cls: Any) -> Any:
        def layer(module: Any, window: int | None, chunk: int | None) -> Any:
            config, name = module.config, f"model.layers.{module.layer_idx}.self_attn.attn"
            heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
            impl = impl_cls(heads, module.head_dim, module.scaling, kv_heads, None, window, "auto")
            of_vllm = types.SimpleNamespace(layer_name=name, attention_chunk_size=chunk)

            def call(q: Any, k: Any, v: Any, cache: Any, batch: Any, mesh: Any) -> Any:
                known = {"kv_caches": [cache], "mesh": mesh, "layer_name_to_kvcache_index": {name: 0}}
                with torchax.default_env(), contexts.set_vllm_model_wrapper_context(**known, shared_attn_metadata=batch):
                    out = impl.forward(of_vllm, *map(torch_view, (q, k, v)), torch.empty(0), batch)
                    caches = contexts.get_vllm_model_wrapper_context().kv_caches
                return caches[0], jax_view(out).reshape(q.shape)

            return call

        return layer

    for name in ("gemma3", "llama4"):
        served, images = getattr(tpu_models, name)(), name == "gemma3"
        wanted = tpu_models.eager(served)
        for what, layer, backend in (("attn", of(TPUAttnImpl), None), ("its own", of(Own), create_attention_backend("rpa"))):
            found = tpu_models.engine(served, layer, images, backend)
            equal = sum(a == b for own, want in zip(found, wanted, strict=True) for a, b in zip(own, want, strict=True))
            total = sum(map(len, wanted))
            yield row(
                f"{name}, {what}: eager's tokens", (equal == total) == (what == "attn"), f"{equal} of {total} tokens equal"
            )


def run_own_tests(folder: Path) -> Iterator[Row]:
    """The package's tests: of the registration, unchanged and with `attn` registered; of its kernels, run by `attn` over caches
    converted at the test's border."""
    unchanged = ("test_attention_backend.py", "test_attention_interface.py", "test_grouped_attention_metadata.py")
    files = [folder / "tests/layers/common" / name for name in unchanged]
    yield pytest_row(
        "own tests of the registration and the interface", folder, [*files, folder / "tests/runner" / "test_kv_cache.py"], {}
    )
    kernels = folder / "tests/kernels"
    for name in ("ragged_paged_attention_kernel_v3_test.py", "ragged_paged_attention_kernel_v3_hd64_test.py"):
        yield pytest_row(f"own tests of RPA v3 run by XLA_ATTN: {name}", folder, [kernels / name], {"ATTN_BACKEND": "XLA_ATTN"})
    few = ["-k", "basic and not dtype1"]
    for name in ("ragged_paged_attention_kernel_v3_test.py", "ragged_paged_attention_kernel_v3_hd64_test.py"):
        yield pytest_row(
            f"own tests of RPA v3 run by PALLAS: {name}", folder, [kernels / name, *few], {"ATTN_BACKEND": "PALLAS"}
        )


def pytest_row(what: str, folder: Path, arguments: list[Any], environ: dict[str, str]) -> Row:
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "tpu_inference_tests", "-p", "no:cacheprovider",
        "--rootdir", str(folder), "-rA", *map(str, arguments),
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT / "benchmarks/programs"), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **environ}
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+.*)", done.stdout, re.M)
    return row(what, done.returncode == 0, "; ".join([re.sub(r" in [\d.]+s.*", "", last).strip("= "), *failed]))


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--tests", type=Path, help="folder with tpu-inference's tests")
    parser.add_argument("--only", choices=("interface", "models", "tests", "engine"), help="one group of checks")
    parser.add_argument("--record", type=Path, help="also write the table as JSON")
    parser.add_argument("--engine", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        place, name, backend, lost, out = args.engine
        Path(out).write_text(json.dumps(text(place, name, backend, lost)))
        return 0
    if args.tests and not (args.tests / "tests/layers/common").is_dir():
        parser.error(f"--tests {args.tests}: contains no tests/layers/common; unzip tpu-inference's wheel")
    ours = types.ModuleType("tests")  # tpu-inference's wheel has a package of this name
    ours.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = ours
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        groups: dict[str, Callable[[], Iterator[Row]]] = {
            "interface": run_interface,
            "models": run_models,
            "engine": lambda: run_engine(Path(folder)),
        }
        if args.tests:
            groups["tests"] = lambda: run_own_tests(args.tests.resolve())
        for name, run in groups.items():
            if args.only in (None, name):
                for found in run():
                    rows.append(found)
                    print(f"{'ok  ' if found['held'] else 'FAIL'} {found['what']}: {found['found']}", flush=True)
    if args.record:
        args.record.write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n")
    return 0 if rows and all(r["held"] for r in rows) else 1


def about() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"date": datetime.date.today().isoformat(), "python": platform.python_version()}
    for name in ("vllm-tpu", "tpu-inference", "jax", "flax", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


if __name__ == "__main__":
    sys.exit(main())
