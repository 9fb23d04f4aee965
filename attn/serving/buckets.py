"""The shapes to which a server pads its steps, so that few programs are compiled, and all of them before the first request.

A step's tokens are padded to one of a few sizes; everything else has one extent: requests, columns of the block table, and
the bounds of lengths. So any requests are served by `len(buckets)` programs: one for steps in which every request
decodes one token, and one for each size of other steps. Padding has lengths of 0 and slots of -1, so that a step reads and
writes nothing for it.

Extents are powers of two, to which `attn.jax` pads batches: its builders leave these as they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from attn.arguments import as_int
from attn.backends.block_table import PAD_SLOT_ID
from attn.backends.metadata import CommonAttentionMetadata, next_power_of_two
from attn.errors import AttnError
from attn.serving.scheduler import Scheduler, Step


class Bucket(NamedTuple):
    """The rows of a padded step, and the bound of its new tokens per request."""

    num_tokens: int
    max_query_len: int


class Buckets:
    """The shapes of all steps of `scheduler`, smallest first: `len(buckets)` programs, one for each item.

    num_tokens: the sizes for steps that read prompts: powers of two, of which the last is at least the token budget. By
        default they double from 16 to the budget. More sizes are more programs, and less padding.

    Raises `AttnError` for sizes that do not hold every step.
    """

    def __init__(self, scheduler: Scheduler, num_tokens: Sequence[int] | None = None) -> None:
        self.block_size = scheduler.block_size
        self.num_reqs = next_power_of_two(scheduler.max_num_reqs)
        # No request has more blocks than the pool, nor more than the longest one allowed needs.
        longest = scheduler.pool.num_blocks
        if scheduler.max_model_len is not None:
            longest = min(longest, -(-scheduler.max_model_len // scheduler.block_size))
        self.columns = next_power_of_two(longest)
        budget = next_power_of_two(scheduler.token_budget)
        if num_tokens is None:
            # 16, 32, ... up to the budget, or the budget alone if it is smaller.
            num_tokens = [1 << i for i in range(min(4, budget.bit_length() - 1), budget.bit_length())]
        sizes = set[int]()
        for passed in num_tokens:
            size = as_int(passed)
            if size is None or size != next_power_of_two(size):
                raise AttnError(f"num_tokens: {passed} must be a power of two, as the extents to which attn.jax pads batches")
            sizes.add(size)
        if max(sizes, default=0) < scheduler.token_budget:
            least = f"at least the scheduler's token_budget={scheduler.token_budget}"
            raise AttnError(f"num_tokens={[*num_tokens]}: the largest must be {least}")
        # The first bucket is for steps of decodes alone, whose rows are at most the requests; a program for
        # max_query_len = 1 may leave out what prompts need. Size 1 is left out of the others, as a step of one token is
        # a decode.
        self._all = (Bucket(min(self.num_reqs, budget), 1), *(Bucket(size, size) for size in sorted(sizes - {1})))

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._all)

    def empty_steps(self) -> Iterator[Step]:
        """Yield a step without requests for each bucket, to compile its program: running it changes no cache."""
        import numpy as np

        nothing = np.zeros(0, np.int32)
        batch = CommonAttentionMetadata.from_lens([], [], [], self.block_size)
        for bucket in self._all:
            yield self._padded(Step(nothing, nothing, batch, nothing, ()), bucket)

    def pad(self, step: Step) -> Step:
        """Return `step` padded to the smallest bucket that holds it. Rows and requests past the step's own are padding."""
        batch = step.attn_metadata
        rows, longest = batch.num_actual_tokens, batch.max_query_len
        fits = [b for b in self._all if b.num_tokens >= rows and b.max_query_len >= longest]
        if not fits or batch.num_reqs > self.num_reqs or batch.block_table.shape[1] > self.columns:
            size = f"{batch.num_reqs} requests, {rows} tokens and {batch.block_table.shape[1]} blocks in a request"
            most = f"{self.num_reqs}, {self._all[-1].num_tokens} and {self.columns}"
            raise AttnError(f"a step of {size}: must be at most {most}, the limits of the scheduler that the buckets are for")
        # The smallest bound first, since sizes grow with it: decodes take the first bucket, others the smallest that
        # holds their rows.
        return self._padded(step, min(fits, key=lambda b: b.max_query_len))

    def _padded(self, step: Step, bucket: Bucket) -> Step:
        import numpy as np

        def rows(x: Any, fill: int = 0) -> Any:
            return np.pad(x, (0, bucket.num_tokens - len(x)), constant_values=fill)

        batch = step.attn_metadata
        reqs, columns = self.num_reqs - batch.num_reqs, self.columns - batch.block_table.shape[1]
        # Padding requests begin where the last one ends: they own no row, and have no key.
        starts, seq_lens = np.pad(batch.query_start_loc, (0, reqs), "edge"), np.pad(batch.seq_lens, (0, reqs))
        padded = batch.replace(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            block_table=np.pad(batch.block_table, ((0, reqs), (0, columns))),
            slot_mapping=rows(batch.slot_mapping, PAD_SLOT_ID),
            num_reqs=self.num_reqs,
            max_query_len=bucket.max_query_len,
            # A constant of the bucket: a bound of the batch itself would be another program at each step.
            max_seq_len=self.columns * self.block_size,
        )
        return replace(
            step,
            token_ids=rows(step.token_ids),
            positions=rows(step.positions),
            attn_metadata=padded,
            # Padded entries read row 0, whose logits `commit` does not use.
            sample_rows=np.pad(step.sample_rows, (0, self.num_reqs - len(step.sample_rows))),
        )
