"""A continuous batcher: decides which tokens of which requests form the next batch, and which cache blocks hold them.

Every step packs as many tokens as the budget allows, oldest request first: one token of each decoding request, a chunk of
each prompt that is still being read. A request allocates blocks as it grows. When none is free, the youngest running request
is preempted: it releases all of its blocks and returns to the front of the queue, to be recomputed later. So the oldest can
always continue; a request that could not finish even alone is rejected by `submit`.

Full blocks are shared: an admitted request reuses the blocks of its prefix, which are never written again. The last token of a
request is always computed, because its logits are needed. See vLLM's scheduler and KV cache manager
(https://docs.vllm.ai/en/latest/design/prefix_caching/).
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attn.arguments import as_int, natural_int, positive_int
from attn.backends.block_table import INT32_MAX
from attn.backends.metadata import CommonAttentionMetadata
from attn.errors import AttnError
from attn.serving.block_pool import BlockPool, PoolError, block_key

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class RequestError(AttnError):
    """A request that can never be served (raised by `submit`), whose next token is not one (`commit`), or that the scheduler
    does not have (`cancel`)."""


@dataclass(eq=False)
class GenerationRequest:
    """A request and its progress.

    `tokens` are the prompt and the generated tokens; the keys and values of the first `num_computed` are in `blocks`, in
    order. `finish_reason` is "eos", "length" or "cancelled" once it is done.
    """

    request_id: int
    tokens: list[int]
    num_prompt_tokens: int
    max_new_tokens: int
    cache_salt: bytes = b""
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None
    keys: list[bytes] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.num_prompt_tokens]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def block_keys(self, count: int, block_size: int) -> list[bytes]:
        """Return the keys of the first `count` blocks, which are full."""
        # Keys of earlier blocks are kept over a preemption: tokens are only ever appended, so they stay true.
        for i in range(len(self.keys), count):
            self.keys.append(
                block_key(self.tokens[i * block_size : (i + 1) * block_size], self.keys[-1] if i else self.cache_salt)
            )
        return self.keys[:count]


@dataclass(frozen=True)
class Step:
    """One batch.

    token_ids, positions: [T] int32, packed request after request, positions as for rotary embeddings. attn_metadata: lengths,
    block table and slots, for `layer.build`. sample_rows: [S] int32, the rows whose logits give the next token of `sampled`,
    in the same order; partially read prompts are not included. `Buckets.pad` appends zeros to each array.
    """

    token_ids: "npt.NDArray[np.int32]"
    positions: "npt.NDArray[np.int32]"
    attn_metadata: CommonAttentionMetadata
    sample_rows: "npt.NDArray[np.int32]"
    sampled: tuple[GenerationRequest, ...]


@dataclass
class Stats:
    """Counts since the scheduler was created.

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


class Scheduler:
    """Batches requests: call `submit`, then `schedule` and `commit` in turn until `schedule` returns None.

    num_blocks, block_size: the caches' blocks and the tokens in each; every layer's cache has the same.
    token_budget: most tokens in a batch; max_num_reqs: most requests in a batch.
    max_model_len: most tokens of a request, prompt and output; None: as many as the blocks hold.
    vocab_size: checks prompts and next tokens, if given (None: they must be int32). eos_token_ids: tokens that end a request.

    `waiting` and `running` are in order of arrival; every running request arrived before every waiting one. Blocks are
    released when a request finishes, is cancelled or is preempted. Methods check their arguments before they change anything.
    Raises ValueError unless the sizes are positive ints and `eos_token_ids` ints of at least 0.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        token_budget: int = 256,
        max_num_reqs: int = 64,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.pool, self.block_size = BlockPool(num_blocks), positive_int("block_size", block_size)
        self.token_budget = positive_int("token_budget", token_budget)
        self.max_num_reqs = positive_int("max_num_reqs", max_num_reqs)
        self.max_model_len = None if max_model_len is None else positive_int("max_model_len", max_model_len)
        self.vocab_size = None if vocab_size is None else positive_int("vocab_size", vocab_size)
        # Here order does not matter, so a set is as good as a list.
        ends = eos_token_ids if isinstance(eos_token_ids, Set) else _listed("eos_token_ids", eos_token_ids)
        self.eos_token_ids = frozenset(natural_int("an entry of eos_token_ids", token) for token in ends)
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []
        self.stats = Stats()
        self._submitted = 0
        # The batch between `schedule` and `commit`, with how many tokens of each request it computes: until then no
        # request's progress changes.
        self._open: tuple[Step, list[tuple[GenerationRequest, int]]] | None = None

    def submit(self, prompt: Sequence[int], max_new_tokens: int, *, cache_salt: bytes = b"") -> GenerationRequest:
        """Queue a request. Only requests with equal `cache_salt` share blocks (see `block_key`).

        prompt: token ids, in a list or an array of ints. Raises `RequestError` if it could never be served, for an argument of
        another type included.
        """
        name = f"request {self._submitted}"
        tokens = [self._token(name, f"prompt[{i}]", token) for i, token in enumerate(_listed(f"{name}: prompt", prompt))]
        if not tokens:
            raise RequestError(f"{name}: the prompt is empty: must have at least one token")
        passed, max_new_tokens = max_new_tokens, as_int(max_new_tokens) or 0
        if max_new_tokens < 1:
            raise RequestError(f"{name}: max_new_tokens={passed!r}: must be an int of at least 1")
        if not isinstance(cache_salt, bytes):
            raise RequestError(f"{name}: cache_salt={cache_salt!r}: must be bytes, such as b'tenant'")
        total = len(tokens) + max_new_tokens
        parts = f"a prompt of {len(tokens)} tokens and max_new_tokens={max_new_tokens}"
        if self.max_model_len is not None and total > self.max_model_len:
            raise RequestError(f"{name}: {parts} make {total}: must be at most max_model_len={self.max_model_len}")
        # This is what makes waiting safe: alone in the pool, every accepted request can finish.
        blocks = self._blocks_for(total - 1)  # the last generated token is not cached
        if blocks > self.pool.num_blocks:
            pool = f"{self.pool.num_blocks} block{'' if self.pool.num_blocks == 1 else 's'} of {self.block_size}"
            raise RequestError(f"{name}: {parts} need {blocks} blocks: the whole pool has {pool}")
        # Numbered only once it is accepted, so that a rejected one leaves no gap.
        request = GenerationRequest(self._submitted, tokens, len(tokens), max_new_tokens, cache_salt)
        self._submitted += 1
        self.waiting.append(request)
        return request

    def cancel(self, request: GenerationRequest) -> None:
        """End a waiting or running request, between `commit` and `schedule`. Raises `RequestError` for any other."""
        # In between, the batch on the device writes to the request's blocks, which a release would give to others.
        if self._open is not None:
            raise RuntimeError("cancel() called before commit() of the batch from schedule()")
        if not isinstance(request, GenerationRequest):
            raise RequestError(f"cancel({request!r}): must be a request that submit() returned")
        if request not in self.waiting and request not in self.running:
            why = f"it has finished ({request.finish_reason})" if request.finish_reason else "it is another scheduler's"
            raise RequestError(f"request {request.request_id} cannot be cancelled: {why}")
        (self.running if request in self.running else self.waiting).remove(request)
        self._finish(request, "cancelled")

    def schedule(self) -> Step | None:
        """Return the next batch, or None if every request is finished.

        Raises `PoolError` if no request can continue, because blocks of `pool` are in use by other code. The requests then
        wait: call again after those blocks are released, or `cancel` the request that the message names.
        """
        if self._open is not None:
            raise RuntimeError("schedule() called again before commit() of its batch")
        # Running requests before waiting ones: they hold blocks, and are older.
        rows = self._continue_running()
        rows += self._admit(self.token_budget - sum(count for _, count in rows))
        if not rows:
            # Nothing runs and nothing could be admitted: all requests wait for blocks that no request has.
            if self.waiting:
                self._refuse_to_wait(self.waiting[0])
            return None
        step = self._pack(rows)
        self.stats.steps += 1
        self.stats.peak_blocks = max(self.stats.peak_blocks, self.pool.num_blocks - self.pool.num_free)
        self._open = step, rows
        return step

    def commit(self, next_tokens: Sequence[int]) -> list[tuple[GenerationRequest, int]]:
        """Append the tokens [S] sampled for `Step.sampled` of the computed batch; return them with their requests.

        next_tokens: token ids, in a list or an array of ints. Raises ValueError for another number of them, and `RequestError`
        for one that is not a token id; the batch can then be committed again. (To end a request that has no valid next token,
        commit any and `cancel` it.)
        """
        if self._open is None:
            raise RuntimeError("commit() called without a batch from schedule()")
        step, rows = self._open
        tokens = _listed("next_tokens", next_tokens)
        if len(tokens) != len(step.sampled):
            raise ValueError(f"{len(tokens)} next tokens: must be {len(step.sampled)}, one per request in step.sampled")
        # All tokens are checked before any state changes, so that a wrong one leaves the batch open.
        taken = [
            (request, self._token(f"request {request.request_id}", f"next_tokens[{i}]", token))
            for i, (request, token) in enumerate(zip(step.sampled, tokens, strict=True))
        ]
        self._open = None
        for request, count in rows:
            # Blocks that became full in this step: from the first that was not full before to the last that is now.
            # Only these are registered, after they were computed and not when they were scheduled, so that `find` never
            # returns one without its keys.
            first = request.num_computed // self.block_size
            request.num_computed += count
            self.stats.computed_tokens += count
            keys = request.block_keys(request.num_computed // self.block_size, self.block_size)
            for i in range(first, len(keys)):
                self.pool.register(request.blocks[i], keys[i])
        for request, token in taken:
            request.tokens.append(token)
            self.stats.generated_tokens += 1
            # The token that ends a request is appended, but its key and value are not computed: no later token needs them.
            reason = (
                "eos" if token in self.eos_token_ids else "length" if len(request.output) == request.max_new_tokens else None
            )
            if reason is not None:
                self.running.remove(request)
                self._finish(request, reason)
        return taken

    def _token(self, name: str, where: str, value: Any) -> int:
        """Return a token id as an int. Raises `RequestError`, with the request's name, for anything else."""
        token, most = as_int(value), INT32_MAX if self.vocab_size is None else min(self.vocab_size - 1, INT32_MAX)
        if token is None or not 0 <= token <= most:
            raise RequestError(f"{name}: {where} = {value!r}: must be an int between 0 and {most}")
        return token

    def _refuse_to_wait(self, request: GenerationRequest) -> None:
        """Raise `PoolError`: other code holds the blocks that `request` lacks, since `submit` checked that the whole pool is
        enough for it, and no request runs."""
        raise PoolError(
            f"request {request.request_id} needs {self._blocks_for(len(request.tokens))} blocks: {self.pool.num_free} of "
            f"{self.pool.num_blocks} are free, and the others are not used by requests: release() what was taken from the pool "
            "elsewhere, or cancel() the request"
        )

    def _continue_running(self) -> list[tuple[GenerationRequest, int]]:
        """Return (request, tokens to compute) of running requests, oldest first, within budget and blocks."""
        rows: list[tuple[GenerationRequest, int]] = []
        budget = self.token_budget
        while len(rows) < len(self.running) and budget:
            request = self.running[len(rows)]
            # One token for a decode; of a prompt what the budget leaves, and the rest in later steps (chunked prefill).
            count = min(len(request.tokens) - request.num_computed, budget)
            if not self._make_room(request, count):
                break
            rows.append((request, count))
            budget -= count
        return rows

    def _make_room(self, request: GenerationRequest, count: int) -> bool:
        """Allocate blocks for `count` more tokens, preempting younger requests; False if `request` itself was preempted."""
        missing = self._blocks_for(request.num_computed + count) - len(request.blocks)
        while missing > self.pool.num_free:
            # The list is in order of arrival. Its last entry is younger than every request that has rows in this step,
            # or is `request` itself: no row that was planned loses its blocks.
            youngest = self.running.pop()
            self._give_up_blocks(youngest)
            # To the front: it arrived before all that wait.
            self.waiting.appendleft(youngest)
            youngest.num_preemptions += 1
            self.stats.preemptions += 1
            if youngest is request:
                return False
        request.blocks += self.pool.allocate(missing)
        return True

    def _admit(self, budget: int) -> list[tuple[GenerationRequest, int]]:
        """Admit waiting requests in order, while the pool has blocks for all of their tokens; return (request, new tokens)."""
        rows: list[tuple[GenerationRequest, int]] = []
        while self.waiting and budget and len(self.running) < self.max_num_reqs:
            request = self.waiting[0]
            # All tokens but the last, whose logits give the next one and have to be computed.
            sharable = (len(request.tokens) - 1) // self.block_size
            shared = self.pool.find(request.block_keys(sharable, self.block_size))
            # Shared blocks that are free count as free in the pool, but will not be once they are shared.
            revived = sum(not self.pool.users(block) for block in shared)
            # Room for all of its tokens, though blocks are allocated chunk by chunk and not reserved: with less, a long
            # prompt would preempt others, or itself, halfway. The first that does not fit stops admission: every
            # running request arrived before every waiting one.
            if self._blocks_for(len(request.tokens)) - len(shared) > self.pool.num_free - revived:
                break
            self.pool.share(shared)
            request.blocks, request.num_computed = shared, len(shared) * self.block_size
            if request.num_preemptions:
                self.stats.recovered_tokens += request.num_computed
            else:
                self.stats.prefix_hit_tokens += request.num_computed
            self.running.append(self.waiting.popleft())
            count = min(len(request.tokens) - request.num_computed, budget)
            # Never preempts here: the check above found room for more than this.
            self._make_room(request, count)
            rows.append((request, count))
            budget -= count
        return rows

    def _finish(self, request: GenerationRequest, reason: str) -> None:
        request.finish_reason = reason
        self._give_up_blocks(request)

    def _give_up_blocks(self, request: GenerationRequest) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.num_computed = [], 0

    def _pack(self, rows: list[tuple[GenerationRequest, int]]) -> Step:
        """Return the arrays of a batch."""
        import numpy as np

        spans = [(request, request.num_computed, request.num_computed + count) for request, count in rows]
        batch = CommonAttentionMetadata.from_lens(
            [stop - start for _, start, stop in spans],
            [stop for _, _, stop in spans],
            [request.blocks for request, _, _ in spans],
            self.block_size,
        )
        # Only the last known token's logits give a new one.
        reads_all = [stop == len(request.tokens) for request, _, stop in spans]
        return Step(
            token_ids=np.concatenate([np.asarray(request.tokens[start:stop], np.int32) for request, start, stop in spans]),
            positions=batch.positions(),
            attn_metadata=batch,
            # The last row of each request.
            sample_rows=(batch.query_start_loc[1:] - 1)[reads_all],
            sampled=tuple(request for (request, _, _), complete in zip(spans, reads_all, strict=True) if complete),
        )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _listed(name: str, values: Any) -> list[Any]:
    """Return a list, or an array of any framework, as a list. Raises `RequestError` for values without order, as a set."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Iterable) or isinstance(values, Set | Mapping):
        raise RequestError(f"{name}={values!r}: must be a list or an array of token ids")
    return list(values)
