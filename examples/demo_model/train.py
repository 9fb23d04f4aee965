"""Train the demo checkpoint: a byte-level Llama of 1.8 million parameters, on one or two CPU cores.

    python -m examples.demo_model.train --out DIR --tokens 6000000 --seed 0

The model is plain PyTorch with the parameter names of `LlamaForCausalLM`, so the checkpoint loads everywhere.
Attention is torch's own: the examples compare this library against the trained model, not against itself. The
budget is counted in tokens, not minutes, so that training does not depend on the machine's load. Most steps use
short windows and some up to `max_position_embeddings`, so that contexts of a thousand bytes work too. Matrices are
trained by Muon, the rest by AdamW. SIGINT or SIGTERM ends the training after the current step, and the model is
saved.

Shapes: B rows · S tokens in a row · H query heads · K kv heads · D head_size · C hidden_size.
"""

import argparse
import contextlib
import itertools
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.demo_model.corpus import Document, documents
from examples.demo_model.export import BOS, EOS, LLAMA, TrainingFacts, save_checkpoint

CONFIG = LLAMA
_HIDDEN, _HEADS, _KV_HEADS, _SIZE = (
    CONFIG[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
)
# (rows, window): share of the steps. All shapes have the same number of tokens, so that steps take similar time.
SHAPES = {(8, 256): 0.70, (4, 512): 0.15, (2, 1024): 0.10, (1, 2048): 0.05}
STEP_TOKENS = 2048
_WARMUP, _FLAT = 0.02, 0.45  # shares of the budget: rise, plateau; the rest falls linearly
_SAVE_SECONDS = 180


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(_HIDDEN, _HEADS * _SIZE, bias=False)
        self.k_proj = nn.Linear(_HIDDEN, _KV_HEADS * _SIZE, bias=False)
        self.v_proj = nn.Linear(_HIDDEN, _KV_HEADS * _SIZE, bias=False)
        self.o_proj = nn.Linear(_HEADS * _SIZE, _HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, S, C]; cos, sin: [S, D] -> [B, S, C]."""
        rows, window, _ = x.shape
        query, key, value = (
            projection(x).view(rows, window, -1, _SIZE).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (t * cos + _rotate_half(t) * sin for t in (query, key))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, window, _HEADS * _SIZE))
        return projected


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        width = CONFIG["intermediate_size"]
        self.gate_proj = nn.Linear(_HIDDEN, width, bias=False)
        self.up_proj = nn.Linear(_HIDDEN, width, bias=False)
        self.down_proj = nn.Linear(width, _HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, C] -> [B, S, C]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(_HIDDEN, eps=CONFIG["rms_norm_eps"])
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(_HIDDEN, eps=CONFIG["rms_norm_eps"])
        self.mlp = MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, S, C]; cos, sin: [S, D] -> [B, S, C]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Decoder(nn.Module):
    """From the embedding to the last norm; a separate module, so that names are `model.layers.0...`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], _HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = nn.RMSNorm(_HIDDEN, eps=CONFIG["rms_norm_eps"])


class Llama(nn.Module):
    """Takes tokens, returns logits; the output projection is the embedding."""

    cos: Tensor  # [max_position_embeddings, D], as is sin
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        frequencies = CONFIG["rope_theta"] ** (-torch.arange(0, _SIZE, 2, dtype=torch.float64) / _SIZE)
        angles = torch.outer(torch.arange(CONFIG["max_position_embeddings"], dtype=torch.float64), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self.apply(_initialise)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)  # every block starts as the identity

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [B, S] -> logits [B, S, vocab_size]."""
        window = tokens.shape[1]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, self.cos[:window], self.sin[:window])
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def _rotate_half(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.05)


def encode(document: Document) -> np.ndarray:
    """Return uint16 [n + 2]: a beginning mark, the bytes, an end mark."""
    body = np.frombuffer(document.text.encode(), dtype=np.uint8)
    return np.concatenate(([BOS], body, [EOS])).astype(np.uint16)


def batches(texts: list[np.ndarray], seed: int) -> Iterator[Tensor]:
    """Yield windows int64 [B, S + 1] indefinitely: the texts, reshuffled in each pass, joined, cut in order."""
    random = np.random.default_rng(seed)
    shapes, shares = list(SHAPES), list(SHAPES.values())
    stream = np.empty(0, np.uint16)
    while True:
        rows, window = shapes[random.choice(len(shapes), p=shares)]
        needed = rows * window + 1
        if len(stream) < needed:
            stream = np.concatenate([stream, *(texts[i] for i in random.permutation(len(texts)))])
        cut = np.stack([stream[i * window : (i + 1) * window + 1] for i in range(rows)])
        stream = stream[rows * window :]
        yield torch.from_numpy(cut.astype(np.int64))


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(progress: float) -> float:
    """Return the fraction of the peak learning rate at `progress` in [0, 1]: up, flat, down to a fiftieth."""
    if progress < _WARMUP:
        return progress / _WARMUP
    fallen = max(0.0, progress - _WARMUP - _FLAT) / (1 - _WARMUP - _FLAT)
    return 1 - 0.98 * min(1.0, fallen)


@torch.no_grad()
def validation_loss(model: nn.Module, texts: list[np.ndarray], window: int = 1024, limit: int | None = None) -> float:
    """Return the mean negative log-likelihood in nats per byte of the joined texts, in non-overlapping windows.

    Only bytes count: beginning and end marks are inputs but not scored. At most `limit` windows are read.
    """
    stream = np.concatenate(texts)
    total, count = 0.0, 0
    for start in range(0, len(stream) - 1, window)[:limit]:
        piece = torch.from_numpy(stream[start : start + window + 1].astype(np.int64))[None]
        target = piece[0, 1:]
        losses = F.cross_entropy(model(piece[:, :-1])[0].float(), target, reduction="none")[target < BOS]
        total, count = total + losses.sum().item(), count + losses.numel()
    return total / count


def rounded(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights in bfloat16, as shipped."""
    return {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}


def train(out: Path, budget: int, seed: int, threads: int) -> float:
    """Train on `budget` tokens, saving to `out` regularly and at the end; return the loss of the saved model."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    corpus = documents()
    texts = [encode(d) for d in corpus if not d.held_out]
    held_out = [encode(d) for d in corpus if d.held_out]
    model = Llama()
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {sum(map(len, texts)):,} tokens "
        f"to learn, {sum(map(len, held_out)):,} held out",
        flush=True,
    )

    def save_now_and_then() -> None:
        value = validation_loss(model, held_out, limit=24)
        save_checkpoint(out, rounded(model))
        print(f"           validation (24 windows) {value:.3f} nats/byte, saved", flush=True)

    started = time.monotonic()
    done = fit(model, batches(texts, seed), budget, save_now_and_then)
    model.load_state_dict(rounded(model), strict=False)
    loss, minutes = validation_loss(model, held_out), (time.monotonic() - started) / 60
    facts = TrainingFacts(
        budget=budget,
        tokens=done,
        seed=seed,
        minutes=minutes,
        loss=loss,
        corpus=sum(d.size for d in corpus),
        documents=len(corpus),
        held_out=sum(d.size for d in corpus if d.held_out),
        held_out_documents=len(held_out),
    )
    save_checkpoint(out, rounded(model), facts)
    print(f"{done:,} tokens, {minutes:.1f} min, validation {loss:.4f} nats/byte, saved to {out}", flush=True)
    return loss


def fit(model: nn.Module, windows: Iterator[Tensor], budget: int, save: Callable[[], None]) -> int:
    """Take steps until `budget` tokens were seen or a signal ends the run; return the number of tokens seen.

    `save` is called every few minutes.
    """
    tools = optimizers(model)
    peaks = [tool.param_groups[0]["lr"] for tool in tools]
    started = saved = time.monotonic()
    steps = math.ceil(budget / STEP_TOKENS)
    average, done = 0.0, 0
    with _asked_to_end() as asked:
        for step, batch in enumerate(itertools.islice(windows, steps), start=1):
            for tool, peak in zip(tools, peaks, strict=True):
                tool.param_groups[0]["lr"] = peak * rate(step / steps)
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            for tool in tools:
                tool.step()
                tool.zero_grad()
            average += (loss.item() - average) * max(0.02, 1 / step)
            done, now = step * STEP_TOKENS, time.monotonic()
            if not math.isfinite(average):
                raise FloatingPointError(f"the loss is {average} after {done} tokens")
            if step % 25 == 0:
                speed = done / (now - started)
                left = (steps - step) * STEP_TOKENS / speed / 60
                print(f"{done:>9,} tokens  loss {average:.3f}  {speed:,.0f}/s  {left:.1f} min left", flush=True)
            if now - saved > _SAVE_SECONDS:
                saved = now
                save()
            if asked:
                break
    return done


@contextlib.contextmanager
def _asked_to_end() -> Iterator[list[int]]:
    """Yield a list that stays empty until the process receives SIGINT or SIGTERM, which have no other effect."""
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Exit codes: 0 trained and saved, 1 training failed, 2 invalid arguments."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo_model.train", description="Train the demo checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; created if missing")
    parser.add_argument("--tokens", type=int, default=6_000_000, help="training budget (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.tokens < 1 or options.threads < 1 or options.seed < 0:
        parser.error("--tokens and --threads must be at least 1, --seed at least 0")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} exists and is not a directory")
    try:
        train(options.out, options.tokens, options.seed, options.threads)
    except (FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
