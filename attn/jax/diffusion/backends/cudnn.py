"""CUDNN: cuDNN's fused attention by way of `jax.nn.dot_product_attention` (549-605 TFLOP/s on an H200)."""

from attn.capabilities import Capabilities, Feature, MultipleOf
from attn.jax.diffusion.backends._dense import DenseBackend
from attn.jax.diffusion.backends._dot_product import DotProductImpl


class CuDNNAttentionBackend(DenseBackend):
    capabilities = Capabilities(
        framework="jax",
        platforms=("gpu",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(MultipleOf(8, 8, 128),),
        features=frozenset({Feature.MASK, Feature.BACKWARD}),
        archs=(("gpu", ("sm_80+",)),),
    )

    @staticmethod
    def get_name() -> str:
        return "CUDNN"

    @staticmethod
    def get_impl_cls() -> type["CuDNNAttentionImpl"]:
        return CuDNNAttentionImpl


class CuDNNAttentionImpl(DotProductImpl):
    backend = CuDNNAttentionBackend
    implementation = "cudnn"
