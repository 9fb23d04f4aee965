"""The dense family's part of the suite: diffusion backends against the float64 oracle, cases derived from capabilities.

Lengths that no tile divides, masks of every kind, both orders of a joint stream, grouped heads, NaN behind masks. A wing's
driver (`attn.torch.diffusion.testing`, and its twin under jax) turns a call in NumPy into its arrays and back. What a
backend approximates is held to the error that it declares, everything else to the paged family's rules (`rules.BUDGETS`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from attn import evidence, reference
from attn.capabilities import Feature, supports_size
from attn.diffusion.backends.abstract import DiffusionRequest
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.imports import resolve_obj_by_qualname
from attn.testing import bits
from attn.testing.conformance import EXECUTED, BackendReport, Failure, Report, device_for, evidence_of
from attn.testing.rules import BUDGETS
from attn.verdicts import not_loadable

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DenseCase:
    """rows S and keys M of each of `batch` entries; lens: keys that are there, [] for all; holes: a key mask that is no
    prefix; mask: a full boolean mask; joint: (rows, keys) of a second stream, put to the front or the rear."""

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

    def __str__(self) -> str:
        return self.name

    def request(self, error_budget: float = 0.0) -> DiffusionRequest:
        """What this case asks of a backend."""
        features = frozenset({Feature.MASK.value} if self.mask else ())
        return DiffusionRequest(
            self.head_size, self.dtype, features=features, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            error_budget=error_budget,
        )  # fmt: skip


@dataclass
class DenseCall:
    """A case's arrays in float32, each number one of the case's dtype: see `DiffusionAttentionMetadata`."""

    case: DenseCase
    query: Array
    key: Array
    value: Array
    present: Array | None
    mask: Array | None
    joint: tuple[Array, Array, Array] | None


def dense_cases(backend: Any) -> list[DenseCase]:
    """The cases that a backend class must pass, from its capabilities."""
    c = backend.capabilities
    size = next(s for s in (64, 128, 32, 192, 256) if supports_size(s, c.head_sizes))
    plain = DenseCase("self", head_size=size, dtype=next(d for d in ("bfloat16", "float32", "float16") if d in c.dtypes))
    exact = backend.error == 0
    found = [
        plain,
        replace(plain, name="one row", rows=1, keys=77),
        replace(plain, name="cross", rows=40, keys=77),
        replace(plain, name="grouped heads", num_heads=6, num_kv_heads=2),
        replace(plain, name="causal", causal=True, rows=70, keys=70),
        replace(plain, name="explicit scale", scale=0.31),
        replace(plain, name="longer than a tile", rows=130, keys=200, batch=1),
        *(replace(plain, name=f"head size {s}", head_size=s) for s in (32, 80, 96, 128, 256) if supports_size(s, c.head_sizes)),
        *(replace(plain, name=d, dtype=d) for d in c.dtypes if d in BUDGETS),
        replace(plain, name="joint, front", joint=(7, 7)),
        replace(plain, name="joint, rear", joint=(7, 7), rear=True),
        replace(plain, name="joint keys alone", joint=(0, 9)),
    ]
    if exact:
        found += [
            replace(plain, name="one key", keys=1, rows=3),
            replace(plain, name="causal, fewer rows than keys", causal=True, rows=20, keys=50),
            replace(plain, name="causal, more rows than keys", causal=True, rows=50, keys=20),
            replace(plain, name="padded keys", rows=20, keys=40, lens=(17, 40)),
            replace(plain, name="an entry without keys", rows=20, keys=40, lens=(0, 33)),
            replace(plain, name="holes among keys", rows=20, keys=40, holes=True),
            replace(plain, name="joint, padded text", joint=(7, 7), lens=(20, 33)),
        ]
    if Feature.MASK in c.features:
        found += [replace(plain, name="mask", mask=True), replace(plain, name="mask, grouped", mask=True, num_kv_heads=2)]
    # what is refused in this combination is no case: a provider that is here may serve less than the family
    served = [case for case in found if not backend.why_not(case.request(backend.error)) and case.keys >= backend.min_keys]
    return list({case.name: case for case in served}.values())


def draw_dense(case: DenseCase) -> DenseCall:
    """The arrays of a case, always the same; what a mask hides is NaN where the mask is one of keys."""
    rng = np.random.default_rng((case.rows, case.keys, case.head_size, case.num_heads))

    def normal(rows: int, heads: int) -> Array:
        values = rng.standard_normal((case.batch, rows, heads, case.head_size), np.float32)
        return np.asarray(bits.decode(bits.encode(values, case.dtype), case.dtype), np.float32)

    q, k, v = normal(case.rows, case.num_heads), normal(case.keys, case.num_kv_heads), normal(case.keys, case.num_kv_heads)
    present = None
    if case.lens:
        present = np.arange(case.keys) < np.array(case.lens)[:, None]
    elif case.holes:
        present = rng.random((case.batch, case.keys)) < 0.6
    if present is not None:
        k[~present] = v[~present] = np.nan
    mask = rng.random((case.batch, 1, case.rows, case.keys)) < 0.7 if case.mask else None
    if mask is not None:
        mask[0, 0, 3] = False  # a row that sees nothing
    rows, keys = case.joint
    joint = (normal(rows, case.num_heads), normal(keys, case.num_kv_heads), normal(keys, case.num_kv_heads)) if keys else None
    return DenseCall(case, q, k, v, present, mask, joint)


def expected_dense(call: DenseCall) -> Array:
    """The oracle's answer, [B, S (+ J), H, D] in float64."""
    case = call.case
    q, k, v, there = call.query, call.key, call.value, call.present
    if call.joint is not None:
        present = np.ones(k.shape[:2], bool) if there is None else there
        extra = np.ones(call.joint[1].shape[:2], bool)
        parts = [(call.joint[0], q), (call.joint[1], k), (call.joint[2], v), (extra, present)]
        q, k, v, there = (np.concatenate(p[::-1] if case.rear else p, 1) for p in parts)
    out = []
    for b in range(case.batch):
        mask = None if call.mask is None else call.mask[b]
        if there is not None:
            mask = there[b][None, None] if mask is None else mask & there[b]
        out.append(reference.attention(q[b], k[b], v[b], scale=case.scale, causal=case.causal, mask=mask)[0])
    return np.stack(out)


def check_dense(backend: Any, case: DenseCase) -> None:
    """Run one case on a backend class; AssertionError with the worst row's error against what is allowed."""
    call = draw_dense(case)
    run: Callable[[Any, DenseCall], Array] = resolve_obj_by_qualname(
        f"attn.{backend.get_impl_cls().framework}.diffusion.testing.dense"
    )
    got, want = run(backend, call).astype(np.float64), expected_dense(call)
    assert got.shape == want.shape, f"{case}: shape {got.shape}, not {want.shape}"
    assert np.isfinite(got).all(), f"{case}: {np.sum(~np.isfinite(got))} numbers are not finite"
    size = np.sqrt((want**2).mean(-1))
    error = np.sqrt(((got - want) ** 2).mean(-1)) / np.where(size == 0, 1, size)
    allowed = max(BUDGETS[case.dtype].hard, 3 * backend.error)
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error[worst] <= allowed, (
        f"{case}: relative row error {error[worst]:.3g} > {allowed:.3g} at [batch, row, head] {worst}"
    )


def run_dense(names: Sequence[str] | None = None, *, kind: str | None = None, only: str = "", record: bool = False) -> Report:
    """The dense suite on diffusion backends by name, or on every one that runs here; `record` keeps the outcome as evidence.

    `kind` as in `run_conformance`: with `stand-in` or `interpreted` no device is asked for; None is `ran`, or
    `interpreted` where the backend says so. Raises ValueError for an unknown name or kind, for a part that is to be
    recorded, and for an interpreted run that is to pass as `ran`.
    """
    if kind is not None and kind not in EXECUTED:
        raise ValueError(f"kind={kind!r} (supports {', '.join(EXECUTED)})")
    if record and only:
        raise ValueError(f"record=True needs the whole suite, not the cases that contain {only!r}")
    reports, rows = [], []
    for name in DiffusionAttentionBackendEnum.names() if names is None else names:
        candidate = DiffusionAttentionBackendEnum[name].candidate()
        why = list(not_loadable(candidate))
        backend: Any = candidate.backend
        if backend is None or why:
            reports.append(BackendReport(name, skipped="; ".join(why)))
            continue
        device = device_for(backend)
        interpreted = device.platform in backend.interpreted_on
        if interpreted and kind == "ran":
            raise ValueError(f"{name} is executed by an interpreter here: kind must be 'interpreted'")
        how = kind or ("interpreted" if interpreted else "ran")
        if interpreted and names is None and kind is None:
            reports.append(BackendReport(name, skipped="executed by an interpreter here, which takes long: ask for it by name"))
            continue
        if how == "ran" and (refused := backend.capabilities.device_reasons(device)):
            reports.append(BackendReport(name, skipped="; ".join(refused)))
            continue
        report = BackendReport(name, device.name or device.platform, device.platform, "dense", how)
        begin = time.perf_counter()
        for case in dense_cases(backend):
            if only not in case.name:
                continue
            report.cases += 1
            try:
                check_dense(backend, case)
            except AssertionError as error:
                report.failures.append(Failure(case.name, [str(error)], ""))
        report.seconds = time.perf_counter() - begin
        if not report.cases:
            report.skipped = "no case was selected"
        else:
            rows.append(evidence_of(report, backend, "diffusion"))
        reports.append(report)
    if record:
        evidence.record(rows)
    return Report(reports)
