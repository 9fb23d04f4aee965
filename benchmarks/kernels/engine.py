"""What a row of a head costs the bulk tensor engine of a Hopper GPU (TMA), by its bytes, where it begins, and the box.

    python -m benchmarks.kernels.engine              cycles of each copied row, on a Hopper GPU
    python -m benchmarks.kernels.engine --compile    compile for sm_90 only, with or without a GPU

Every multiprocessor copies tiles of 64 keys of one head after another, as the prefill's producers do, into four places in turn,
and nothing else; the median program's clock, by the multiprocessor's number of rows. One program is one warp that issues
copies; two show whether the engine limits it. Keys are [N, P, K, D] in bfloat16, pages of `P`, none beside the one before.
"heads": boxes of the head's own columns, up to 64 at a time, which the engine fills with zeros beyond D, as
`hopper_prefill_launch.plan_of` describes them. "flat": a token's heads as one dimension of K * D, so that boxes have whole rows
of 128 bytes, of which the last columns are the next head's. "aligned": flat boxes that begin at the multiple of 32 bytes before
the head, as the prefill copies heads of 40, 56, 72...
"""

import argparse
from typing import Any, NamedTuple

from attn.kernels import compiled
from attn.kernels.gluon import descriptor, fence_async_shared, gl, gluon, load_box, mbarrier

TILES, STAGES, ROWS = 256, 4, 64
MULTIPROCESSORS = 132
_STEP = gl.constexpr(179)  #: between the pages of one box and the next: no divisor of their number, which is a power of 2
TOKENS = 16384  #: of the cache: less than the second-level cache holds


class Case(NamedTuple):
    size: int
    heads: int
    page: int
    form: str

    def boxes(self) -> compiled.Boxes:
        """The array as the engine sees it."""
        d, k, p, n, box = self.size, self.heads, self.page, TOKENS // self.page, min(self.page, ROWS)
        if self.form != "heads":
            return compiled.Boxes("bfloat16", (n, p, 1, k * d), (p * k * d, k * d, k * d, 1), (1, box, 1, 64))
        return compiled.Boxes("bfloat16", (n, p, k, d), (p * k * d, k * d, d, 1), (1, box, 1, 64))

    def constants(self) -> dict[str, int]:
        pieces = -(-self.size // 64)
        sizes = {"SIZE": self.size, "HEADS": self.heads, "PIECES": pieces, "BOX": min(self.page, ROWS)}
        return {**sizes, "FLAT": FORMS.index(self.form), "STAGES": STAGES, "ROWS": ROWS, "PAGES": TOKENS // self.page}


FORMS = ("heads", "flat", "aligned")
CASES = [
    Case(size, heads, page, form)
    for size, heads in ((32, 8), (40, 8), (40, 1), (48, 8), (56, 8), (64, 8), (72, 4), (80, 8), (96, 8), (112, 8), (128, 8))
    for page in (16, 64)
    for form in FORMS
]


@gluon.jit
def _clock():  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise("mov.u32 $0, %clock; // $1", "=r,r", [gl.program_id(0)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def copies(  # type: ignore[no-untyped-def]
    out, desc, tiles, SIZE: gl.constexpr, HEADS: gl.constexpr, PIECES: gl.constexpr, BOX: gl.constexpr,
    FLAT: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, PAGES: gl.constexpr,
):  # fmt: skip
    BOXES: gl.constexpr = ROWS // BOX
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PIECES * BOXES, 1, BOX, 1, 64], desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    head = gl.program_id(0) % HEADS
    column = head * SIZE - (head * SIZE % 16 if FLAT == 2 else 0)
    first = gl.program_id(0) * 37
    begin = _clock()
    for i in range(tiles):
        stage = i % STAGES
        if i >= STAGES:
            mbarrier.wait(bars.index(stage), i // STAGES & 1 ^ 1)
        mbarrier.expect(bars.index(stage), ROWS * PIECES * 128)
        for b in gl.static_range(BOXES):
            page = (first + i * BOXES + b) * _STEP % PAGES  # computed: a load would be waited for
            for h in gl.static_range(PIECES):
                at = [page, 0, 0, column + h * 64] if FLAT else [page, 0, head, h * 64]
                load_box(desc, at, bars.index(stage), ring.index((stage * PIECES + h) * BOXES + b))
    for i in range(tiles, tiles + STAGES):
        mbarrier.wait(bars.index(i % STAGES), i // STAGES & 1 ^ 1)
    gl.store(out + gl.program_id(0), _clock() - begin)


def compile_for_sm_90() -> None:
    for case in CASES:
        arguments = {"out": compiled.Pointer("int32"), "desc": case.boxes(), "tiles": TILES, **case.constants()}
        program = compiled.compile_kernel(copies, "sm_90", arguments, {"num_warps": 4})
        print(f"{case}: {len(program.image)} bytes, {program.shared} of shared memory")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time copies of the bulk tensor engine.")
    parser.add_argument("--compile", action="store_true", help="compile for sm_90 only")
    if parser.parse_args().compile:
        return compile_for_sm_90()
    import torch

    out = torch.empty(2 * MULTIPROCESSORS, dtype=torch.int32, device="cuda")
    print(f"cycles of a row: {', '.join(FORMS)}; the same with two programs on each multiprocessor")
    figures: dict[Any, float] = {}
    for case in CASES:
        boxes = case.boxes()
        keys = torch.zeros(boxes.shape, device="cuda", dtype=torch.bfloat16)
        desc = descriptor(keys.data_ptr(), keys.dtype, boxes.shape, boxes.strides, boxes.box)
        for programs in (1, 2):
            for _ in range(3):
                copies[(programs * MULTIPROCESSORS,)](out, desc, TILES, num_warps=4, **case.constants())
            clocks = float(out[: programs * MULTIPROCESSORS].float().median())
            figures[case, programs] = clocks / (TILES * ROWS * programs)
        if case.form == FORMS[-1]:
            shown = ", ".join(f"{figures[case._replace(form=form), n]:.2f}" for n in (1, 2) for form in FORMS)
            print(f"{case.heads} heads of {case.size}, pages of {case.page}: {shown}")


if __name__ == "__main__":
    main()
