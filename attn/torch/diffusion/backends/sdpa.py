"""TORCH_SDPA: PyTorch's own choice of kernel, on any device, with any mask, differentiable: the universal fallback."""

from attn.capabilities import Capabilities, Feature, MultipleOf
from attn.torch.diffusion.backends._dense import DenseBackend
from attn.torch.diffusion.backends._sdpa import SDPABase


class SDPABackend(DenseBackend):
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda", "rocm", "xpu", "npu", "cpu"),
        dtypes=("float32", "float16", "bfloat16", "float64"),
        head_sizes=(MultipleOf(1),),
        features=frozenset({Feature.MASK, Feature.BACKWARD}),
    )

    @staticmethod
    def get_name() -> str:
        return "TORCH_SDPA"

    @staticmethod
    def get_impl_cls() -> type["SDPAImpl"]:
        return SDPAImpl


class SDPAImpl(SDPABase):
    backend = SDPABackend
