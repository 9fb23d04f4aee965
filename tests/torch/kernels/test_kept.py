"""Kept launches pass to the kernels what the call would pass if its batch knew none. Compiles for sm_90: 40 s on one core."""

from pathlib import Path

from tests.torch.kernels.test_direct import DRIVER, assert_equal, needs_compiler

SCRIPT = (
    DRIVER
    + """
import dataclasses, threading
from types import SimpleNamespace
import numpy as np
from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum
from attn.errors import DTypeError, UnsupportedError
from attn.torch import kv_cache as caches
from attn.torch.backends import _triton
from attn.torch.backends._triton import _BatchPlan
from attn.torch.kernels import kept
from attn.torch.metadata import shared_calls

H, K, D, P = 4, 2, 64, 16
used = []

class Everything:
    def __contains__(self, value):
        return True

given, plainly = Everything(), passed  # addresses as they are

def passed(value, kind):
    # an address with a mark: how large one is depends on the machine's allocator
    value = plainly(value, kind)
    return ("at", value) if kind.startswith("*") and value is not None else value

def counted_prepared(self, *args, **kwargs):
    used.append(self)
    return call(self, *args, **kwargs)

direct.Prepared.__call__ = counted_prepared

def counted(name, function):
    # an operation is passed views, which their shapes and strides are a part of
    def call(*tensors, **out):
        views = *tensors, *out.values()
        shapes = tuple((tuple(x.shape), x.stride(), x.dtype) for x in views)
        launched.append((name, shapes, None, [("at", x.data_ptr()) for x in views]))
        return function(*tensors, **out)

    return call

torch.bmm, torch.Tensor.copy_ = counted("bmm", torch.bmm), counted("copy", torch.Tensor.copy_)
HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
DECODES, MIXED, FEW = ([1] * 5, [40, 900, 7, 300, 65]), ([1, 33, 1], [400, 70, 9]), ([5, 5], [200, 90])
PROMPTS, WRITES = ([33, 40], [400, 70]), _BatchPlan(writes=True)

def batch_of(lens, causal=True, spans=False, prefix=False, tree=False):
    query_lens, seq_lens = lens
    columns = -(-max(seq_lens) // P)
    table = np.arange(len(query_lens) * columns, dtype=np.int32).reshape(-1, columns)
    return CommonAttentionMetadata.from_lens(
        query_lens, seq_lens, table, P, causal=causal,
        spans=np.full((sum(query_lens), 2), -1, np.int32) if spans else None,
        prefix=np.ones(len(query_lens), np.int32) if prefix else None,
        tree_mask=np.tile(np.tri(5, dtype=bool), (len(query_lens), 1, 1)) if tree else None)

class Layer:
    # one layer, and the tensors of its calls over a batch
    def __init__(self, lens, cache="auto", arrangement="", lse=False, sinks=False, backend="TRITON_ATTN", batch={},
                 plan=None, **options):
        self.cls = AttentionBackendEnum[backend].get_class()
        self.cls.is_interpreted = staticmethod(lambda: True)  # else tensors on the CPU are an error
        extras = {"sinks": torch.rand(H), "alibi_slopes": torch.rand(H)} if sinks else {}
        self.impl = self.cls.get_impl_cls()(H, D, 0.1, K, kv_cache_dtype=cache, **extras, **options)
        self.impl.need_to_return_lse_for_decode = lse
        if plan:
            self.impl._plan = lambda *_: plan
        self.scales = SimpleNamespace(_k_scale=torch.ones(K), _v_scale=torch.ones(K))
        self.spec = KVCacheSpec(P, K, D, "bfloat16", cache, 512)
        self.batch, tokens = batch_of(lens, **batch), sum(lens[0])
        self.kv_cache = None if "attn_type" in options else caches.allocate(self.cls, self.spec, 512)
        width = H + 2 * K
        if arrangement == "slices":
            whole = torch.zeros(tokens, width, D, dtype=HALF)
            self.query, self.key, self.value = whole.split((H, K, K), 1)
        else:
            self.query, self.key, self.value = (torch.zeros(tokens, n, D, dtype=HALF) for n in (H, K, K))
        if arrangement == "flat":
            self.query, self.key, self.value = (x.flatten(1) for x in (self.query, self.key, self.value))
        if arrangement == "cached":
            self.key = self.value = None
        self.output = None if arrangement == "new" else torch.zeros(tokens, H, D, dtype=HALF)

    def build(self):
        return self.cls.get_builder_cls()(self.spec, ["layer"], None, torch.device("cpu")).build(0, self.batch)

    def __call__(self, metadata):
        # what the call launched, memory of its own by the order in which it is used
        used.clear()
        result = self.impl.forward(
            self.scales, self.query, self.key, self.value, self.kv_cache, metadata, self.output)
        own = {x.data_ptr(): i for i, x in enumerate(result if isinstance(result, tuple) else (result,))}
        caches = () if self.kv_cache is None else self.impl._caches(self.kv_cache)[:2]
        known = [x.data_ptr() for x in (
            *metadata.tensors(), self.query, self.key, self.value, *caches, self.output,
            self.impl.sinks, self.impl.alibi_slopes, self.scales._k_scale, self.scales._v_scale) if x is not None]
        found = []
        for name, hash_, grid, values in taken():
            named = []
            for value in values:
                if isinstance(value, tuple) and value[0] == "at" and value[1] not in known:
                    value = "own", own.setdefault(value[1], len(own))
                named.append(value)
            found.append((name, hash_, grid, named))
        return found

class MLALayer(Layer):
    def __init__(self, lens, cache="auto", backend="TRITON_MLA", lse=False, arrangement="", padding=0, scale=0.1):
        self.cls = AttentionBackendEnum[backend].get_class()
        self.cls.is_interpreted = staticmethod(lambda: True)
        rank, nope, rope = 128, 16, 64
        self.indexer = SimpleNamespace(topk_indices=torch.zeros(sum(lens[0]), 64, dtype=torch.int32))
        self.impl = self.cls.get_impl_cls()(
            H, rank + rope, scale, 1, kv_cache_dtype=cache, kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=rope,
            v_head_dim=16, kv_b_proj=torch.zeros(rank, H, nope + 16, dtype=HALF),
            indexer=self.indexer if "SPARSE" in backend else None)
        self.impl.need_to_return_lse_for_decode = lse
        self.scales = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
        self.spec = KVCacheSpec(P, 1, rank + rope, "bfloat16", cache, 512)
        self.batch, tokens = batch_of(lens), sum(lens[0]) + padding
        self.kv_cache = caches.allocate(self.cls, self.spec, 512)
        self.query = torch.zeros(tokens, H, nope + rope, dtype=HALF)
        self.key, self.value = torch.zeros(tokens, rank, dtype=HALF), torch.zeros(tokens, rope, dtype=HALF)
        self.output = None if arrangement == "new" else torch.zeros(tokens, H, 16, dtype=HALF)
        if arrangement == "copied":  # rows that are not dense, of which the call makes a copy
            self.key = torch.zeros(rank, tokens, dtype=HALF).T
        elif arrangement == "flat":
            self.query, self.output, self.value = self.query.flatten(1), self.output.flatten(1), self.value[:, None]
        elif arrangement == "cached":
            self.key = self.value = None
        self.impl._caches = lambda cache: (cache, self.indexer.topk_indices)
        self.impl.process_weights_after_loading(HALF)
        self.impl.sinks, self.impl.alibi_slopes = self.impl._w_uk_t, self.impl._w_uv

plain = dict(lens=DECODES)
calls = [
    (plain, "write attention merge"),
    (dict(lens=DECODES, arrangement="slices"), "write attention merge"),
    (dict(lens=DECODES, arrangement="flat", lse=True), "write attention merge"),
    (dict(lens=DECODES, arrangement="new"), "write attention merge"),
    (dict(lens=DECODES, arrangement="cached"), "attention merge"),
    (dict(lens=DECODES, sinks=True, logits_soft_cap=5.0, sliding_window=100), "write attention merge"),
    (dict(lens=DECODES, cache="fp8"), "write attention merge"),
    (dict(lens=MIXED), "write prefill attention merge"),
    (dict(lens=MIXED, lse=True, arrangement="slices"), "write prefill attention merge"),
    (dict(lens=MIXED, cache="fp8"), "write attention attention merge"),
    (dict(lens=MIXED, plan=_BatchPlan(together=True)), "write attention merge"),
    (dict(lens=PROMPTS, plan=_BatchPlan(singles=False)), "write prefill"),
    (dict(lens=PROMPTS, plan=_BatchPlan(singles=False), cache="fp8"), "write attention"),
    (dict(lens=FEW, plan=_BatchPlan(singles=False)), "write attention merge"),
    (dict(lens=PROMPTS, attn_type="encoder_only"), "prefill"),
    (dict(lens=DECODES, plan=WRITES), "attention merge"),
    (dict(lens=DECODES, plan=WRITES, arrangement="slices", lse=True), "attention merge"),
    (dict(lens=DECODES, plan=WRITES._replace(whole=True), arrangement="flat"), "attention"),
    (dict(lens=DECODES, plan=WRITES, arrangement="cached"), "attention merge"),
    (dict(lens=DECODES, plan=WRITES, cache="fp8"), "attention merge"),
    (dict(lens=DECODES, plan=WRITES, kv_sharing_target_layer_name="other"), "attention merge"),
    (dict(lens=FEW, batch=dict(tree=True)), "write attention merge"),
    (dict(lens=FEW, batch=dict(prefix=True)), "write attention merge"),
]
def forget(metadata):
    metadata.__dict__.pop("_kept", None)
    shared_calls.cache_clear()

mla = [
    (plain, "write bmm stream_k attend merge bmm"),
    (dict(lens=DECODES, cache="fp8", lse=True), "write bmm stream_k attend merge bmm"),
    (dict(lens=DECODES, arrangement="flat"), "write bmm stream_k attend merge bmm"),
    (dict(lens=DECODES, arrangement="new", padding=3), "write bmm stream_k attend merge bmm"),
    (dict(lens=DECODES, scale=-0.1), "write bmm stream_k attend merge bmm"),  # the queries are copied
    (dict(lens=DECODES, arrangement="cached"), "copy bmm stream_k attend merge bmm"),
    (dict(lens=MIXED), "write bmm stream_k attend merge bmm copy copy"),  # the copies are of the prompt
    (dict(lens=([1] * 5, [900] * 5)), "write bmm attend bmm"),
    (dict(lens=DECODES, backend="TRITON_MLA_SPARSE"), "write bmm attend bmm"),
]
for of, options, names in [(Layer, *case) for case in calls] + [(MLALayer, *case) for case in mla]:
    one, other = of(**options), of(**options)
    metadata = one.build()
    one(metadata)
    assert used, options
    repeated = other(metadata)
    assert not used, options
    again = one(metadata), other(metadata)
    assert not used and again[1] == repeated, options
    another = one.build()
    for first in (metadata, another):  # of the same kind
        first.__dict__.pop("_kept", None)
        found = other(first)
        assert not used, options
        forget(first)
        anew = other(first)
        assert used and found == anew and (first is another or repeated == anew), (options, found, anew)
    assert [name for name, *_ in repeated] == names.split(), (options, [name for name, *_ in repeated])

# what calls differ in beside addresses is another call
one, metadata = Layer(**plain), Layer(**plain).build()
one(metadata)

def is_new(other):
    found = other(metadata)
    assert used and found
    forget(metadata)
    assert other(metadata) == found
    forget(metadata)
    one(metadata)

others = dict(logits_soft_cap=3.0), dict(sliding_window=7), dict(arrangement="slices"), dict(sinks=True), dict(lse=True)
for options in others:
    is_new(Layer(**plain, **options))
other = Layer(**plain)
other.impl.batch_invariant = True
is_new(other)

other = Layer(**plain)
other.query = torch.zeros(5 * H * D + 1, dtype=HALF)[1:].view(5, H, D)  # of another alignment
is_new(other)
assert metadata.kept().calls
metadata.max_seq_len = 400
assert not metadata.kept().calls
is_new(Layer(**plain))

# a captured graph may be replayed with decodes, and with pages that requests share: it has the launches that serve any batch,
# whatever was kept before
is_captured = _triton.is_captured
for lens, plan, names in (
    (PROMPTS, _BatchPlan(singles=False), "write prefill attention merge"), (DECODES, WRITES, "write attention merge")
):
    one = Layer(lens=lens, plan=plan)
    metadata = one.build()
    one(metadata)
    assert len(one(metadata)) == 2 and not used
    known, = metadata.kept().calls.values()
    known.launches._stream, _triton.is_captured = lambda number: 7, lambda x: True
    torch.cuda.is_current_stream_capturing = lambda: True
    assert [name for name, *_ in one(metadata)] == names.split() and used
    torch.cuda.is_current_stream_capturing = lambda: False
    assert len(one(metadata)) == 2 and not used
    _triton.is_captured = is_captured

# requests are split alike from some length on, and shorter ones if they need as many tiles
for lens, most, is_same in (
    ([40, 899, 7, 60, 65], 900, True), ([40, 600, 7, 60, 65], 900, True), ([40, 512, 7, 60, 65], 900, False),
    ([40, 900, 7, 60, 65], 512, False), ([40, 90, 7, 81, 65], 96, True), ([40, 80, 7, 30, 65], 96, False),
):
    one = Layer(lens=([1] * 5, [40, most, 7, 60, 65]))
    one.batch.block_table = np.resize(one.batch.block_table, (5, 57))
    metadata = one.build()
    forget(metadata)
    one(metadata)
    longer = Layer(lens=([1] * 5, lens))
    longer.batch.block_table = np.resize(longer.batch.block_table, (5, 57))
    batch = longer.build()
    found = longer(batch)
    assert bool(used) != is_same, lens
    forget(batch)
    assert longer(batch) == found

other = Layer(**plain)
other.value = other.key  # two tensors in one place
metadata = other.build()
other(metadata)
assert [known.launches for known in metadata.kept().calls.values()] == [None]
assert other(other.build()) and used

for change, error in ((lambda x: x.float(), DTypeError), (lambda x: x.requires_grad_(), UnsupportedError)):
    other = Layer(**plain)
    other.query = change(other.query)
    try:
        other(metadata)
    except error:
        continue
    raise AssertionError(error)

# a layer that has yet to move its vectors to the device does not repeat another layer's launches
one, other = Layer(**plain, sinks=True), Layer(**plain, sinks=True)
metadata = one.build()
for layer in (one, other):
    here = {name: getattr(layer.impl, name) for name in ("sinks", "alibi_slopes")}
    vars(layer.impl).update({name: x.to("meta") for name, x in here.items()})
    layer.impl._moved = lambda name, values, device, here=here: here[name]
    layer(metadata)
    assert used
one(metadata)
found = other(metadata)
assert not used
forget(metadata)
assert other(metadata) == found

# launches that another thread repeats at the time are made anew, and measured ones are not kept
one, metadata = Layer(**plain), Layer(**plain).build()
one(metadata)
copies = MLALayer(**plain, arrangement="copied")
batch = copies.build()
copies(batch)
assert [name for name, *_ in copies(batch)] == "write bmm stream_k attend merge bmm".split() and len(used) == 4
known, = metadata.kept().calls.values()
steps = known.launches._idle.pop()
one(metadata)
assert used
known.launches._idle.append(steps)
one(metadata)
assert not used
attend, one.impl._attend = one.impl._attend, None

def measured(call):
    with kept.unkept():
        attend(call)
    attend(call)

one.impl._attend = measured
forget(metadata)
metadata = one.build()
assert len(one(metadata)) == 5 and len(one(metadata)) == 3
# where the attention is not kept, the write is
double = torch.ones((), dtype=torch.float64)  # converted by each call
for cache, scale, repeats in (("auto", double, True), ("fp8", torch.ones(()), True), ("fp8", double, False)):
    one, other = (Layer(lens=MIXED, cache=cache, backend="TORCH_SDPA") for _ in "ab")
    for layer in (one, other):
        layer.impl._attend, layer.impl._writes_by_kernel = lambda call: None, lambda *tensors: True
        scales = {"_k_scale": scale.clone(), "_v_scale": scale.clone()}
        layer.scales = SimpleNamespace(**scales, _k_scale_float=1.0, _v_scale_float=1.0)
    metadata = one.build()
    expected = other(metadata)
    assert used and [name for name, *_ in expected] == ["write"]
    one(metadata)
    assert bool(used) != repeats, (cache, scale)
    found = other(metadata)
    assert bool(used) != repeats and (found == expected or not repeats), (cache, scale)
    other.value = torch.zeros_like(other.value)
    moved = other(metadata)
    assert bool(used) != repeats
    forget(metadata)
    assert moved == other(metadata) and used
type(other.impl).do_kv_cache_update = lambda impl, *tensors: torch.zeros(3)  # more than launches, as far as is known
other.impl._run = lambda call, stages=None: used.append(stages)
forget(metadata)
assert other(metadata) == [] and used == [None]
import copy, pickle
assert "_kept" not in vars(copy.copy(metadata)) and metadata.__dict__["_kept"]
print("equal")
"""
)


@needs_compiler
def test_repeated_launches_pass_what_new_ones_pass(tmp_path: Path) -> None:
    assert_equal(SCRIPT, tmp_path)
