"""TRITON_ATTN: our own kernels, every feature on every NVIDIA and AMD GPU that Triton compiles for.

It wins where the vendors' kernels have no answer (ALiBi with windows, large head sizes in float32, trees, int8 caches) and
in decode, which is bound by memory and where it reads the cache about as fast as the device copies. On Hopper, prefill of
16-bit caches has a schedule of its own and runs beside the decodes of its batch. Measurements:
benchmarks/notes/triton.md.
"""

from attn.torch.backends import _triton


class TritonAttentionBackend(_triton.TritonPagedBackend):
    name = "TRITON_ATTN"
    capabilities = _triton.capabilities(("cuda", "rocm"))


class TritonAttentionImpl(_triton.TritonPagedImpl, backend=TritonAttentionBackend):
    pass
