"""The launches that `benchmarks.pallas` estimates: the rows of its table, and launches drawn at random."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from attn.tools.bench import parse
from attn.tools.bench.sample import Sizes, sample
from attn.visibility import PLAIN, BatchMask, LayerMask

CHIPS = ("v6e", "v5e", "v7x")
PAGES = (128, 16, 64, 256)
OURS, RPA, RPA64, JAX = "attn", "rpa_v3", "rpa_v3_hd64", "jax_rpa"
MLA, DENSE = ("mla_v1", "mla_v2"), ("splash", "jax_flash", "tpuinf_flash")
TOPK = 2048  #: keys that a row of a sparse layer names


class Row(NamedTuple):
    """A kind of launch.

    batch: in the grammar of `attn bench`.
    heads: query heads, kv heads, head size.
    peers: names of the peers' kernels in `programs`.
    images: (size, every): that many of every so many new tokens are an image's, which see each other.
    goals: microseconds by (chip, page).
    parts: rows that launch some of the requests or heads separately, and how many of each make up the whole (below 0: are taken
        from it); their sum replaces the whole if that cannot be simulated.
    covered: tokens that a row of the block table covers.
    """

    name: str
    batch: str
    heads: tuple[int, int, int] = (32, 8, 128)
    peers: tuple[str, ...] = ()
    pages: tuple[int, ...] = (128,)
    kind: str = "paged"  # or latent, sparse (latent, of the best TOPK keys), dense, dense_backward
    stored: str = "bfloat16"
    window: int | None = None
    chunk_size: int | None = None
    images: tuple[int, int] | None = None
    sinks: bool = False
    goals: dict[tuple[str, int], float] = {}
    parts: tuple[tuple[str, int], ...] = ()
    chips: tuple[str, ...] = CHIPS
    covered: int = 32768

    @property
    def mask(self) -> LayerMask:
        """What the rows of every request see."""
        return LayerMask(window=(self.window and self.window - 1, None), chunk_size=self.chunk_size)

    @property
    def seen(self) -> BatchMask:
        """What the batch lets its rows see besides."""
        from attn.tools.aot.tpu import images

        return BatchMask(spans=images(*self.lens, *self.images)) if self.images else PLAIN

    @property
    def lens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(new tokens, tokens in the cache, new ones included) of the requests."""
        query_lens, seq_lens = zip(*parse(self.batch), strict=True)
        return query_lens, seq_lens


_QUARTER, _SINGLE, _GPT = (8, 2, 128), (8, 1, 128), (64, 8, 64)
_LATENT, _E4M3 = (128, 1, 576), "float8_e4m3fn"
_DECODES, _PROMPT = "64q1s4k", "q2ks8k"
_ROWS = (
    Row("decode 64 x 4k", _DECODES, peers=(RPA, JAX), pages=PAGES, goals={("v6e", 128): 560}),
    Row(
        "mixed 63 + 1,985 at 4k", "63q1s4k_q1985s4k", peers=(RPA, JAX), pages=PAGES, goals={("v6e", 128): 700},
        parts=(("decode 63 x 4k", 1), ("prefill 1,985 at 4k, 8/2 heads", 4)),
    ),
    Row("decode 63 x 4k", "63q1s4k", pages=PAGES),
    Row("prefill 1,985 at 4k, 8/2 heads", "q1985s4k", _QUARTER, pages=PAGES),
    Row(
        "prefill 2k at 8k", _PROMPT, peers=(RPA,), pages=PAGES, goals={("v6e", 128): 500, ("v5e", 128): 1400},
        parts=(("prefill 2k at 8k, 8/2 heads", 4),),
    ),
    Row("prefill 2k at 8k, 8/2 heads", _PROMPT, _QUARTER, pages=PAGES),
    Row("decode 64 x 4k, D 64, sinks", _DECODES, _GPT, (RPA64,), PAGES, sinks=True, goals={("v6e", 128): 320}),
    Row("decode 64 x 4k, D 64, sinks, window 128", _DECODES, _GPT, (RPA64,), window=128, sinks=True),
    Row(
        "prefill 2k at 8k, D 64, sinks", _PROMPT, _GPT, (RPA64,), sinks=True,
        parts=(("prefill 2k at 8k, D 64, sinks, 8/1 heads", 8),),
    ),
    Row("prefill 2k at 8k, D 64, sinks, 8/1 heads", _PROMPT, (8, 1, 64), sinks=True),
    Row("decode 64 x 4k, e4m3", _DECODES, peers=(RPA,), pages=PAGES, stored=_E4M3, goals={("v6e", 128): 330}),
    Row("decode 64 x 4k, int8", _DECODES, stored="int8"),
    Row("decode 64 x 4k, int4_per_token_head", _DECODES, stored="uint8", chips=("v6e", "v5e")),
    Row("decode 64 x 4k, window 1,024", _DECODES, peers=(RPA,), window=1024, goals={("v6e", 128): 175}),
    Row("decode 16 x 32k", "16q1s32k", peers=(RPA,), pages=PAGES),
    Row("prefill 2k at 8k, 64/8 heads", _PROMPT, (64, 8, 128), (RPA,), parts=(("prefill 2k at 8k, 8/1 heads", 8),)),
    Row("prefill 2k at 8k, 8/1 heads", _PROMPT, _SINGLE, (RPA,)),
    Row("dense causal 2k", "q2k", peers=DENSE, pages=(0,), kind="dense", goals={("v6e", 0): 75}),
    Row("dense causal 2k, with gradient", "q2k", pages=(0,), kind="dense_backward"),
    Row("MLA decode 64 x 4k, 128 heads", _DECODES, _LATENT, MLA, kind="latent", goals={("v6e", 128): 250}),
    Row("MLA decode 64 x 4k, 128 heads, e4m3", _DECODES, _LATENT, MLA, kind="latent", stored=_E4M3),
    Row("MLA sparse decode, 2,048 of 64 x 64k, 128 heads", "64q1s64k", _LATENT, kind="sparse", chips=("v6e", "v5e")),
    # short requests, and a shard of tensor parallelism
    Row("decode 128 x 60", "128q1s60", peers=(RPA,), covered=1024),
    Row("decode 128 x 500", "128q1s500", peers=(RPA,), covered=1024),
    Row(
        "decode 63 x 500 and one of 30,000", "63q1s500_q1s30000", peers=(RPA,),
        parts=(("decode 3 x 500 and one of 30,000", 1), ("decode 8 x 500", 15), ("decode 4 x 500", -15)),
    ),
    Row("decode 3 x 500 and one of 30,000", "3q1s500_q1s30000", chips=("v7x",)),
    Row("16 prompts of 500", "16q500", peers=(RPA,), covered=2048),
    Row(
        "decode 48 of 100 to 7,996, 8/1 heads", "_".join(f"q1s{100 + 168 * n}" for n in range(48)), _SINGLE, (RPA,),
        covered=8192,
    ),
    Row("prefill 4k, 8/2 heads", "q4k", _QUARTER, chips=("v6e",)),
    Row("prefill 4k, images of 256 in 1,024, 8/2 heads", "q4k", _QUARTER, images=(256, 1024), chips=("v6e",)),
    Row("prefill 4k, images of 256 in 1,000, 8/2 heads", "q4k", _QUARTER, images=(256, 1000), chips=("v6e",)),
    Row("prefill 4k at 14k, window 4,096, 8/2 heads", "q4ks14k", _QUARTER, window=4096, chips=("v6e",)),
    Row("prefill 4k at 14k, chunks of 4,096, 8/2 heads", "q4ks14k", _QUARTER, chunk_size=4096, chips=("v6e",)),
    # its time on a TPU is public: benchmarks/notes/tpu-paged.md
    Row(
        "decode 256 x 1,523, 8/4 heads of 256, window 1,024, e4m3", "256q1s1523", (8, 4, 256), (RPA,), (256,), stored=_E4M3,
        window=1024, chips=("v6e", "v7x"),
    ),
    Row("decode 64 x 16k, window 4,096", "64q1s16k", window=4096, chips=("v6e",)),
    Row("decode 64 x 16k, chunks of 4,096", "64q1s16k", chunk_size=4096, chips=("v6e",)),
)  # fmt: skip

#: Launches that v7x's simulator aborts on or takes more than 9 GiB for, and how many of their requests it follows.
FOLLOWED = {_DECODES: 8, "63q1s4k": 8, "16q1s32k": 1, "128q1s500": 8, "16q500": 2, "256q1s1523": 8}


def _in_parts(row: Row) -> tuple[Row, ...]:
    """A row, and rows of as many of its requests as v7x's simulator follows. The whole is such rows one after another; of eight
    it is four, and what four more take for every other four."""
    most = FOLLOWED.get(row.batch, 0) if row.kind == "paged" and "v7x" in row.chips else 0
    if not most:
        return (row,)
    if row.window == 128:  # the simulator aborts on eight of them
        most = 4
    number, each = len(row.lens[0]), row.batch[row.batch.index("q") :]
    less = {"peers": (), "pages": row.pages[:1], "goals": {}, "chips": ("v7x",)}
    parts = [
        row._replace(name=row.name.replace(f"{number} ", f"{n} ", 1), batch=f"{n}{each}", **less)
        for n in ((4, 8) if most == 8 else (most,))
    ]
    fours = -(-number // 4)
    times = (2 - fours, fours - 1) if most == 8 else (-(-number // most),)
    return row._replace(parts=tuple(zip((part.name for part in parts), times, strict=True))), *parts


#: By name: two rows may have the same parts.
ROWS = tuple({part.name: part for row in _ROWS for part in _in_parts(row)}.values())
#: The bounds of rows drawn at random: what the simulator follows within minutes.
DRAWN = Sizes(64, 8192, 512, 2048, 4096, ("32/8", "16/2", "8/1"), (64, 128, 256), "bfloat16", block_sizes=(16, 64, 128))
DRAWN_LATENT = replace(DRAWN, heads=("128", "64", "32", "16"), head_sizes=(576,))

#: A row, a chip, a page, a kernel.
Job = tuple[Row, str, int, str]


def wanted(peers: bool) -> Iterator[Job]:
    """Yield everything to measure, the most important first: ours, the first page size of every row, then the others."""
    for ours in (True, False)[: 1 + peers]:
        for rank in range(len(PAGES)):
            for row in ROWS:
                for page in row.pages[rank : rank + 1]:
                    for chip in row.chips:
                        for kernel in (OURS,) if ours else row.peers:
                            yield row, chip, page, kernel


def drawn(count: int, seed: int, with_peers: bool) -> Iterator[Job]:
    """Yield `count` rows drawn at random, on every chip: a third latent, half of each kind over e4m3."""
    latent, paged = sample(count, seed, DRAWN_LATENT, mla=True), sample(count, seed, DRAWN)
    for number in range(count):
        is_latent, stored = number % 3 == 2, ("bfloat16", "float8_e4m3fn")[number % 2]
        case = (latent if is_latent else paged)[number]
        peers = MLA if is_latent else (RPA64,) if case.head_size == 64 else (RPA,)
        heads = case.num_heads, case.num_kv_heads, case.head_size
        kind, sinks = "latent" if is_latent else "paged", case.head_size == 64
        row = Row(f"{case}, {stored}", case.batch, heads, peers, (case.block_size,), kind, stored, sinks=sinks)
        for chip in CHIPS:
            for kernel in (OURS, *(peers if with_peers else ())):
                yield row, chip, case.block_size, kernel


def key_of(row: Row, chip: str, page: int, kernel: str) -> str:
    return f"{row.name} | {chip} | {page} | {kernel}"
