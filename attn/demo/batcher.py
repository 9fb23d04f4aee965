"""A continuous batcher: decides which tokens of which requests form the next batch, and which cache blocks hold them.

Every step packs as many tokens as the budget allows, oldest request first: one token of each decoding request, a chunk of
each prompt that is still being read. A request allocates blocks as it grows. When none is free, the youngest running request
is preempted: it releases all of its blocks and returns to the front of the queue, to be recomputed later. So the oldest can
always continue; a request that could not finish even alone is rejected by `submit`.

Full blocks are shared: a block is identified by a digest of all tokens up to its end, and an admitted request reuses the
blocks of its prefix. A shared block is never written again. The last token of a request is always computed, because its logits
are needed.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from attn.backends.metadata import CommonAttentionMetadata
from attn.demo.block_pool import BlockPool
from attn.errors import AttnError


class RequestError(AttnError):
    """A request that can never be served; raised by `submit`."""


@dataclass(eq=False)
class GenerationRequest:
    """A request and its progress.

    `tokens` are the prompt and the generated tokens; the keys and values of the first `num_computed` are in `blocks`, in
    order. `finish_reason` is "eos" or "length" once it is done.
    """

    request_id: int
    tokens: list[int]
    num_prompt_tokens: int
    max_new_tokens: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None
    digests: list[bytes] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.num_prompt_tokens]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def full_digests(self, count: int, block_size: int) -> list[bytes]:
        """Return the digests of the first `count` blocks, each of the block's tokens and the previous digest."""
        for i in range(len(self.digests), count):
            own = np.asarray(self.tokens[i * block_size : (i + 1) * block_size], np.int64).tobytes()
            self.digests.append(hashlib.blake2b((self.digests[-1] if i else b"") + own, digest_size=16).digest())
        return self.digests[:count]


@dataclass(frozen=True)
class Plan:
    """One batch.

    token_ids, positions: [T] int32, packed. `sample_rows`: [S] int32, the rows whose logits give the next token of
    `sampled`, in the same order; partially read prompts are not included.
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    attn_metadata: CommonAttentionMetadata
    sample_rows: npt.NDArray[np.int32]
    sampled: tuple[GenerationRequest, ...]


@dataclass
class Stats:
    """Counts since the batcher was created.

    Tokens found in registered blocks: `prefix_hit_tokens` of requests admitted for the first time, `recovered_tokens` of
    resumed requests, which often find their own earlier blocks.
    """

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_hit_tokens: int = 0
    recovered_tokens: int = 0
    preemptions: int = 0
    peak_blocks: int = 0


class Batcher:
    """Batches requests: call `submit`, then `step` and `commit` in turn until `step` returns None.

    `token_budget` limits the tokens of a batch, `max_num_reqs` its requests. `waiting` and `running` are in order of arrival;
    every running request arrived before every waiting one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int,
        max_position_embeddings: int,
        eos_token_ids: Iterable[int] = (),
        token_budget: int = 256,
        max_num_reqs: int = 64,
    ) -> None:
        sizes = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "token_budget": token_budget,
            "max_num_reqs": max_num_reqs,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.pool, self.block_size = BlockPool(num_blocks), block_size
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings
        self.eos_token_ids = frozenset(eos_token_ids)
        self.token_budget, self.max_num_reqs = token_budget, max_num_reqs
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []
        self.stats = Stats()
        self._submitted = 0
        self._open: tuple[Plan, list[tuple[GenerationRequest, int]]] | None = None

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> GenerationRequest:
        """Queue a request. Raises `RequestError` if it could never be served."""
        name, tokens = f"request {self._submitted}", [int(token) for token in prompt]
        if not tokens:
            raise RequestError(f"{name}: the prompt is empty: must have at least one token")
        if max_new_tokens < 1:
            raise RequestError(f"{name}: max_new_tokens={max_new_tokens}: must be at least 1")
        for i, token in enumerate(tokens):
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"{name}: prompt[{i}] = {token}: must be between 0 and {self.vocab_size - 1}")
        total = len(tokens) + max_new_tokens
        parts = f"a prompt of {len(tokens)} tokens and max_new_tokens={max_new_tokens}"
        if total > self.max_position_embeddings:
            limit = self.max_position_embeddings
            raise RequestError(f"{name}: {parts} make {total}: must be at most max_position_embeddings={limit}")
        blocks = self._blocks_for(total - 1)  # the last generated token is not cached
        if blocks > self.pool.num_blocks:
            pool = f"{self.pool.num_blocks} blocks of {self.block_size}"
            raise RequestError(f"{name}: {parts} need {blocks} blocks: the whole pool has {pool}")
        request = GenerationRequest(self._submitted, tokens, len(tokens), max_new_tokens)
        self._submitted += 1
        self.waiting.append(request)
        return request

    def step(self) -> Plan | None:
        """Return the next batch, or None if every request is finished."""
        if self._open is not None:
            raise RuntimeError("step() called again before commit() of its batch")
        rows = self._continue_running()
        rows += self._admit(self.token_budget - sum(count for _, count in rows))
        if not rows:
            return None
        self.stats.steps += 1
        self.stats.peak_blocks = max(self.stats.peak_blocks, self.pool.num_blocks - self.pool.num_free)
        plan = self._plan(rows)
        self._open = plan, rows
        return plan

    def commit(self, next_tokens: Sequence[int]) -> list[tuple[GenerationRequest, int]]:
        """Append the tokens [S] sampled for `Plan.sampled` of the computed batch; return them with their requests."""
        if self._open is None:
            raise RuntimeError("commit() called without a batch from step()")
        plan, rows = self._open
        if len(next_tokens) != len(plan.sampled):
            raise ValueError(f"{len(next_tokens)} next tokens: must be {len(plan.sampled)}, one per row in sample_rows")
        self._open = None
        for request, count in rows:
            first = request.num_computed // self.block_size
            request.num_computed += count
            self.stats.computed_tokens += count
            digests = request.full_digests(request.num_computed // self.block_size, self.block_size)
            for i in range(first, len(digests)):
                self.pool.register(request.blocks[i], digests[i])
        taken = [(request, int(token)) for request, token in zip(plan.sampled, next_tokens, strict=True)]
        for request, token in taken:
            request.tokens.append(token)
            self.stats.generated_tokens += 1
            if token in self.eos_token_ids:
                request.finish_reason = "eos"
            elif len(request.output) == request.max_new_tokens:
                request.finish_reason = "length"
            if request.finish_reason is not None:
                self.running.remove(request)
                self._give_up_blocks(request)
        return taken

    def _continue_running(self) -> list[tuple[GenerationRequest, int]]:
        """Return (request, tokens to compute) of running requests, oldest first, within budget and blocks."""
        rows: list[tuple[GenerationRequest, int]] = []
        budget = self.token_budget
        while len(rows) < len(self.running) and budget:
            request = self.running[len(rows)]
            count = min(len(request.tokens) - request.num_computed, budget)
            if not self._make_room(request, count):
                break
            rows.append((request, count))
            budget -= count
        return rows

    def _make_room(self, request: GenerationRequest, count: int) -> bool:
        """Allocate blocks for `count` more tokens, preempting younger requests; False if `request` itself was preempted."""
        wanted = self._blocks_for(request.num_computed + count) - len(request.blocks)
        while wanted > self.pool.num_free:
            youngest = self.running.pop()
            self._give_up_blocks(youngest)
            self.waiting.appendleft(youngest)
            youngest.num_preemptions += 1
            self.stats.preemptions += 1
            if youngest is request:
                return False
        request.blocks += [self.pool.allocate() for _ in range(wanted)]
        return True

    def _admit(self, budget: int) -> list[tuple[GenerationRequest, int]]:
        """Return the same for waiting requests, in order, while there are blocks for all tokens that they must read."""
        rows: list[tuple[GenerationRequest, int]] = []
        while self.waiting and budget and len(self.running) < self.max_num_reqs:
            request = self.waiting[0]
            sharable = (len(request.tokens) - 1) // self.block_size
            shared = self.pool.find(request.full_digests(sharable, self.block_size))
            revived = sum(not self.pool.holders[block] for block in shared)
            if self._blocks_for(len(request.tokens)) - len(shared) > self.pool.num_free - revived:
                break
            for block in shared:
                self.pool.hold(block)
            request.blocks, request.num_computed = shared, len(shared) * self.block_size
            if request.num_preemptions:
                self.stats.recovered_tokens += request.num_computed
            else:
                self.stats.prefix_hit_tokens += request.num_computed
            self.running.append(self.waiting.popleft())
            count = min(len(request.tokens) - request.num_computed, budget)
            self._make_room(request, count)
            rows.append((request, count))
            budget -= count
        return rows

    def _give_up_blocks(self, request: GenerationRequest) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.num_computed = [], 0

    def _plan(self, rows: list[tuple[GenerationRequest, int]]) -> Plan:
        """Pack the arrays of a batch."""
        spans = [(request, request.num_computed, request.num_computed + count) for request, count in rows]
        batch = CommonAttentionMetadata.from_lens(
            [stop - start for _, start, stop in spans],
            [stop for _, _, stop in spans],
            [request.blocks for request, _, _ in spans],
            self.block_size,
        )
        reads_all = [stop == len(request.tokens) for request, _, stop in spans]
        return Plan(
            token_ids=np.concatenate([np.asarray(request.tokens[start:stop], np.int32) for request, start, stop in spans]),
            positions=np.concatenate([np.arange(start, stop, dtype=np.int32) for _, start, stop in spans]),
            attn_metadata=batch,
            sample_rows=(batch.query_start_loc[1:] - 1)[reads_all],
            sampled=tuple(request for (request, _, _), complete in zip(spans, reads_all, strict=True) if complete),
        )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
