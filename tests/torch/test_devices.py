"""Layers, batches and caches on devices: they follow the device context and `.to()`, and a call has all of them on one."""

import collections
import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import attn
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum
from attn.errors import DeviceError, UnsupportedError
from attn.tools.fuzz import entries as fuzz_entries
from attn.torch import Attention, DiffusionAttention, MLAAttention
from attn.torch.backends import _paged
from attn.torch.backends._paged import PagedAttentionImpl
from attn.torch.backends.mla import _mla
from attn.torch.backends.mla._mla import MLACommonImpl
from attn.torch.diffusion.parallel import SequenceParallelAttention
from attn.torch.metadata import check_device

META = torch.device("meta")
TESTS = Path(__file__).parents[1]
BATCH = CommonAttentionMetadata.from_lens([5], [5], [[1]], 16)


def layer_of(name: str, **options: Any) -> Any:
    if "MLA" not in name:
        return Attention(4, 32, num_kv_heads=2, backend=name, **options)
    return MLAAttention(2, 32, 16, 16, 16, torch.zeros(32, 2, 32), block_size=16, backend=name, **options)


def call(layer: Any, metadata: Any, cache: torch.Tensor, device: Any, odd: str = "") -> torch.Tensor:
    shapes = ((5, 2, 32), (5, 32), (5, 16)) if isinstance(layer, MLAAttention) else ((5, 4, 32), (5, 2, 32), (5, 2, 32))
    names = ("query", "key", "value")
    arrays = [torch.zeros(s, device=META if n == odd else device) for n, s in zip(names, shapes, strict=True)]
    out: torch.Tensor = layer(*arrays, cache, metadata)
    return out


@pytest.mark.parametrize("move", ["context", "to", "to_empty"])
def test_a_layer_is_where_it_was_made_or_moved(move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device meta stands in for a GPU. A model made on meta itself is loaded elsewhere, so that does not place a layer."""
    if move == "context":
        monkeypatch.setattr("attn.torch.layer._NOWHERE", ("cpu",))
        with META:
            layer = Attention(4, 32, num_kv_heads=2, kv_cache_dtype="int8", k_scale=0.5, v_scale=0.5)
    else:
        layer = Attention(4, 32, num_kv_heads=2, kv_cache_dtype="int8", k_scale=0.5, v_scale=0.5)
        assert layer.half().new_kv_cache(2).device.type == "cpu"
        layer = layer.to(META) if move == "to" else layer.to_empty(device=META)
    assert layer._k_scale_float == 0.5
    for one in (layer, copy.deepcopy(layer), layer.half()):
        metadata, cache = one.build(BATCH), one.new_kv_cache(4)
        assert {metadata.seq_lens.device, metadata.slot_mapping.device, cache.device, one._k_scale.device} == {META}
    assert layer.build(BATCH, device="cpu").seq_lens.device.type == "cpu"
    monkeypatch.undo()
    with META:
        loaded_later = Attention(4, 32)
    assert loaded_later.new_kv_cache(2).device.type == "cpu"


@pytest.mark.parametrize("name", ["CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION", "TORCH_MLA"])
def test_another_default_device_changes_no_call(name: str) -> None:
    """A prompt, a decode and several rows on the CPU, as beside a model on a GPU: no helper tensor is on the default device."""
    layer = layer_of(name)
    cache = layer.new_kv_cache(8)
    batch = CommonAttentionMetadata.from_lens([5, 1, 2], [5, 21, 20], [[3], [7, 4], [1, 2]], 16)
    shapes = ((8, 2, 32), (8, 32), (8, 16)) if "MLA" in name else ((8, 4, 32), (8, 2, 32), (8, 2, 32))
    arrays = [torch.randn(shape) for shape in shapes]
    want = layer(*arrays, cache, layer.build(batch))
    with META:
        got = layer(*arrays, cache, layer.build(batch.replace(), device="cpu"))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION", "TORCH_MLA"])
def test_a_call_on_two_devices_is_refused_with_both(name: str) -> None:
    layer = layer_of(name)
    here, there = (layer.build(BATCH, device=device) for device in ("cpu", META))
    cache = layer.new_kv_cache(4, "cpu")
    call(layer, here, cache, "cpu")
    advice = r'move the layer .*layer\.to\("cpu"\).* layer\.build\(batch, device="cpu"\)'
    with pytest.raises(DeviceError, match=rf"{name}: query_start_loc of the batch is on meta, query on cpu: {advice}"):
        call(layer, there, cache, "cpu")
    here.slot_mapping = here.slot_mapping.to(META)
    with pytest.raises(DeviceError, match=f"{name}: slot_mapping of the batch is on meta, query on cpu"):
        call(layer, here, cache, "cpu")
    here = layer.build(BATCH, device="cpu")
    with pytest.raises(DeviceError, match=f"{name}: kv_cache is on meta, query on cpu"):
        call(layer, here, layer.new_kv_cache(4, META), "cpu")
    for odd in ("key", "value"):
        with pytest.raises(DeviceError, match=rf"{name}: \w+ is on meta, query on cpu"):
            call(layer, here, cache, "cpu", odd)


@pytest.mark.parametrize("name", ["TORCH_SDPA", "TORCH_MLA"])
def test_scales_whose_values_are_lost_are_refused(name: str) -> None:
    layer = layer_of(name, kv_cache_dtype="fp8", k_scale=0.05).to(META)
    with pytest.raises(DeviceError, match=f"{name}: layer._k_scale is on meta, query on cpu: the scale's value is lost"):
        call(layer, layer.build(BATCH, device="cpu"), layer.new_kv_cache(4, "cpu"), "cpu")


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_numbers_per_head_keep_their_values_within_meta(name: str, form: Any) -> None:
    """A model's constructor runs there, and its weights are loaded later."""
    values = form([0.5, 0.25, 0.125, 0.75])
    with META:
        layer = layer_of("TORCH_SDPA", **{name: values})
    call(layer, layer.build(BATCH, device="cpu"), layer.new_kv_cache(4, "cpu"), "cpu")
    assert getattr(layer.impl, name).tolist() == [0.5, 0.25, 0.125, 0.75]


@pytest.mark.parametrize("name", ["TORCH_SDPA", "TORCH_MLA"])
def test_a_call_is_where_its_query_is(name: str) -> None:
    """Not on torch's default device."""
    layer = layer_of(name, kv_cache_dtype="fp8", k_scale=0.5)
    metadata, cache = layer.build(BATCH, device="cpu"), layer.new_kv_cache(4, "cpu")
    here = torch.device("cpu")
    with META:
        assert call(layer, metadata, cache, here).device == here


@pytest.mark.parametrize("name", ["TORCH_SDPA", "TORCH_MLA"])
def test_a_call_makes_the_device_of_its_query_the_current_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some packages launch kernels on the current GPU, wherever their arrays are."""
    query: Any = SimpleNamespace(is_cuda=True, get_device=lambda: 1)
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert _paged.is_elsewhere(query) == (current == 0)
    current_ones = list[torch.device]()

    @contextmanager
    def device(of: torch.device) -> Iterator[None]:
        current_ones.append(of)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    for module in (_paged, _mla):
        monkeypatch.setattr(module, "is_elsewhere", lambda x: not current_ones)
    layer = layer_of(name)
    call(layer, metadata := layer.build(BATCH), layer.new_kv_cache(2), "cpu")
    assert current_ones == [torch.device("cpu")]
    calls = metadata.kept().calls
    for signature, known in [*calls.items()] if name == "TORCH_SDPA" else []:  # a known call compares what was kept of it
        calls[signature] = known._replace(gpu=1)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: len(current_ones) - 1, raising=False)
        call(layer, metadata, layer.new_kv_cache(2), "cpu")
        assert len(current_ones) == 2


def test_random_devices_around_a_layer() -> None:
    """Where it is made, moved, built for and called."""
    subject = fuzz_entries.subject_of("LAYER_DEVICE")
    ends = collections.Counter(map(subject.check, fuzz_entries.program(subject, 0, 0, 120)))
    assert ends["served"] > 25 and ends["refused"] > 25


@pytest.mark.parametrize("name", ["TRITON_ATTN", "TRITON_MLA"])
def test_kernels_of_a_gpu_refuse_a_call_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a layer that was chosen for a GPU and never moved there: all is on the host."""
    backend = AttentionBackendEnum[name].get_class()
    monkeypatch.setattr(backend, "is_interpreted", staticmethod(lambda: False))
    with pytest.raises(DeviceError, match=f"{name}: query is on cpu: must be on a device of cuda, rocm"):
        check_device(backend, layer_of("TORCH_SDPA").build(BATCH, device="cpu"), torch.zeros(5, 4, 32))


def test_every_backend_checks_devices_alike() -> None:
    """The check is in the base classes, which no backend's class goes around."""
    checked = 0
    for member in AttentionBackendEnum:
        if str(member.value or "").startswith("attn.torch."):
            impl = member.get_class().get_impl_cls()
            base = MLACommonImpl if issubclass(impl, MLACommonImpl) else PagedAttentionImpl
            assert (impl.forward, impl._check_call) == (base.forward, base._check_call), member.name
            checked += 1
    assert checked > 15


@pytest.mark.parametrize("name", [None, "CPU_ATTN", "TORCH_SDPA"])
def test_tensors_on_the_host_are_served_there_on_a_machine_with_a_gpu(name: str | None, gpu_here: None) -> None:
    """The selector would choose for the GPU, where a model is moved after it was made."""
    layer = Attention(4, 32, num_kv_heads=2, backend=name)
    call(layer, layer.build(BATCH), layer.new_kv_cache(2), "cpu")
    assert layer.selection.device.platform == "cpu" and layer.selection.name in ("CPU_ATTN", name)
    assert layer.to(torch.bfloat16).selection.device.platform == "cpu"
    batch = torch.zeros(1, 5, 4, 32)
    with attn.global_force_attn_backend_context_manager("CPU_ATTN"):
        assert Attention(4, 32).selection.name == "CPU_ATTN"
    assert attn.attention(batch, batch, batch, backend="CPU_ATTN").shape == batch.shape
    dense = DiffusionAttention(4, 32)
    on_gpu = dense.impl
    assert dense(batch, batch, batch).shape == batch.shape and dense.selection.device.platform == "cpu"
    dense.follow(torch.device("cuda"))
    assert dense.impl is on_gpu and dense.half().selection.device.platform == "cuda"


@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_a_sharded_sequence_on_the_host_of_a_machine_with_a_gpu(
    strategy: str, gpu_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    # of a group of one, the exchange returns what it is given
    monkeypatch.setattr(dist, "all_to_all_single", lambda received, sent, group: received.copy_(sent))
    layer, batch = SequenceParallelAttention(4, 32, strategy=strategy), torch.zeros(1, 5, 4, 32)
    assert layer(batch, batch, batch).shape == batch.shape and layer.local.selection.device.platform == "cpu"


def test_a_latent_layer_on_the_host_of_a_machine_with_a_gpu(gpu_here: None) -> None:
    layer = MLAAttention(2, 32, 16, 16, 16, torch.zeros(32, 2, 32), block_size=16)
    call(layer, layer.build(BATCH), layer.new_kv_cache(2), "cpu")
    assert layer.selection.name == "TORCH_MLA" and layer.selection.device.platform == "cpu"


def test_a_named_backend_is_not_replaced_where_the_layer_is(gpu_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device meta stands in for the GPU."""
    monkeypatch.setattr("attn.torch.layer.platform_of", {"cpu": "cpu", "meta": "cuda"}.get)
    monkeypatch.setattr("attn.torch.layer._NOWHERE", ("cpu",))
    with pytest.raises(UnsupportedError, match=r"CPU_ATTN\s+platform=cuda \(supports cpu\)"), META:
        Attention(4, 32, num_kv_heads=2, backend="CPU_ATTN", dtype=torch.float32)
    layer = Attention(4, 32, num_kv_heads=2, backend="CPU_ATTN")
    layer.new_kv_cache(2, META)  # its call there is refused
    assert layer.selection.name == "CPU_ATTN" and layer.half().selection.name == "CPU_ATTN"


def test_a_layer_of_a_gpu_may_have_caches_on_the_host(gpu_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those that an engine moves pages to. The device meta stands in for the GPU."""
    monkeypatch.setattr("attn.torch.layer.platform_of", {"cpu": "cpu", "meta": "cuda"}.get)
    layer = Attention(4, 32, num_kv_heads=2)
    on_gpu = layer.selection
    layer.new_kv_cache(2, META)
    layer.new_kv_cache(2, "cpu")
    layer.build(BATCH, device="cpu")
    assert layer.selection is on_gpu
    other = Attention(4, 32, num_kv_heads=2)
    other.new_kv_cache(2, "cpu")
    assert other.selection.device.platform == "cpu"
    other.build(BATCH, device=META)  # the accelerator's is where it is called
    assert other.selection.device.platform == "cuda"
    for device, platform in ((META, "cuda"), ("cpu", "cpu"), (META, "cuda")):
        other.to_empty(device=device).new_kv_cache(2)
        assert other.selection.device.platform == platform


def test_a_backend_of_the_host_refuses_a_call_on_a_gpu() -> None:
    backend, query = AttentionBackendEnum["CPU_ATTN"].get_class(), SimpleNamespace(device=torch.device("cuda", 1))
    with pytest.raises(DeviceError, match="CPU_ATTN: query is on cuda:1: must be on a device of cpu"):
        check_device(backend, None, query)  # type: ignore[arg-type]


@pytest.mark.full
def test_files_whose_tensors_are_on_the_host_pass_on_a_machine_with_a_gpu() -> None:
    """Those that choose backends without saying for which device, in a process whose selector finds a GPU."""
    names = "test_functional.py test_layer.py selection torch/test_layer.py torch/diffusion reports integrations/test_vllm.py"
    files = [str(TESTS / name) for name in names.split()]
    # A machine with a GPU has Triton; here it may be beside the environment.
    compilers = str(Path(sys.prefix) / "compilers")
    if importlib.util.find_spec("triton") is None and not (Path(compilers) / "triton").is_dir():
        pytest.skip("triton is neither installed nor in the environment's folder compilers")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), compilers])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "tests.testing.gpu_here", *files]
    done = subprocess.run(command, cwd=TESTS.parent, env=env, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["TRITON_ATTN", "TORCH_SDPA", "TRITON_MLA"])
@pytest.mark.parametrize("how", ["context", "to", "device="])
def test_on_a_gpu(name: str, how: str) -> None:
    dtype: dict[str, Any] = {"dtype": torch.float32}
    if how == "context":
        with torch.device("cuda"):
            layer = layer_of(name, **dtype)
        cache, metadata = layer.new_kv_cache(4, device="cuda"), layer.build(BATCH)
    else:
        with torch.device("cuda" if "MLA" in name else "cpu"):  # a latent layer is where its weights are
            layer = layer_of(name, **dtype)
        if how == "to":
            layer = layer.to("cuda")
            cache, metadata = layer.new_kv_cache(4), layer.build(BATCH)
        else:
            cache, metadata = layer.new_kv_cache(4, "cuda"), layer.build(BATCH, device="cuda")
    assert call(layer, metadata, cache, "cuda").device.type == "cuda"
    with pytest.raises(DeviceError, match=rf"{name}: query_start_loc of the batch is on cpu, query on cuda:0: .*cuda:0"):
        call(layer, layer.build(BATCH, device="cpu"), cache, "cuda")
    with pytest.raises(DeviceError, match=rf"{name}: kv_cache is on cpu, query on cuda:0"):
        call(layer, metadata, layer.new_kv_cache(4, "cpu"), "cuda")
