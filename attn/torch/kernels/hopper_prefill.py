"""The Hopper prefill, `attn.kernels.hopper_prefill`, launched for torch's tensors."""

import functools
from collections.abc import Sequence
from operator import or_
from typing import Any, NamedTuple

import torch

from attn.kernels import hopper
from attn.kernels.gluon import descriptor
from attn.kernels.hopper_prefill import prefill as _prefill
from attn.kernels.hopper_prefill_launch import (
    ONE_PAGE,
    ROWS,
    Arrays,
    PrefillParams,
    PrefillPlan,
    Variant,
    constants,
    copies,
    fits,
    plan_of,
)
from attn.kernels.launch import LOG2E, UNBOUNDED
from attn.torch.kernels.direct import (
    Prepared,
    Repeated,
    Signature,
    memory_of_stream,
    multiprocessors,
    on_device,
    signature_of,
)

_ARRAYS = 12  #: of the kernel, without the counters
_NO_LISTS = (None,) * 5  #: in place of the arrays behind the lengths, where requests are equal
_KEPT = 64  #: plans of an `EqualPrompts`


def serves(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, group: int, page: int, negate: bool = False
) -> bool:
    """Whether the kernel supports these shapes, dtypes and addresses; the caller checks features. negate: whether the scale is
    negative."""
    size, width = query.shape[-1], value_cache.shape[-1]
    # Whether the bulk engine copies queries: only whole rows as they are in memory, so not with the sign of a negative scale.
    copied = copies(group, query.stride(), negate, not query.data_ptr() % 16)
    if query.dtype not in (torch.bfloat16, torch.float16) or not fits(size, width, copied, group, page):
        return False
    for cache in (key_cache, value_cache):
        # a tensor map takes addresses and strides of multiples of 16 bytes, which are 8 elements
        if cache.dtype != query.dtype or cache.data_ptr() % 16 or functools.reduce(or_, cache.stride()[:-1]) % 8:
            return False
    return True


def prefill(
    arrays: Sequence[Any], params: PrefillParams, factors: tuple[float, float], processors: int, *, ragged: bool = False
) -> None:
    """Compute the rows of requests with more than `params.min_query` tokens; the rest of the contract is `paged_attention`'s.

    arrays: output, lse, query, key_cache, value_cache, query_start_loc, seq_lens, block_table, sinks, and spans, prefix and
    is_causal, which may be left out. factors: of scores, into base 2 (into the cap's units with a soft cap, whose `cap` is then
    in base 2), and of values. processors: the number of multiprocessors that it may use. ragged: whether keys have no pages,
    and `seq_lens` [R + 1] says where those of each request begin.
    """
    key_cache, block_table = arrays[3], arrays[7]
    # Callers leave the last ones out: MLA's prompts and dense calls have no spans, prefixes and flags.
    arrays = (*arrays, *[None] * (_ARRAYS - len(arrays)))
    page = ROWS if block_table is None else key_cache.shape[1]
    _planned(arrays, page, params, ragged)(arrays, factors, processors)


class _PlannedLaunch(NamedTuple):
    """A launch for arrays of certain shapes, strides and dtypes.

    numbers: requests, pages, strides of the log-sum-exp and the block table, and 0; of equal requests, the keys of each in
    place of pages, and the rows of each in place of 0.
    """

    kernel: Prepared
    plan: PrefillPlan
    numbers: tuple[int, int, int, int, int]

    def __call__(self, arrays: Sequence[torch.Tensor | None], factors: tuple[float, float], processors: int) -> None:
        """arrays: of the kernel, without the counters."""
        grid, arrays, numbers = self.launch(arrays, factors, processors)
        try:
            self.kernel(grid, arrays, *numbers)
        # The compiler's errors turn the kernel off and raise `CannotCompile`, for which `on_device` makes the call again;
        # others pass.
        except Exception as error:
            hopper.turn_off("hopper_prefill", error)
            raise

    def launch(
        self, arrays: Sequence[torch.Tensor | None], factors: tuple[float, float], processors: int
    ) -> tuple[int, tuple[torch.Tensor | None, ...], tuple[Any, ...]]:
        """Return the number of programs, and the kernel's arrays, tensor maps and numbers."""
        _, _, query, key, value, *_ = arrays
        assert query is not None and key is not None and value is not None
        dtype, (q_map, k_map, v_map) = query.dtype, self.plan.maps
        k_desc, v_desc = descriptor(key.data_ptr(), dtype, *k_map), descriptor(value.data_ptr(), dtype, *v_map)
        # The kernel takes three maps in any case; without a copy it does not read this one.
        q_desc = k_desc if q_map is None else descriptor(query.data_ptr(), dtype, *q_map)
        # Units of work are taken from a counter, and the kernel leaves both at 0: a fixed order gave some programs three times
        # the work of others (16 prompts of 2,048, 16/8 heads of 128, on an H200: 322 -> 431 TFLOP/s).
        counters = memory_of_stream(query.device, 0, 2)[1]
        numbers = q_desc, k_desc, v_desc, *factors, *self.numbers, *self.plan.strides
        return self.plan.programs(processors), (*arrays, counters), numbers


def _planned(arrays: Sequence[Any], page: int, params: PrefillParams, ragged: bool = False) -> _PlannedLaunch:
    """arrays: of the kernel, without the counters. Requests without lists (`starts`) are equal: see `Variant`."""
    output, lse, query, key, value, starts, _, table, *_ = arrays
    shapes, of = (x.shape for x in (query, key, value)), (x.stride() for x in (query, key, value, output))
    equal = starts is None
    num_reqs = key.shape[0] if equal else starts.shape[0] - 1
    plan = plan_of(Arrays(*shapes, *of), num_reqs, page, equal or table is not None, params, not query.data_ptr() % 16)
    signature, copied = signature_of((*arrays, None), plan.strides), plan.maps[0] is not None
    kernel = _prepared(signature, plan.sizes, params, copied, ragged, plan.far)
    of_lists = 0 if lse is None else lse.stride(0), 0 if table is None else table.stride(0)
    keys, rows = (key.shape[1], query.shape[0] // num_reqs) if equal else (key.shape[0], 0)
    return _PlannedLaunch(kernel, plan, (num_reqs, keys, *of_lists, rows))


class EqualPrompts:
    """Requests of equal lengths whose keys are read where they are: shapes are examined once. Where there are more keys than
    rows, causal rows are the last ones. lens, of its methods: how many of each entry's keys count, [B] int32 on the device;
    None: all. The rest may have any content."""

    def __init__(self, scale: float, causal: bool) -> None:
        self._of = scale, causal
        self.factors = abs(scale) * LOG2E, 1.0
        self._params = PrefillParams(negate=scale < 0, right=0 if causal else UNBOUNDED)
        #: By shapes, strides and dtypes: the plan, and whether queries are copied.
        self._plans: dict[Any, tuple[_PlannedLaunch, bool] | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return EqualPrompts, self._of  # a copy of a layer plans its own launches, whose kernels are the process's

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lse: torch.Tensor | None = None,
        lens: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Return [B, S, H, D] of query [B, H, S, D] and key, value [B, K, M, D], and fill lse [H, B * S].

        None if the kernel does not support their shapes, dtypes and addresses."""
        return _equal_prompts(query, key, value, lse, lens, self)

    def bound(
        self, general: Repeated, lens: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Repeated:
        """Return `general`, which makes such calls, for arrays of these shapes, strides and dtypes: see `Prepared.again`."""
        planned = self.plan_of(query, key, value, None, lens)
        # a launch that is repeated has no copy of the queries before it
        if planned is None or planned[1]:
            return general
        plan, _ = planned
        batch, heads, rows, size = query.shape
        operands = None, None, query, key, value, None, lens, *_NO_LISTS
        programs, arrays, numbers = plan.launch(operands, self.factors, multiprocessors(query.device))
        addresses = [0 if x is None else x.data_ptr() for x in arrays]
        # The maps follow the addresses; that of queries is of keys (2) where the engine does not copy queries (`launch`).
        n, q_map = len(addresses), 1 if plan.plan.maps[0] is not None else 2
        changing = (0, 0), (2, 1), (3, 2), (4, 3), (n, q_map), (n + 1, 2), (n + 2, 3)
        shape, passed, held = (batch, rows, heads, size), (*addresses, *numbers), (arrays[-1], lens)
        return plan.kernel.again(general, query.device, shape, (programs, 1), passed, changing, held)

    def plan_of(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lse: torch.Tensor | None, lens: torch.Tensor | None
    ) -> tuple[_PlannedLaunch, bool] | None:
        """Return the launch for such arrays, and whether it takes a copy of the queries.

        None if the kernel does not support their shapes and dtypes, or is off."""
        if not hopper.is_on("hopper_prefill"):  # also since a launch failed to compile
            return None
        shapes, strides = (query.shape, key.shape, value.shape), (query.stride(), key.stride(), value.stride())
        kind = *shapes, *strides, query.dtype, key.dtype, value.dtype, query.device, lse is None, lens is None
        try:
            return self._plans[kind]
        except KeyError:
            if len(self._plans) >= _KEPT:
                self._plans.clear()
            planned = self._plans[kind] = self._planned(query, key, value, lse, lens)
            return planned

    def _planned(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lse: torch.Tensor | None, lens: torch.Tensor | None
    ) -> tuple[_PlannedLaunch, bool] | None:
        heads, rows = query.shape[1:3]
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        dense = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        if not dense or not serves(q, k, v, heads // key.shape[1], ONE_PAGE, self._params.negate):
            return None
        flat = q.flatten(0, 1)
        # the plan needs the output's strides alone, and each call makes one of its own
        arrays = torch.empty_like(flat, memory_format=torch.contiguous_format), lse, flat, k, v, None, lens, *_NO_LISTS
        params = self._params._replace(ends=lens is None).seeing(key.shape[2], rows)
        # `flatten` returns a view where it can: another address says that it copied
        return _planned(arrays, ONE_PAGE, params), flat.data_ptr() != q.data_ptr()


@on_device
def _equal_prompts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor | None,
    lens: torch.Tensor | None,
    prompts: EqualPrompts,
) -> torch.Tensor | None:
    planned = prompts.plan_of(query, key, value, lse, lens)
    # The plan is of arrays at multiples of 16 bytes, which shapes and strides do not tell.
    if planned is None or (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
        return None
    plan, copied = planned
    batch, heads, rows, size = query.shape
    # [B, H, S, D] whose batch and rows are not one dimension of a constant stride, as the kernel's [T, H, D] has to be
    if copied:
        query = query.transpose(1, 2).contiguous()
    output = query.new_empty((batch, rows, heads, size))
    plan((output, lse, query, key, value, None, lens, *_NO_LISTS), prompts.factors, multiprocessors(query.device))
    return output


@functools.lru_cache(maxsize=1024)
def _prepared(
    signature: Signature, sizes: tuple[int, ...], params: PrefillParams, copied: bool, ragged: bool, far: bool
) -> Prepared:
    """The kernel for calls that agree in these: `constants`' arguments."""
    _, lse, _, _, _, starts, _, table, sinks, _, _, is_causal, _ = signature[1]
    paged, *has = (x is not None for x in (table, sinks, lse, is_causal))
    variant = Variant(paged, ragged, copied, has[0], has[1], has[2], far, starts is None)
    # begins while the launch before it ends, whose results the kernel waits for: half a microsecond of a short launch
    return Prepared(_prefill, **constants(sizes, params, variant), launch_pdl=True)
