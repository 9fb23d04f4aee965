"""CUTLASS_MLA: the CUTLASS decode kernel for datacentre Blackwell from vLLM's extension.

One token per request, 128 heads (fewer are padded with zeros), pages of 128, 512 + 64 columns. The kernel fills the output and
the log-sum-exp (natural, [R, 128]) that it is passed, and needs a workspace, whose size another function returns. Schema of
`sm100_cutlass_mla_decode` as in vLLM 0.33's `_custom_ops`.
"""

import torch

from attn.capabilities import Feature
from attn.torch import records
from attn.torch.backends.mla._metadata import MLACommonMetadataBuilder
from attn.torch.backends.mla._mla import DecodeCall, MLACommonBackend
from attn.torch.backends.mla._vendor import UniformMLAImpl, with_heads

_HEADS = 128
_ANY_SPLITS = -1  #: the kernel chooses


class CutlassMLAMetadataBuilder(MLACommonMetadataBuilder):
    # a longer query is a prefill: the kernel takes one token a request
    decode_threshold = 1


class CutlassMLABackend(MLACommonBackend):
    name = "CUTLASS_MLA"
    builder_cls = CutlassMLAMetadataBuilder
    block_sizes = (128,)
    capabilities = records.CUDA(
        head_sizes=(576,),
        features=frozenset({Feature.MLA, Feature.LSE}),
        packages=("vllm",),
        install="vllm",
        archs=(("cuda", ("sm_10*",)),),
    )
    latent_dims = ((512, 64),)
    most_heads = _HEADS


class CutlassMLAImpl(UniformMLAImpl, backend=CutlassMLABackend):
    def _decode_uniform(
        self, call: DecodeCall, q: torch.Tensor, lens: torch.Tensor, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm import _custom_ops as ops

        requests, _, heads, _ = q.shape
        rank = self.kv_lora_rank
        padded = with_heads(q[:, 0], _HEADS)
        out = q.new_empty(requests, _HEADS, rank)
        lse = torch.empty(requests, _HEADS, dtype=torch.float32, device=q.device)
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.device.type == "cuda" else 1
        # by the longest request, since the kernel decides the number of splits
        size = ops.sm100_cutlass_mla_get_workspace_size(max(1, call.meta.max_seq_len), requests, processors, _ANY_SPLITS)
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        ops.sm100_cutlass_mla_decode(
            out,
            lse,
            padded[..., :rank],
            padded[..., rank:],
            call.kv_cache,
            seq_lens=lens,
            page_table=block_table,
            workspace=workspace,
            scale=self.scale,
            num_kv_splits=_ANY_SPLITS,
        )
        return out[:, None, :heads], lse[:, :heads, None]
