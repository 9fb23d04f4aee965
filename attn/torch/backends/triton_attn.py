"""TRITON_ATTN: this package's own Triton kernels, with every feature on every NVIDIA and AMD GPU that Triton compiles for.

It is the fastest for features that vendors' kernels lack (ALiBi with windows, large head sizes in float32, trees, int8
caches) and in decode, which is memory bound and reads the cache at about the device's copy bandwidth. On Hopper, prefill of
16-bit caches has its own schedule and runs concurrently with the decodes of its batch.
"""

from attn.torch.backends import _triton


class TritonAttentionBackend(_triton.TritonPagedBackend):
    name = "TRITON_ATTN"
    capabilities = _triton.capabilities(("cuda", "rocm"))


class TritonAttentionImpl(_triton.TritonPagedImpl, backend=TritonAttentionBackend):
    pass
