"""TRITON_MLA_SPARSE: MLA over chosen keys by this package's own Triton kernel, on NVIDIA and AMD GPUs.

The kernel of TRITON_MLA, with one tile per token that holds its heads. It reads the rows that the token's indices list instead
of the whole sequence, and splits that list as a decode splits its sequence.
"""

from attn.capabilities import Feature
from attn.torch.backends.mla import _triton
from attn.torch.backends.mla._sparse import SparseMLABackend, SparseMLAImpl


class TritonMLASparseBackend(SparseMLABackend, _triton.TritonKernelsBackend):
    name = "TRITON_MLA_SPARSE"
    capabilities = _triton.capabilities(frozenset({Feature.SPARSE_MLA, Feature.LSE, Feature.NAN_SAFE}))


class TritonMLASparseImpl(SparseMLAImpl, _triton.TritonKernelsImpl, backend=TritonMLASparseBackend):
    pass
