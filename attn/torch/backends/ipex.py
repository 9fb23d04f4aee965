"""IPEX: Intel Extension for PyTorch's paged attention on a CPU, for those who have it: it wants the torch of its number.

Decodes at the head of a batch take `single_query_cached_kv_attention`, everything after them `flash_attn_varlen_func`,
encoders `varlen_attention`. What their sources (v2.8.0+cpu) mean differently ends here:
- A window's keys are copied to pages of their own, which begin where the first row's window does: the decode kernel merges
  the parts of a context that lie outside its window as if their scores were 0. A window of one key cannot be said to the
  prefill kernel, which also multiplies by 0 what a row does not see: for that window, and where a value that some row does
  not see is no finite number, each row becomes a request of its own.
- Given no window, the decode kernel takes four rows with the same first page for beams of one length, and fails; given one
  as long as the context, it does not, and hides nothing. It refuses a window and a soft cap together: a cap takes every
  row to the prefill kernel.
- `varlen_attention` ignores its scale on a CPU: queries carry it, in float32. Rows without a key come back as anything.
- `reshape_and_cache` writes slot -1 in front of its page, and fp8 scales are read by no kernel: the layers' own writer
  is kept, and fp8 caches are refused, as are ALiBi (decodes only) and whatever needs a log-sum-exp.
On an XPU the same functions want another cache ([N, P, K, D]) and drop a decode's window: that platform is not served.
"""

import functools
from typing import Any

import numpy as np
import torch

from attn.backends.abstract import AttentionType
from attn.capabilities import ATTN_TYPES, ENCODER_TYPES, Capabilities, Device, Feature, MultipleOf, Request
from attn.errors import UnsupportedError
from attn.imports import resolve_obj_by_qualname, version_of
from attn.torch.backends._paged import HeadsFirstBackend, PagedAttentionImpl, PagedCall, RaggedCall
from attn.torch.backends._ragged import all_finite
from attn.torch.backends._vendor import decodes_first, int32, lacking, token_slots

_NEEDS = (
    ("modules.PagedAttention.single_query_cached_kv_attention", ("head_mapping", "window_size", "softcap")),
    ("modules.PagedAttention.flash_attn_varlen_func", ("cu_seqlens_kv", "block_tables", "window_size_left", "softcap")),
    ("functional.varlen_attention", ("seqlen_q", "is_causal", "softmax_scale", "softcap")),
)


class IpexAttentionBackend(HeadsFirstBackend):
    name = "IPEX"
    block_sizes = (16, 32, 64, 128)  # divisors of the 128 keys that a decode's part has
    capabilities = Capabilities(
        framework="torch",
        platforms=("cpu",),
        dtypes=("float32", "bfloat16", "float16"),
        head_sizes=(MultipleOf(16, 16, 256),),
        attn_types=ATTN_TYPES,
        features=frozenset({Feature.NON_CAUSAL, Feature.SLIDING_WINDOW, Feature.SOFT_CAP, Feature.KV_SHARING}),
        packages=("intel_extension_for_pytorch",),
        install="intel-extension-for-pytorch",
        archs=(("cpu", ("x86_64",)),),
    )

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device)
        asked = request.features
        causal = request.attn_type == AttentionType.DECODER and Feature.NON_CAUSAL not in asked
        if Feature.SLIDING_WINDOW in asked and not causal:
            why.append(f"{Feature.SLIDING_WINDOW.value} without causality not supported")
        if Feature.SOFT_CAP in asked and request.attn_type in ENCODER_TYPES:
            why.append(f"{Feature.SOFT_CAP.value} with attn_type={request.attn_type} not supported")
        own = version_of("intel-extension-for-pytorch")
        if own and own.split(".")[:2] != torch.__version__.split(".")[:2]:  # imported, it would end the process
            why.append(f"intel-extension-for-pytorch {own} needs the torch of its number ({torch.__version__} is here)")
        return why


class IpexAttentionImpl(PagedAttentionImpl, backend=IpexAttentionBackend):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # here and not in `why_not`: importing it takes seconds and replaces operators of torch's, which a choice must not
        if why := _lacking():
            raise UnsupportedError(f"{self.backend.get_name()}: {'; '.join(why)}", why)

    def _attend(self, call: PagedCall) -> None:
        meta, causal, left, kv_cache = call.meta, call.causal, call.window[0], call.kv_cache
        starts, lens = meta.host_lens()
        counts = np.diff(starts)
        request = np.repeat(np.arange(len(lens)), counts)  # of each row
        ends = lens[request] - (starts[request + 1] - 1 - np.arange(len(request))) if causal else lens[request]
        query, output = call.query[: len(request)].contiguous(), call.output[: len(request)]
        keys, values, table = kv_cache[0].contiguous(), kv_cache[1].contiguous(), meta.block_table
        begin = np.clip(lens - counts - (left or 0), 0, lens)  # the first key that some row may not see
        if causal and (left == 0 or _spoilt(values, table, counts, begin, lens)):
            counts, lens, table = np.ones_like(request), np.maximum(ends, 0), table[torch.from_numpy(request)]
            starts, begin = np.arange(len(request) + 1), np.clip(ends - 1 - (left or 0), 0, None)
        if left is not None:
            keys, values, table = _copied(keys, values, table, begin, lens)
            lens = lens - begin
        cap = None if left == 0 else self.logits_soft_cap  # one key has all the weight, whatever its score
        first = decodes_first(starts) if cap is None else 0
        if longest := int(lens[:first].max(initial=0)):
            heads = torch.arange(self.num_kv_heads, dtype=torch.int32).repeat_interleave(self.num_heads // self.num_kv_heads)
            _llm().modules.PagedAttention.single_query_cached_kv_attention(
                output=output[:first],
                query=query[:first],
                key_cache=keys,
                value_cache=values,
                head_mapping=heads,
                scale=self.scale,
                block_tables=table[:first],
                context_lens=int32(lens[:first]),
                block_size=keys.shape[2],
                max_context_len=longest,
                alibi_slopes=None,
                window_size=longest,
            )
        rows = int(starts[first])
        if rows < len(request) and (longest := int(lens[first:].max(initial=0))):
            bounds = [int32(np.concatenate([[0], np.cumsum(n)])) for n in (counts[first:], lens[first:])]
            _llm().modules.PagedAttention.flash_attn_varlen_func(
                output=output[rows:],
                query=query[rows:],
                key_cache=keys,
                value_cache=values,
                cu_seqlens_q=bounds[0],
                cu_seqlens_kv=bounds[1],
                max_seqlen_q=int(counts[first:].max()),
                max_seqlen_kv=longest,
                scale=self.scale,
                is_cusal=causal,  # their spelling
                block_tables=table[first:],
                alibi_slopes=None,
                window_size_left=-1 if left is None else left,
                softcap=-1.0 if cap is None else cap,
            )
        if (ends <= 0).any():
            output[torch.from_numpy(ends <= 0)] = 0

    def _attend_ragged(self, call: RaggedCall) -> None:
        meta, rows = call.meta, call.meta.num_actual_tokens
        if rows == 0:
            return
        plain = self.head_size**-0.5
        query, key, value, made = (x[:rows] for x in (call.query, call.key, call.value, call.output))
        if self.scale != plain:  # in float32: rounded to a narrower dtype, the scaled query would be another
            query, key, value = query.float() * (self.scale / plain), key.float(), value.float()
            made = torch.empty_like(query)
        _llm().functional.varlen_attention(
            query=query,
            key=key,
            value=value,
            out=made,
            seqlen_q=meta.query_start_loc,
            seqlen_k=meta.query_start_loc,
            alibi_slopes=None,
            max_seqlen_q=meta.max_query_len,
            max_seqlen_k=meta.max_query_len,
            pdropout=0.0,
            softmax_scale=plain,
            zero_tensors=False,
            is_causal=call.causal,
            return_softmax=False,
            gen_=None,
        )
        if self.scale != plain:
            call.output[:rows] = made


def _spoilt(values: torch.Tensor, table: torch.Tensor, counts: Any, begin: Any, lens: Any) -> bool:
    """Whether a value from key `begin` on is NaN or infinite in a request of several rows: it would reach them all."""
    several = np.flatnonzero(counts > 1)
    slots = token_slots(table, values.shape[2], several, begin[several], lens[several]).long()
    return not all_finite(values[slots // values.shape[2], :, slots % values.shape[2]])


def _copied(
    keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, begin: Any, end: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens begin[i]..end[i] of request i as token 0, 1, ... of pages of their own [n, K, P, D], and their table."""
    _, heads, page, size = keys.shape
    held = end - begin
    pages = -(-held // page)
    row = np.cumsum(pages) - pages  # each one's first page
    at = np.arange(held.sum()) + np.repeat(row * page - (np.cumsum(held) - held), held)
    slots = torch.zeros(int(pages.sum()) * page, dtype=torch.int64)
    slots[torch.from_numpy(at)] = token_slots(table, page, np.arange(len(held)), begin, end).long()
    slots = slots.view(-1, 1, page)
    runs = ((slots // page * heads + torch.arange(heads)[:, None]) * page + slots % page).flatten()
    copies = [part.reshape(-1, size).index_select(0, runs).view(-1, heads, page, size) for part in (keys, values)]
    columns = np.arange(max(1, int(pages.max(initial=0))))
    return copies[0], copies[1], int32(np.minimum(row[:, None] + columns, max(0, len(slots) - 1)))


def _llm() -> Any:
    return resolve_obj_by_qualname("intel_extension_for_pytorch.llm")


@functools.cache
def _lacking() -> tuple[str, ...]:
    name = "intel-extension-for-pytorch"
    return lacking(" ".join(filter(None, (name, version_of(name)))), _llm(), _NEEDS)
