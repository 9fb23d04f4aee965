"""A decoder served by JAX on a mesh of devices, over `attn.jax.Attention`: the shapes of Llama 3.1 and of Gemma 2.

    server = Server(LLAMA_8B, mesh, Scheduler(num_blocks=4096, block_size=128, token_budget=2048), dtype="bfloat16")
    server.warmup()                                            # every program, before weights are loaded
    server.load(Decoder(LLAMA_8B, jax.random.key(0), dtype="bfloat16"))
    requests = [server.scheduler.submit(prompt, max_new_tokens=64) for prompt in prompts]
    for tokens in server.serve(): ...                          # [(request, token)] of each step

Layers are scanned, so the model compiles in the time of one group of layers; the scan carries all caches in one array, which
is donated and updated in place. Heads and the feed-forward network are sharded over the mesh's only axis: XLA adds the sums
over devices after both of a layer's output projections, and attention itself needs no communication.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn.jax import Attention, ServingStep
from attn.jax.sharding import HeadShards, cache_partition
from attn.serving import Buckets, GenerationRequest, Scheduler, Step
from attn.tools.demo.jax_llama import rotate

#: Attends in one layer: (its place in the group, its number, query [T, H, D], key and value [T, K, D], caches), where
#: number may be traced. Returns (output [T, H, D], caches).
Attend = Callable[[int, jax.Array, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A decoder's sizes. `windows`: of the layers of a group (None: full attention); groups repeat until `num_layers`.

    gemma: Gemma 2's norms before and after, its gated unit and scaled embedding, instead of Llama's.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    windows: tuple[int | None, ...] = (None,)
    attn_cap: float | None = None
    final_cap: float | None = None
    rope_theta: float = 10_000.0
    gemma: bool = False

    def smaller(self, **sizes: Any) -> "Shape":
        """Return this shape with other sizes."""
        return dataclasses.replace(self, **sizes)


LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256, rope_theta=500_000.0)
GEMMA_9B = Shape(42, 3584, 14336, 16, 8, 256, 256000, (4096, None), attn_cap=50.0, final_cap=30.0, gemma=True)
#: Shapes for a CPU, with heads for eight devices.
SMALL = {"num_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_kv_heads": 2, "head_size": 16, "vocab_size": 200}
LLAMA_SMALL = LLAMA_8B.smaller(**SMALL, num_heads=8)
GEMMA_SMALL = GEMMA_9B.smaller(**SMALL, num_heads=16, windows=(12, None), attn_cap=5.0)


class Decoder(nnx.Module):
    """Embedding, scanned layers, norm and the tied head, with random weights: [G, W, ...] for G groups of W layers.

    Their scales let attention decide the next token, so that an error in it shows.
    """

    def __init__(self, shape: Shape, key: jax.Array, *, dtype: Any = "float32") -> None:
        self.shape = s = shape
        keys = iter(jax.random.split(key, 8))
        layers = (s.num_layers // len(s.windows), len(s.windows))

        def normal(*extents: int, fan_in: int, gain: float = 1.0) -> nnx.Param[jax.Array]:
            return nnx.Param(jax.random.normal(next(keys), extents, dtype) * (gain * fan_in**-0.5))

        hidden, wide, size = s.hidden_size, s.intermediate_size, s.head_size
        self.embed = normal(s.vocab_size, hidden, fan_in=hidden, gain=hidden**-0.5 if s.gemma else 1.0)
        self.query = normal(*layers, hidden, s.num_heads, size, fan_in=hidden, gain=4.0)
        self.key = normal(*layers, hidden, s.num_kv_heads, size, fan_in=hidden)
        self.value = normal(*layers, hidden, s.num_kv_heads, size, fan_in=hidden)
        self.out = normal(*layers, s.num_heads, size, hidden, fan_in=s.num_heads * size)
        self.gate = normal(*layers, hidden, wide, fan_in=hidden)
        self.up = normal(*layers, hidden, wide, fan_in=hidden)
        self.down = normal(*layers, wide, hidden, fan_in=wide)
        self.norms = nnx.Param(jnp.full((*layers, 4 if s.gemma else 2, hidden), 1 - s.gemma, dtype))
        self.last_norm = nnx.Param(jnp.full((hidden,), 1 - s.gemma, dtype))

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend, caches: Any) -> tuple[jax.Array, Any]:
        """Return the last hidden states [T, E] of tokens at positions [T], and the caches."""
        s, group = self.shape, len(self.shape.windows)
        hidden = self.embed[...][token_ids] * (s.hidden_size**0.5 if s.gemma else 1.0)
        angles = positions[:, None, None] * s.rope_theta ** (-jnp.arange(s.head_size // 2) * 2.0 / s.head_size)
        rotation = jnp.cos(angles), jnp.sin(angles)
        stacked = {name: getattr(self, name)[...] for name in ("query", "key", "value", "out", "gate", "up", "down", "norms")}

        def layers(carried: Any, scanned: Any) -> tuple[Any, None]:
            hidden, caches = carried
            weights, number = scanned
            for i in range(group):
                w = {name: x[i] for name, x in weights.items()}
                before, *after = self._norms(w["norms"])
                x = before(hidden)
                query, key, value = (jnp.einsum("te,ehd->thd", x, w[name]) for name in ("query", "key", "value"))
                out, caches = attend(i, number * group + i, rotate(query, rotation), rotate(key, rotation), value, caches)
                hidden = hidden + after[0](jnp.einsum("thd,hde->te", out, w["out"]))
                x = after[1](hidden)
                gate = jax.nn.gelu(x @ w["gate"]) if s.gemma else jax.nn.silu(x @ w["gate"])
                hidden = hidden + after[2](gate * (x @ w["up"]) @ w["down"])
            return (hidden, caches), None

        groups = jnp.arange(s.num_layers // group)
        return jax.lax.scan(layers, (hidden, caches), (stacked, groups))[0]

    def next_tokens(self, hidden: jax.Array) -> jax.Array:
        """Return the likeliest token after each hidden state [S, E]: [S] int32."""
        logits = (self._norm(self.last_norm[...])(hidden) @ self.embed[...].T).astype(jnp.float32)
        cap = self.shape.final_cap
        return (logits if cap is None else cap * jnp.tanh(logits / cap)).argmax(-1)

    def _norm(self, weight: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """Return RMSNorm with a weight [E] (Gemma: 1 + weight), computed in float32."""

        def norm(x: jax.Array) -> jax.Array:
            wide = x.astype(jnp.float32)
            wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
            return (wide * (weight + self.shape.gemma)).astype(x.dtype)

        return norm

    def _norms(self, weights: jax.Array) -> list[Callable[[jax.Array], jax.Array]]:
        """Return the norms before and after attention, and before and after the feed-forward network."""
        own = [self._norm(weight) for weight in weights]
        return own if self.shape.gemma else [own[0], lambda x: x, own[1], lambda x: x]


#: How each weight is sharded over a mesh axis "heads"; what is not listed is replicated.
PARTITIONS = {
    "embed": P("heads"),
    **dict.fromkeys(("query", "key", "value"), P(None, None, None, "heads")),
    **dict.fromkeys(("out", "down"), P(None, None, "heads")),
    **dict.fromkeys(("gate", "up"), P(None, None, None, "heads")),
}


class Server:
    """A decoder on a mesh with one axis, "heads", and the loop that serves it."""

    def __init__(
        self, shape: Shape, mesh: Mesh, scheduler: Scheduler, *, dtype: Any = "float32", backend: str | None = None,
        num_tokens: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.mesh, self.scheduler, self.dtype = shape, mesh, scheduler, dtype
        self.buckets = Buckets(scheduler, num_tokens)
        self.shards = shards = HeadShards(shape.num_heads, shape.num_kv_heads, mesh.size)
        self.num_blocks = scheduler.pool.num_blocks

        def layer(heads: int, kv_heads: int, window: int | None = None) -> Attention:
            return Attention(
                heads, shape.head_size, num_kv_heads=kv_heads, sliding_window=window, logits_soft_cap=shape.attn_cap,
                block_size=scheduler.block_size, dtype=dtype, backend=backend,
            )  # fmt: skip

        self.whole = layer(shape.num_heads, len(shards.kv_heads))  # allocates caches and builds batches for all layers
        self.selection = self.whole.selection
        rows, pages = P(None, "heads"), cache_partition(self.whole.backend, "heads")
        self.layers = [
            jax.shard_map(
                layer(shards.local_heads, shards.local_kv_heads, window), mesh=mesh,
                in_specs=(rows, rows, rows, pages, P()), out_specs=(rows, pages), check_vma=False,
            )
            for window in shape.windows
        ]  # fmt: skip
        self.cache_sharding = NamedSharding(mesh, pages)
        graph, self.state = nnx.split(nnx.eval_shape(lambda: Decoder(shape, jax.random.key(0), dtype=dtype)))

        def step(state: Any, caches: jax.Array, token_ids: jax.Array, metadata: Any, sample_rows: jax.Array) -> Any:
            def attend(place: int, number: jax.Array, query: Any, key: Any, value: Any, caches: Any) -> Any:
                return self.layers[place](query, key, value, caches, metadata.of_layer(number, self.num_blocks))

            model = nnx.merge(graph, state)
            hidden, caches = model(token_ids, metadata.positions(), attend, caches)
            return model.next_tokens(hidden[sample_rows]), caches

        shardings = NamedSharding(mesh, P()), self.cache_sharding
        self.step = ServingStep(jax.jit(step, donate_argnames="caches", out_shardings=shardings))

    def inputs(self, padded: Step) -> tuple[Any, ...]:
        """Return the arguments of a padded step that follow the weights and the caches."""
        return padded.token_ids, self.whole.build(padded.attn_metadata), padded.sample_rows

    def warmup(self) -> list[jax.stages.Compiled]:
        """Compile every program from shapes alone: the weights may be loaded later, or elsewhere."""

        def described(path: Any, x: Any) -> Any:
            extents, sharding = x.shape, self._sharding(path)
            if path[0].key in ("key", "value"):
                extents = (*extents[:3], len(self.shards.kv_heads), extents[4])
            return jax.ShapeDtypeStruct(extents, x.dtype, sharding=sharding)

        state = jax.tree_util.tree_map_with_path(described, self.state)
        caches = self.cache_shape()
        empty = (jax.tree.map(_described, self.inputs(step)) for step in self.buckets.empty_steps())
        return self.step.warmup((state, caches, *inputs) for inputs in empty)

    def cache_shape(self) -> jax.ShapeDtypeStruct:
        """Return the shape, dtype and sharding of the array of all layers' caches."""
        caches = jax.eval_shape(self._new_caches)
        return jax.ShapeDtypeStruct(caches.shape, caches.dtype, sharding=self.cache_sharding)

    def load(self, model: Decoder) -> None:
        """Distribute a model's weights over the mesh, kv heads repeated if there are more devices, and allocate the caches."""

        def placed(path: Any, x: jax.Array) -> jax.Array:
            if path[0].key in ("key", "value"):
                x = x[:, :, :, np.array(self.shards.kv_heads)]
            return jax.device_put(x, self._sharding(path))

        self.state = jax.tree_util.tree_map_with_path(placed, nnx.split(model)[1])
        self.caches = self._new_caches()

    def _new_caches(self) -> jax.Array:
        return self.whole.new_kv_cache(self.num_blocks, self.cache_sharding, layers=self.shape.num_layers)

    def serve(self) -> Iterator[list[tuple[GenerationRequest, int]]]:
        """Run until every request is finished, yielding the new tokens of each step."""
        while (step := self.scheduler.schedule()) is not None:
            tokens, self.caches = self.step(self.state, self.caches, *self.inputs(self.buckets.pad(step)))
            yield self.scheduler.commit(np.asarray(tokens)[: len(step.sampled)].tolist())

    def _sharding(self, path: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PARTITIONS.get(path[0].key, P()))


def _described(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def dense(model: Decoder, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the likeliest token after each token of `texts`: one pass with softmax over all scores, without a cache."""
    shape = model.shape

    def attend(place: int, number: Any, query: Any, key: Any, value: Any, caches: Any) -> tuple[jax.Array, Any]:
        key, value = (jnp.repeat(x, shape.num_heads // shape.num_kv_heads, axis=1) for x in (key, value))
        scores = jnp.einsum("qhd,khd->hqk", query, key) * shape.head_size**-0.5
        if shape.attn_cap is not None:
            scores = shape.attn_cap * jnp.tanh(scores / shape.attn_cap)
        distance = jnp.arange(len(query))[:, None] - jnp.arange(len(key))
        window = shape.windows[place]
        seen = (distance >= 0) & (distance < (len(key) if window is None else window))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, value), caches

    @jax.jit
    @jax.vmap
    def forward(tokens: jax.Array) -> jax.Array:
        return model.next_tokens(model(tokens, jnp.arange(len(tokens)), attend, None)[0])

    longest = max(map(len, texts))
    padded = np.array([[*text, *[0] * (longest - len(text))] for text in texts], np.int32)  # later tokens change nothing
    return [row[: len(text)].tolist() for row, text in zip(np.asarray(forward(padded)), texts, strict=True)]
