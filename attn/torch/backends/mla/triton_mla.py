"""TRITON_MLA: multi-head latent attention by this package's own Triton kernels, on NVIDIA and AMD GPUs.

One kernel serves every decode (`attn.kernels.mla_decode`): it splits keys, has 16 to 64 (token, head) rows per tile,
and loads each tile of latents once for scores and values. Nothing waits for the device, so a decode can be captured in a CUDA
graph and replayed for any batch within the bounds of its metadata. Prefills use an MLA prefill backend.
"""

from attn.capabilities import Device, Feature
from attn.torch.backends.mla import _triton
from attn.torch.backends.mla._metadata import MLACommonMetadataBuilder

#: Rows of a prompt that take about as long absorbed as expanded over a long context. With DeepSeek's sizes both have as many
#: operations at 171 rows; on an H200, where contexts are also gathered and written, absorbed is 1.3 to 1.5 times as fast with
#: 256 rows, and from 3 % slower to 24 % faster with 384 (128 and 32 heads, 4k and 32k keys).
SHORT_ROWS = 320


class TritonMLAMetadataBuilder(MLACommonMetadataBuilder):
    """Builder that absorbs short prompts over long contexts where the decode kernel has the rate of a prefill's."""

    def short_rows(self) -> int:
        return SHORT_ROWS if _triton.uses_hopper(self.kv_cache_spec, self.device) else 0


class TritonMLABackend(_triton.TritonKernelsBackend):
    name = "TRITON_MLA"
    builder_cls = TritonMLAMetadataBuilder
    capabilities = _triton.capabilities(frozenset({Feature.MLA, Feature.LSE, Feature.DCP, Feature.NAN_SAFE}))

    @classmethod
    def rules(cls, device: Device | None = None) -> tuple[str, ...]:
        short = f"n of them over c earlier tokens are absorbed too if n (2 c + n) <= {2 * SHORT_ROWS} c (16-bit latents)"
        on_hopper = device is not None and (device.platform, device.arch) == ("cuda", "sm_90") and not cls.off_paths(device)
        return (*super().rules(device), *((short,) if on_hopper else ()))


class TritonMLAImpl(_triton.TritonKernelsImpl, backend=TritonMLABackend):
    can_return_lse_for_decode = True
