"""Single rows over keys in no cache are the formula; on a GPU, or in Triton's interpreter (10 s on one core)."""

import itertools
from typing import Any

import pytest
import torch

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.functional import attention
from attn.torch.diffusion.backends.triton_attn import TritonAttentionImpl
from attn.torch.interpreter import prepare
from attn.torch.kernels.runs import Runs
from tests.levels import some

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.triton_kernels,
    # the interpreter computes with NumPy, which speaks of the infinities that kernels handle on purpose, and with its old ways
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
]
SINKS = torch.linspace(-2, 3, 8, device=DEVICE)


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    prepare("TRITON_ATTN")  # the interpreter's bfloat16


def arrays(dtype: torch.dtype, heads: int, size: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query [3, 8, D], key and value [3, heads, m, D], views of a cache that is NaN elsewhere."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.full((3, heads, keys + 5, size), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
    for x in whole:
        x[:, :, :keys] = torch.randn(3, heads, keys, size, generator=generator).to(x)
    query = torch.randn(3, 8, size, generator=generator).to(DEVICE, dtype)
    return query, whole[0][:, :, :keys], whole[1][:, :, :keys]


def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float = 0.3,
    cap: float = 0.0,
    window: int | None = None,
    **given: Any,
) -> torch.Tensor:
    """Return [B, H, D] of query [B, H, D]."""
    from attn.torch.kernels.dense_decode import decoder

    return decoder(query.device, query.dtype, (query.shape[1], *key.shape[1::2]), scale, cap, window)(
        query[:, :, None], key, value, **given
    )[:, 0]


def check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: Any = None, splits: int = 0, **options: Any
) -> None:
    options = {"scale": 0.3, **options}
    cap, rest = options.get("logits_soft_cap", 0.0), {name: options.get(name) for name in ("sinks", "window")}
    lens = None if runs is None else Runs(*torch.tensor(runs, dtype=torch.int32, device=DEVICE).T.contiguous())
    got = decode(query, key, value, options["scale"], cap, runs=lens, splits=splits, **rest)
    for b, (first, number) in enumerate(runs or [(0, key.shape[2])] * 3):
        own = (x[b : b + 1, :, first : first + number].transpose(1, 2).float() for x in (key, value))
        want = attention(query[b : b + 1, None].float(), *own, causal=True, layout="BSHD", **options)
        near = {torch.float32: 2e-5, torch.float16: 2e-3}.get(query.dtype, 2e-2)
        torch.testing.assert_close(got[b].float(), want[0, 0], rtol=near, atol=near)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"scale": -0.3, "window": 20},
    "cap": {"logits_soft_cap": 2.0, "window": 200},
    "sinks": {"sinks": SINKS, "window": 65},
    "cap and sinks": {"sinks": SINKS, "logits_soft_cap": 2.0, "scale": -0.3},
}
RUNS = [(0, 130), (100, 30), (7, 0)]
WHOLE = [*itertools.product(OPTIONS, [None, RUNS], [torch.float32, torch.float16, torch.bfloat16])]
#: (heads, size, keys, splits)
SHAPES = [(8, 64, 1, 0), (1, 64, 300, 5), (4, 80, 70, 0), (2, 128, 70, 2), (4, 256, 70, 1)]
if DEVICE == "cpu":  # interpreted: some options a day, and every dtype with runs once
    wide = [case for case in WHOLE if case[2] == torch.float32]
    WHOLE = [*some(wide, 4, "rows"), *(case for case in WHOLE if case[2] != torch.float32 and case[:2] == ("sinks", RUNS))]
else:
    SHAPES = [
        (*layer, *keys) for layer in [(8, 64), (1, 64), (4, 80), (2, 128), (4, 256)] for keys in [(1, 0), (70, 0), (3000, 64)]
    ]


@pytest.mark.parametrize(("option", "runs", "dtype"), WHOLE)
def test_a_row_is_the_formula(option: str, runs: Any, dtype: torch.dtype) -> None:
    check(*arrays(dtype, 2, 32, 130), runs=runs, splits=3, **OPTIONS[option])


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_of_every_dtype(splits: int) -> None:
    """A launch that was kept for one dtype does not read sinks of another."""
    given, sinks = arrays(torch.float32, 2, 32, 130), SINKS.to(torch.bfloat16)
    want = decode(*given, sinks=sinks.float(), splits=splits)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        assert torch.equal(decode(*given, sinks=sinks.to(dtype), splits=splits), want)


@pytest.mark.parametrize(("heads", "size", "keys", "splits"), SHAPES)
def test_every_shape(heads: int, size: int, keys: int, splits: int) -> None:
    check(*arrays(torch.float32, heads, size, keys), splits=splits)


@pytest.mark.parametrize("place", ["tokens first", "odd address", "odd strides", "not dense", "one batch of another"])
def test_every_memory(place: str) -> None:
    """Launches that are repeated from what was kept before take these addresses and strides, or are Triton's own."""
    query, key, value = arrays(torch.float16, 2, 64, 70)
    check(query, key, value)
    if place == "tokens first":
        key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    elif place == "odd address":
        key, value = (torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape) for x in (key, value))
        query = torch.cat([query.new_zeros(1), query.flatten()])[1:].view(query.shape)
    elif place == "odd strides":
        key, value = (torch.cat([x, x[..., :3]], -1)[..., :64] for x in (key, value))
    elif place == "not dense":
        query, key, value = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (query, key, value))
    else:
        key, value = (torch.cat([x[:, :, :9], x], 2)[:, :, 9:] for x in (key, value))
    check(query, key, value)
    check(*arrays(torch.float16, 2, 64, 71))


@pytest.mark.parametrize("splits", [1, 4])
def test_a_value_that_is_not_a_number_stays_in_its_request(splits: int) -> None:
    query, key, value = arrays(torch.float32, 2, 32, 130)
    value[1, 0, 50, 3] = torch.inf
    key[2, 1, 129] = torch.nan
    got = decode(query, key, value, 0.3, splits=splits)
    assert got[0].isfinite().all() and got[1, 4:].isfinite().all() and got[2, :4].isfinite().all()
    assert (got[1, :4, 3] == torch.inf).all() and got[1, :4, :3].isfinite().all() and got[2, 4:].isnan().all()
    check(*arrays(torch.float32, 2, 32, 130), splits=splits)  # nothing is left in memory that is kept


@pytest.mark.parametrize("there", [None, [[True] * 70, [False, True] * 35, [False] * 70]], ids=["whole", "gaps"])
def test_a_row_of_the_dense_backend(there: list[list[bool]] | None) -> None:
    query, *keys = arrays(torch.float32, 2, 32, 70)
    key, value = (x.transpose(1, 2) for x in keys)
    impl = TritonAttentionImpl(8, 32, -0.3, False, 2)
    mask = None if there is None else torch.tensor(there, device=DEVICE)
    want = attention(query[:, None], key, value, scale=-0.3, layout="BSHD", mask=None if mask is None else mask[:, None, None])
    got = impl.forward(query[:, None], key, value, DiffusionAttentionMetadata(attn_mask=mask))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    if mask is None:
        launch = impl.launcher(query[:, None], key, value)
        torch.testing.assert_close(launch(query[:, :, None], *keys), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("splits", [0, 4])
def test_a_mask_of_keys_within_runs(splits: int) -> None:
    """Keys that are masked, and those outside the runs, may hold anything."""
    query, key, value = arrays(torch.float32, 2, 32, 130)
    runs, mask = [(0, 130), (30, 61), (7, 0)], torch.rand(3, 131, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[0, 64:] = False  # whole tiles
    mask = mask[:, 1:].to(DEVICE)
    lens = Runs(*torch.tensor(runs, dtype=torch.int32, device=DEVICE).T.contiguous())
    for x in (key, value):
        x.masked_fill_(~mask[:, None, :, None], torch.nan)
    got = decode(query, key, value, runs=lens, mask=mask, splits=splits)
    for b, (first, number) in enumerate(runs):
        own = mask[b, first : first + number].nonzero()[:, 0] + first
        want = attention(query[b, None], *(x[b, :, own].transpose(0, 1) for x in (key, value)), scale=0.3)
        torch.testing.assert_close(got[b], want[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_a_row_in_a_graph_is_one_operator(masked: bool) -> None:
    query, *keys = arrays(torch.float32, 2, 32, 70)
    given = query[:, None], *(x.transpose(1, 2) for x in keys)
    impl = TritonAttentionImpl(8, 32, -0.3, False, 2)
    mask = torch.rand(3, 70, device=DEVICE) > 0.5 if masked else None

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return impl.forward(query, key, value, DiffusionAttentionMetadata(attn_mask=mask))

    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    want = call(*given, mask)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend=backend)(*given, mask), want)
    assert sum("dense_row" in name for name in seen) == 1 and not any("attn.dense.default" in name for name in seen)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs need a GPU")
def test_a_graph_reads_the_tensors_of_its_replay() -> None:
    query, key, value = arrays(torch.bfloat16, 2, 64, 1000)
    number = torch.tensor([1000, 30, 500], dtype=torch.int32, device=DEVICE)
    runs = Runs(torch.zeros_like(number), number)
    decode(query, key, value, 0.3, runs=runs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(query, key, value, 0.3, runs=runs)
    for lens in itertools.permutations((1000, 30, 0)):
        number.copy_(torch.tensor(lens))
        query.copy_(query.roll(1, 0))
        graph.replay()
        want = decode(query, key, value, 0.3, runs=runs)
        torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter launches nothing that could be repeated")
@pytest.mark.parametrize("keys", [40, 3000])
def test_a_prepared_call_is_the_call_for_other_arrays(keys: int) -> None:
    """Also on another stream, and in a graph, where the decoder makes it."""
    from attn.torch.kernels.dense_decode import decoder

    like = arrays(torch.bfloat16, 2, 64, keys)
    attend = decoder(like[0].device, torch.bfloat16, (8, 2, 64), 0.3, 0.0, None)
    attend(like[0][:, :, None], *like[1:])
    prepared = attend.bound(like[0][:, :, None], *like[1:])
    assert prepared is not attend
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    for turn in range(4):
        query, *cache = (x.roll(turn + 1, 0) for x in arrays(torch.bfloat16, 2, 64, keys))
        others = query[:, :, None], *(torch.cat([x, x.new_full((3, 2, 5, 64), torch.nan)], 2)[:, :, :keys] for x in cache)
        want = attend(*others)
        if turn == 2:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got = prepared(*others, None, None)
            torch.cuda.current_stream().wait_stream(stream)
        elif turn == 3:
            with torch.cuda.graph(graph):
                got = prepared(*others, None, None)
            graph.replay()
        else:
            got = prepared(*others, None, None)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs need a GPU")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures nothing to make the pool
def test_cudagraph_trees_record_rows_again_for_another_cache() -> None:
    """Nothing that a launch keeps is in their pool: they refuse to record where anything but outputs is left."""
    from attn.torch.kernels.dense_decode import row

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return row(query, key, value, 0.3, mask=mask) * 2

    alive = []
    for turn in range(3):
        query, *cache = arrays(torch.bfloat16, 2, 64, 1000)
        alive.append(cache)  # another place in each turn, as the static cache of each `generate` is
        for x in cache:
            torch._dynamo.mark_static_address(x)
        mask = torch.arange(1000, device=DEVICE).expand(3, -1) < 700 + turn
        for _ in range(3):
            got = step(query[:, :, None], *cache, mask).clone()
        torch.testing.assert_close(got, row(query[:, :, None], *cache, 0.3, mask=mask) * 2, rtol=1e-2, atol=1e-2)
