"""A torch program that serves with the PALLAS backend: arrays cross by DLPack at a layer's border, the cache stays with JAX."""

import jax
import pytest
import torch
from flax import nnx
from torch import nn

import attn
import attn.jax
import attn.torch
from attn.arrays import to_framework
from attn.backends.metadata import CommonAttentionMetadata

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")

H, K, D, P = 2, 1, 64, 16


class Block(nn.Module):
    """Projections in torch around whatever attends: `attend(query, key, value, batch)`, of [T, heads, D]."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.qkv, self.merge = nn.Linear(32, (H + 2 * K) * D), nn.Linear(H * D, 32)

    def forward(self, x, batch):
        query, key, value = self.qkv(x).unflatten(-1, (-1, D)).split((H, K, K), 1)
        return x + self.merge(self.attend(query, key, value, batch).flatten(1))


def by_torch():
    layer = attn.torch.Attention(H, D, num_kv_heads=K, sliding_window=5, block_size=P)
    cache = layer.new_kv_cache(4)
    build = layer.backend.get_builder_cls()(layer.kv_cache_spec).build
    return lambda q, k, v, batch: layer(q, k, v, cache, build(0, batch))


def by_pallas():
    layer = attn.jax.Attention(H, D, num_kv_heads=K, sliding_window=5, block_size=P, backend="PALLAS")
    cache = nnx.Variable(layer.new_kv_cache(4, jax.devices()[0]))  # committed, as what crosses is: one program, not two
    build = layer.backend.get_builder_cls()(layer.kv_cache_spec, config={"bucket": False}).build
    return lambda q, k, v, batch: layer.impl(layer, q, k, v, cache, build(0, batch))


@torch.no_grad()
def test_a_torch_block_over_pallas():
    """A prompt in two chunks: hidden states are those of the torch framework's own, over a cache that JAX has written."""
    blocks = [Block(attend()) for attend in (by_torch, by_pallas)]
    torch.manual_seed(1)
    for total in (8, 16):  # one bound, so that PALLAS compiles once
        batch = CommonAttentionMetadata.from_lens([8], [total], [[2]], P).replace(max_seq_len=16)
        x = torch.randn(8, 32)
        want, got = (block(x, batch) for block in blocks)
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_crosses_is_not_copied():
    tensor = torch.randn(6, H, D)
    crossed = to_framework(tensor, "jax")
    assert crossed.unsafe_buffer_pointer() == tensor.data_ptr()
    assert to_framework(crossed, "torch").data_ptr() == tensor.data_ptr()
    assert isinstance(crossed, jax.Array)


def test_gradients_do_not_cross():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 16, H, D, requires_grad=True), torch.randn(1, 16, K, D), torch.randn(1, 16, K, D)
    with pytest.raises(ValueError, match="gradients do not cross"):
        attn.attention(q, k, v, causal=True, backend="PALLAS")
