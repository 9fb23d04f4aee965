"""Explain a model: which backend serves each kind of its attention layers, what their cache takes, and lower bounds on time.

The layers come from `attn.reports.model_config`, the choices from `attn.explain`. Times are those of attention alone at the
device's rates (`attn.reports.machines.CEILINGS`): measured ones, or its datasheet's peaks, as the report says.
"""

from collections.abc import Collection
from dataclasses import dataclass
from html import escape
from typing import Any

from attn import dtypes
from attn.arguments import positive_int
from attn.backends.mla.prefill.selector import make_mla_prefill_request, select_mla_prefill
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import ENCODER_TYPES, AttentionType, Device
from attn.dtypes import dtype_name
from attn.reports import machines
from attn.reports.machines import ATTAINED, CEILINGS, Attained, Ceilings, pairs, product_of
from attn.reports.model_config import LayerKind, ModelLayers, read_layers
from attn.reports.report import assumed_machine, explain
from attn.selection.platforms import default_framework, platform_for
from attn.selection.verdicts import Selection
from attn.tables import block, html, paragraph, plain, wrapped

POSITION_BIAS = "adds a learned position bias to the scores, which is not a feature of any paged backend"
_HEAD = ("layers", "kind", "heads", "size", "backend", "cache/token", "cache", "decode ms", "prompt ms")


@dataclass(frozen=True)
class KindReport:
    """One kind of layers. Bytes and operations are of all its layers and, except `token_bytes`, of all requests.

    `selection` is None for layers that are not attention, or that no backend can serve (`reason`); `prefill` is
    the choice of a latent layer's backend for prompts, where the framework has such backends. `decode_bytes` are the cached
    bytes that a decode step reads; `prompt_flops` the operations of prompts as long as the context.
    """

    layer: LayerKind
    selection: Selection | None
    prefill: Selection | None
    reason: str
    token_bytes: int
    cache_bytes: int
    decode_bytes: int
    prompt_flops: int

    @property
    def label(self) -> str:
        """The kind with its window or chunk, such as `sliding 4096`."""
        limit = self.layer.window or self.layer.chunk or self.layer.topk
        return f"{self.layer.name} {limit}" if limit else self.layer.name

    @property
    def backend(self) -> str | None:
        return self.selection.name if self.selection else None

    @property
    def heads(self) -> str:
        return f"{self.layer.num_heads}/{self.layer.num_kv_heads}" if self.layer.is_attention else ""


@dataclass(frozen=True)
class ModelReport:
    """A model's layers, the choice for each kind, and totals for `requests` requests of `context` tokens.

    Prints as text of at most 100 columns and displays as a table in notebooks. `ceilings`: the device's rates, None if
    neither a measurement nor a datasheet is recorded.
    """

    model: ModelLayers
    rows: tuple[KindReport, ...]
    device: Device
    dtype: str
    kv_cache_dtype: str
    block_size: int
    context: int
    requests: int
    ceilings: Ceilings | None

    @property
    def served(self) -> bool:
        """Whether every attention layer has a backend."""
        return all(row.backend for row in self.rows if row.layer.is_attention)

    def total(self, name: str) -> int:
        """Return the sum of a number of `KindReport` over all kinds."""
        return sum(getattr(row, name) for row in self.rows)

    def decode_ms(self, nbytes: int) -> float | None:
        """Return the time of a copy of `nbytes`; None without a record, or where a decode reads no cache."""
        # Bytes / (GB/s) / 1e6 = ms. Decodes read each cached key and value once, so the rate of a copy bounds them.
        return nbytes / self.ceilings.copy_gb_per_s / 1e6 if self.ceilings and nbytes else None

    def prompt_ms(self, flops: int) -> float | None:
        """Return the time of `flops` at the rate of a bfloat16 product; None without a record, or for other dtypes."""
        recorded = self.ceilings is not None and self.dtype == "bfloat16" and flops
        # FLOP / (TFLOP/s) / 1e9 = ms: 1e12 FLOP a TFLOP, 1e3 ms a second. The rate is that of bfloat16, so other dtypes
        # have no time.
        return flops / self.ceilings.gemm_tflop_per_s / 1e9 if recorded and self.ceilings else None

    def measured(self, row: KindReport) -> Attained | None:
        """Return the fractions of the device's rates that the chosen backend reached with such layers, if measured."""
        layer = row.layer
        plain = self.dtype == "bfloat16" and self.kv_cache_dtype == "auto" and not (layer.features or layer.latent)
        # What `ATTAINED` was measured with; a figure of other layers would be a guess.
        plain = plain and self.block_size == 16
        return ATTAINED.get((product_of(self.device.name), row.backend or "", layer.head_size or 0)) if plain else None

    def _measured(self, row: KindReport) -> str:
        """Describe `measured` in a sentence; nothing without it."""
        reached, decode, prompt = self.measured(row), self.decode_ms(row.decode_bytes), self.prompt_ms(row.prompt_flops)
        if reached is None or decode is None or prompt is None:
            return ""
        times = [f"64 decodes {reached.copy:.2f} of the copy's ({decode / reached.copy:.3g} ms at that rate)"]
        if reached.gemm:
            times.append(f"4 prompts {reached.gemm:.2f} of the product's ({prompt / reached.gemm:.3g} ms)")
        return f"rates reached with heads of this size and 4096 tokens: {', '.join(times)}; small batches reach less"

    @property
    def title(self) -> str:
        count = sum(row.layer.count for row in self.rows)
        return f"{self.model.model_type} ({self.model.source}): {count} layers, {self.dtype}, on {self.device}"

    @property
    def notes(self) -> tuple[str, ...]:
        """The source of the model, the meaning of the numbers, and remarks on all choices."""
        load = f"{self.requests} request{'s' * (self.requests > 1)} of {self.context} tokens"
        total = self.total("token_bytes")
        sentences = [
            f"cache ({self.kv_cache_dtype}): {_bytes(total)} per token, {_bytes(total * self.block_size)} per block of "
            f"{self.block_size} tokens in all layers, {_bytes(self.total('cache_bytes'))} for {load}"
        ]
        if any(row.layer.window or row.layer.chunk for row in self.rows):
            sentences.append("cache of windows and chunks: all tokens; less if the caller frees the blocks that no row sees")
        if any(row.layer.chunk for row in self.rows):
            sentences.append(
                "chunked layers: other backends compute them as full attention with each chunk as a request of its own"
            )
        if any(row.layer.attn_type == AttentionType.ENCODER_DECODER for row in self.rows):
            sentences.append("encoder and decoder: both have as many tokens as the context")
        return (*sentences, self._times(), *self.model.notes, *_common(self.rows))

    def _times(self) -> str:
        if self.ceilings is None:
            name = self.device.name or self.device.platform
            return f"times: not recorded: there are no rates of {name} (recorded: {', '.join(CEILINGS)})"
        copy, gemm, source, measured = self.ceilings
        source = f"measured: {source}" if measured else f"peaks, not measured: {source}"
        prompt = f"prompt: its operations at {gemm:.0f} TFLOP/s" if self.dtype == "bfloat16" else "prompt: bfloat16 only"
        return f"times, attention alone: decode: the cached bytes read at {copy:.0f} GB/s; {prompt} ({source})"

    def cells(self) -> list[list[str]]:
        """Return the table's rows, the total last."""
        rows = []
        for row in self.rows:
            layer, attends = row.layer, row.layer.is_attention
            backend = (row.backend or "none") if attends else "not attention"
            rows.append([str(layer.count), row.label, row.heads, str(layer.head_size or ""), backend, *self._numbers(row)])
        # Times of sums equal sums of times, since each is proportional to its bytes or operations.
        total = KindReport(LayerKind("total"), None, None, "", *map(self.total, _NUMBERS))
        return [*rows, [str(sum(row.layer.count for row in self.rows)), "total", "", "", "", *self._numbers(total)]]

    def _numbers(self, row: KindReport) -> list[str]:
        # An empty cell is a time that is not known, or of nothing.
        times = (self.decode_ms(row.decode_bytes), self.prompt_ms(row.prompt_flops))
        return [_bytes(row.token_bytes), _bytes(row.cache_bytes), *("" if ms is None else f"{ms:.3g}" for ms in times)]

    def __str__(self) -> str:
        lines = [*_wrapped("", self.title), "", *block([_HEAD, *self.cells()], "  ")]
        for row in self.rows:
            if row.layer.is_attention:
                lines += ["", *_wrapped("", f"{row.label}: {self.described(row)}")]
                lines += _wrapped("    ", *_choice(row, _common(self.rows)), self._measured(row))
        return "\n".join([*lines, "", *_wrapped("  ", *self.notes, f"fields read: {', '.join(self.model.fields)}")])

    def described(self, row: KindReport) -> str:
        """Describe one layer of a kind: what it needs of a backend, its scale, its cache."""
        layer = row.layer
        words = [f"{row.heads} heads of {layer.head_size}"]
        words += [f"soft_cap {layer.soft_cap:g}" if name == "soft_cap" else name for name in sorted(layer.features)]
        words += [layer.attn_type] if layer.attn_type != AttentionType.DECODER else []
        words += [f"scale {layer.scale:.4g}"] if layer.scale else []
        # `token_bytes` is of all layers of the kind.
        token = row.token_bytes // layer.count
        cached = f"; a layer caches {_bytes(token)} per token, {_bytes(token * self.block_size)} per block" if token else ""
        return ", ".join(words) + cached

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the table, and each kind's selection below it, folded."""
        kinds = "".join(
            f"<details><summary><b>{escape(row.label)}</b>: {escape(self.described(row))}</summary>"
            f"{row.selection._repr_html_() if row.selection else f'<p>{escape(row.reason)}</p>'}"
            f"{f'<p>prompts:</p>{row.prefill._repr_html_()}' if row.prefill else ''}"
            f"<p>{escape(self._measured(row))}</p></details>"
            for row in self.rows
            if row.layer.is_attention
        )
        notes = (*self.notes, f"fields read: {', '.join(self.model.fields)}")
        table = html(_HEAD, ([escape(cell) for cell in cells] for cells in self.cells()))
        texts = "".join(paragraph(escape(note)) for note in notes)
        return f"<div>{paragraph(f'<b>{escape(self.title)}</b>')}{table}{kinds}{texts}</div>"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for `--json`."""
        return {
            "model_type": self.model.model_type,
            "config": self.model.source,
            **{name: plain(getattr(self, name)) for name in _SETTING},
            "fields": list(self.model.fields),
            "notes": list(self.notes),
            "ceilings": plain(self.ceilings),
            "kinds": [
                {
                    **plain(row.layer),
                    "features": sorted(row.layer.features),
                    "backend": row.backend,
                    "reason": row.reason,
                    **self._figures({name: getattr(row, name) for name in _NUMBERS}),
                    "measured": plain(self.measured(row)),
                    "selection": plain(row.selection),
                    "prefill": plain(row.prefill),
                }
                for row in self.rows
            ],
            "total": {
                **self._figures({name: self.total(name) for name in _NUMBERS}),
                "block_bytes": self.total("token_bytes") * self.block_size,
            },
        }

    def _figures(self, numbers: dict[str, int]) -> dict[str, Any]:
        times = {"decode_ms": self.decode_ms(numbers["decode_bytes"]), "prompt_ms": self.prompt_ms(numbers["prompt_flops"])}
        return {**numbers, **times}


def explain_model(
    config: Any,
    *,
    context: int = 4096,
    requests: int = 1,
    dtype: Any = None,
    kv_cache_dtype: str | None = None,
    block_size: int = 16,
    backend: AttentionBackendEnum | str | None = None,
    framework: str | None = None,
    device: Device | str | None = None,
    disable: Collection[str] = (),
    assume: Collection[str] | None = None,
) -> ModelReport:
    """Explain which backend each attention layer of a model would get, and what the layers' caches take.

    Reads transformers' configuration without importing transformers. Other arguments are those of `attn.explain`, and:
        config: a `config.json`, a folder with one, its contents as a dict, or a configuration object of transformers.
        context: tokens per request, in the cache or in the prompt.
        requests: requests in the batch.
        dtype: dtype of the activations. None: the file's.

    Raises `CheckpointError` (a ValueError) for a configuration that cannot be read, with the file and the field, and ValueError
    for malformed arguments; layers that no backend serves are in the report (`ModelReport.served` is False).
    """
    context, requests = positive_int("context", context), positive_int("requests", requests)
    block_size = positive_int("block_size", block_size)
    model = read_layers(config)
    dtype = model.dtype if dtype is None else dtype
    # Raises for a format that does not exist.
    dtypes.kv_cache_element(kv_cache_dtype, dtype_name(dtype))  # encoders have no cache whose request would check it
    if isinstance(device, str):
        device = machines.device_named(device, framework or dtypes.framework_of_dtype(dtype))
    kv_cache_dtype = kv_cache_dtype or "auto"
    rows: list[KindReport] = []
    # The device of the first choice, where none was passed: all layers of a model are on one.
    target: Device | None = device
    args: dict[str, Any] = {"backend": backend, "framework": framework, "device": device, "disable": disable, "assume": assume}
    for layer in model.kinds:
        # T5's bias differs for each pair of positions and head, which no feature of a paged backend describes, so none
        # is asked.
        selection, reason = None, POSITION_BIAS if layer.position_bias else ""
        if layer.is_attention and not reason:
            cached = layer.attn_type not in ENCODER_TYPES
            arguments = {name: getattr(layer, name) for name in ("features", "attn_type", "num_heads", "num_kv_heads")}
            # Encoders attend the keys of the call: no cache, and no block size that could rule out a backend.
            stored, page = (kv_cache_dtype, block_size) if cached else (None, None)
            selection = explain(layer.head_size, dtype, stored, page, **arguments, **args)
            target = selection.device
        token = _token_bytes(layer, dtype_name(dtype), kv_cache_dtype) * layer.count
        row = KindReport(
            layer=layer,
            selection=selection,
            prefill=_prefill(layer, selection, assume),
            reason=reason,
            token_bytes=token,
            # Whole blocks: the last one of a request is allocated even if one token is in it.
            cache_bytes=token * -(-context // block_size) * block_size * requests,
            decode_bytes=token * _seen(layer, context) * requests,
            prompt_flops=_pair_flops(layer) * _pairs(layer, context) * layer.count * requests,
        )
        rows.append(row)
    # A model without attention made no choice that could name a device.
    target = target or platform_for(framework or dtypes.framework_of_dtype(dtype) or default_framework()).device()
    return ModelReport(
        model=model,
        rows=tuple(rows),
        device=target,
        dtype=dtype_name(dtype),
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        context=context,
        requests=requests,
        ceilings=CEILINGS.get(product_of(target.name)),
    )


_NUMBERS = ("token_bytes", "cache_bytes", "decode_bytes", "prompt_flops")
_SETTING = ("device", "dtype", "kv_cache_dtype", "block_size", "context", "requests")


def _prefill(layer: LayerKind, selection: Selection | None, assume: Collection[str] | None) -> Selection | None:
    """Choose the backend for prompts of a latent layer; None without candidates, and for a sparse one."""
    # A sparse layer's prompts are computed from the chosen rows of the latent cache: no heads are expanded.
    if selection is None or layer.latent is None or layer.topk:
        return None
    key = layer.latent.qk_nope_head_dim + layer.latent.qk_rope_head_dim
    request = make_mla_prefill_request(key, layer.latent.v_head_dim, selection.request.dtype, num_heads=layer.num_heads)
    # The same assumptions as for the layer's own choice, which `explain` has left by now.
    with assumed_machine(selection.device, None, assume):
        prefill = select_mla_prefill(request, framework=selection.device.framework, device=selection.device)
    return prefill if prefill.trace else None


def _token_bytes(layer: LayerKind, dtype: str, kv_cache_dtype: str) -> int:
    """Count the bytes of a token in one layer's cache: keys and values, or the row of a latent, which is both."""
    if not layer.is_attention or layer.attn_type in ENCODER_TYPES:
        return 0
    stored = dtypes.DTYPES[dtypes.kv_cache_element(kv_cache_dtype, dtype)].itemsize
    row = stored * dtypes.kv_cache_row(kv_cache_dtype, layer.head_size)
    # A latent row is key and value of all heads; other layers store both, for each kv head.
    return row if layer.latent else 2 * layer.num_kv_heads * row


def _seen(layer: LayerKind, context: int) -> int:
    """Count the cached tokens that the last of `context` tokens sees."""
    if layer.chunk:
        # The last token's position within its chunk, itself included.
        return (context - 1) % layer.chunk + 1
    return min(context, layer.window or layer.topk or context)


def _pairs(layer: LayerKind, context: int) -> int:
    """Count the visible pairs of a query and a key in a prompt of `context` tokens."""
    # Encoders and cross attention are not causal: every row sees every key.
    if layer.attn_type != AttentionType.DECODER:
        return context * context
    if layer.chunk:
        # Chunks do not see each other: each whole one is a causal prompt of its own, and so is the rest.
        whole, tail = divmod(context, layer.chunk)
        return whole * pairs(layer.chunk, layer.chunk, layer.chunk) + pairs(tail, tail, layer.chunk)
    return pairs(context, context, layer.window or layer.topk or context)


def _pair_flops(layer: LayerKind) -> int:
    """Count the operations of all heads for a query and a key: scores and weighted values. A prompt over a latent expands its
    keys and values, whose projections are not counted; a sparse one reads the latent itself."""
    if layer.latent is None:
        # Two products of head_size multiplications and as many additions: scores, and weighted values.
        return 4 * layer.num_heads * layer.head_size
    rank, rope, nope, value = layer.latent
    return 2 * layer.num_heads * (rank + rope + rank if layer.topk else nope + rope + value)


def _choice(row: KindReport, common: Collection[str]) -> list[str]:
    """Return the candidates and their verdicts, and the notes that other choices do not share."""
    if row.selection is None:
        return [f"   no backend: {row.reason}"]
    verdicts = _verdicts(row.selection)
    if row.prefill:
        verdicts += ["prompts:", *_verdicts(row.prefill)]
    requested = [] if row.selection.source == "priority" else [f"requested by {row.selection.source}"]
    measured = [f"measured on this machine: {row.selection.measured}"] if row.selection.measured else []
    return [*requested, *verdicts, *measured, *(note for note in row.selection.notes if note not in common)]


def _verdicts(selection: Selection) -> list[str]:
    marked = [f"{'->' if v is selection.winner else '  '} {v.name}: {v}" for v in selection.trace]
    return marked or [f"   {reason}" for reason in selection.reasons]


def _common(rows: Collection[KindReport]) -> tuple[str, ...]:
    """Return the notes that all choices have."""
    # Shown once below the table instead of below each kind.
    notes = [row.selection.notes for row in rows if row.selection]
    return tuple(note for note in notes[0] if all(note in other for other in notes)) if notes else ()


def _wrapped(indent: str, *texts: str) -> list[str]:
    """Wrap paragraphs, their second and later lines indented further."""
    return [line for text in texts for line in wrapped(text, indent, "     ")]


def _bytes(count: int) -> str:
    """Format bytes in the largest binary unit with at least one; nothing for 0."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}" if count else ""
