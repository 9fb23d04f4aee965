"""Conformance of diffusion backends (the dense family): compared with the float64 oracle, cases derived from capabilities.

Cases cover lengths that are not multiples of a tile, all kinds of masks, both orders of a joint stream, grouped heads and
NaN in masked keys. Calls outside a backend's limits must be rejected with the reasons of `why_not_call`. A framework's
driver (`attn.torch.diffusion.testing`, `attn.jax.diffusion.testing`) converts a call from NumPy and its result back. A
backend that approximates is checked against the error that it declares, every other one against `rules.BUDGETS`. Level
`full` adds Flux's length and, on a GPU, arrays with offsets of more than 32 bits (`vast`), which are drawn on the device
and compared at some rows.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from attn import reference
from attn.capabilities import Device, Feature, supports_size
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata, DiffusionRequest
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.errors import UnsupportedError
from attn.imports import resolve_obj_by_qualname
from attn.testing import bits
from attn.testing.case import Recipe
from attn.testing.conformance import Family, Report, run_family
from attn.testing.rules import BUDGETS, require
from attn.testing.subject import Subject
from attn.testing.suite import LEVELS

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DenseCase(Recipe):
    """A case of the dense family.

    rows, keys: lengths S and M of each of `batch` entries.
    lens: number of present keys of each entry; (): all.
    holes: use a key mask that is not a prefix.
    mask: use a full boolean mask.
    joint: (rows, keys) of a second stream, joined at the front or, with `rear`, at the rear.
    vast: draw the arrays on the device and compare some rows.
    inputs: "randn" or "needle" (every query looks for one key).
    layout: memory layout of rows: "heads" ([B, S, H, D]) or, torch only, "heads_first" (views of [B, H, S, D]) or "fused"
        (views of wider rows, at odd addresses and strides).
    refused: reasons that the rejection of the call must state.
    """

    option = " --registry diffusion"
    words = {"inputs": ("randn", "needle"), "layout": ("heads", "heads_first", "fused")}

    name: str
    rows: int = 33
    keys: int = 33
    batch: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_size: int = 64
    dtype: str = "bfloat16"
    causal: bool = False
    scale: float | None = None
    lens: tuple[int, ...] = ()
    holes: bool = False
    mask: bool = False
    joint: tuple[int, int] = (0, 0)
    rear: bool = False
    vast: bool = False
    inputs: str = "randn"
    layout: str = "heads"
    seed: int = 0
    refused: tuple[str, ...] = ()

    def request(self, error_budget: float = 0.0) -> DiffusionRequest:
        """Return the case's request to a backend."""
        features = frozenset({Feature.MASK.value} if self.mask else ())
        return DiffusionRequest(
            self.head_size,
            self.dtype,
            features=features,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            error_budget=error_budget,
            **self.call_facts,
        )

    @property
    def call_facts(self) -> dict[str, Any]:
        """The arguments of `why_not_call`."""
        rows, keys = self.rows + self.joint[0], self.keys + self.joint[1]
        padded = any(n < self.keys for n in self.lens)
        return {"rows": rows, "keys": keys, "causal": self.causal, "key_mask": padded or self.holes}


@dataclass
class DenseArrays:
    """A case's arrays: float32 values representable in the case's dtype. See `DiffusionAttentionMetadata`."""

    case: DenseCase
    query: Array
    key: Array
    value: Array
    present: Array | None
    mask: Array | None
    joint: tuple[Array, Array, Array] | None

    @property
    def given_mask(self) -> Array | None:
        """The mask that is passed: of rows and keys if there is one, else of keys."""
        return self.present if self.mask is None else self.mask


def attend(impl: Any, call: DenseArrays, qkv: Sequence[Any], mask: Any, joint: Sequence[Any] | None) -> Any:
    """Run an implementation on a call's arrays of its framework; `mask` is None, or that of keys or of rows and keys."""
    meta = DiffusionAttentionMetadata(joint_strategy="rear" if call.case.rear else "front")
    # Lengths and a mask are two ways to say which keys are present; a case uses one, so that both are tested.
    if call.case.lens:
        meta.kv_lens = call.case.lens
    else:
        meta.attn_mask = mask
    if joint is not None:
        query, meta.joint_key, meta.joint_value = joint
        # A joint stream may have keys alone; None, as a caller without queries passes.
        meta.joint_query = query if query.shape[1] else None
    if mask is None and joint is None and not call.case.lens:
        # An implementation may keep the launch of calls without masks: the third is the first that finds it made.
        query, key, value = qkv
        for other in (query, -query):
            impl.forward(other, key, value)
        return impl.forward(*qkv)
    return impl.forward(*qkv, meta)


#: Every other head of 72 begins 16 bytes after a multiple of 32 in 16 bits.
_SIZES = (32, 72, 80, 96, 128, 256)


def dense_cases(backend: Any, device: Device | None = None, level: str = "quick") -> list[DenseCase]:
    """Return the cases that a backend class must pass and the calls that it must reject, from its capabilities and limits.

    Raises ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r} (supports {', '.join(LEVELS)})")
    c = backend.capabilities
    size = Subject.sizes((64, 128, 32, 192, 256), c.head_sizes)[0]
    plain = DenseCase("self", head_size=size, dtype=next(d for d in ("bfloat16", "float32", "float16") if d in c.dtypes))
    candidates = [
        plain,
        replace(plain, name="one row, one key", rows=1, keys=1),
        replace(plain, name="one row", rows=1, keys=77),
        replace(plain, name="one key", keys=1, rows=3),
        replace(plain, name="77 rows", rows=77, keys=77),
        replace(plain, name="cross", rows=40, keys=77),
        replace(plain, name="grouped heads", num_heads=6, num_kv_heads=2),
        replace(plain, name="causal", causal=True, rows=70, keys=70),
        replace(plain, name="explicit scale", scale=0.31),
        replace(plain, name="negative scale", scale=-0.31),
        replace(plain, name="negative scale, causal", scale=-0.31, causal=True, rows=70, keys=70),
        replace(plain, name="longer than a tile", rows=130, keys=200, batch=1),
        *(replace(plain, name=f"head size {s}", head_size=s) for s in _SIZES if supports_size(s, c.head_sizes)),
        *(replace(plain, name=d, dtype=d) for d in c.dtypes if d in BUDGETS),
        *(
            replace(plain, name=f"{d}, {words}, views at odd addresses", dtype=d, rows=rows, batch=batch, layout="fused")
            for d in c.dtypes
            if c.framework == "torch" and d in BUDGETS
            for words, rows, batch in (("33 rows", 33, 2), ("one row", 1, 1))
        ),
        replace(plain, name="joint, front", joint=(7, 7)),
        replace(plain, name="joint, rear", joint=(7, 7), rear=True),
        replace(plain, name="joint keys alone", joint=(0, 9)),
        replace(plain, name="causal, fewer rows than keys", causal=True, rows=20, keys=50),
        replace(plain, name="causal, more rows than keys", causal=True, rows=50, keys=20),
        replace(plain, name="padded keys", rows=20, keys=40, lens=(17, 40)),
        replace(plain, name="an entry without keys", rows=20, keys=40, lens=(0, 33)),
        replace(plain, name="holes among keys", rows=20, keys=40, holes=True),
        replace(plain, name="joint, padded text", joint=(7, 7), lens=(20, 33)),
        replace(plain, name="causal, padded keys", causal=True, rows=40, keys=40, lens=(17, 40)),
    ]
    if level == "full":
        few = replace(plain, batch=1, num_heads=2, num_kv_heads=1)
        candidates += [
            replace(few, name="4608 rows", rows=4608, keys=4608),
            replace(few, name="4608 rows with the joint stream's", rows=4096, keys=4096, joint=(512, 512)),
            *(_vast(plain) if device is not None and device.platform in ("cuda", "rocm") else ()),
        ]
    if Feature.MASK in c.features:
        candidates += [replace(plain, name="mask", mask=True), replace(plain, name="mask, grouped", mask=True, num_kv_heads=2)]
    runs_on = None if device is None or c.device_reasons(device) else device  # otherwise it is interpreted, or a stand-in
    cases: dict[str, DenseCase] = {}
    for case in candidates:
        why = backend.why_not_call(**case.call_facts)
        if why:
            # `vast` would call the driver's function for large arrays, which expects a result.
            cases[f"refused: {case}"] = replace(case, name=f"refused: {case}", vast=False, refused=tuple(why))
            # A backend that only demands a multiple of keys (`key_multiple`) is tested with the next one.
            case = _fitted(case, backend)
        # skip unsupported combinations: the installed provider may support less than the family
        if not backend.why_not(case.request(backend.error), runs_on):
            cases[case.name] = case
    return list(cases.values())


def _fitted(case: DenseCase, backend: Any) -> DenseCase:
    """Return the case with keys added up to the backend's multiple (and as many rows, if there were as many as keys)."""
    more = -(case.keys + case.joint[1]) % backend.key_multiple
    # More keys would move the diagonal.
    if case.causal or not more:
        return case
    name = f"{case}, and {more} keys more"
    return replace(case, name=name, keys=case.keys + more, rows=case.rows + more * (case.rows == case.keys))


def _vast(plain: DenseCase) -> list[DenseCase]:
    """Return cases with queries, keys or both of more than 2**31 elements; the other array is short to save time."""
    long = replace(plain, batch=1, num_heads=32, num_kv_heads=32, head_size=128, rows=77, keys=77, vast=True)
    many = 2**31 // (32 * 128) + 64  # rows of a sequence; the last 64 are beyond 2**31 elements
    return [
        replace(long, name="keys of 2**31 elements", keys=many),
        replace(long, name="queries of 2**31 elements", rows=many, joint=(512, 512), keys=64),
        replace(long, name="a batch of 2**31 elements", batch=64, rows=8256, keys=8256),
        replace(long, name="a batch of 2**31 elements, padded", batch=64, rows=8256, keys=8256, lens=(8000,) * 63 + (8200,)),
    ]


def draw_dense(case: DenseCase) -> DenseArrays:
    """Return the arrays of a case, deterministically; keys and values that a key mask excludes are NaN."""
    seeds = (case.seed,) if case.seed else ()
    rng = np.random.default_rng((case.rows, case.keys, case.head_size, case.num_heads, *seeds))

    def normal(rows: int, heads: int) -> Array:
        values = rng.standard_normal((case.batch, rows, heads, case.head_size), np.float32)
        return bits.drawn(values, case.dtype)

    q, k, v = normal(case.rows, case.num_heads), normal(case.keys, case.num_kv_heads), normal(case.keys, case.num_kv_heads)
    if case.inputs == "needle":
        scale = case.head_size**-0.5 if case.scale is None else case.scale
        target = rng.integers(0, case.keys, (case.batch, case.rows, case.num_heads))
        sought = k[
            np.arange(case.batch)[:, None, None], target, np.arange(case.num_heads) // (case.num_heads // case.num_kv_heads)
        ]
        q = bits.drawn((8 / (scale * case.head_size) * sought + 0.25 * q).astype(np.float32), case.dtype)  # scores of about 8
    present = None
    if case.lens:
        present = np.arange(case.keys) < np.array(case.lens)[:, None]
    elif case.holes:
        # [B, M]; an entry may lose all keys, whose rows must then be 0.
        present = rng.random((case.batch, case.keys)) < 0.6
    if present is not None:
        # Every dense backend must exclude masked keys instead of multiplying them by 0.
        k[~present] = v[~present] = np.nan
    # [B, 1, S, M]: one mask for all heads, as models pass it.
    mask = rng.random((case.batch, 1, case.rows, case.keys)) < 0.7 if case.mask else None
    if mask is not None:
        mask[:1, 0, min(3, case.rows - 1) :][:, :1] = False  # a row without keys
    rows, keys = case.joint
    joint = (normal(rows, case.num_heads), normal(keys, case.num_kv_heads), normal(keys, case.num_kv_heads)) if keys else None
    return DenseArrays(case, q, k, v, present, mask, joint)


def expected_dense(call: DenseArrays) -> Array:
    """Return the oracle's result [B, S (+ J), H, D] in float64."""
    case = call.case
    q, k, v, present = call.query, call.key, call.value, call.present
    if call.joint is not None:
        seen = np.ones(k.shape[:2], bool) if present is None else present
        extra = np.ones(call.joint[1].shape[:2], bool)
        # The mask is of the image's keys; the joint stream's are all present.
        parts = [(call.joint[0], q), (call.joint[1], k), (call.joint[2], v), (extra, seen)]
        q, k, v, present = (np.concatenate(p[::-1] if case.rear else p, 1) for p in parts)
    out = np.zeros(q.shape)
    for b in range(case.batch):
        mask = None if call.mask is None else call.mask[b]
        if present is not None:
            mask = present[b][None, None] if mask is None else mask & present[b]
        out[b] = reference.attention(q[b], k[b], v[b], scale=case.scale, causal=case.causal, mask=mask)[0]
    return out


def check_dense(backend: Any, case: DenseCase) -> None:
    """Run one case on a backend class.

    Raises AssertionError with the worst row's error and the allowed error.
    """
    driver = f"attn.{backend.get_impl_cls().framework}.diffusion.testing"
    if case.vast:
        for sampled in resolve_obj_by_qualname(f"{driver}.vast")(backend, case):
            require(sampled.finite, f"{case}: non-finite numbers in the output")
            # [R, 1, D] and [M, 1, D]: the oracle takes heads in the second axis.
            arrays = (sampled.query[:, None], sampled.key[:, None], sampled.value[:, None])
            _judge(backend, case, sampled.out[:, None], reference.attention(*arrays, scale=case.scale)[0])
        return
    call = draw_dense(case)
    run: Callable[[Any, DenseArrays], Array] = resolve_obj_by_qualname(f"{driver}.dense")
    if case.refused:
        try:
            run(backend, call)
        except UnsupportedError as refusal:
            # The call may have further reasons.
            require(set(case.refused) <= set(refusal.reasons), f"{case}: rejected with other reasons: {refusal}")
            return
        raise AssertionError(f"{case}: computed instead of rejected: {'; '.join(case.refused)}")
    got, want = run(backend, call).astype(np.float64), expected_dense(call)
    require(got.shape == want.shape, f"{case}: shape {got.shape}, not {want.shape}")
    # The oracle's result is finite in every case; a count says more than a relative error of NaN.
    require(np.isfinite(got).all(), f"{case}: {np.sum(~np.isfinite(got))} numbers are not finite")
    _judge(backend, case, got, want)


def _judge(backend: Any, case: DenseCase, got: Array, want: Array) -> None:
    """Check every row's error against the dtype's budget, and an approximation's total error against the declared one."""
    if not want.size:
        return
    # [B, S, H]. A row without keys has a size of 0: its error is then absolute.
    size = np.sqrt((want**2).mean(-1))
    error = np.sqrt(((got - want) ** 2).mean(-1)) / np.where(size == 0, 1, size)
    budget = BUDGETS[case.dtype].hard
    # A declared error is that of the whole output; single rows of an approximation scatter about it.
    worst, most = np.unravel_index(error.argmax(), error.shape), budget + 3 * backend.error
    require(error[worst] <= most, f"{case}: relative row error {error[worst]:.3g} > {most:.3g} at [.., row, head] {worst}")
    whole, most = np.sqrt(((got - want) ** 2).sum() / max((want**2).sum(), 1e-30)), budget + backend.error
    text = f"{case}: relative error {whole:.3g} > {most:.3g}, declared {backend.error}"
    require(not backend.error or whole <= most, text)


@dataclass
class Sampled:
    """Some rows of one head of a vast call.

    query, out: [R, D]; key, value: [M, D], attended by these rows; finite: whether the whole output is finite.
    """

    query: Array
    out: Array
    key: Array
    value: Array
    finite: bool


def vast_places(case: DenseCase) -> list[tuple[int, int, int, list[tuple[int, int]]]]:
    """Return [(batch entry, head, number of keys, [(row, the key that it looks for)])]: the first, middle and last of each.

    A row that looks for a key shows whether that key was read; the last ones have offsets of more than 32 bits.
    """

    def ends(n: int) -> list[int]:
        # `_vast` puts the last 64 beyond 2**31 elements.
        return [0, n // 2, max(0, n - 64), max(0, n - 2), n - 1]

    places = []
    for b, h in sorted({(0, 0), (case.batch // 2, 1), (case.batch - 1, case.num_heads - 1)}):
        keys = case.lens[b] if case.lens else case.keys + case.joint[1]
        places.append((b, h, keys, list(zip(ends(case.rows + case.joint[0]), ends(keys), strict=True))))
    return places


def run_dense(names: Sequence[str] | None = None, *, level: str = "quick", **options: Any) -> Report:
    """Run the suite on the named diffusion backends, or on all that run here; `options` are those of `run_family`."""
    cases = functools.partial(dense_cases, level=level)
    words = "dense, full" if level == "full" else "dense"
    return run_family(Family.checked("diffusion", words, DiffusionAttentionBackendEnum, cases, check_dense), names, **options)
