"""Compare XLA_ATTN with plain JAX: gather every page, call `jax.nn.dot_product_attention`.

The layer's step includes the write to a donated cache; the plain one only reads, and supports decodes only. Rounds are
interleaved and medians reported. Outputs are compared with each other in the same run. Bytes are those of the keys and values
that the rows attend to.

    python benchmarks/xla_attn.py --dtype float32 --heads 4 2 64
"""

import argparse
import statistics
import time

import jax
import numpy as np

from attn.backends.metadata import CommonAttentionMetadata
from attn.jax import Attention

CASES = {
    "decode 8 x 512": ([1] * 8, [512] * 8),
    "decode 16 x 512": ([1] * 16, [512] * 16),
    "decode 32 x 512": ([1] * 32, [512] * 32),
    "decode 16, 31 to 511": ([1] * 16, [32 * i + 31 for i in range(16)]),
    "15 decodes at 512 and 113 new": ([1] * 15 + [113], [512] * 15 + [113]),
    "prefill 512": ([512], [512]),
    "decode 64 x 4k": ([1] * 64, [4096] * 64),
    "prefill 2k at 8k": ([2048], [8192]),
}
BLOCK_SIZE = 16


class Setup:
    """A case's arrays: `layer()` and, for decodes, `plain()` run a step and wait for its result."""

    def __init__(self, query_lens: list[int], seq_lens: list[int], heads: tuple[int, int, int], dtype: str) -> None:
        num_heads, num_kv_heads, head_size = heads
        used = [-(-length // BLOCK_SIZE) for length in seq_lens]
        order = np.random.default_rng(0).permutation(sum(used) + 1)[: sum(used)]
        table = np.split(order, np.cumsum(used)[:-1])
        batch = CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, BLOCK_SIZE)
        attention = Attention(
            num_heads, head_size, num_kv_heads=num_kv_heads, dtype=dtype, block_size=BLOCK_SIZE, backend="XLA_ATTN"
        )
        self.metadata = attention.build(batch)
        rows = self.metadata.slot_mapping.shape[0]
        keys = jax.random.split(jax.random.key(0), 4)
        self.q = jax.random.normal(keys[0], (rows, num_heads, head_size), dtype)
        self.k, self.v = (jax.random.normal(key, (rows, num_kv_heads, head_size), dtype) for key in keys[1:3])
        self.cache = jax.random.normal(keys[3], attention.new_kv_cache(sum(used) + 1).shape, dtype)
        self.bytes = 2 * sum(seq_lens) * num_kv_heads * head_size * self.cache.dtype.itemsize
        self.decodes = set(query_lens) == {1}
        self.compiled = jax.jit(attention.__call__, donate_argnums=3)
        self.by_hand = jax.jit(by_hand)

    def layer(self) -> jax.Array:
        out, self.cache = self.compiled(self.q, self.k, self.v, self.cache, self.metadata)
        return jax.block_until_ready(out)

    def plain(self) -> jax.Array:
        return jax.block_until_ready(self.by_hand(self.q, self.cache, self.metadata.block_table, self.metadata.seq_lens))


def by_hand(query: jax.Array, cache: jax.Array, table: jax.Array, lens: jax.Array) -> jax.Array:
    """Return decode attention [R, H, D], with pages gathered to [R, S, K, D] first."""
    keys, values = (half[table].reshape(len(lens), -1, *cache.shape[3:]) for half in cache)
    return jax.nn.dot_product_attention(query[:, None], keys, values, key_value_seq_lengths=lens)[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--heads", type=int, nargs=3, default=(4, 2, 64), metavar=("H", "K", "D"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("cases", nargs="*", help="parts of case names (default: all)")
    options = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {options.dtype}, heads {tuple(options.heads)}")
    for name, (query_lens, seq_lens) in CASES.items():
        if options.cases and not any(part in name for part in options.cases):
            continue
        setup = Setup(query_lens, seq_lens, tuple(options.heads), options.dtype)
        begin = time.perf_counter()
        out = setup.layer()
        compiling = time.perf_counter() - begin
        ways = {"layer": setup.layer, **({"by hand": setup.plain} if setup.decodes else {})}
        if setup.decodes:
            error = np.abs(np.asarray(setup.plain(), np.float32) - np.asarray(out, np.float32)).max()
            assert error < 0.05, f"{name}: the two differ by {error}"
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, run in ways.items():
                begin = time.perf_counter()
                run()
                times[way].append(time.perf_counter() - begin)
        words = [f"{way} {1e3 * statistics.median(t):8.3f} ms (best {1e3 * min(t):.3f})" for way, t in times.items()]
        speed = setup.bytes / statistics.median(times["layer"]) / 1e9
        print(f"{name:30} compile {compiling:4.1f} s   {'   '.join(words)}   {speed:.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
