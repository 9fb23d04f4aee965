"""Tensor parallelism by DTensor: heads are sharded, a layer has the local ones, and nothing is communicated.

One process stands for rank 0 of two: what a rank computes depends on its own heads alone.
"""

import pytest
import torch

import attn.torch
from attn.backends.metadata import CommonAttentionMetadata

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)

from torch.distributed.tensor import DTensor, Shard, init_device_mesh  # noqa: E402
from torch.distributed.tensor.experimental import local_map  # noqa: E402

H, K, D, P, WORLD = 8, 4, 32, 16, 2


@pytest.fixture(scope="module")
def mesh():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield init_device_mesh("cpu", (WORLD,), mesh_dim_names=("heads",))
    distributed.destroy_process_group()


def mine(tensor, dim, mesh):
    """Rank 0's share of a tensor's heads, as the tensor that it is a share of."""
    return DTensor.from_local(tensor.chunk(WORLD, dim)[0].contiguous(), mesh, [Shard(dim)], run_check=False)


@torch.no_grad()
def test_a_layer_of_the_local_heads(mesh):
    whole = attn.torch.Attention(H, D, num_kv_heads=K, block_size=P, sliding_window=7)
    local = attn.torch.Attention(H // WORLD, D, num_kv_heads=K // WORLD, block_size=P, sliding_window=7)
    batch = CommonAttentionMetadata.from_lens([5, 1], [5, 21], [[3], [1, 2]], P)
    build = local.backend.get_builder_cls()(local.kv_cache_spec).build
    torch.manual_seed(0)
    given = [torch.randn(6, heads, D) for heads in (H, K, K)]
    caches = [layer.new_kv_cache(4) for layer in (whole, local)]
    want = whole(*given, caches[0], build(0, batch))

    heads, metadata = [Shard(1)], build(0, batch)

    def attend(q, k, v):
        return local(q, k, v, caches[1], metadata)

    sharded = local_map(attend, out_placements=heads, in_placements=(heads, heads, heads), device_mesh=mesh)
    out = sharded(*(mine(x, 1, mesh) for x in given))
    assert isinstance(out, DTensor) and out.shape == want.shape and tuple(out.placements) == tuple(heads)
    torch.testing.assert_close(out.to_local(), want.chunk(WORLD, 1)[0])


def test_the_drop_in_and_its_gradients(mesh):
    heads = [Shard(1)]
    sharded = local_map(
        attn.torch.scaled_dot_product_attention, out_placements=heads, in_placements=(heads, heads, heads), device_mesh=mesh
    )
    torch.manual_seed(0)
    given = [torch.randn(2, H, 5, D, requires_grad=True) for _ in range(3)]
    attn.torch.scaled_dot_product_attention(*given).square().sum().backward()
    shares = [mine(x.detach(), 1, mesh).requires_grad_() for x in given]
    sharded(*shares).to_local().square().sum().backward()
    for share, x in zip(shares, given, strict=True):
        torch.testing.assert_close(share.grad.to_local(), x.grad.chunk(WORLD, 1)[0])
