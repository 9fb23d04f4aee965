"""Entry points that the fuzzer calls besides backends: the frameworks' entries, schedulers, and layers made under a device.

An entry gives what the framework's own function gives, or raises an error of this library where that function refuses or the
entry's documentation does. The other two have modules of their own (`serving`, and `on_torch`).
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from attn.imports import installed, resolve_obj_by_qualname
from attn.testing.case import Recipe
from attn.tools.fuzz import serving

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CallCase(Recipe):
    """A call of an entry: the arguments' shapes.

    extra: "" or the further argument, with its shape in `more`: "bool" or "float" (torch's mask); "mask", "bias",
        "query_seq_lengths" or "key_value_seq_lengths" (jax).
    run: compare values; False: shapes (jax).
    """

    option = " --registry entries"
    words = {"extra": ("", "bool", "float", "mask", "bias", "query_seq_lengths", "key_value_seq_lengths")}

    name: str
    query: Shape
    key: Shape
    value: Shape
    extra: str = ""
    more: Shape = ()
    causal: bool = False
    gqa: bool = False
    scale: float | None = None
    run: bool = True

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the call's arguments."""
        return {name: getattr(self, name) for name in ("query", "key", "value", *(["more"] if self.extra else []))}


class Compared(NamedTuple):
    """An entry and the framework's function.

    theirs, entry: call the two; refusals, errors: exceptions with which they refuse. same: raises AssertionError if their
    results differ. documented: whether the entry's documentation names such calls; it then declines none.
    """

    theirs: Callable[[], Any]
    refusals: Any
    entry: Callable[[], Any]
    errors: Any
    same: Callable[[Any, Any], None]
    documented: bool = False

    def judged(self, case: CallCase) -> str:
        """Return whether both "refused" or "served" the call, or the entry "declined" it.

        Raises AssertionError, and an entry's exception unless it is one of this library's errors.
        """
        try:
            want = self.theirs()
        # The framework's own function is run first: it says whether the call has a meaning.
        except self.refusals as error:
            try:
                got = self.entry()
            except self.errors:
                return "refused"
            raise AssertionError(f"{case}: a result where the framework refuses ({error}): {got}") from error
        try:
            got = self.entry()
        except self.errors as error:
            # An entry may refuse more than the framework does, unless its documentation promises to serve it.
            assert not self.documented, f"{case}: refused but documented: {error}"
            return "declined"
        self.same(got, want)
        return "served"


def is_documented(case: CallCase) -> bool:
    """Whether the documentation of `attn.torch.scaled_dot_product_attention` names such shapes."""
    q, k, v = case.query, case.key, case.value
    # With grouped heads the third dimension is checked on its own, and does not broadcast.
    outer = -3 if case.gqa else -2
    if not 3 <= len(q) == len(k) == len(v) or q[-1] != k[-1] or k[-2] != v[-2]:
        return False
    if case.gqa and (k[-3] != v[-3] or (k[-3] and q[-3] % k[-3])):
        return False
    try:
        np.broadcast_shapes(q[:outer], k[:outer], v[:outer])
        # A mask may broadcast to the scores, but must not enlarge them.
        scores = (*np.broadcast_shapes(q[:outer], k[:outer]), *q[outer:-1], k[-2])
        return not case.extra or (len(case.more) > 1 and np.broadcast_shapes(case.more, scores) == scores)
    except ValueError:
        return False


def _changed(rng: random.Random, shapes: dict[str, list[int]], times: int, sizes: list[int], swaps: bool) -> None:
    """Change the shapes of a call: a size, a dimension more or less, two dimensions swapped."""
    for _ in range(times):
        shape = shapes[rng.choice(list(shapes))]
        # A shape may have lost all of its dimensions.
        at, change = rng.randrange(len(shape) or 1), rng.choice(["size", "size", "size", "drop", "add", *["swap"] * swaps])
        if change == "size" and shape:
            shape[at] = rng.choice(sizes)
        elif change == "drop" and len(shape) > 2 * swaps:
            del shape[0]
        elif change == "add":
            shape.insert(0, rng.choice([1, 2]))
        elif swaps and len(shape) > 1:
            shape[0], shape[1] = shape[1], shape[0]


def _torch_call(rng: random.Random) -> CallCase:
    # A valid call [B, H, S, D], of which a few sizes are then changed: most random shapes would be refused at once.
    shapes = {name: [2, 4, 8, 16] for name in ("query", "key", "value")} | {"more": [2, 4, 8, 8]}
    if rng.random() < 0.3:
        shapes = {name: [3, *shape] for name, shape in shapes.items()}
    _changed(rng, shapes, rng.choice([0, 1, 1, 2, 3]), [0, 1, 1, 2, 3, 4, 8, 9, 16], True)
    masking = rng.choice(["none", "none", "causal", "bool", "float"])
    extra = masking if masking in ("bool", "float") else ""
    scale = rng.choice([None, None, None, 0.3, -0.3])
    # torch refuses a mask beside is_causal, so they are drawn as alternatives.
    return _call(shapes, extra, causal=masking == "causal", gqa=rng.random() < 0.5, scale=scale)


def _jax_call(rng: random.Random) -> CallCase:
    shapes = {name: [2, 8, 4, 16] for name in ("query", "key", "value")} | {"mask": [2, 4, 8, 8], "lens": [2]}
    _changed(rng, shapes, rng.choice([0, 1, 1, 2]), [0, 1, 2, 3, 4, 8, 9, 16], False)
    extra = rng.choice(["", "", "mask", "bias", "query_seq_lengths", "key_value_seq_lengths"])
    shapes["more"] = shapes["lens" if extra.endswith("lengths") else "mask"]
    scale = rng.choice([None, None, None, 0.3, -0.3])
    return _call(shapes, extra, causal=rng.random() < 0.4, scale=scale, run=rng.random() < 0.1)


def _call(shapes: dict[str, list[int]], extra: str, **options: Any) -> CallCase:
    query, key, value, more = (tuple(shapes[name]) for name in ("query", "key", "value", "more"))
    return CallCase("", query, key, value, extra, more if extra else (), **options)


def _smaller_call(case: CallCase) -> Iterator[CallCase]:
    for name, shape in case.shapes.items():
        yield from (case.replace(**{name: (*shape[:i], 1, *shape[i + 1 :])}) for i, n in enumerate(shape) if n > 1)
    if all(len(shape) > 3 for shape in case.shapes.values()):
        yield case.replace(**{name: shape[1:] for name, shape in case.shapes.items()})


@dataclass(frozen=True)
class LayerCase(Recipe):
    """A torch layer and the devices around it. "": none.

    layer_type: "attention" or "mla". made: torch's default device during construction. moved: devices of `.to()` in turn.
    copied: whether a deep copy is used. during: torch's default device during `build` and the call. asked: `build`'s argument.
    batch: "numpy", or the device of the batch's arrays. inputs: devices of query, key, value and cache; "" is the metadata's.
    weights: slopes ("alibi") or sinks ("sinks") in a list, sinks in a tensor on the CPU ("tensor"), or the scales of a
        quantised cache ("scale", per head "scales").
    """

    option = " --registry entries"
    words = {"layer_type": ("attention", "mla"), "weights": ("", "alibi", "sinks", "tensor", "scale", "scales")}

    name: str
    layer_type: str = "attention"
    backend: str = "TORCH_SDPA"
    made: str = ""
    moved: tuple[str, ...] = ()
    copied: bool = False
    during: str = ""
    asked: str = ""
    batch: str = "numpy"
    inputs: tuple[str, ...] = ("", "", "", "")
    weights: str = ""


def _layer(rng: random.Random) -> LayerCase:
    devices = resolve_obj_by_qualname("attn.tools.fuzz.on_torch.devices")()

    def one(share: float) -> str:
        return rng.choice(devices) if rng.random() < share else ""

    layer_type = rng.choice(["attention", "attention", "mla"])
    other = "TORCH_SDPA" if "cuda" in devices else "CPU_ATTN"  # which does not serve a machine with a GPU
    backend = "TORCH_MLA" if layer_type == "mla" else rng.choice(["TORCH_SDPA", "TORCH_SDPA", other])
    moved = [rng.choice(devices) for _ in range(rng.choice([0, 0, 1, 2]))]
    if "meta" in moved:
        del moved[moved.index("meta") + 1 :]  # no module leaves it by `to`
    # All on one device, or each mostly where the metadata is.
    inputs = (one(1.0),) * 4 if rng.random() < 0.3 else tuple(one(0.1) for _ in range(4))
    weights = ["", "", "scale", *(["alibi", "scales"] if layer_type == "attention" else [])]
    weights += ["sinks", "tensor"] if backend == "TORCH_SDPA" else []
    case = LayerCase("", layer_type, backend, made=one(0.6), moved=tuple(moved), copied=rng.random() < 0.2, inputs=inputs)
    case = case.replace(during=one(0.2), asked=one(0.4))
    batch = rng.choice(["numpy", *(device for device in devices if device != "meta")])
    return case.replace(batch=batch, weights=rng.choice(weights))


def _smaller_layer(case: LayerCase) -> Iterator[LayerCase]:
    yield from (case.replace(moved=case.moved[:i] + case.moved[i + 1 :]) for i in range(len(case.moved)))
    for i, device in enumerate(case.inputs):
        if device:
            yield case.replace(inputs=(*case.inputs[:i], "", *case.inputs[i + 1 :]))


@dataclass(frozen=True)
class EntrySubject:
    """An entry point. `case`: the class of its cases; `draw`: one case; `judge`: the function that judges one, or its name;
    `needs`: the package that it needs."""

    name: str
    case: Any
    draw: Callable[[random.Random], Any]
    judge: Any
    simpler: Callable[[Any], Iterator[Any]]
    plain: dict[str, Any] = field(default_factory=dict)
    needs: str = "numpy"

    def serves(self, case: Any) -> bool:
        """Whether the case can be drawn: any can."""
        return True

    def missing(self) -> str:
        """Why it cannot run on this machine, or ""."""
        return "" if installed(self.needs) else f"{self.needs} is not installed"

    def check(self, case: Any) -> str:
        """Judge a case and say how it ended. Raises AssertionError, and exceptions that are no errors of this library."""
        judge = resolve_obj_by_qualname(self.judge) if isinstance(self.judge, str) else self.judge
        return str(judge(case))


_LAYER = LayerCase.plain(("layer_type", "backend"))
_CALL = {"extra": "", "causal": False, "gqa": False, "scale": None, "run": False}
SUBJECTS = {
    subject.name: subject
    for subject in (
        EntrySubject(
            "TORCH_ENTRY", CallCase, _torch_call, "attn.tools.fuzz.on_torch.call_entry", _smaller_call, _CALL, "torch"
        ),
        EntrySubject("JAX_ENTRY", CallCase, _jax_call, "attn.tools.fuzz.on_jax.call_entry", _smaller_call, _CALL, "jax"),
        EntrySubject("SCHEDULER", serving.SchedulerCase, serving.draw, serving.check, serving.simpler, {"held": False}),
        EntrySubject(
            "LAYER_DEVICE", LayerCase, _layer, "attn.tools.fuzz.on_torch.layer_device", _smaller_layer, _LAYER, "torch"
        ),
    )
}


def names() -> list[str]:
    """Return the names of all of them."""
    return list(SUBJECTS)


def subject_of(name: str) -> EntrySubject:
    """Return the entry point of that name. Raises ValueError for an unknown one, and under `python -O`."""
    if not __debug__:
        raise ValueError("python -O removes the checks of entries, which are assertions: run them without -O")
    if name not in SUBJECTS:
        raise ValueError(f"unknown entry {name!r}; known: {', '.join(SUBJECTS)}")
    return SUBJECTS[name]


def program(subject: EntrySubject, seed: int, number: int, cases: int, one_shape: bool = False) -> list[Any]:
    """Return the cases of program `number`; as in `fuzz_cases`, but a program's cases have nothing in common."""
    rng = random.Random(f"{seed}/entries/{subject.name}/{number}")
    return [subject.draw(rng).replace(name=f"fuzz {seed}/{number}.{i}") for i in range(cases)]
