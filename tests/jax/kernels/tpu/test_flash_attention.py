"""The dense TPU kernels in TPU interpret mode: the float64 oracle, gradients against the plain formula's (about 30 s).

Races are watched and uninitialised memory is NaN. Blocks are small, so that a case has several groups and chunks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

import attn
from attn import reference
from attn.jax import ops
from attn.jax.kernels.tpu import flash_attention as module
from attn.jax.kernels.tpu._chips import CHIPS
from attn.jax.kernels.tpu._flash_layout import BlockSizes, Extents, block_sizes_for, vmem_bytes
from attn.jax.kernels.tpu.flash_attention import Extras, FlashParams
from attn.jax.testing import DMAMode, interpreter
from attn.visibility import LayerMask
from tests.levels import sampled

BLOCKS = (BlockSizes(positions=128, units=2, chunk=128, keys=4096),) * 2
#: relative norm of the error of a gradient
GRADIENT_ERROR = {"float32": 1e-5, "bfloat16": 1e-2}


def draw(shape: tuple[int, ...], rng: np.random.Generator, dtype: str, gain: float = 1.0) -> jax.Array:
    return jnp.asarray((rng.standard_normal(shape, np.float32) * gain).astype(jnp.dtype(dtype)))


def tensors(
    rows: int, keys: int, heads: tuple[int, int] = (4, 2), size: int = 64, value_size: int | None = None, **more: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(q, k, v); more: batch, dtype, and gain, which multiplies q."""
    batch, dtype, rng = more.get("batch", 1), more.get("dtype", "bfloat16"), np.random.default_rng(0)
    return (
        draw((batch, rows, heads[0], size), rng, dtype, more.get("gain", 1.0)),
        draw((batch, keys, heads[1], size), rng, dtype),
        draw((batch, keys, heads[1], value_size or size), rng, dtype),
    )


def flash_attention(q: Any, k: Any, v: Any, *, causal: bool = False, sliding_window: Any = None, **more: Any) -> Any:
    """The kernel with its rules, arrays and options by name."""
    extras = Extras(**{name: more.pop(name) for name in Extras._fields if name in more})
    rules = {name: more.pop(name) for name in ("scale", "logits_soft_cap", "block_sizes") if name in more}
    mask = LayerMask(causal, sliding_window or (None, None))
    return module.flash_attention(q, k, v, FlashParams(mask, **rules), extras, **more)


def split(rules: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, the rest)."""
    found = {name: jnp.asarray(x) for name, x in rules.items() if isinstance(x, np.ndarray)}
    return found, {name: x for name, x in rules.items() if name not in found}


def by_sequence(q: Any, k: Any, rules: dict[str, Any]) -> list[tuple[int, int, Any]]:
    """(sequence, its keys, its mask of segments) of a case."""
    lens, of_rows = rules.get("kv_lens", [k.shape[1]] * q.shape[0]), rules.get("q_segment_ids")
    if of_rows is None:
        return [(b, int(lens[b]), None) for b in range(q.shape[0])]
    of_keys = rules["kv_segment_ids"]
    return [(b, int(lens[b]), of_rows[b][:, None] == of_keys[b][None, : int(lens[b])]) for b in range(q.shape[0])]


def check(qkv: Any, blocks: Any = BLOCKS, mode: DMAMode = "on_wait", **rules: Any) -> None:
    """out and lse against the oracle, the gradients of a random functional of both against the formula's."""
    q, k, v = qkv
    arrays, static = split(rules)
    rng = np.random.default_rng(1)
    weight = draw((*q.shape[:3], v.shape[3]), rng, "float32")
    lse_weight = draw((q.shape[0], q.shape[2], q.shape[1]), rng, "float32")

    def functional_of(out: jax.Array, lse: jax.Array) -> jax.Array:
        return (out.astype(jnp.float32) * weight).sum() + (jnp.where(lse == -jnp.inf, 0, lse) * lse_weight).sum()

    def ours(q: jax.Array, k: jax.Array, v: jax.Array, arrays: dict[str, jax.Array]) -> Any:
        how = {"return_lse": True, "interpret": interpreter(mode), "block_sizes": blocks}
        made = flash_attention(q, k, v, **how, **arrays, **static)
        return functional_of(*made), made

    def formula(q: jax.Array, k: jax.Array, v: jax.Array, arrays: dict[str, jax.Array]) -> Any:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        parts = []
        for b, keys, mask in by_sequence(q, k, rules):
            extras = {name: arrays[name] for name in ("sinks", "alibi_slopes") if name in arrays}
            extras |= {name: static[name] for name in ("causal", "scale", "logits_soft_cap") if name in static}
            given = {"window": static.get("sliding_window"), "mask": mask, "return_lse": True, **extras}
            parts.append(attn.attention(q[b], k[b, :keys], v[b, :keys], **given))
        return functional_of(*(jnp.stack(x) for x in zip(*parts, strict=True)))

    # arguments that only define masks have no gradient, and slopes reject one
    learnt = {name: arrays[name] for name in ("sinks",) if name in arrays}
    fixed = {name: x for name, x in arrays.items() if name not in learnt}
    everything = (0, 1, 2, 3)
    step = jax.grad(lambda q, k, v, learnt: ours(q, k, v, {**fixed, **learnt}), everything, has_aux=True)
    got, (out, lse) = jax.jit(step)(q, k, v, learnt)
    assert not interpret_pallas_call.races.races_found
    want = jax.jit(jax.grad(lambda q, k, v, learnt: formula(q, k, v, {**fixed, **learnt}), everything))(q, k, v, learnt)
    assert_close(qkv, np.asarray(out, np.float64), np.asarray(lse), rules)
    for name, x, y in zip("qkv", got, want, strict=False):
        assert relative(x, y) <= GRADIENT_ERROR[q.dtype.name], (name, relative(x, y))
    if learnt:
        assert relative(got[3]["sinks"], want[3]["sinks"]) <= GRADIENT_ERROR[q.dtype.name]


def relative(x: jax.Array, y: jax.Array) -> float:
    wide = np.asarray(y, np.float64)
    return float(np.linalg.norm(np.asarray(x, np.float64) - wide) / (np.linalg.norm(wide) + 1e-30))


def assert_close(qkv: tuple[jax.Array, ...], out: Any, lse: Any, rules: dict[str, Any]) -> None:
    q, k, v = (np.asarray(x).astype(np.float64) for x in qkv)
    names = ("causal", "scale", "logits_soft_cap", "alibi_slopes", "sinks")
    for b, keys, mask in by_sequence(q, k, rules):
        given = {name: rules[name] for name in names if name in rules}
        given |= {"window": rules.get("sliding_window") or (None, None), "mask": mask}
        want, want_lse = reference.attention(q[b], k[b, :keys], v[b, :keys], **given)
        np.testing.assert_array_equal(np.isnan(out[b]), np.isnan(want))
        np.testing.assert_array_equal(np.isnan(lse[b]), np.isnan(want_lse))
        error = np.sqrt(np.mean(np.nan_to_num(out[b] - want) ** 2, axis=-1))
        size = np.sqrt(np.mean(np.nan_to_num(want) ** 2, axis=-1))
        limit = 1e-5 if qkv[0].dtype == jnp.float32 else 2.0**-7
        assert (error <= limit * (size + 1e-3)).all(), np.max(error / (size + 1e-3))
        live = np.isfinite(want_lse)
        np.testing.assert_array_equal(lse[b][~live], want_lse[~live])
        np.testing.assert_allclose(lse[b][live], want_lse[live], atol=1e-4, rtol=1e-5)


SLOPES = reference.alibi_slopes(4).astype(np.float32)
SINKS = np.array([-1, 0, 3, 5], np.float32)
SEGMENTS = np.sort(np.random.default_rng(0).integers(0, 3, (1, 260)), axis=1).astype(np.int32)

#: The second begins within a unit of rows, and a chunk of keys has the first alone.
HALVES = np.repeat(np.int32([0, 1]), (150, 110))[None]


def opposed(qkv: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The first row that sees a key sees one of its opposite: its sum vanishes unless the maximum is subtracted."""
    q, k, v = qkv
    own = jnp.repeat(k[:, 0], q.shape[2] // k.shape[2], axis=1)
    return q.at[:, q.shape[1] - k.shape[1]].set(-16 * own), k, v


CASES: dict[str, tuple[tuple[jax.Array, ...], dict[str, Any]]] = {
    "causal": (opposed(tensors(300, 300)), {"causal": True}),
    "eager": (tensors(130, 130, (2, 2), 192, 128), {"causal": True, "mode": "eager", "blocks": None}),
    "own lengths": (
        tensors(150, 333, (4, 1), 128, batch=2),
        {"causal": True, "kv_lens": np.array([333, 170], np.int32), "sinks": SINKS},
    ),
    "rows before the keys, leaping scores": (tensors(230, 150, gain=60.0), {"causal": True}),
    "window, soft cap": (tensors(270, 270, size=80), {"causal": True, "sliding_window": (134, None), "logits_soft_cap": 5.0}),
    "window both ways": (tensors(200, 230, (6, 2), 96), {"sliding_window": (30, 9), "scale": 0.2}),
    "float32": (tensors(200, 200, dtype="float32"), {"causal": True, "alibi_slopes": SLOPES, "sinks": SINKS}),
    "alibi both ways": (tensors(140, 200, (4, 4)), {"alibi_slopes": SLOPES}),
    "segments": (tensors(260, 260), {"causal": True, "q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS}),
    "segments both ways": (tensors(260, 260), {"q_segment_ids": HALVES, "kv_segment_ids": HALVES}),
    "launches": (
        tensors(150, 700),
        {"kv_lens": np.array([650], np.int32), "sinks": SINKS, "blocks": (BLOCKS[0]._replace(keys=384),) * 2},
    ),
}


#: Each alone notices a defect of `tests.testing.planted`.
KEPT = ("causal", "window, soft cap", "segments both ways")


@pytest.mark.parametrize("name", sampled(list(CASES), 1, "flash attention", lambda name: name in KEPT))
def test_against_the_oracle(name: str) -> None:
    qkv, rules = CASES[name]
    check(qkv, **rules)


@functools.partial(jax.jit, static_argnames=("causal",))
def interpreted(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, **arrays: jax.Array) -> Any:
    how = {"return_lse": True, "interpret": interpreter(), "block_sizes": BLOCKS}
    return flash_attention(q, k, v, causal=causal, **how, **arrays)


def test_nan_reaches_the_rows_that_attend_to_it() -> None:
    """NaN and infinities in keys and values, seen by some rows and behind the length: exactly the oracle's rows."""
    q, k, v = tensors(150, 200, dtype="float32")
    k = k.at[0, 120, 1, 3].set(jnp.nan).at[0, 190:].set(jnp.nan)
    v = v.at[0, 100, 0, 5].set(jnp.nan).at[0, 110, 1, 2].set(jnp.inf).at[0, 190:].set(jnp.nan)
    rules = {"causal": True, "kv_lens": np.array([190], np.int32)}
    out, lse = interpreted(q, k, v, True, kv_lens=jnp.asarray(rules["kv_lens"]))
    names = ("inf", np.isinf(np.asarray(out))), ("nan", np.isnan(np.asarray(out)))
    assert all(found.any() for _, found in names)
    finite = np.where(np.isinf(np.asarray(out)), 0, np.asarray(out))
    want, want_lse = reference.attention(*(np.asarray(x[0, :190], np.float64) for x in (q, k, v)), causal=True)
    np.testing.assert_array_equal(np.isnan(finite[0]), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(np.asarray(out)[0]), np.isinf(want))
    np.testing.assert_array_equal(np.isnan(np.asarray(lse)[0]), np.isnan(want_lse))


def test_gradients_ignore_masked_keys() -> None:
    """What lies behind a sequence's length is NaN, and its gradient 0; the others are as without."""
    q, k, v = tensors(140, 200, dtype="float32")
    lens = jnp.array([170], jnp.int32)
    step = jax.jit(jax.grad(lambda q, k, v: interpreted(q, k, v, True, kv_lens=lens)[0].sum(), (0, 1, 2)))
    clean = step(q, k.at[:, 170:].set(0), v.at[:, 170:].set(0))
    poisoned = step(q, k.at[:, 170:].set(jnp.nan), v.at[:, 170:].set(jnp.nan))
    for x, y in zip(poisoned, clean, strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.asarray(poisoned[1])[:, 170:].any()


def test_gradients_of_keys_ignore_rows_that_do_not_see_them() -> None:
    """NaN in a query or a cotangent: keys behind that row have the gradients that they have without the row."""
    q, k, v = tensors(160, 160, (2, 1), dtype="float32")
    ones, row = jnp.ones(q.shape, q.dtype), 40

    @jax.jit
    def gradients(q: jax.Array, d_out: jax.Array) -> Any:
        return jax.vjp(lambda k, v: interpreted(q, k, v, True)[0], k, v)[1](d_out)

    want_k, want_v = (x[:, row + 1 :] for x in gradients(q, ones.at[:, row].set(0)))
    of_query, _ = gradients(q.at[:, row, 0, 3].set(jnp.nan), ones.at[:, row].set(0))
    of_keys, of_values = gradients(q, ones.at[:, row].set(jnp.nan))
    for got, want in ((of_query, want_k), (of_keys, want_k), (of_values, want_v)):
        assert relative(got[:, row + 1 :], want) < GRADIENT_ERROR["float32"]  # the row's unit is computed another way


def finite_differences() -> None:
    q, k, v = tensors(20, 24, (2, 1), dtype="float32")
    direction = tensors(20, 24, (2, 1), dtype="float32", gain=0.5)

    @jax.jit
    def value(step: jax.Array) -> jax.Array:
        moved = (x + step * dx[::-1] for x, dx in zip((q, k, v), direction, strict=True))
        out, lse = flash_attention(*moved, causal=True, return_lse=True, interpret=interpreter())
        return jnp.sin(out).sum() + jnp.cos(lse).sum()

    slope = jax.grad(value)(jnp.float32(0.1))
    h = 2e-2
    by_differences = (8 * (value(0.1 + h) - value(0.1 - h)) - (value(0.1 + 2 * h) - value(0.1 - 2 * h))) / (12 * h)
    np.testing.assert_allclose(slope, by_differences, rtol=2e-3)


def training() -> None:
    """A few steps of gradient descent on one attention layer: the loss falls, and is the formula's."""
    rng = np.random.default_rng(0)
    x, target = draw((2, 20, 32), rng, "float32"), draw((2, 20, 32), rng, "float32")
    start = {name: draw((32, 32), rng, "float32", 32**-0.5) for name in ("q", "k", "v", "out")}

    def losses(attend: Any) -> list[float]:
        def loss(weights: dict[str, jax.Array]) -> jax.Array:
            q, k, v = ((x @ weights[name]).reshape(2, 20, 2, 16) for name in ("q", "k", "v"))
            return ((attend(q, k, v).reshape(2, 20, 32) @ weights["out"] - target) ** 2).mean()

        step = jax.jit(jax.value_and_grad(loss))
        weights, seen = start, []
        for _ in range(4):
            value, gradient = step(weights)
            seen.append(float(value))
            weights = jax.tree.map(lambda w, g: w - 2.0 * g, weights, gradient)
        return seen

    got = losses(functools.partial(flash_attention, causal=True, interpret=interpreter()))
    want = losses(functools.partial(attn.attention, causal=True))
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert all(later < earlier for earlier, later in zip(got, got[1:], strict=False))


@pytest.mark.parametrize("way", sampled([finite_differences, training], 1, "gradients"))
def test_gradients_are_those_of_the_values(way: Callable[[], None]) -> None:
    """Gradients are compared with the formula's by every case above; two ways that know no formula, or use it whole."""
    way()


def test_attention_on_a_tpu_comes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attn.attention` on jax arrays takes the kernel on a TPU where it has the rules, and else the formula."""
    q, k, v = tensors(20, 20, dtype="float32")
    want = attn.attention(q, k, v, causal=True, window=7)
    calls, kernel = [], module.flash_attention

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(ops, "on_tpu", lambda x: True)
    monkeypatch.setattr(module, "flash_attention", spy)
    got = attn.attention(q, k, v, causal=True, window=7)
    assert len(calls) == 1
    np.testing.assert_allclose(got, want, atol=1e-5)
    attn.attention(q, k, v, causal=True, mask=jnp.ones((), bool))
    attn.attention(*(x.astype(jnp.float16) for x in (q, k, v)))
    assert len(calls) == 1


def test_nothing_to_attend() -> None:
    q, k, v = tensors(3, 0)
    out, lse = flash_attention(q, k, v, return_lse=True, interpret=interpreter())
    assert not np.asarray(out).any() and np.isneginf(np.asarray(lse)).all() and lse.shape == (1, 4, 3)
    gradient = jax.grad(lambda q: flash_attention(q, k, v, interpret=interpreter()).sum().astype(jnp.float32))(q)
    assert gradient.shape == q.shape and not np.asarray(gradient).any()


def test_arguments_without_a_gradient_are_rejected() -> None:
    q, k, v = tensors(4, 4)

    def loss(q: jax.Array, slopes: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, alibi_slopes=slopes, interpret=interpreter()).astype(jnp.float32).sum()

    slopes = jnp.asarray(SLOPES)
    with pytest.raises(TypeError, match="alibi_slopes have no gradient"):
        jax.eval_shape(jax.grad(loss, 1), q, slopes)
    jax.eval_shape(jax.grad(loss), q, slopes)
    with pytest.raises(TypeError, match="differentiable once"):
        jax.eval_shape(jax.grad(lambda q: jax.grad(loss)(q, slopes).astype(jnp.float32).sum()), q)


WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "rank": (ValueError, r"must be \[B, S, H, D\]", {"q": (4, 4, 64)}),
    "head sizes": (ValueError, "q and k in head size", {"k": (1, 4, 2, 32)}),
    "keys": (ValueError, "k and v in keys", {"v": (1, 5, 2, 64)}),
    "heads": (ValueError, "4 query heads must be a multiple of 3 kv heads", {"k": (1, 4, 3, 64), "v": (1, 4, 3, 64)}),
    "dtype": (TypeError, "must be all bfloat16 or all float32", {"dtype": "float16"}),
    "window": (ValueError, "each side of the window must be None or at least 0", {"sliding_window": (-1, 0)}),
    "soft cap": (ValueError, "logits_soft_cap=-1.0", {"logits_soft_cap": -1.0}),
    "chip": (ValueError, "chip='v3' is unknown", {"chip": "v3"}),
    "one segment": (ValueError, "give both or neither", {"q_segment_ids": np.zeros((1, 4), np.int32)}),
    "sinks": (ValueError, r"sinks has shape \[3\]: must be \[4\]", {"sinks": np.zeros(3, np.float32)}),
    "lens": (TypeError, "kv_lens has dtype float32: must be int32", {"kv_lens": np.zeros(1, np.float32)}),
}


@pytest.mark.parametrize("bound", [2**31 - 1, 2**40])
def test_a_bound_beyond_every_key_is_none(bound: int) -> None:
    """Added to a position in 32 bits it would overflow."""
    qkv = [jnp.asarray(np.random.default_rng(i).standard_normal((1, 9, 2, 64)), jnp.float32) for i in range(3)]
    got, want = (flash_attention(*qkv, sliding_window=window) for window in ((bound, bound), (None, None)))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", WRONG)
def test_nonsense_is_refused(name: str) -> None:
    error, text, changed = WRONG[name]
    dtype = changed.get("dtype", "bfloat16")
    shapes = {"q": (1, 4, 4, 64), "k": (1, 4, 2, 64), "v": (1, 4, 2, 64)}
    qkv = [jnp.zeros(changed.get(n, shape), dtype) for n, shape in shapes.items()]
    arguments = {n: x for n, x in changed.items() if n not in ("q", "k", "v", "dtype")}
    with pytest.raises(error, match=text):
        flash_attention(*qkv, **arguments)


def test_the_rule_of_block_sizes() -> None:
    """On every chip and at every length, blocks leave a quarter of VMEM to what the compiler spills."""
    for chip, limits in CHIPS.items():
        for heads in (1, 3, 4, 7):
            for size, value_size in ((64, 64), (128, 128), (192, 128), (256, 256)):
                for itemsize, backward in ((2, False), (2, True), (4, False), (4, True)):
                    extents = Extents(heads, 1 << 16, 1 << 16, size, value_size, itemsize, backward)
                    sizes = block_sizes_for(chip, extents)
                    assert vmem_bytes(sizes, extents) <= limits.vmem * 3 // 4, (chip, extents, sizes)
                    assert sizes.keys % sizes.chunk == 0 and sizes.positions in (128, 256)
