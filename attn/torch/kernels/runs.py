"""Requests whose keys are a run among keys of equal number, as padding leaves them."""

import torch


class Runs:
    """One run of keys per request, among keys of equal number: first, number: int32 [B] on the device."""

    def __init__(self, first: torch.Tensor, number: torch.Tensor) -> None:
        self.first, self.number = first, number
        self._sequences: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def sequences(self, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut `keys` rows per request into three sequences: before its run, the run, and after; made once.

        Returns where they begin, int32 [3 B + 1], and which rows are in no run, bool [B, keys].
        """
        if keys not in self._sequences:
            device, end = self.first.device, self.first + self.number
            begins = torch.arange(0, len(end) * keys, keys, dtype=torch.int32, device=device)
            starts = torch.stack((begins, begins + self.first, begins + end), 1).flatten()
            starts = torch.nn.functional.pad(starts, (0, 1), value=len(end) * keys)
            at = torch.arange(keys, dtype=torch.int32, device=device)
            self._sequences[keys] = starts, (at < self.first[:, None]) | (at >= end[:, None])
        return self._sequences[keys]
