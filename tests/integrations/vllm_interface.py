"""The parts of vLLM's interface that `attn` uses, checked on the installed `vllm`: the stand-in in tests, a real one in
`benchmarks/vllm_cpu.py`.

The stand-in's signatures are the documentation. Batches go through vLLM's own classes of one description, without an engine.
"""

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STANDIN = Path(__file__).parents[1] / "standins" / "vllm_engine_pkg"
#: Modules with classes whose signatures count.
MODULES = ("vllm.v1.attention.backend", "vllm.v1.attention.backends.cpu_attn", "vllm.v1.attention.selector")


def drift(standin: Path = STANDIN, modules: tuple[str, ...] = MODULES) -> list[str]:
    """What the installed package has otherwise than documented: a missing name or argument, one more without a default."""
    return [found for name in modules for found in _drift(name, _documented(standin, name), importlib.import_module(name))]


def _documented(standin: Path, name: str) -> Any:
    """A module of the stand-in, whichever package is installed."""
    path = standin.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"documented_{name.rpartition('.')[2]}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _drift(where: str, documented: Any, real: Any) -> Iterator[str]:
    for name, cls in vars(documented).items():
        if getattr(cls, "__module__", None) != documented.__name__ or name.startswith("_"):
            continue
        if not hasattr(real, name):
            yield f"{where} has no {name}"
            continue
        if not inspect.isclass(cls):
            yield from _arguments(f"{where}.{name}", cls, getattr(real, name))
            continue
        for what in (f for f in vars(cls) if callable(getattr(cls, f)) and (not f.startswith("_") or f == "__init__")):
            found = getattr(getattr(real, name), what, None)
            if found is None:
                yield f"{name} has no {what}"
            else:
                yield from _arguments(f"{name}.{what}", getattr(cls, what), found)


def _arguments(what: str, documented: Any, real: Any) -> Iterator[str]:
    want, found = (inspect.signature(f).parameters for f in (documented, real))
    yield from (f"{what} has no {name}" for name in want if name not in found)
    more = [p for name, p in found.items() if name not in want and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    yield from (f"{what} wants {p.name} too" for p in more if p.default is p.empty)
    common = [name for name in found if name in want]
    if common != [name for name in want if name in found]:
        yield f"{what} has its arguments in another order: {', '.join(found)}"


def layer(**more: Any) -> Any:
    """What an implementation reads of the layer that calls it."""
    import torch

    one = torch.ones(())
    return SimpleNamespace(
        _q_scale=one,
        _k_scale=one,
        _v_scale=one,
        _prob_scale=one,
        _k_scale_float=1.0,
        _v_scale_float=1.0,
        kv_sharing_target_layer_name=None,
        **more,
    )


def builder(backend: Any = None) -> Any:
    """Our builder, or that of a backend made from ours, for layers of a name."""
    import torch

    from attn.integrations._vllm import AttnBackend

    make = (backend or AttnBackend).get_builder_cls()
    return make(
        SimpleNamespace(block_size=16), ["layers.0.attn"], SimpleNamespace(speculative_config=None), torch.device("cpu")
    )


def common(query_lens: list[int], seq_lens: list[int], block_size: int, padding: int = 0, **more: Any) -> Any:
    """vLLM's description of a batch, blocks dealt in turn from 1 on; `padding` rows at its end belong to no request."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    each = [-(-n // block_size) for n in seq_lens]
    table = torch.zeros(len(each), max(each), dtype=torch.int32)
    for r, n in enumerate(each):
        table[r, :n] = torch.arange(n) * len(each) + r + 1
    slots = [
        int(table[r, p // block_size]) * block_size + p % block_size
        for r, (q, n) in enumerate(zip(query_lens, seq_lens, strict=True))
        for p in range(n - q, n)
    ]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    settings = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "num_reqs": len(each),
        "num_actual_tokens": len(slots) + padding,
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        "block_table_tensor": table,
        "slot_mapping": torch.tensor(slots + [-1] * padding),
        "causal": True,
    }
    return CommonAttentionMetadata(**{**settings, **more})


def new_cache(layout: str, blocks: int, heads: int, block_size: int, row: int, dtype: Any = None) -> Any:
    """vLLM's cache of the second of three layers [N, K, P, 2 D], in memory as a layout says; NaN where nothing is written."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheLayout

    shape, order = (3, blocks, heads, block_size, row), KVCacheLayout[layout].value
    memory = torch.full([shape[i] for i in order], torch.nan, dtype=dtype)
    return memory.permute([order.index(i) for i in range(5)])[1]


HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32
#: Images of the two requests of `_decoder`: three in the first step, one in the second, whose decode sees it causally.
IMAGES = {0: [(0, 3), (8, 18), (22, 35)], 1: [(2, 16)]}


def batches() -> Iterator[tuple[str, float]]:
    """(what a layer needs, its largest difference from the formula) of prompts, their continuation and decodes in one batch."""
    import torch
    from vllm.v1.attention.backend import AttentionType

    sinks = torch.linspace(-1, 1, HEADS)
    slopes = [2.0**-i for i in range(HEADS)]
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("a causal layer", {}, {}),
        ("a window of 7", {"sliding_window": 7}, {"window": (6, 0)}),
        ("a soft cap", {"logits_soft_cap": 2.0}, {"logits_soft_cap": 2.0}),
        ("sinks and a window", {"sinks": sinks, "sliding_window": 7}, {"sinks": sinks, "window": (6, 0)}),
        ("ALiBi", {"alibi_slopes": slopes}, {"alibi_slopes": torch.tensor(slopes)}),
    ]
    yield "images", _decoder("LBHNC", {}, {}, IMAGES)
    yield "images beside a window", _decoder("LBHNC", {"sliding_window": 7}, {"window": (6, 0)}, IMAGES)
    yield "images cut by a window", _decoder("LBHNC", {"sliding_window": 7}, {"window": (6, 0)}, IMAGES, clamp=True)
    for layout in ("LBHNC", "LBNHC", "BLHNC"):
        for what, arguments, terms in cases:
            yield f"{what}, layout {layout}", _decoder(layout, arguments, terms)
    yield "an encoder", _encoder(AttentionType.ENCODER_ONLY)


def _draw(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@contextlib.contextmanager
def made_in(dtype: Any) -> Iterator[None]:
    """As vLLM builds a model: its dtype is torch's default."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def implementation(dtype: Any = None, backend: Any = None, **arguments: Any) -> Any:
    import torch

    from attn.integrations._vllm import AttnBackend

    with made_in(dtype or torch.float32):
        return (backend or AttnBackend).get_impl_cls()(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, **arguments)


def _decoder(layout: str, arguments: dict[str, Any], terms: dict[str, Any], images: Any = None, clamp: bool = False) -> float:
    """Two prompts, then more of one beside a decode of the other and rows of padding, against the formula over all keys.

    images: as `mm_req_doc_ranges`. clamp: whether a window cuts them.
    """
    import torch

    import attn

    impl, cache = implementation(**arguments), new_cache(layout, 7, KV_HEADS, 16, 2 * HEAD_SIZE)
    keys, values = ([_draw(n + which, KV_HEADS, HEAD_SIZE)[:n] for n in (40, 19)] for which in (0, 1))
    worst = 0.0
    for query_lens, seq_lens, padding in (([20, 18], [20, 18], 0), ([20, 1], [40, 19], 3)):
        step = common(query_lens, seq_lens, 16, padding, mm_req_doc_ranges=images)
        fresh = [slice(n - q, n) for q, n in zip(query_lens, seq_lens, strict=True)]
        key, value = (torch.cat([x[rows] for x, rows in zip(both, fresh, strict=True)]) for both in (keys, values))
        impl.do_kv_cache_update(layer(), key, value, cache, step.slot_mapping)
        query = _draw(step.num_actual_tokens, HEADS, HEAD_SIZE)
        output = torch.full_like(query, torch.nan)
        called = layer(mm_prefix_clamp_sliding_window=clamp)
        impl.forward(called, query, key, value, cache, builder().build(0, step), output=output)
        for r, (start, n) in enumerate(zip((0, query_lens[0]), seq_lens, strict=True)):
            mine = slice(start, start + query_lens[r])
            rows = torch.arange(n - query_lens[r], n)
            spans = torch.full((len(rows), 2), -1, dtype=torch.int32)
            for image in (images or {}).get(r, ()):
                spans[(rows >= image[0]) & (rows <= image[1])] = torch.tensor(image, dtype=torch.int32)
            reach = {"spans": spans.numpy(), "span_window": clamp} if images else {}
            q, k, v = query[None, mine], keys[r][None, :n], values[r][None, :n]
            want = attn.attention(q, k, v, causal=True, **terms, **reach)[0]
            worst = max(worst, float((output[mine] - want).abs().max()))
    return worst


def _encoder(attn_type: Any) -> float:
    """Two requests, each of which sees itself; vLLM gives one block a request and no cache."""
    import torch

    import attn

    impl, lens = implementation(attn_type=attn_type), [9, 33]
    step = common(lens, lens, 16, block_table_tensor=torch.zeros(2, 1, dtype=torch.int32), causal=False)
    query, key, value = (_draw(sum(lens) + i, h, HEAD_SIZE)[: sum(lens)] for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    impl.do_kv_cache_update(layer(), key, value, torch.empty(0), step.slot_mapping)
    output = torch.empty_like(query)
    impl.forward(layer(), query, key, value, torch.empty(0), builder().build(0, step), output)
    worst = 0.0
    for part in (slice(0, 9), slice(9, 42)):
        want = attn.attention(query[None, part], key[None, part], value[None, part], causal=False)[0]
        worst = max(worst, float((output[part] - want).abs().max()))
    return worst


# --- only with a real vLLM: what it makes of a backend by itself ------------------------------------------------------


def chosen() -> list[str]:
    """What goes wrong when a real vLLM for processors is to find us: its registry, its platform, its selector's words."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from attn.integrations import vllm as integration

    path = integration.register()
    backend: Any = AttentionBackendEnum.CUSTOM.get_class()
    plain = AttentionSelectorConfig(64, torch.bfloat16, "auto", None, has_sink=True, has_sliding_window=True)
    wrong = [] if ".".join(backend.full_cls_name()) == path else [f"CUSTOM leads to {backend}"]
    for asked, expected in ((AttentionBackendEnum.CUSTOM, path), (None, AttentionBackendEnum.CPU_ATTN.value)):
        got = current_platform.get_attn_backend_cls(asked, attn_selector_config=plain, num_heads=4)
        wrong += [f"{asked} is given {got}"] if got != expected else []
    for flag in ("use_mla", "use_sparse", "use_rswa", "use_dcp"):
        if not backend.validate_configuration(device_capability=None, **plain._replace(**{flag: True})._asdict()):
            wrong.append(f"{flag} is not refused")
    return wrong


def wrapped() -> Iterator[tuple[str, float]]:
    """(what, largest difference from the formula) of vLLM's own wrappers around a backend."""
    yield "cross attention", _cross()
    yield "chunks of 16", _chunked()


def _cross() -> float:
    """Two requests' first step, which writes the encoder's keys, and their next, which finds them."""
    import numpy as np
    import torch
    from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend

    import attn
    from attn.integrations._vllm import AttnBackend

    backend, lens = create_cross_attention_backend(AttnBackend), [33, 9]
    impl, cache = (
        implementation(backend=backend, attn_type="encoder_decoder"),
        new_cache("LBHNC", 7, KV_HEADS, 16, 2 * HEAD_SIZE),
    )
    key, value = (_draw(42 + i, KV_HEADS, HEAD_SIZE)[:42] for i in (0, 1))
    worst = 0.0
    for query_lens, seq_lens, written in (([4, 1], [4, 1], (key, value)), ([1, 1], [5, 2], (None, None))):
        now, encoder = (torch.tensor(n, dtype=torch.int32) for n in (seq_lens, lens))
        step = common(
            query_lens,
            lens,
            16,
            seq_lens_cpu_upper_bound=now,
            encoder_seq_lens=encoder,
            encoder_seq_lens_cpu=np.array(lens, dtype=np.int32),
        ).replace(seq_lens=now)
        query = _draw(sum(query_lens), HEADS, HEAD_SIZE)
        output = torch.full_like(query, torch.nan)
        impl.forward(layer(), query, *written, cache, builder(backend).build(0, step), output)
        for mine, keys in ((slice(0, query_lens[0]), slice(0, 33)), (slice(query_lens[0], None), slice(33, 42))):
            want = attn.attention(query[None, mine], key[None, keys], value[None, keys])[0]
            worst = max(worst, float((output[mine] - want).abs().max()))
    return worst


def _chunked() -> float:
    """A prompt of 40 and a chunk of another, whose rows see keys of their own chunk of 16 alone."""
    import torch
    from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend

    import attn
    from attn.integrations._vllm import AttnBackend

    backend = create_chunked_local_attention_backend(AttnBackend, 16)
    impl, cache = implementation(backend=backend), new_cache("LBHNC", 7, KV_HEADS, 16, 2 * HEAD_SIZE)
    query_lens, seq_lens = [40, 7], [40, 21]
    step = common(query_lens, seq_lens, 16, seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32))
    every = common(seq_lens, seq_lens, 16)
    key, value = (_draw(61 + i, KV_HEADS, HEAD_SIZE)[:61] for i in (0, 1))
    impl.do_kv_cache_update(layer(), key, value, cache, every.slot_mapping)
    query = _draw(47, HEADS, HEAD_SIZE)
    output = torch.full_like(query, torch.nan)
    impl.forward(layer(), query, key, value, cache, builder(backend).build(0, step), output)
    worst = 0.0
    for mine, keys, n, q in ((slice(0, 40), slice(0, 40), 40, 40), (slice(40, 47), slice(40, 61), 21, 7)):
        chunk = torch.arange(n) // 16
        want = attn.attention(
            query[None, mine], key[None, keys], value[None, keys], causal=True, mask=chunk[-q:, None] == chunk
        )[0]
        worst = max(worst, float((output[mine] - want).abs().max()))
    return worst
