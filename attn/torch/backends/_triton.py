"""Base classes of the backends that use this package's Triton kernels: the hooks, implemented by one launch function.

Nothing in this module waits for the device or depends on its values, so a forward can be captured in a CUDA graph and
replayed for any batch within the bounds of its metadata. The host's copy of the lengths, if there is one, only selects among
launches that are all correct, and outside of captures leaves out launches that the batch does not need: that of decodes
where there are none, and that of the cache's write where the decodes' launch has all requests and may write their tokens. A
layer that requests `batch_invariant` adds the results of stretches of keys that the request decides, whichever programs have
them, and uses tiles by its shape alone and no measured launches (docs/semantics.md §17); its arrays must begin at multiples of
16 bytes, as torch allocates them.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from attn import envs
from attn.arguments import fold_sign
from attn.backends.abstract import AttentionType
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.paged import PagedCall
from attn.capabilities import ATTN_TYPES, PAGED_FEATURES, Capabilities, Device, Feature, MultipleOf, Request
from attn.dtypes import PER_TOKEN_HEAD
from attn.kernels.hopper_prefill_launch import keys_below
from attn.kernels.launch import MIN_KEYS_TO_SPLIT, TOGETHER, TUNED, UNBOUNDED, power_of_two
from attn.kernels.memory import group_reason
from attn.kernels.paged_launch import GENERAL
from attn.torch import kv_cache as caches
from attn.torch.backends import _hopper
from attn.torch.backends._paged import QKV, PagedAttentionBackend, PagedAttentionImpl, is_captured
from attn.torch.interpreter import judged_on, prepare
from attn.torch.kernels.runs import Runs, numbers, stream_of
from attn.torch.metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder

if TYPE_CHECKING:  # loaded with Triton
    from attn.backends.metadata import IntArray
    from attn.torch.kernels.kept import KeptLaunches, Stages

FEATURES = PAGED_FEATURES | {Feature.PER_HEAD_SCALES, Feature.OUTPUT_SCALE, Feature.NAN_SAFE, Feature.BATCH_INVARIANT}
_PLAIN_OR_SCALED = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8")
KV_CACHE_DTYPES = (*_PLAIN_OR_SCALED, "fp8_per_token_head", "int8_per_token_head")


def capabilities(platforms: tuple[str, ...], **changes: Any) -> Capabilities:
    """Return the capabilities of a backend with these kernels; `changes` replace fields."""
    record: dict[str, Any] = {
        "framework": "torch",
        "platforms": platforms,
        "dtypes": ("bfloat16", "float16", "float32"),
        "head_sizes": (MultipleOf(8, 32, 256), 512),
        "kv_cache_dtypes": KV_CACHE_DTYPES,
        "attn_types": ATTN_TYPES,
        "features": FEATURES,
        "packages": ("triton",),
        "archs": (("cuda", ("sm_80+",)),),
    }
    return Capabilities(**{**record, **changes})


class TritonMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builds batches, also for graphs that are replayed with other lengths."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not torch.compiler.is_compiling():
            # for `writes_apart`, which reads the host's block table when a layer first asks
            metadata.kept().batch = common_attn_metadata
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PagedAttentionMetadata:
        """Build a batch whose launches do not follow its lengths, so that a captured graph suits any lengths in its bounds."""
        metadata = self.build(0, common_attn_metadata)
        # Without the host's lengths a layer has no plan (`_plan`), and its launches serve every batch.
        metadata.query_start_loc_cpu = metadata.seq_lens_cpu = None
        return metadata


class TritonPagedBackend(PagedAttentionBackend):
    """Base of the Triton backends: checks the limits that depend on each other."""

    builder_cls = TritonMetadataBuilder
    block_sizes = (MultipleOf(16),)

    @classmethod
    def off_paths(cls, device: Device | None = None) -> tuple[str, ...]:
        return _hopper.off_paths("hopper_prefill", device)

    @classmethod
    def rules(cls, device: Device | None = None) -> tuple[str, ...]:
        on_hopper = device is not None and (device.platform, device.arch) == ("cuda", "sm_90") and not cls.off_paths(device)
        general = f"{', '.join(GENERAL)}, and heads of 512 in groups that do not divide 64"
        sm90 = f"prompts of 16-bit caches take the Hopper prefill kernel, except for {general}"
        packed = "prompts that do not fill the device are split, in one launch with decodes (heads of up to 128)"
        on_nvidia = device is not None and device.platform == "cuda"
        return ((sm90,) if on_hopper else ()) + ((packed,) if on_nvidia else ())

    @staticmethod
    def is_interpreted() -> bool:
        """Whether TRITON_INTERPRET makes the kernels run interpreted on the host, on whichever device the tensors are."""
        import triton

        return bool(triton.knobs.runtime.interpret)

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        device = judged_on(device)
        reason = group_reason(device.arch if device else "", request)
        return super().why_not(request, device) + ([reason] if reason else [])


class _BatchPlan(NamedTuple):
    """The launches of a batch: multiprocessors reserved for the prefill while it overlaps decodes (0: all), `keys_below` of its
    rows (None: unknown), whether decodes skip split-KV, whether prompts are in the decodes' launch, whether there may
    be requests of one token, and whether the decodes' launch may write all new tokens."""

    prefill_programs: int = 0
    keys_below: int | None = None
    whole: bool = False
    together: bool = False
    singles: bool = True
    writes: bool = False

    @property
    def serves_others(self) -> bool:
        """Whether the launches are correct for any batch of these bounds, as a captured graph's must be."""
        return self.singles and not self.writes


# The launches of a batch whose lengths only the device knows: correct for any, with all multiprocessors for each.
_UNKNOWN = _BatchPlan()


class TritonPagedImpl(PagedAttentionImpl):
    """Base of the Triton implementations. A subclass names its backend, and overrides `_sparse` if it has a pattern."""

    can_return_lse_for_decode = True
    traceable = True
    attends_keys = attends_valid_keys = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare(self.backend.get_name())
        #: Whether the cache has a scale for each token and head.
        self._keeps_scales = self.kv_cache_dtype in PER_TOKEN_HEAD

    def _constants(self) -> tuple[Any, ...]:
        pattern = self._sparse()
        return (*super()._constants(), None if pattern is None else tuple(pattern))

    def _kind_of_batch(self, attn_metadata: PagedAttentionMetadata, kv_cache: Any) -> Any:
        if kv_cache is None:
            plan = _UNKNOWN._replace(keys_below=self._keys_below(attn_metadata))
        else:
            plan = self._plan(attn_metadata, kv_cache)
        # Bounds above it are launched alike, so that a step with another longest request is of a known kind.
        keys = min(attn_metadata.max_seq_len, MIN_KEYS_TO_SPLIT)
        # tiles of keys are of a multiple of 16; another number of measured launches: some were measured since
        return plan, -(-keys // 16), len(TUNED), envs.switch("ATTN_AUTOTUNE")

    def _stages(self, call: PagedCall) -> None:
        """All launches are kept."""

    def _run_first(self, call: PagedCall, qkv: QKV) -> "KeptLaunches | None":
        from attn.torch.kernels.kept import Keeper

        scales = (call.layer._k_scale, call.layer._v_scale) if self._quantised else ()
        tensors = self._launched(scales, call.output, call.lse, *qkv, call.kv_cache)
        with Keeper((*tensors, *call.meta.tensors())) as keeper:
            self._run(call)
        if keeper.kept is not None and call.kv_cache is not None:
            # Launches that leave something out for this kind of batch must not be captured: a graph is replayed with other
            # lengths.
            keeper.kept.of_batch = not self._plan(call.meta, call.kv_cache).serves_others
        return keeper.kept

    def _writes_by_kernel(self, key: torch.Tensor, kv_cache: torch.Tensor) -> bool:
        return True  # interpreted on a CPU, and an operator of traced graphs, as the attention is

    def _run(self, call: PagedCall, stages: "Stages | None" = None) -> torch.Tensor | None:
        if not self._writes_itself(call):
            return super()._run(call, stages)
        self._attend(call, writes=True)
        return None

    def _writes_itself(self, call: PagedCall) -> bool:
        """Whether the decodes' launch writes the new tokens: of decoders, where the plan lets it."""
        if call.key is None or self.attn_type != AttentionType.DECODER or self.kv_sharing_target_layer_name is not None:
            return False
        if self._keeps_scales or type(self).do_kv_cache_update is not PagedAttentionImpl.do_kv_cache_update:
            return False
        plan, query = self._plan(call.meta, call.kv_cache), call.query
        # whether pages are apart is known of this batch only, and a graph is replayed with others
        if not plan.writes or is_captured(query):
            return False
        from attn.kernels.launch import writes_rows
        from attn.torch.kernels.direct import arch

        # again, since the plan is of layers of any dtype
        group = self.num_heads // self.num_kv_heads
        return writes_rows(arch(), group, call.meta.max_query_len, query.element_size(), plan.together)

    def _attend(self, call: PagedCall, writes: bool = False) -> None:
        from attn.torch.kernels.paged_attention import paged_attention

        meta, (key_cache, value_cache, token_scales) = call.meta, self._caches(call.kv_cache)
        plan = self._plan(meta, key_cache)
        if not plan.serves_others and is_captured(call.query):
            # all other numbers of the plan are only a matter of speed
            plan = plan._replace(singles=True)
        scales = {"k_scale": token_scales[0], "v_scale": token_scales[1]} if token_scales is not None else self._scales(call)
        arguments: dict[str, Any] = dict(
            self._common(call, key_cache, value_cache),
            **{name: getattr(meta, name) for name in ("seq_lens", "block_table", "max_seq_len")},
            tree_right=self.window[1],
            **meta.mask._asdict(),
            chunk_size=self.mask.chunk_size,
            span_window=bool(self.mask.span_window),
            **scales,
            sparse=self._sparse(),
            **plan._asdict(),
        )
        del arguments["writes"]
        if writes:
            arguments |= {"key": call.key, "value": call.value, "slots": meta.slot_mapping}
        if not self.batch_invariant and not torch.compiler.is_compiling() and envs.switch("ATTN_AUTOTUNE"):
            from attn.torch import autotune
            from attn.torch.kernels.kept import unkept

            # A mixed batch is measured as a prefill; the launch of its decodes is tuned by a batch of decodes alone.
            phase = "decode" if meta.max_query_len == 1 else "prefill"
            sizes = (call.query.element_size(), key_cache.element_size())
            # measured launches are of the kernels apart, which may not write: prompts in the decodes' launch have a rule of
            # their own
            apart = {"together": False, "key": None, "value": None, "slots": None}
            launch = functools.partial(paged_attention, **{**arguments, **apart})
            # what is measured is launched many times and belongs to no call
            with unkept():
                autotune.tune(phase, (self.num_heads // self.num_kv_heads, self.head_size, *sizes), launch, call.query.device)
        paged_attention(**arguments)

    @property
    def _held(self) -> int:
        """The most tokens of a request that a decode's tile has beside prompts."""
        group = self.num_heads // self.num_kv_heads
        return max(16, power_of_two(group)) // group if self.batch_invariant else 1

    def _plan(self, attn_metadata: PagedAttentionMetadata, key_cache: torch.Tensor) -> "_BatchPlan":
        """Return what the host's lengths say about a batch's launches; computed once per batch and shape."""
        start, seq_lens = attn_metadata.query_start_loc_cpu, attn_metadata.seq_lens_cpu
        # a graph serves any batch of its shapes
        if torch.compiler.is_compiling() or start is None or seq_lens is None or not key_cache.is_cuda:
            return _UNKNOWN
        kept, plain = attn_metadata.kept(), not self._keeps_scales and self.kv_sharing_target_layer_name is None
        # Shared by layers over the batch. One with another pattern or causality takes the plan of the first of its shape: every
        # plan is correct for it, and only its speed follows from that.
        plans, itemsize = kept.plans, key_cache.element_size()
        shape = (self.num_heads, self.num_kv_heads, self.head_size, self.window, itemsize, plain, self.batch_invariant)
        if shape not in plans:
            from attn.kernels.launch import writes_rows
            from attn.torch.kernels.direct import arch, multiprocessors

            most, on, group = attn_metadata.max_query_len, arch(), self.num_heads // self.num_kv_heads
            plan = self._planned(start[1:] - start[:-1], seq_lens, most, itemsize, on, multiprocessors(key_cache.device))
            # caches of one and two bytes are of queries of two bytes or more
            writes = plain and writes_rows(on, group, most, max(itemsize, 2), plan.together) and kept.writes_apart
            plans[shape] = plan._replace(writes=writes and (not self.batch_invariant or most <= self._held))
        return plans[shape]

    def _planned(
        self, q_lens: "IntArray", seq_lens: "IntArray", most: int, itemsize: int, arch: str, processors: int
    ) -> "_BatchPlan":
        """Return `_plan` of requests of these lengths. most: the bound of `q_lens`; itemsize: of the cache."""
        from attn.kernels.launch import are_whole, blocks_of, packs_rows, prefill_programs, run_together, times_are_known

        group, left = self.num_heads // self.num_kv_heads, self.window[0]
        # what a request's rows see together: a window of each, so `left` keys before the first row's own
        keys = seq_lens if left is None else np.minimum(seq_lens, left + q_lens)
        held, invariant = self._held, self.batch_invariant
        # else a decode's tile holds each request
        has_prompts = most > held and (invariant or most > 16 or most * group > TOGETHER)
        packs = self.head_size <= 128 and packs_rows(arch, max(itemsize, 2)) and not (invariant or self._sparse())
        if has_prompts and packs and run_together(q_lens, keys, group, self.num_kv_heads, processors):
            # each tile of rows reads its request's keys, so a request counts as often as it has tiles
            of_tiles = np.repeat(keys, blocks_of(q_lens, group))
            return _BatchPlan(0, None, are_whole(of_tiles, self.num_kv_heads, processors), True)
        single = (q_lens > 0) & (q_lens <= held)
        singles = int(np.count_nonzero(single))
        # up to 16 tokens a request, a decode's tile holds them all; in a batch with longer ones it serves single tokens only
        decodes = keys if singles == len(keys) else keys[single if most > 16 or invariant else q_lens > 0]
        of_tile = most * group if most <= 16 and not invariant else group
        timed = times_are_known(arch, self.head_size, itemsize, itemsize)
        programs, below, whole = 0, None, are_whole(decodes, self.num_kv_heads, processors, of_tile if timed else 0)
        if has_prompts:
            # float64: rows times keys of a prompt exceed 32 bits
            several = q_lens > held
            rows, of_rows = q_lens[several].astype(np.float64), seq_lens[several]
            # (row, key) pairs: row i of n over m keys sees m - n + 1 + i of them, or a whole window of left + 1
            if left is not None:
                full = np.clip(of_rows - left - 1, 0, rows)  # rows that see a whole window
                pairs = float(np.sum((rows - full) * (of_rows - (rows - 1 + full) / 2) + full * (left + 1)))
            else:
                pairs = float(rows.dot(of_rows - (rows - 1) / 2 if self.mask.causal else of_rows))
            # keys and values of the decodes, which are bound by reading these
            nbytes = 2 * self.num_kv_heads * self.head_size * itemsize * int(keys[single].sum())
            # 4: a multiplication and an addition in each of both products
            programs = prefill_programs(4 * self.num_heads * self.head_size * pairs, nbytes, processors)
            # keys that a row sees on average, which decide the size of the Hopper kernel's tiles
            seen = pairs / max(1.0, float(rows.sum()))
            below = keys_below(seen, 0, UNBOUNDED, 0 if self.mask.causal else UNBOUNDED)
        return _BatchPlan(programs, below, whole, singles=singles > 0)

    def _attend_ragged(self, call: PagedCall) -> None:
        from attn.torch.kernels.paged_attention import paged_attention

        common = self._common(call, call.key, call.value)
        lists = {"seq_lens": None, "block_table": None, "max_seq_len": call.meta.max_query_len}
        paged_attention(**common, **lists, tree_right=None, keys_below=self._keys_below(call.meta))

    def _keys_below(self, attn_metadata: PagedAttentionMetadata) -> int | None:
        """Return `keys_below` of the rows of requests that attend their own rows, once per batch; None if not known."""
        start = attn_metadata.query_start_loc_cpu
        # as in `_plan`
        if self.batch_invariant or torch.compiler.is_compiling() or start is None:
            return None
        plans, rule = attn_metadata.kept().plans, ("own rows", self.window)
        if rule not in plans:
            lens = (start[1:] - start[:-1]).astype(np.float64)
            keys = float(lens.dot(lens)) / max(1.0, float(lens.sum()))  # of the request that a row belongs to, on average
            plans[rule] = keys_below(keys, keys, *(UNBOUNDED if bound is None else bound for bound in self.window))
        return plans[rule]  # type: ignore[no-any-return]

    def _common(self, call: PagedCall, keys: torch.Tensor, values: torch.Tensor) -> dict[str, Any]:
        """Return the launch's arguments that do not depend on where the keys are."""
        return dict(
            {name: getattr(call, name) for name in ("output", "lse", "query", "output_scale")},
            key_cache=keys,
            value_cache=values,
            query_start_loc=call.meta.query_start_loc,
            max_query_len=call.meta.max_query_len,
            left=call.window[0],
            right=call.window[1],
            **self._scores(),
        )

    def _scores(self) -> dict[str, Any]:
        """Return the launch's arguments that are constants of the layer, except what its rows see."""
        return dict(
            scale=self.scale,
            soft_cap=self.logits_soft_cap or 0.0,
            slopes=self.alibi_slopes,
            sinks=self.sinks,
            invariant=self.batch_invariant,
        )

    def attend_keys(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, valid: Runs | None = None
    ) -> torch.Tensor:
        """Attend requests of equal lengths over keys that are in no cache, where they are.

        query: [B, n, H, D], the last n tokens of each request; key, value: [B, m, K, D], in the query's dtype and on its
        device; causal: whether no row sees a later key; valid: each request's keys among the m, None for all. With n = m the
        rows of these keys are real, and the others are 0. Returns [B, n, H, D].

        Keys are copied if requests are not a whole number of keys apart in memory, or with n = m if they are not adjacent; any
        array is if its last dimension is not dense.
        """
        from attn.kernels.launch import are_all_whole
        from attn.torch.kernels.direct import multiprocessors
        from attn.torch.kernels.paged_attention import paged_attention

        (batch, n, heads, size), m, device = query.shape, key.shape[1], query.device
        if batch == 0:
            return torch.empty_like(query)
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        self._move_to(device)
        # a kernel of its own: no plan, no merge in a launch of its own, and little for the host to do
        if n == 1 and self.has_row_operator:
            rows = self._decoder(device, query.dtype)
            return rows(*(x.transpose(1, 2) for x in (query, key, value)), self.sinks, valid)
        here = device, stream_of(device)
        whole, table, lens, outside = False, None, None, None
        if n == m:
            keys = [x.flatten(0, 1) for x in (key, value)]
            starts, outside = (numbers(batch + 1, 0, n, *here), None) if valid is None else valid.sequences(n)
        else:
            # Requests become entries of a cache of one run: `begins` are the rows of their first keys.
            *keys, stride = _in_row(key, value)
            starts, begins = numbers(batch + 1, 0, n, *here), numbers(batch, 0, stride, *here)
            lens = numbers(batch, m, 0, *here) if valid is None else valid.number
            table = (begins if valid is None else begins + valid.first)[:, None]
            # Only the number of keys is known here, up to a multiple of 64 so that a chat's next token asks no new question.
            if device.type == "cuda":
                whole = are_all_whole(batch, -(-m // 64) * 64, self.num_kv_heads, multiprocessors(device))
        output = query.new_empty(batch * n, heads, size)
        left, right = self.window[0], 0 if causal else self.window[1]
        reach = (UNBOUNDED if bound is None else bound for bound in (left, right))
        paged_attention(
            output,
            None,
            fold_sign(query.flatten(0, 1), self.signed_scale),
            *keys,
            query_start_loc=starts,
            seq_lens=lens,
            block_table=table,
            max_query_len=n,
            max_seq_len=m,
            left=left,
            right=right,
            tree_right=None,
            **self._scores(),
            chunk_size=self.mask.chunk_size,
            sparse=self._sparse(),
            keys_below=keys_below(m, n, *reach),
            whole=whole,
            singles=False,  # either all requests have few enough rows for a decode's tile, or none has
        )
        output = output.view(batch, n, heads, size)
        return output if outside is None else output.masked_fill_(outside[..., None, None], 0)

    @property
    def has_row_operator(self) -> bool:  # type: ignore[override]
        """Not fixed by the constructor: the layer says afterwards whether its results depend on the batch."""
        # its splits follow the batch, and it has neither biases nor patterns
        return not (self.batch_invariant or self.alibi_slopes is not None or self._sparse() or self.mask.chunk_size)

    def row_launcher(self, device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
        return self._decoder(device, dtype) if self.has_row_operator else None

    def _decoder(self, device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        from attn.torch.kernels.dense_decode import decoder

        self._move_to(device)
        # keys left of the row, and its own
        window = None if self.window[0] is None else self.window[0] + 1
        shape = self.num_heads, self.num_kv_heads, self.head_size
        return decoder(device, dtype, shape, self.signed_scale, self.logits_soft_cap or 0.0, window)

    def _sparse(self) -> list[int] | None:
        """Return a block-sparse pattern for the kernel, or None."""
        return None

    def _scales(self, call: PagedCall) -> dict[str, Any]:
        """Return the launch's scales of a quantised cache; a scalar on the host is a factor, which costs no time."""
        scales: dict[str, Any] = {}
        if not caches.is_quantised(call.kv_cache.dtype):
            return scales
        for name, scale in (("k", call.layer._k_scale), ("v", call.layer._v_scale)):
            on_host = isinstance(scale, torch.Tensor) and scale.ndim == 0 and scale.device.type == "cpu"
            # the number is unknown while a graph is traced
            known = not isinstance(scale, torch.Tensor) or (on_host and not torch.compiler.is_compiling())
            if known:
                scales[f"{name}_factor"] = float(scale)
            else:
                scales[f"{name}_scale"] = self._on(call.kv_cache.device, scale)
        return scales


def _in_row(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """View keys and values [B, m, K, D] as [S, K, D], and return the number of rows from one request to the next.

    Copies them if that is no whole number, or another one for values.
    """
    # The copies of the first turn have strides that pass in the second.
    for _ in range(2):
        strides = [divmod(x.stride(0), x.stride(1)) for x in (key, value)]
        if key.shape[0] == 1 or (strides[0] == strides[1] and strides[0][1] == 0):
            break
        key, value = key.contiguous(), value.contiguous()
    rows = strides[0][0] if key.shape[0] > 1 else 0
    count = (key.shape[0] - 1) * rows + key.shape[1]
    keys, values = (x.as_strided((count, *x.shape[2:]), x.stride()[1:], x.storage_offset()) for x in (key, value))
    return keys, values, rows
