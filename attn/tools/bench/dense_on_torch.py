"""`attn bench --registry diffusion` in torch: tensors, timing, and errors.

Times are those of plain calls, launched one after another behind a write of 256 MiB (`TorchBench.times`): a call takes
milliseconds, which hides the host's work, and not every vendor's call can be captured in a graph.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from attn.tools.bench import Timing
from attn.tools.bench.dense import Shape
from attn.tools.bench.on_torch import TorchBench
from attn.tools.bench.stopwatches import timing

_TURNS, _SECONDS = 2, 0.3  #: rounds per backend, seconds per round
_SAMPLED = 32  #: rows of each head that are compared


class DenseBench:
    """Timing on one device."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._watch = TorchBench(device)
        self.device = self._watch.device
        self._flushed = torch.zeros((256 if self._watch.on_gpu else 1) << 18, device=self.device)

    def about(self) -> dict[str, Any]:
        return self._watch.about()

    @torch.no_grad()
    def measure(self, shape: Shape, dtype: str, backends: Sequence[Any]) -> list[Timing | Exception]:
        """Time every backend class on the same tensors. A backend that raised has its exception in place of a time.

        Rounds are interleaved, so that clock throttling affects every backend equally.
        """
        size = (shape.batch, shape.rows, shape.heads, shape.head_size)
        generator = torch.Generator(self.device).manual_seed(0)
        torch_dtype = getattr(torch, dtype)
        query, key, value = tensors = [
            torch.randn(size, device=self.device, dtype=torch_dtype, generator=generator) for _ in "qkv"
        ]
        # The same rows of every head and backend: all rows in float32 would be as many operations as a backend's call.
        rows = torch.randint(shape.rows, (min(_SAMPLED, shape.rows),), generator=generator, device=self.device)
        want = _sampled(query, key, value, rows)
        # Compiles, checks, and estimates how many calls a round may have.
        results = [self._first(backend, shape, tensors, rows, want) for backend in backends]
        times: list[list[float]] = [[] for _ in backends]
        turn = list(zip(results, times, backends, strict=True))
        for _ in range(_TURNS):
            for first, samples, backend in turn:
                if isinstance(first, Timing):
                    call = partial(self._impl(backend, shape).forward, *tensors)
                    count = min(20, max(3, int(_SECONDS * 1e3 / first.ms)))
                    samples += self._watch.times(call, self._flushed.zero_, count)
            turn.reverse()  # each backend inherits the clock of the one before it
        return [
            timing(sorted(samples), error=x.error) if isinstance(x, Timing) else x
            for x, samples in zip(results, times, strict=True)
        ]

    @staticmethod
    def _impl(backend: Any, shape: Shape) -> Any:
        return backend.get_impl_cls()(shape.heads, shape.head_size)

    def _first(
        self, backend: Any, shape: Shape, tensors: list[torch.Tensor], rows: torch.Tensor, want: torch.Tensor
    ) -> Timing | Exception:
        """The error of a first call and an estimate of its time, or the exception that the backend raised."""
        try:
            impl = self._impl(backend, shape)
            torch.full_like(tensors[0], torch.nan)  # freed at once: the allocator is likely to reuse it for the output
            got = impl.forward(*tensors)[:, rows].float()
            error = float((got - want).norm() / want.norm())
            ms = self._watch.times(partial(impl.forward, *tensors), lambda: None, 1)[0]
        except Exception as refusal:
            return refusal
        # The estimate divides `_SECONDS` above.
        ms = max(ms, 1e-3)
        return Timing(ms, ms, ms, error=error)


def _sampled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Attention [B, rows, H, D] of sampled rows in float32, head by head."""
    out = query[:, rows].float()
    for b in range(query.shape[0]):
        for h in range(query.shape[2]):
            # [rows, S] of one head at a time, as a float32 copy of all keys would take twice their memory.
            scores = out[b, :, h] @ key[b, :, h].float().T * query.shape[3] ** -0.5
            out[b, :, h] = scores.softmax(-1) @ value[b, :, h].float()
    return out
