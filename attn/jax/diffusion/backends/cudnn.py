"""CUDNN: cuDNN's fused attention through `jax.nn.dot_product_attention` (549-605 TFLOP/s on an H200)."""

from attn.capabilities import Capabilities, Device, Feature, Request
from attn.diffusion.backends import cudnn
from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.imports import version_of
from attn.jax.diffusion.backends._dot_product import DotProductImpl


class CuDNNAttentionBackend(DiffusionAttentionBackend):
    name = "CUDNN"
    capabilities = Capabilities(
        framework="jax",
        platforms=("gpu",),
        dtypes=("bfloat16", "float16"),
        head_sizes=cudnn.HEAD_SIZES,
        features=frozenset({Feature.MASK, Feature.BACKWARD}),
        archs=(("gpu", ("sm_80+",)),),
    )

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device) + cudnn.head_size_reasons(request, device)
        if device is not None and device.arch == "sm_103" and (version := _cudnn_version()) < (9, 11):
            why.append(f"cuDNN {'.'.join(map(str, version))} on sm_103 (supports 9.11 and newer)")
        return why


def _cudnn_version() -> tuple[int, ...]:
    """Return (major, minor) of the cuDNN in jax's wheels; if cuDNN was installed otherwise, a version that passes any check."""
    for package in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        if version := version_of(package):
            return tuple(int(part) for part in version.split(".")[:2])
    # a cuDNN of the system has no package to ask, and is not refused for what is not known
    return (99,)


class CuDNNAttentionImpl(DotProductImpl, backend=CuDNNAttentionBackend):
    implementation = "cudnn"
