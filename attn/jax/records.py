"""The common fields of JAX backends' records, by compiler. A backend adds its own."""

from functools import partial

from attn.capabilities import Capabilities, Feature

#: Why a request's bits depend on its batch where XLA computes a layer, or the projections of latent attention.
VARIES = "XLA compiles products of all requests' rows for each padded batch, and two programs may sum in different orders"
NOT_INVARIANT = ((Feature.BATCH_INVARIANT, VARIES),)

XLA = partial(Capabilities, framework="jax", platforms=("tpu", "gpu", "cpu"), dtypes=("float32", "bfloat16", "float16"))
PALLAS = partial(XLA, platforms=("tpu", "cpu"), dtypes=("float32", "bfloat16"), archs=(("tpu", ("v5e", "v5p", "v6e", "v7x")),))
TRITON = partial(
    XLA,
    platforms=("gpu",),
    dtypes=("bfloat16", "float16", "float32"),
    packages=("triton",),
    install="triton",
    archs=(("gpu", ("sm_80+",)),),
)
