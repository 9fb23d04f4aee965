"""The dense family's side of `attn bench --registry diffusion` under torch: tensors, turns, and the judge.

Times are those of plain calls, launches queued one after another behind a write of 256 MiB (`TorchBench.times`): a call takes
milliseconds, so that what the host does is hidden, and not every vendor's call can be captured in a graph.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from attn.bench import Timing
from attn.bench.dense import Shape
from attn.torch.bench import TorchBench

_TURNS, _SECONDS = 2, 0.3  #: of each backend, and of a turn
_SAMPLED = 32  #: rows of each head that are compared


class DenseBench:
    """One device and the stopwatch."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._watch = TorchBench(device)
        self.device = self._watch.device
        self._dirt = torch.zeros((256 if self._watch.on_gpu else 1) << 18, device=self.device)

    def about(self) -> dict[str, Any]:
        return self._watch.about()

    @torch.no_grad()
    def measure(self, shape: Shape, dtype: str, backends: Sequence[Any]) -> list[Timing | Exception]:
        """Every backend class on the same tensors; what it raised stands for its time."""
        size = (shape.batch, shape.rows, shape.heads, shape.head_size)
        generator = torch.Generator(self.device).manual_seed(0)
        kind = getattr(torch, dtype)
        query, key, value = tensors = [torch.randn(size, device=self.device, dtype=kind, generator=generator) for _ in "qkv"]
        at = torch.randint(shape.rows, (min(_SAMPLED, shape.rows),), generator=generator, device=self.device)
        want = _sampled(query, key, value, at)
        found = [self._first(backend, shape, tensors, at, want) for backend in backends]
        times: list[list[float]] = [[] for _ in backends]
        turn = list(zip(found, times, backends, strict=True))
        for _ in range(_TURNS):
            for timing, mine, backend in turn:
                if isinstance(timing, Timing):
                    call = partial(self._impl(backend, shape).forward, *tensors)
                    count = min(20, max(3, int(_SECONDS * 1e3 / timing.ms)))
                    mine += self._watch.times(call, self._dirt.zero_, count)
            turn.reverse()  # the clock that one leaves is the next one's
        return [_timed(one, sorted(mine)) if isinstance(one, Timing) else one for one, mine in zip(found, times, strict=True)]

    @staticmethod
    def _impl(backend: Any, shape: Shape) -> Any:
        return backend.get_impl_cls()(shape.heads, shape.head_size)

    def _first(
        self, backend: Any, shape: Shape, tensors: list[torch.Tensor], at: torch.Tensor, want: torch.Tensor
    ) -> Timing | Exception:
        """The error of a first call, and roughly how long the next takes. Whatever a backend raises is its answer."""
        try:
            impl = self._impl(backend, shape)
            torch.full_like(tensors[0], torch.nan)  # freed at once: an output that is not written to is likely to lie there
            got = impl.forward(*tensors)[:, at].float()
            error = float((got - want).norm() / want.norm())
            ms = self._watch.times(partial(impl.forward, *tensors), lambda: None, 1)[0]
        except Exception as refusal:
            return refusal
        ms = max(ms, 1e-3)
        return Timing(ms, ms, ms, error=error)


def _timed(first: Timing, times: list[float]) -> Timing:
    low, high = times[len(times) // 5], times[4 * len(times) // 5]
    return Timing(statistics.median(times), low, high, error=first.error)


def _sampled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Attention [B, rows, H, D] of some rows in float32, head by head."""
    out = query[:, at].float()
    for b in range(query.shape[0]):
        for h in range(query.shape[2]):
            scores = out[b, :, h] @ key[b, :, h].float().T * query.shape[3] ** -0.5
            out[b, :, h] = scores.softmax(-1) @ value[b, :, h].float()
    return out
