"""IPEX: paged attention of Intel Extension for PyTorch on a CPU; it requires PyTorch of the same version.

Decodes at the start of a batch use `single_query_cached_kv_attention`, the requests after them `flash_attn_varlen_func`,
encoders `varlen_attention`. Deviations of these functions (source of v2.8.0+cpu) that this adapter handles:
- The decode kernel merges the splits of a context outside its window as if their scores were 0. So a window's keys are copied
  to new pages, which start where the first row's window does. The prefill kernel cannot express a window of one key, and it
  multiplies masked values by 0. For that window, or if a masked value is not finite, each row becomes a separate request.
- Without a window, the decode kernel takes four rows with the same first page for beams of one length, and fails. With a
  window as long as the context it does not fail, and masks nothing. It rejects a window together with a soft cap, so with a
  soft cap every row uses the prefill kernel.
- `varlen_attention` ignores its scale on a CPU, so queries are scaled in float32. Its result for rows without a key is
  undefined.
- `reshape_and_cache` writes slot -1 in front of its page, and no kernel reads fp8 scales. So this package's own cache write is
  used, and fp8 caches are rejected, as are ALiBi (decodes only) and everything that needs a log-sum-exp.
On an XPU the same functions need another cache layout ([N, P, K, D]) and ignore a decode's window: XPUs are not supported.
"""

import functools
from typing import Any

import numpy as np
import torch

from attn.backends.abstract import AttentionType
from attn.backends.paged import PagedCall
from attn.capabilities import ATTN_TYPES, ENCODER_TYPES, Capabilities, Device, Feature, MultipleOf, Request
from attn.errors import UnsupportedError
from attn.imports import resolve_obj_by_qualname, version_of
from attn.torch.backends._paged import HeadsFirstBackend, PagedAttentionImpl
from attn.torch.backends._ragged import all_finite
from attn.torch.backends._vendor import decodes_first, int32, lacking, token_slots

_NEEDS = (
    ("modules.PagedAttention.single_query_cached_kv_attention", ("head_mapping", "window_size", "softcap")),
    ("modules.PagedAttention.flash_attn_varlen_func", ("cu_seqlens_kv", "block_tables", "window_size_left", "softcap")),
    ("functional.varlen_attention", ("seqlen_q", "is_causal", "softmax_scale", "softcap")),
)


class IpexAttentionBackend(HeadsFirstBackend):
    name = "IPEX"
    block_sizes = (16, 32, 64, 128)  # divisors of the 128 keys in a split of a decode
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
        features = request.features
        causal = request.attn_type == AttentionType.DECODER and Feature.NON_CAUSAL not in features
        if Feature.SLIDING_WINDOW in features and not causal:
            why.append(f"{Feature.SLIDING_WINDOW.value} without causality not supported")
        if Feature.SOFT_CAP in features and request.attn_type in ENCODER_TYPES:
            why.append(f"{Feature.SOFT_CAP.value} with attn_type={request.attn_type} not supported")
        version = version_of("intel-extension-for-pytorch")
        if version and version.split(".")[:2] != torch.__version__.split(".")[:2]:  # importing it would end the process
            why.append(f"intel-extension-for-pytorch {version} needs PyTorch of the same version (found {torch.__version__})")
        return why


class IpexAttentionImpl(PagedAttentionImpl, backend=IpexAttentionBackend):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # not in `why_not`, since the import takes seconds and replaces operators of PyTorch, which selection must not do
        if why := _lacking():
            raise UnsupportedError(f"{self.backend.get_name()}: {'; '.join(why)}", why)

    def _attend(self, call: PagedCall) -> None:
        meta, causal, left, kv_cache = call.meta, call.causal, call.window[0], call.kv_cache
        starts, lens = meta.host_lens()
        counts = np.diff(starts)
        request = np.repeat(np.arange(len(lens)), counts)  # of each row
        # keys that each row sees, from the last row of a request backwards
        ends = lens[request] - (starts[request + 1] - 1 - np.arange(len(request))) if causal else lens[request]
        query, output = call.query[: len(request)].contiguous(), call.output[: len(request)]
        keys, values, table = kv_cache[0].contiguous(), kv_cache[1].contiguous(), meta.block_table
        begin = np.clip(lens - counts - (left or 0), 0, lens)  # the first key that some row may not see
        if causal and (left == 0 or _any_nonfinite(values, table, counts, begin, lens)):
            # each row a request that ends at its own last key: nothing is left to mask
            counts, lens, table = np.ones_like(request), np.maximum(ends, 0), table[torch.from_numpy(request)]
            starts, begin = np.arange(len(request) + 1), np.clip(ends - 1 - (left or 0), 0, None)
        if left is not None:
            keys, values, table = _copied(keys, values, table, begin, lens)
            lens = lens - begin
        cap = None if left == 0 else self.logits_soft_cap  # a single key has weight 1, whatever its score
        first = decodes_first(starts) if cap is None else 0
        # 0: no decodes, or none with a key
        if longest := int(lens[:first].max(initial=0)):
            heads = torch.arange(self.num_kv_heads, dtype=torch.int32, device=query.device)
            heads = heads.repeat_interleave(self.num_heads // self.num_kv_heads)
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
                # hides no key; the module's docstring says why a window is passed
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
                is_cusal=causal,  # spelled so in the extension
                block_tables=table[first:],
                alibi_slopes=None,
                window_size_left=-1 if left is None else left,
                softcap=-1.0 if cap is None else cap,
            )
        # rows that see no key are 0, whatever a kernel wrote
        if (ends <= 0).any():
            output[torch.from_numpy(ends <= 0)] = 0

    def _attend_ragged(self, call: PagedCall) -> None:
        meta, rows = call.meta, call.meta.num_actual_tokens
        if rows == 0:
            return
        plain = self.head_size**-0.5
        query, key, value, output = (x[:rows] for x in (call.query, call.key, call.value, call.output))
        if self.scale != plain:  # in float32, since rounding the scaled query to a narrower dtype would change it
            query, key, value = query.float() * (self.scale / plain), key.float(), value.float()
            output = torch.empty_like(query)
        _llm().functional.varlen_attention(
            query=query,
            key=key,
            value=value,
            out=output,
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
            call.output[:rows] = output


def _any_nonfinite(values: torch.Tensor, table: torch.Tensor, counts: Any, begin: Any, lens: Any) -> bool:
    """Whether a value from key `begin` on is NaN or infinite in a request of several rows, all of which it would reach."""
    several = np.flatnonzero(counts > 1)
    slots = token_slots(table, values.shape[2], several, begin[several], lens[several]).long()
    return not all_finite(values[slots // values.shape[2], :, slots % values.shape[2]])


def _copied(
    keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, begin: Any, end: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy tokens begin[i]..end[i] of each request i to new pages, from token 0 on.

    Returns keys and values [n, K, P, D], and their block table.
    """
    _, heads, page, size = keys.shape
    count = end - begin
    pages = -(-count // page)
    row = np.cumsum(pages) - pages  # the first page of each request
    index = np.arange(count.sum()) + np.repeat(row * page - (np.cumsum(count) - count), count)
    # the padding of a last page copies token 0 of the cache, behind the request's length
    slots = torch.zeros(int(pages.sum()) * page, dtype=torch.int64, device=keys.device)
    slots[torch.from_numpy(index)] = token_slots(table, page, np.arange(len(count)), begin, end).long()
    slots = slots.view(-1, 1, page)
    # rows of D elements in the order of the new pages: [pages, K, P]
    runs = ((slots // page * heads + torch.arange(heads, device=keys.device)[:, None]) * page + slots % page).flatten()
    copies = [part.reshape(-1, size).index_select(0, runs).view(-1, heads, page, size) for part in (keys, values)]
    columns = np.arange(max(1, int(pages.max(initial=0))))
    return copies[0], copies[1], int32(np.minimum(row[:, None] + columns, max(0, len(slots) - 1)))


def _llm() -> Any:
    return resolve_obj_by_qualname("intel_extension_for_pytorch.llm")


@functools.cache
def _lacking() -> tuple[str, ...]:
    name = "intel-extension-for-pytorch"
    return lacking(" ".join(filter(None, (name, version_of(name)))), _llm(), _NEEDS)
