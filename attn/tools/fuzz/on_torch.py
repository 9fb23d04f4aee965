"""Calls of torch's entry, and layers that move between devices, judged."""

import contextlib
import copy
import dataclasses
import re
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from attn.backends.metadata import CommonAttentionMetadata
from attn.errors import DeviceError, ShapeError
from attn.tools.fuzz.entries import CallCase, Compared, LayerCase, is_documented
from attn.torch.dot_product import scaled_dot_product_attention
from attn.torch.layer import Attention, MLAAttention


def call_entry(case: CallCase) -> str:
    """Judge a call of `attn.torch.scaled_dot_product_attention` by torch's own function (`Compared`)."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(shape) for shape in (case.query, case.key, case.value))
    mask = None
    if case.extra:
        mask = torch.randn(case.more) if case.extra == "float" else torch.rand(case.more) > 0.3
        if mask.ndim and case.extra == "bool":
            # A row without keys is 0 here, and may be NaN in torch.
            mask[..., :1] = True
    # Slices, as a shape may have fewer dimensions.
    heads = [shape[-3:-2] for shape in (case.query, case.key, case.value)]
    if torch.__version__ < "2.13" and ((0,) in heads or case.value[-2:-1] == (0,) != case.key[-2:-1]):
        return "declined"  # torch's own divides by the number of heads or of values, and the process dies
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": case.causal, "enable_gqa": case.gqa}
    sign = -1 if (case.scale or 1) < 0 else 1  # torch's kernel for a CPU multiplies the -inf of a causal mask by the scale: NaN
    scale = None if case.scale is None else abs(case.scale)

    def theirs() -> torch.Tensor:
        if case.gqa and heads[1] == (0,) != heads[2]:
            raise RuntimeError("it divides by the number of heads, and the process dies")
        return F.scaled_dot_product_attention(sign * query, key, value, scale=scale, **options)

    return Compared(
        theirs,
        (RuntimeError, IndexError),
        lambda: scaled_dot_product_attention(query, key, value, scale=case.scale, **options),
        ShapeError,
        lambda got, want: torch.testing.assert_close(
            got, want, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda text: f"{case}: another result: {text}"
        ),
        is_documented(case),
    ).judged(case)


def devices() -> list[str]:
    """The devices of `layer_device`."""
    return ["cpu", "meta", *(["cuda"] if torch.cuda.is_available() else [])]


def layer_device(case: LayerCase) -> str:
    """Judge a layer's devices: its metadata and caches are on its home device; a call with two devices is refused and names
    both; a call with one gives the output of a layer that was never moved."""
    # The same layer, never moved: what it gives on the CPU is expected on every device.
    plain, batch = _new_layer(case), CommonAttentionMetadata.from_lens([5], [5], [[1]], 16)
    want = _layer_call(plain, case, ("cpu",) * 4, plain.build(batch, device="cpu"))
    with torch.device(case.made) if case.made else contextlib.nullcontext():
        layer = _new_layer(case)
    for device in case.moved:
        layer = layer.to(device)
    # As transformers and torch's parallel wrappers copy modules.
    layer = copy.deepcopy(layer) if case.copied else layer
    home = _home_device(case)
    if case.batch != "numpy":
        arrays: dict[str, Any] = {name: torch.from_numpy(getattr(batch, name)).to(case.batch) for name in _BATCH}
        batch = dataclasses.replace(batch, **arrays)
    with torch.device(case.during) if case.during else contextlib.nullcontext():
        metadata, cache = layer.build(batch, device=case.asked or None), layer.new_kv_cache(2)
    target = case.asked or home
    for name in _BATCH:
        device_type = getattr(metadata, name).device.type
        assert device_type == target, f"{case}: metadata on another device: {name} on {device_type}, must be {target}"
    assert cache.device.type == home, f"{case}: a cache on another device: {cache.device}, must be {home}"
    inputs = tuple(device or target for device in case.inputs)
    # On the meta device a scale has no value, and cannot come back.
    lost = case.weights.startswith("scale") and case.moved[-1:] == ("meta",)
    used = {*inputs, target, *([home] if case.layer_type == "mla" else []), *(["meta"] if lost else [])}
    if used == {"meta"}:
        return "declined"  # nothing is computed there
    try:
        with torch.device(case.during) if case.during else contextlib.nullcontext():
            got = _layer_call(layer, case, inputs, metadata)
    except DeviceError as error:
        assert len(used) > 1, f"{case}: refused on one device: {error}"
        # Both names, or a user does not know what to move.
        named = [device for device in used if re.search(rf"\b{device}\b", str(error))]
        assert len(named) > 1, f"{case}: the error does not name both devices: {error}"
        return "refused"
    assert len(used) == 1, f"{case}: taken on two devices: {sorted(used)}"
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-4, msg=lambda text: f"{case}: another result: {text}")
    return "served"


def _home_device(case: LayerCase) -> str:
    """Return the device on which a layer makes its metadata and caches."""
    if case.layer_type == "mla":  # the weights' device, which `to` does not change
        return case.made or "cpu"
    # A layer without weights has no device until it is moved: it follows torch's default at the time of the call.
    placed = "" if case.made in ("cpu", "meta") else case.made
    for device in case.moved:
        placed = device if device != (placed or "cpu") else placed
    return placed or case.during or "cpu"


_BATCH = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
_WEIGHTS: dict[str, dict[str, Any]] = {
    "scale": {"kv_cache_dtype": "fp8", "k_scale": 0.05},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.7]},
    "sinks": {"sinks": [0.5, -1.0, 2.0, 0.0]},
    "tensor": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], device="cpu")},
    "scales": {"kv_cache_dtype": "fp8", "k_scale": [0.02, 0.03], "v_scale": [0.01, 0.05]},
}


def _new_layer(case: LayerCase) -> Any:
    """Return a layer of small sizes, made on torch's default device."""
    more = _WEIGHTS.get(case.weights, {})
    if case.layer_type == "mla":
        # not `linspace`: transformers replaces it while it makes a model, and torch then keeps it from following devices
        up = (torch.arange(32 * 4 * 32) / 2047.5 - 1).reshape(32, 4, 32)
        return MLAAttention(4, 32, 16, 8, 16, up, block_size=16, backend=case.backend, **more)
    return Attention(4, 16, num_kv_heads=2, block_size=16, backend=case.backend, **more)


def _layer_call(layer: Any, case: LayerCase, inputs: tuple[str, ...], metadata: Any) -> torch.Tensor:
    """Return the output of 5 tokens, with the query, keys, values and the cache on `inputs`."""
    shapes = [(4, 24), (32,), (8,)] if case.layer_type == "mla" else [(4, 16), (2, 16), (2, 16)]
    numbers = [np.random.default_rng(i).standard_normal((5, *shape), np.float32) for i, shape in enumerate(shapes)]
    # The fourth input is the cache, which is made below.
    tensors = [torch.from_numpy(x).to(device) for x, device in zip(numbers, inputs, strict=False)]
    with torch.no_grad():
        out: torch.Tensor = layer(*tensors, layer.new_kv_cache(2, inputs[3]), metadata)
    return out
