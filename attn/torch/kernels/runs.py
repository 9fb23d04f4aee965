"""Requests of equal numbers of rows and keys: where they begin, and the run of each one's keys that padding leaves."""

import functools

import torch


def stream_of(device: torch.device) -> int:
    """Return the address of the device's current stream; 0: the default one, or no GPU."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


def numbers(count: int, start: int, step: int, device: torch.device, stream: int) -> torch.Tensor:
    """Return `count` int32 numbers, `start` and then each `step` more, made once for all layers of a step.

    Not kept while a CUDA graph is captured: its memory is the graph's, and its values are there when the graph is replayed.
    """
    # the default stream, 0, cannot be captured
    capturing = stream and torch.cuda.is_current_stream_capturing()
    return (_kept_numbers.__wrapped__ if capturing else _kept_numbers)(count, start, step, device, stream)


@functools.lru_cache(maxsize=128)
def _kept_numbers(count: int, start: int, step: int, device: torch.device, stream: int) -> torch.Tensor:
    """stream: the stream that computes and reads the numbers."""
    if step == 0:
        return torch.full((count,), start, dtype=torch.int32, device=device)
    return torch.arange(start, start + count * step, step, dtype=torch.int32, device=device)


class Runs:
    """One run of keys per request, among keys of equal number: first, number: int32 [B] on the device."""

    def __init__(self, first: torch.Tensor, number: torch.Tensor) -> None:
        self.first, self.number = first, number
        self._sequences: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._masks: dict[tuple[int, bool], torch.Tensor] = {}

    def sequences(self, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut `keys` rows per request into three sequences: before its run, the run, and after; made once.

        Returns where they begin, int32 [3 B + 1], and which rows are in no run, bool [B, keys].
        """
        if keys not in self._sequences:
            device, end = self.first.device, self.first + self.number
            begins = torch.arange(0, len(end) * keys, keys, dtype=torch.int32, device=device)
            # Three sequences for each request, so that the kernel of sequences attends runs: rows before and after attend
            # themselves, and the caller sets them to 0.
            starts = torch.stack((begins, begins + self.first, begins + end), 1).flatten()
            starts = torch.nn.functional.pad(starts, (0, 1), value=len(end) * keys)
            at = torch.arange(keys, dtype=torch.int32, device=device)
            self._sequences[keys] = starts, (at < self.first[:, None]) | (at >= end[:, None])
        return self._sequences[keys]

    def mask(self, keys: int, causal: bool) -> torch.Tensor:
        """Return which of `keys` keys are in each run, bool [B, keys]; causal: which of them each row of a run sees, the rows
        being the keys' tokens, [B, 1, keys, keys]. Made once."""
        if (keys, causal) not in self._masks:
            at = torch.arange(keys, dtype=torch.int32, device=self.first.device)
            mask = (at >= self.first[:, None]) & (at < (self.first + self.number)[:, None])
            if causal:
                mask = (mask[:, None, :, None] & mask[:, None, None]) & (at <= at[:, None])
            self._masks[keys, causal] = mask
        return self._masks[keys, causal]
