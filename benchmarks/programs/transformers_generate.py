"""Time prefill and decode of transformers' models: its default implementation of attention beside `attn`.

    python benchmarks/programs/transformers_generate.py --contexts 512 3000 --batch 2

Small models with random weights, on a CUDA device if there is one, otherwise on the CPU. Each repetition runs every
implementation in turn, so that throttling and other load affect all of them; the table has the fastest repetition. Every
implementation is given the same tokens. The run fails if logits of `attn` differ from those of transformers' default by more
than `LIMITS`.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from attn.integrations import transformers as attn_transformers

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 131072, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
#: Models by name: (configuration, its options beside `SHAPE`). In gemma2 and gpt_oss every other layer has a window.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 1024, "query_pre_attn_scalar": 64}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
#: Factor of query and key projections: with small random scores every key would have almost the same weight.
SHARP = 12.0
#: The largest difference of logits, relative to their standard deviation: layers and experts amplify roundings.
LIMITS = {"float32": 1e-2, "bfloat16": 0.2}


@dataclass
class Times:
    """Milliseconds of each repetition, and the largest relative difference of logits from the default's."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    error: float = 0.0


def model_of(name: str, dtype: torch.dtype, device: str) -> Any:
    config, options = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**SHAPE, **options)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype).to(device).eval()
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if "q_proj.weight" in parameter or "k_proj.weight" in parameter:
                weight.mul_(SHARP)
    return model


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() * 1e3


@torch.no_grad()
def run(model: Any, ids: torch.Tensor, context: int) -> tuple[float, list[float], torch.Tensor]:
    """Return the prefill's ms, each decoded token's ms, and the logits of the last prompt token and of these tokens."""
    device, cache, logits, steps = ids.device.type, transformers.DynamicCache(config=model.config), [], []
    before = clock(device)
    logits.append(model(input_ids=ids[:, :context], past_key_values=cache, logits_to_keep=1).logits)
    prefill = clock(device) - before
    for at in range(context, ids.shape[1]):
        before = clock(device)
        logits.append(model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits)
        steps.append(clock(device) - before)
    return prefill, steps, torch.cat(logits, 1).float()


def measure(name: str, context: int, options: argparse.Namespace, device: str) -> dict[str, Times]:
    """Return the times of transformers' default, which is the first entry, and of `attn`."""
    model = model_of(name, getattr(torch, options.dtype), device)
    default = model.config._attn_implementation
    ids = torch.randint(2, SHAPE["vocab_size"], (options.batch, context + options.tokens), device=device)
    found = {default: Times(), "attn": Times()}
    for turn in range(options.repeats + 1):  # the first warms up
        outputs = {}
        for implementation, times in found.items():
            model.set_attn_implementation(implementation)
            prefill, steps, outputs[implementation] = run(model, ids, context)
            if turn:
                times.prefill.append(prefill)
                times.decode.append(statistics.median(steps))
        want = outputs[default]
        error = float((outputs["attn"] - want).abs().max() / want.std())
        found["attn"].error = max(found["attn"].error, error)
    if not found["attn"].error <= LIMITS[options.dtype]:
        sys.exit(f"{name}, {context} tokens: logits of attn differ from {default}'s by {found['attn'].error:.2g} deviations")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 3000], help="tokens of the prompts")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to decode after each prompt")
    parser.add_argument("--batch", type=int, default=2, help="prompts at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=LIMITS, default="float32")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    attn_transformers.register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    run_of: dict[str, Any] = {"device": on, "torch": torch.__version__, "transformers": transformers.__version__}
    run_of |= {"dtype": options.dtype, "batch": options.batch, "rows": []}
    print(", ".join(f"{name} {value}" for name, value in run_of.items() if name != "rows") + "\n")
    print("| model | context | attention | prefill ms | ms per token | largest difference |")
    print("|---|---|---|---|---|---|")
    for name in options.models:
        for context in options.contexts:
            for implementation, times in measure(name, context, options, device).items():
                row = {"model": name, "context": context, "attention": implementation}
                row |= {"prefill_ms": min(times.prefill), "ms_per_token": min(times.decode), "error": times.error}
                run_of["rows"].append(row)
                cells = "{model} | {context} | {attention} | {prefill_ms:.1f} | {ms_per_token:.2f} | {error:.1e}"
                print(f"| {cells.format(**row)} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(run_of, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
