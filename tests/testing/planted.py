"""Defects planted in the library's sources, one at a time, each of which the tests must notice.

`tests.testing.mutants` breaks a simulated kernel, which shows what the conformance suite sees. Here the library itself is
broken, in a copy: `python -m tests.testing.planted` says which test file and which test noticed each defect. What survives
shows a missing test. `--full` runs the expensive cases too: a defect that only they notice is one that `make test` misses.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
TIMEOUT = 900.0  #: seconds that a test file may take; whatever takes longer has noticed


@dataclass(frozen=True)
class Defect:
    """One small mistake."""

    name: str
    file: str  #: a path under attn
    old: str  #: text that the file has exactly once
    new: str  #: what replaces it
    tests: tuple[str, ...]  #: files under tests that could notice, the one most likely to first
    why: str  #: what is wrong, in a sentence

    def planted(self, text: str) -> str:
        """Return the file's text with the defect.

        Raises ValueError if the text does not have `old` exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: attn/{self.file} has {count} times what the defect replaces: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What the test files made of a defect; `killer` is "" if none noticed."""

    name: str
    killer: str = ""  #: the test file that noticed
    test: str = ""  #: its test, or how it noticed without one: see `run_file`
    seconds: float = 0.0
    files: dict[str, str] = field(default_factory=dict)  #: of each file that ran, what noticed: "" for nothing


MASKS = ("test_visibility.py", "torch/backends/test_ragged.py", "test_conformance.py")
RAGGED = ("torch/backends/test_ragged.py",)
FLEX = ("torch/backends/test_flex_attention.py",)
INTERPRETED = ("torch/test_interpreted.py",)
FLASHINFER = ("torch/backends/test_flashinfer.py",)
XLA = ("jax/kernels/test_xla.py", "test_conformance.py")
PAGED_TPU = ("jax/kernels/tpu/test_ragged_paged_attention.py", "jax/test_conformance.py")
MLA_TPU = ("jax/kernels/tpu/test_mla_attention.py",)
MLA_SPARSE_TPU = ("jax/kernels/tpu/test_mla_sparse_attention.py",)
FLASH_TPU = ("jax/kernels/tpu/test_flash_attention.py",)
MLA = ("torch/backends/mla/test_mla.py", "torch/backends/mla/test_torch_mla.py", "test_conformance.py")

DEFECTS = (
    # torch: requests one at a time
    Defect(
        "visibility_window_left",
        "visibility.py",
        "seen = seen & (key >= position - left)",
        "seen = seen & (key > position - left)",
        MASKS,
        "A row does not see the first key of its window.",
    ),
    Defect(
        "visibility_spans_always_cut",
        "visibility.py",
        "if self.layer.span_window and right is not None:",
        "if right is not None:",
        MASKS,
        "The right side of a window cuts spans although the layer does not ask for it.",
    ),
    Defect(
        "visibility_common_ranges",
        "visibility.py",
        "if unlimited or not (one.has_ranges or two.has_ranges):",
        "if unlimited or not (one.has_ranges and two.has_ranges):",
        ("test_visibility.py",),
        "The common mask of two keeps spans that the other does not allow.",
    ),
    Defect(
        "visibility_common_causality",
        "visibility.py",
        "return False, None, flags[0] | flags[-1]",
        "return False, None, flags[0] & flags[-1]",
        ("test_visibility.py",),
        "A request that one of two masks makes causal is not causal in their common mask.",
    ),
    Defect(
        "visibility_tree_transposed",
        "visibility.py",
        "edge = tree[request, row_node * inside, node * inside]",
        "edge = tree[request, node * inside, row_node * inside]",
        MASKS,
        "A token of a tree sees its descendants and not its ancestors.",
    ),
    Defect(
        "ragged_alibi_not_symmetric",
        "torch/backends/_ragged.py",
        "scores - slopes * distance.abs()",
        "scores + slopes * distance",
        RAGGED,
        "ALiBi favours later keys in a batch that is not causal.",
    ),
    Defect(
        "visibility_chunk_start",
        "visibility.py",
        "seen = seen & (key >= position // self.layer",
        "seen = seen & (key > position // self.layer",
        MASKS,
        "A row does not see the first key of its chunk.",
    ),
    Defect(
        "ragged_v_scale_dropped",
        "torch/backends/_ragged.py",
        "return replace(rules, scale=rules.scale * k_scale, v_scale=v_scale)",
        "return replace(rules, scale=rules.scale * k_scale)",
        RAGGED,
        "Values of a quantised cache are not multiplied by their scale.",
    ),
    Defect(
        "ragged_window_page_offset",
        "torch/backends/_ragged.py",
        "tokens = slice(low % block_size, low % block_size + total - low)",
        "tokens = slice(0, total - low)",
        RAGGED,
        "The first key of a window is taken for the first of its page.",
    ),
    Defect(
        "sdpa_causal_top_left",
        "torch/backends/sdpa.py",
        "if rules.is_causal() and work.position == work.first_key and work.query.shape[0] > 1:",
        "if rules.is_causal() and work.query.shape[0] > 1:",
        RAGGED,
        "The causal mask of a chunk is aligned with the first key.",
    ),
    Defect(
        "cpu_decode_window",
        "torch/backends/cpu_attn.py",
        "low, _ = rules.reach(total - 1, total - 1, total)",
        "low, _ = rules.reach(total - 2, total - 1, total)",
        RAGGED,
        "A decode's window has one key too many.",
    ),
    Defect(
        "cpu_one_buffer",
        "torch/backends/cpu_attn.py",
        "keys, values = _Store(kv_cache[0], 0), _Store(kv_cache[1], 1)",
        "keys, values = _Store(kv_cache[0], 0), _Store(kv_cache[1], 0)",
        RAGGED,
        "Values are gathered into the buffer that still holds the keys.",
    ),
    Defect(
        "cpu_inexact_kept",
        "torch/backends/cpu_attn.py",
        "    if not _cpu_kernel.finite(log):\n        return False",
        "    if not _cpu_kernel.finite(log):\n        return True",
        RAGGED,
        "A prompt whose scores are not finite is not computed again.",
    ),
    # torch: what the paged backends share
    Defect(
        "paged_writes_shared_cache",
        "torch/backends/_paged.py",
        "if self.kv_sharing_target_layer_name is None and key is not None:",
        "if key is not None:",
        RAGGED,
        "A layer that reads another layer's cache writes its own keys there.",
    ),
    Defect(
        "paged_padding_is_written",
        "torch/backends/_paged.py",
        "slots = slots[: meta.num_actual_tokens]",
        "slots = slots[:]",
        ("torch/test_layer.py",),
        "Rows of padding are written to the cache.",
    ),
    Defect(
        "paged_extent_not_checked_again",
        "torch/backends/_paged.py",
        "if shape is None or not isinstance(kv_cache, torch.Tensor) or kv_cache.shape != shape:",
        "if shape is None or not isinstance(kv_cache, torch.Tensor):",
        RAGGED,
        "A cache of another shape than the first one is not checked.",
    ),
    Defect(
        "paged_gradient_of_keys",
        "torch/backends/_paged.py",
        "check_no_gradient(self, query=query, key=key, value=value)",
        "check_no_gradient(self, query=query)",
        RAGGED,
        "Gradients of keys and values are dropped without an error.",
    ),
    # torch: FlexAttention
    Defect(
        "flex_window_left",
        "torch/backends/_flex.py",
        "seen = seen & (distance >= -left)",
        "seen = seen & (distance > -left)",
        FLEX,
        "A row does not see the first key of its window.",
    ),
    Defect(
        "flex_whole_pages",
        "torch/backends/_flex.py",
        "whole = torch.minimum(torch.maximum(-(-common // page), low), high)",
        "whole = torch.minimum(torch.maximum(common // page, low), high)",
        FLEX,
        "A page that a window cuts counts as one that every row sees.",
    ),
    Defect(
        "flex_first_place_kept",
        "torch/backends/_flex.py",
        'index.flatten(), "amax")',
        'index.flatten(), "amin", include_self=False)',
        FLEX,
        "Of a page that is listed twice the first place is kept.",
    ),
    # torch: the adapters
    Defect(
        "flash_key_starts",
        "torch/backends/flash_attn.py",
        "out=metadata.key_starts[1:]",
        "out=metadata.key_starts[:-1]",
        ("torch/backends/test_flash_attn.py",),
        "Cumulative key lengths are off by one request.",
    ),
    Defect(
        "flash_mask_rows_past_the_last",
        "torch/backends/_flash_providers.py",
        "q_row * (q_row < lens.seqlen_q)",
        "q_row",
        ("torch/backends/test_flash_attn.py",),
        "The mask reads the spans of rows that are not in the batch.",
    ),
    Defect(
        "flash_mask_position",
        "torch/backends/_flash_providers.py",
        "context = lens.seqlen_k - lens.seqlen_q",
        "context = 0 * lens.seqlen_k",
        ("torch/backends/test_flash_attn.py",),
        "The mask takes rows for the first tokens of their request.",
    ),
    Defect(
        "flash_mask_provider_of_another_batch",
        "torch/backends/flash_attn.py",
        "chosen_by = call.query.dtype, block_size, call.query.device, batch_needs",
        "chosen_by = call.query.dtype, block_size, call.query.device",
        ("torch/backends/test_flash_attn.py",),
        "A batch with spans goes to the provider of one without, which ignores them.",
    ),
    Defect(
        "flash_mask_chunk_of_the_longest",
        "torch/backends/flash_attn.py",
        "layer.chunk_size >= longest",
        "layer.chunk_size >= longest - 1",
        ("torch/backends/test_flash_attn.py",),
        "A request that is one token longer than a chunk has no mask.",
    ),
    Defect(
        "flashinfer_last_page",
        "torch/backends/flashinfer.py",
        "(lens - 1) % self.block_size + 1",
        "lens % self.block_size",
        FLASHINFER,
        "A full last page counts as empty.",
    ),
    Defect(
        "flashinfer_lse_base",
        "torch/backends/flashinfer.py",
        "(log * LN2).T",
        "log.T",
        FLASHINFER,
        "A log-sum-exp of base 2 is returned as a natural one.",
    ),
    Defect(
        "flashinfer_stale_plan",
        "torch/backends/flashinfer.py",
        "            for group in metadata.plans:\n                metadata.plan(group)\n",
        "",
        FLASHINFER,
        "A captured graph attends the batch that was planned before.",
    ),
    Defect(
        "vendor_empty_request_decodes",
        "torch/backends/_vendor.py",
        "np.flatnonzero(np.diff(starts) != 1)",
        "np.flatnonzero(np.diff(starts) > 1)",
        FLASHINFER,
        "Requests without a new token count as decodes.",
    ),
    Defect(
        "vendor_infinite_lse",
        "torch/backends/_vendor.py",
        "log = torch.where(empty, -torch.inf, log)",
        "log = log * 1",
        ("torch/backends/test_flash_attn.py", *FLASHINFER),
        "A row without keys keeps the vendor's log-sum-exp of +inf.",
    ),
    # jax: XLA's loop over the keys
    Defect(
        "visibility_window_cuts_span",
        "visibility.py",
        "if self.layer.span_window and left is not None:",
        "if left is not None:",
        MASKS,
        "The window cuts spans although the layer does not ask for it.",
    ),
    Defect(
        "visibility_widest_tree",
        "visibility.py",
        "((new <= width) &",
        "((new < width) &",
        MASKS,
        "A tree as wide as its mask is attended as a chain.",
    ),
    Defect(
        "xla_page_past_the_cache",
        "jax/kernels/xla.py",
        "(ids >= num_blocks)",
        "(ids > num_blocks)",
        XLA,
        "A page one past the cache is read from another one without a sign.",
    ),
    Defect(
        "xla_decode_k_scale",
        "jax/kernels/xla.py",
        ".swapaxes(2, 3) * score_scale",
        ".swapaxes(2, 3) * rules.scale",
        XLA,
        "Scores of decodes are not multiplied by the scale of a quantised cache.",
    ),
    Defect(
        "xla_tile_of_row",
        "jax/kernels/xla.py",
        "return jnp.where(tiles.owned[:, None, None], x, fill)",
        "return x",
        XLA,
        "Rows of padding return what another row has.",
    ),
    # jax: latents
    Defect(
        "xla_mla_index_at_the_end",
        "jax/kernels/xla_mla.py",
        "(indices < seq_lens[request][:, None])",
        "(indices <= seq_lens[request][:, None])",
        ("jax/backends/mla/test_xla_mla_sparse.py",),
        "The position after a request's last key counts as a key.",
    ),
    Defect(
        "xla_mla_power_of_two",
        "jax/kernels/xla_mla.py",
        "exponent - (fraction == 0.5)",
        "exponent",
        ("jax/backends/mla/test_xla_mla.py",),
        "A scale that is a power of two is rounded up to the next.",
    ),
    Defect(
        "jax_mla_context_chunk",
        "jax/backends/mla/_mla.py",
        "position = jnp.where(index < ends, index - keys[request], 0)",
        "position = jnp.where(index < ends, index, 0)",
        ("jax/backends/mla/test_xla_mla.py",),
        "Positions within a context chunk are counted from the chunk's first request.",
    ),
    Defect(
        "xla_mla_indexer_last_step",
        "jax/kernels/xla_mla.py",
        "-(-(last + 1) // (pages * page))",
        "last // (pages * page)",
        ("jax/backends/mla/test_xla_mla_sparse.py",),
        "The indexer does not score the keys of a row's last step.",
    ),
    Defect(
        "xla_mla_keys_of_a_cut_request",
        "jax/kernels/xla_mla.py",
        "keys = jnp.maximum(keys - (starts - inside)[1:], 0)",
        "keys = jnp.maximum(keys, 0)",
        ("jax/kernels/test_xla_mla.py",),
        "A request whose last rows are in another window is aligned with its last key in this one too.",
    ),
    Defect(
        "jax_mla_rows_of_two_windows",
        "jax/backends/mla/_mla.py",
        "(row >= low + j * window) & (row < high)",
        "row < high",
        ("jax/backends/mla/test_xla_mla.py",),
        "Rows of the last window that the window before has too are merged twice.",
    ),
    # jax: the TPU's kernels
    Defect(
        "tpu_single_window",
        "jax/kernels/tpu/_single.py",
        "(j >= keys.low)",
        "(j > keys.low)",
        PAGED_TPU,
        "A decode does not see the first key of its window.",
    ),
    Defect(
        "tpu_single_soft_cap",
        "jax/kernels/tpu/_single.py",
        "(cfg.logits_soft_cap * LOG2_E)",
        "cfg.logits_soft_cap",
        PAGED_TPU,
        "A decode's capped scores are not in units of log2.",
    ),
    Defect(
        "tpu_single_sink",
        "jax/kernels/tpu/_single.py",
        "jnp.exp2(refs.rules1[SINK, n] - jnp.where(m == -jnp.inf, 0.0, m))",
        "jnp.exp2(refs.rules1[SINK, n])",
        PAGED_TPU,
        "A decode's sink is not taken relative to the maximum.",
    ),
    Defect(
        "tpu_single_lse_base",
        "jax/kernels/tpu/_single.py",
        "m * (1 / LOG2_E)) + jnp.log(total)",
        "m) + jnp.log2(total)",
        PAGED_TPU,
        "A decode's log-sum-exp is returned in units of log2.",
    ),
    Defect(
        "tpu_single_joined_heads",
        "jax/kernels/tpu/_single.py",
        "out = jnp.where(row >= i * cfg.group,",
        "out = jnp.where(row > i * cfg.group,",
        PAGED_TPU,
        "The first query head of a joined kv head gets the values of the one before.",
    ),
    Defect(
        "tpu_long_window_right",
        "jax/kernels/tpu/_long.py",
        "high = jnp.minimum(high, position + right + 1)",
        "high = jnp.minimum(high, position + right)",
        PAGED_TPU,
        "A row of a prompt does not see the last key of its window.",
    ),
    Defect(
        "tpu_long_alibi_not_symmetric",
        "jax/kernels/tpu/_long.py",
        "(dist if cfg.mask.causal and not (cfg.tree or cfg.ranges) else -jnp.abs(dist))",
        "dist",
        PAGED_TPU,
        "ALiBi favours later keys in a prompt that is not causal.",
    ),
    Defect(
        "tpu_long_step_not_clear",
        "jax/kernels/tpu/_long.py",
        "clear &= first >= item.position + cfg.large - 1 - left",
        "clear &= first >= item.position - left",
        PAGED_TPU,
        "A step of keys that the window cuts for the last rows is not masked.",
    ),
    Defect(
        "tpu_whole_block_not_clear",
        "jax/kernels/tpu/_kernel.py",
        "begin + first, begin + first + size)",
        "begin + first, begin + first + cfg.chunk)",
        PAGED_TPU,
        "A block whose first step every row sees is processed without masks.",
    ),
    Defect(
        "tpu_long_chunk_not_clear",
        "jax/kernels/tpu/_long.py",
        "first >= _chunk_start(item.position + cfg.large - 1, chunk)",
        "first >= _chunk_start(item.position, chunk)",
        PAGED_TPU,
        "A step of keys before the last rows' chunk is not masked.",
    ),
    Defect(
        "tpu_long_chunk_start",
        "jax/kernels/tpu/_long.py",
        "jnp.maximum(_chunk_start(position, chunk), item.low if low is None else low)",
        "jnp.maximum(_chunk_start(position, chunk), item.low)",
        PAGED_TPU,
        "A chunk replaces the window of a prompt's rows.",
    ),
    Defect(
        "tpu_long_tree_siblings",
        "jax/kernels/tpu/_long.py",
        "(ordered & jnp.logical_not(is_tree))",
        "ordered",
        PAGED_TPU,
        "A token of a tree sees its siblings before it.",
    ),
    Defect(
        "tpu_long_never_repeated",
        "jax/kernels/tpu/_long.py",
        "@pl.when(refs.flags[REPEAT] > 0)",
        "@pl.when(refs.flags[REPEAT] > 1)",
        PAGED_TPU,
        "A step whose sums left their range is not repeated.",
    ),
    Defect(
        "tpu_long_results_before_the_repetition",
        "jax/kernels/tpu/_long.py",
        "        refs.flags[WRITTEN] = jnp.int32(0)\n\n        def head",
        "\n        def head",
        PAGED_TPU,
        "The results of an item whose last step is repeated are those from before.",
    ),
    Defect(
        "tpu_long_results_of_a_step_before",
        "jax/kernels/tpu/_long.py",
        "refs.flags[WRITTEN] = jnp.int32(_writes(cfg, masked))",
        "refs.flags[WRITTEN] = jnp.int32(_writes(cfg, 1))",
        PAGED_TPU,
        "An item whose last step writes no results has none.",
    ),
    Defect(
        "tpu_long_second_tile_without_masks",
        "jax/kernels/tpu/_long.py",
        "offset >= step.clear",
        "offset > step.clear",
        PAGED_TPU,
        "The second tile of a step of two has no masks.",
    ),
    Defect(
        "tpu_long_output_overwritten",
        "jax/kernels/tpu/_kernel.py",
        "_long.finish(cfg, refs, lax.rem(i, 2))",
        "_long.finish(cfg, refs, 1 - lax.rem(i, 2))",
        PAGED_TPU,
        "Results are stored from the other item's half of the buffer.",
    ),
    Defect(
        "tpu_long_values_taken_for_finite",
        "jax/kernels/tpu/_long.py",
        "if is_masked and may_be_nonfinite",
        "if not is_masked and may_be_nonfinite",
        PAGED_TPU,
        "A NaN or an infinity among the values reaches rows of a prompt that do not see it.",
    ),
    Defect(
        "tpu_long_bound_of_the_first_key",
        "jax/kernels/tpu/_long.py",
        "register * _SUBLANES < bound - first - sublane",
        "register * _SUBLANES < bound - first",
        PAGED_TPU,
        "Rows of a prompt see up to seven keys past their last.",
    ),
    Defect(
        "tpu_long_v_scale",
        "jax/kernels/tpu/_long.py",
        "refs.rules[V_FACTOR, k, :, at] / jnp.where",
        "1.0 / jnp.where",
        PAGED_TPU,
        "Values of a quantised cache are not multiplied by their scale in prompts.",
    ),
    Defect(
        "tpu_plan_last_token_lost",
        "jax/kernels/tpu/_plan.py",
        "written_to = jnp.where(of_request, position + 1, 0)",
        "written_to = jnp.where(of_request, position, 0)",
        PAGED_TPU,
        "The last new token is not written to the cache.",
    ),
    Defect(
        "tpu_plan_page_in_part",
        "jax/kernels/tpu/_plan.py",
        "from_page = -(-jnp.minimum(written_from, written_to + cfg.page) // cfg.page)",
        "from_page = jnp.minimum(written_from, written_to + cfg.page) // cfg.page",
        PAGED_TPU,
        "A page whose first rows are old is overwritten by one copy of new rows.",
    ),
    Defect(
        "tpu_plan_tiles_before_a_page",
        "jax/kernels/tpu/_plan.py",
        "nth >= (from_page * per_page - first)[r]",
        "nth >= 0",
        PAGED_TPU,
        "New rows before the first page that they fill are not written to the cache.",
    ),
    Defect(
        "tpu_plan_page_of_another",
        "jax/kernels/tpu/_plan.py",
        "table = jnp.where((source_tile >= 0) & ~single, -1 - source_tile, table)",
        "table = jnp.where((source_tile >= 0) & ~single & (batch.query_lens[:, None] > 3), -1 - source_tile, table)",
        PAGED_TPU,
        "Requests of a few rows read pages that other requests fill before they are written.",
    ),
    Defect(
        "tpu_pages_single_reads_early",
        "jax/kernels/tpu/_pages.py",
        "seen = refs.counts[last - 1], refs.counts[last] > 0",
        "seen = refs.counts[last - 1], refs.counts[last] > 1",
        PAGED_TPU,
        "A request of one row reads a page that another request fills before it is written.",
    ),
    Defect(
        "tpu_long_sums_of_the_item_before",
        "jax/kernels/tpu/_long.py",
        "refs.flags[CURRENT] = ZEROS",
        "pass",
        PAGED_TPU,
        "The sums of an item of a prompt contain those of the item before it.",
    ),
    Defect(
        "tpu_plan_ranges_that_do_not_meet",
        "jax/kernels/tpu/_plan.py",
        "((other_low <= high) & (low <= other_high))",
        "(other_low <= high)",
        PAGED_TPU,
        "A range of keys and one that begins after it are merged, with the keys between.",
    ),
    Defect(
        "tpu_plan_order_of_ranges",
        "jax/kernels/tpu/_plan.py",
        "else (2, 1, 2):",
        "else (1, 2, 1):",
        PAGED_TPU,
        "Rows before the first key that see a span do not see their prefix.",
    ),
    Defect(
        "tpu_plan_span_last_key",
        "jax/kernels/tpu/_plan.py",
        "jnp.minimum(high, mask.spans[:, 1] + 1)",
        "jnp.minimum(high, mask.spans[:, 1])",
        PAGED_TPU,
        "A row does not see the last key of its span.",
    ),
    Defect(
        "tpu_plan_span_window",
        "jax/kernels/tpu/_plan.py",
        "layer.window if layer.span_window else (None, None)",
        "(None, None)",
        PAGED_TPU,
        "A window does not cut spans although the layer asks for it.",
    ),
    Defect(
        "tpu_plan_prefix",
        "jax/kernels/tpu/_plan.py",
        "jnp.minimum(high, mask.prefix[request])",
        "jnp.minimum(high, mask.prefix[request] - 1)",
        PAGED_TPU,
        "A row does not see the last key of its prefix.",
    ),
    Defect(
        "tpu_plan_mixed",
        "jax/kernels/tpu/_plan.py",
        "if mask.is_causal is None else mask.is_causal[request]",
        "if mask.is_causal is None else mask.is_causal[0]",
        PAGED_TPU,
        "All requests are causal if the first one is.",
    ),
    Defect(
        "tpu_plan_clear",
        "jax/kernels/tpu/_plan.py",
        "jnp.max(jnp.where(real, of_rows[0, 0], -1), axis=1)",
        "of_rows[0, 0, :, 0]",
        PAGED_TPU,
        "Keys that the first row of an item sees are not masked for the others.",
    ),
    Defect(
        "tpu_pages_gap",
        "jax/kernels/tpu/_pages.py",
        "(first + cfg.kv_block <= high), 0, number)",
        "(first < high), 0, number)",
        PAGED_TPU,
        "A block that begins between two ranges is not loaded.",
    ),
    Defect(
        "tpu_single_gap",
        "jax/kernels/tpu/_single.py",
        "seen &= (j < low) | (j >= high)",
        "seen &= (j < low) | (j > high)",
        PAGED_TPU,
        "A decode does not see the first key of its second range.",
    ),
    Defect(
        "tpu_single_gap_values",
        "jax/kernels/tpu/_single.py",
        "values = jnp.where(visible(keys, row), values, 0.0)",
        "pass",
        PAGED_TPU,
        "A NaN between two ranges, or after the last key, reaches a decode.",
    ),
    Defect(
        "tpu_single_failed_values",
        "jax/kernels/tpu/_single.py",
        "for x in (refs.l1, refs.acc1)",
        "for x in (refs.l1,)",
        PAGED_TPU,
        "A decode beside a NaN that it does not see is not repeated.",
    ),
    Defect(
        "tpu_line_queries",
        "jax/kernels/tpu/_line.py",
        "lax.rem(owner, cfg.query_slots), lax.rem(owner, cfg.segments)",
        "lax.rem(owner, cfg.segments), lax.rem(owner, cfg.segments)",
        PAGED_TPU,
        "Queries of a block ahead replace those of the block that is processed.",
    ),
    Defect(
        "tpu_line_outputs",
        "jax/kernels/tpu/_line.py",
        "pl.when(owner >= cfg.segments)",
        "pl.when(owner < 0)",
        PAGED_TPU,
        "A decode's results are replaced before they are stored.",
    ),
    Defect(
        "tpu_line_gap",
        "jax/kernels/tpu/_line.py",
        "(next_number < beyond), beyond, next_number)",
        "(next_number < beyond), beyond + 1, next_number)",
        PAGED_TPU,
        "A decode does not see the first segment after a gap.",
    ),
    Defect(
        "tpu_line_invariant",
        "jax/kernels/tpu/_line.py",
        "        if self.cfg.invariant:\n            return jnp.bool_(False)\n",
        "",
        ("jax/backends/test_pallas.py",),
        "Which keys a decode's steps have depends on the requests before it.",
    ),
    Defect(
        "tpu_line_whole",
        "jax/kernels/tpu/_line.py",
        "whole = segment.live & (begin >= low) & (stop <= high)",
        "whole = segment.live & (stop <= high)",
        PAGED_TPU,
        "A block that begins before a decode's window is not masked.",
    ),
    Defect(
        "tpu_plan_last_segment",
        "jax/kernels/tpu/_plan.py",
        "jnp.maximum(-(-(high - origin) // cfg.segment), 1)",
        "jnp.maximum((high - origin) // cfg.segment, 1)",
        PAGED_TPU,
        "A decode's last segment is lost if it is not full.",
    ),
    Defect(
        "tpu_plan_singles_first",
        "jax/kernels/tpu/_plan.py",
        "jnp.argsort(~is_single, stable=True)",
        "jnp.argsort(is_single, stable=True)",
        PAGED_TPU,
        "Longer requests are where the kernel looks for those of one row.",
    ),
    Defect(
        "tpu_long_span_beside_tree",
        "jax/kernels/tpu/_long.py",
        "is_before(jnp.broadcast_to(jnp.int32(NO_TREE), position.shape) if cfg.ranges else position + 1)",
        "is_before(position + 1)",
        PAGED_TPU,
        "Beside trees, a span is cut by causality.",
    ),
    Defect(
        "tpu_plan_causal_item",
        "jax/kernels/tpu/_plan.py",
        "last = position + jnp.minimum(q_lens[r] - offset, large) - 1",
        "last = position",
        PAGED_TPU,
        "An item's keys end where those of its first row do.",
    ),
    Defect(
        "tpu_pages_last_page",
        "jax/kernels/tpu/_pages.py",
        "stop = lax.div(self.high(i) + (cfg.page - 1), cfg.page)",
        "stop = lax.div(self.high(i), cfg.page)",
        PAGED_TPU,
        "A last page that is not full is not loaded.",
    ),
    Defect(
        "tpu_pages_shared_wait",
        "jax/kernels/tpu/_pages.py",
        "jnp.where(i > first, self.field(_plan.READ, jnp.maximum(i - 1, 0)), 0)",
        "jnp.where(i > first, self.field(_plan.READ, i), 0)",
        PAGED_TPU,
        "An item does not wait for pages of a block that it shares and is the first to read.",
    ),
    Defect(
        "tpu_plan_shared_step",
        "jax/kernels/tpu/_plan.py",
        "_round_up(high - origin, cfg.least)",
        "high - origin",
        PAGED_TPU,
        "An item's last step begins before all of its pages are there, if others share them.",
    ),
    Defect(
        "tpu_kernel_shared_values",
        "jax/kernels/tpu/_kernel.py",
        "item.low - begin, item.loaded - begin, tiles",
        "item.low - begin, item.high - begin, tiles",
        PAGED_TPU,
        "An item zeroes values that the next one reads from the same block.",
    ),
    Defect(
        "tpu_pages_partial_tile",
        "jax/kernels/tpu/_pages.py",
        "field(_plan.FIRST, t) < self.cfg.tile",
        "field(_plan.FIRST, t) < self.cfg.tile - 1",
        PAGED_TPU,
        "A tile that lacks one row overwrites the row that was there.",
    ),
    Defect(
        "tpu_pages_new_rows_unseen",
        "jax/kernels/tpu/_pages.py",
        "                refs.kv[slot, :, :, rows] = refs.new[t]",
        "                pass",
        PAGED_TPU,
        "Requests of a launch that writes its new rows last do not see them.",
    ),
    Defect(
        "tpu_pages_late_rows_of_another",
        "jax/kernels/tpu/_pages.py",
        "jnp.where(n == tiles.seen, number, 0)",
        "jnp.where(n == 0, number, 0)",
        PAGED_TPU,
        "A page that another request writes is loaded before it is written.",
    ),
    Defect(
        "tpu_plan_late_rows_of_another",
        "jax/kernels/tpu/_plan.py",
        "(jnp.sum(of_tile, dtype=jnp.int32) > jnp.sum(stop > tiles.columns[FIRST]))",
        "(jnp.sum(of_tile, dtype=jnp.int32) > 2 * jnp.sum(stop > tiles.columns[FIRST]))",
        PAGED_TPU,
        "New rows in a page that another request sees are written after it is loaded.",
    ),
    Defect(
        "tpu_pages_unused_slots",
        "jax/kernels/tpu/_pages.py",
        "lax.fori_loop(lax.div(jnp.clip(stop, 0, cfg.kv_block), cfg.tile), tiles, tile, None)",
        "lax.fori_loop(lax.div(jnp.clip(stop, 0, cfg.kv_block), cfg.tile) + 1, tiles, tile, None)",
        MLA_TPU,
        "Slots after the last key are not zeroed, so that a NaN there reaches every row.",
    ),
    Defect(
        "tpu_kernel_last_chunk",
        "jax/kernels/tpu/_kernel.py",
        "cfg.kv_block) + (cfg.chunk - 1), cfg.chunk)",
        "cfg.kv_block), cfg.chunk)",
        PAGED_TPU,
        "The keys of an item's last chunk are left out if they are fewer than a chunk.",
    ),
    Defect(
        "tpu_kernel_last_step",
        "jax/kernels/tpu/_kernel.py",
        "masked & (left <= cfg.last)",
        "masked & (left <= cfg.last + 8)",
        PAGED_TPU,
        "A last step leaves out keys that rows see.",
    ),
    Defect(
        "tpu_kernel_fused_short",
        "jax/kernels/tpu/_kernel.py",
        "left - (size - cfg.key_tile) <= cfg.last",
        "left - cfg.key_tile <= cfg.last + 64",
        PAGED_TPU,
        "A step of several tiles leaves out keys of its last one that rows see.",
    ),
    Defect(
        "tpu_kernel_fused_clear",
        "jax/kernels/tpu/_kernel.py",
        "count * cfg.key_tile + last, clear=count * cfg.key_tile)",
        "count * cfg.key_tile + last, clear=count * cfg.key_tile + last)",
        PAGED_TPU,
        "The last tile of a step of several has no masks.",
    ),
    Defect(
        "tpu_kernel_fused_end",
        "jax/kernels/tpu/_kernel.py",
        "size *= fused + 1",
        "size *= fused + 2",
        PAGED_TPU,
        "The tile after a step of several is left out.",
    ),
    Defect(
        "tpu_kernel_first_queries",
        "jax/kernels/tpu/_kernel.py",
        "queries(line.count)))",
        "queries(line.count + 2)))",
        PAGED_TPU,
        "The first long item reads the queries of another one.",
    ),
    Defect(
        "tpu_fp8_gain",
        "jax/kernels/tpu/ragged_paged_attention.py",
        "gain * jnp.asarray(v_scale, jnp.float32)",
        "jnp.asarray(v_scale, jnp.float32)",
        PAGED_TPU,
        "Values in fp8 are read 16 times smaller than they are.",
    ),
    Defect(
        "tpu_heads_interleaved",
        "jax/kernels/tpu/ragged_paged_attention.py",
        "query.reshape(-1, cfg.num_kv_heads, cfg.group, cfg.lanes).transpose(1, 0, 2, 3)",
        "query.reshape(-1, cfg.group, cfg.num_kv_heads, cfg.lanes).transpose(2, 0, 1, 3)",
        PAGED_TPU,
        "Query heads share the kv heads in turn and not in groups.",
    ),
    Defect(
        "tpu_padding_rows",
        "jax/kernels/tpu/_plan.py",
        "return jnp.where(self.live[:, None, None], rows, fill)",
        "return rows",
        PAGED_TPU,
        "Rows of padding are not 0.",
    ),
    Defect(
        "tpu_encoder_window",
        "jax/backends/pallas.py",
        "LayerMask(False, self.window)",
        "LayerMask(False)",
        ("jax/test_conformance.py",),
        "The window of an encoder is dropped.",
    ),
    Defect(
        "tpu_slot_gap",
        "jax/backends/pallas.py",
        "if len(written) != written[-1] - written[0] + 1:",
        "if len(written) < written[-1] - written[0]:",
        ("jax/backends/test_pallas.py",),
        "A token between two written ones that has no slot is not refused, and written.",
    ),
    Defect(
        "tpu_mla_starts_twice",
        "jax/kernels/tpu/_mla_kernel.py",
        "pl.when(jnp.logical_not(is_clear(item, begin + cfg.kv_block)))(start_next)",
        "start_next()",
        MLA_TPU,
        "The copies of the next block are started before a block that starts them at its end too.",
    ),
    Defect(
        "tpu_mla_own_key",
        "jax/kernels/tpu/_mla_kernel.py",
        "(item.position + 1 - first)",
        "(item.position - first)",
        MLA_TPU,
        "A row of a prompt does not see its own key.",
    ),
    Defect(
        "tpu_mla_step_count",
        "jax/kernels/tpu/_mla_kernel.py",
        "pl.when(begin + at < item.high)",
        "pl.when(begin + at + size <= item.high)",
        MLA_TPU,
        "Keys of a block's last step are not seen where they do not fill it.",
    ),
    Defect(
        "tpu_mla_step_strangers",
        "jax/kernels/tpu/_mla_kernel.py",
        "tiles = lax.div(start, cfg.tile) + least // cfg.tile",
        "tiles = least // cfg.tile",
        MLA_TPU,
        "Values past a request's last key are zeroed in the first step of a block only.",
    ),
    Defect(
        "tpu_mla_step_place",
        "jax/kernels/tpu/_mla_kernel.py",
        "tiles = [pl.ds(step.start + first, rows.key_tile)",
        "tiles = [pl.ds(first, rows.key_tile)",
        MLA_TPU,
        "Every step reads the keys of the block's first.",
    ),
    Defect(
        "tpu_mla_large_sums",
        "jax/kernels/tpu/_mla_kernel.py",
        "(total <= 2.0**_MAX_LOG2_SUM)",
        "(total == total)",
        MLA_TPU,
        "An item with scores that are much larger than the first tile's, and infinite sums of them, is not repeated.",
    ),
    Defect(
        "tpu_mla_lost_nan",
        "jax/kernels/tpu/_mla_kernel.py",
        "lost = 0 if refs.lost is None else refs.lost[...]",
        "lost = 0",
        MLA_TPU,
        "A NaN of an e4m3 cache is a number where codes are read as another format.",
    ),
    Defect(
        "tpu_mla_reset",
        "jax/kernels/tpu/_mla_kernel.py",
        "_reset(rows)\n        lax",
        "lax",
        MLA_TPU,
        "An item that is repeated is added to the sums of its first pass.",
    ),
    Defect(
        "tpu_mla_overwritten",
        "jax/kernels/tpu/_mla_kernel.py",
        "(long & (row < stop))",
        "(long & (row < 0))",
        MLA_TPU,
        "An item that is repeated leaves its rows in the next request's.",
    ),
    Defect(
        "tpu_mla_unmarked",
        "jax/kernels/tpu/_mla_kernel.py",
        "|= jnp.max(",
        "|= jnp.min(",
        MLA_TPU,
        "An item of which some rows failed is not repeated.",
    ),
    Defect(
        "tpu_mla_output_scale",
        "jax/kernels/tpu/_mla_kernel.py",
        "refs.factors[OUTPUTS] / one.l",
        "1.0 / one.l",
        MLA_TPU,
        "Latents in fp8 are not multiplied by their scale where they are values.",
    ),
    Defect(
        "tpu_mla_hidden_nan",
        "jax/kernels/tpu/_mla_kernel.py",
        "spoilt.append(s[:8])",
        "pass",
        MLA_TPU,
        "A NaN of a later key reaches the rows of a prompt that do not see it.",
    ),
    Defect(
        "tpu_mla_starts",
        "jax/kernels/tpu/_mla_kernel.py",
        "starts = step.begin + step.start == 0",
        "starts = step.start == 0",
        MLA_TPU,
        "Every block of a request forgets the sums of those before it.",
    ),
    Defect(
        "tpu_mla_last_seen",
        "jax/kernels/tpu/_mla_kernel.py",
        "without |= is_clear(",
        "without &= is_clear(",
        MLA_TPU,
        "Rows that see all of their last step's keys have no results.",
    ),
    Defect(
        "tpu_mla_sparse_strangers",
        "jax/kernels/tpu/mla_sparse_attention.py",
        "slots, jnp.max(jnp.where(valid, slots, 0), axis=1, keepdims=True))",
        "slots, 0)",
        MLA_SPARSE_TPU,
        "Entries of a list that are not keys are copied from a slot that may be another request's.",
    ),
    Defect(
        "tpu_mla_sparse_weights",
        "jax/kernels/tpu/mla_sparse_attention.py",
        "0.0, -jnp.inf).astype",
        "0.0, 0.0).astype",
        MLA_SPARSE_TPU,
        "Entries of a list that are not keys have a weight.",
    ),
    Defect(
        "tpu_mla_sparse_places",
        "jax/kernels/tpu/mla_sparse_attention.py",
        "n // _PAIR * _PAIR + n % 2 * 8 + n % _PAIR // 2",
        "n",
        MLA_SPARSE_TPU,
        "Keys are in another order than the list, so that others than those of the list have no weight.",
    ),
    Defect(
        "tpu_mla_sparse_next_list",
        "jax/kernels/tpu/mla_sparse_attention.py",
        "jnp.minimum(g + later + 1, refs.total - 1)",
        "jnp.minimum(g + 1, refs.total - 1)",
        MLA_SPARSE_TPU,
        "The keys of a later step are those of the one before.",
    ),
    Defect(
        "tpu_mla_sparse_list_in_flight",
        "jax/kernels/tpu/mla_sparse_attention.py",
        "_list(refs, g, target).wait()",
        "_list(refs, g, target)",
        MLA_SPARSE_TPU,
        "Keys are copied by a list that has not arrived.",
    ),
    Defect(
        "tpu_flash_small_sums",
        "jax/kernels/tpu/_flash_forward.py",
        "in_range = (jnp.abs(lse) <= _LARGEST)",
        "in_range = (lse <= _LARGEST)",
        FLASH_TPU,
        "Rows whose sums vanish are not computed again.",
    ),
    Defect(
        "tpu_flash_window_chunk",
        "jax/kernels/tpu/_flash.py",
        "begin = jnp.maximum(begin, at.position + cfg.reach - 1 - left)",
        "begin = jnp.maximum(begin, at.position - left)",
        FLASH_TPU,
        "A chunk that the window cuts for the last rows of a group is not masked.",
    ),
    Defect(
        "tpu_flash_segments",
        "jax/kernels/tpu/_flash.py",
        "same &= (unit_least == least) & (unit_greatest == least)",
        "same &= unit_least == least",
        FLASH_TPU,
        "Rows of two segments are taken for rows of the first.",
    ),
    Defect(
        "tpu_flash_cap_gradient",
        "jax/kernels/tpu/_flash_backward.py",
        "    if slope is not None:\n        ds *= slope\n",
        "",
        FLASH_TPU,
        "Gradients ignore the slope of the soft cap.",
    ),
    # jax: layers and batches
    Defect(
        "jax_v_scale_is_k_scale",
        "jax/layer.py",
        "v_scale=self._v_scale",
        "v_scale=self._k_scale",
        ("jax/test_layer.py", "test_layer.py", "test_conformance.py"),
        "Values are scaled by the scale of keys.",
    ),
    Defect(
        "jax_slots_of_layer",
        "jax/metadata.py",
        "slots + skip * self.block_size",
        "slots + skip",
        ("jax/test_metadata.py", "jax/backends/test_paged.py"),
        "Slots of a layer's part of a cache are offset by blocks and not by tokens.",
    ),
    Defect(
        "jax_block_past_the_end",
        "jax/metadata.py",
        "(table < num_blocks)",
        "(table <= num_blocks)",
        ("jax/test_metadata.py", "jax/backends/test_paged.py"),
        "The block after the last is taken for one of the cache.",
    ),
    Defect(
        "jax_padding_slots",
        "jax/backends/_paged.py",
        "jnp.arange(slots.shape[0]) < attn_metadata.num_actual_tokens",
        "jnp.arange(slots.shape[0]) <= attn_metadata.num_actual_tokens",
        ("jax/test_layer.py", "test_conformance.py"),
        "The first row of padding is written to its slot.",
    ),
    Defect(
        "jax_shared_cache_written",
        "jax/backends/_paged.py",
        "if self.kv_sharing_target_layer_name is not None:",
        "if self.kv_sharing_target_layer_name is not None and key is None:",
        ("test_conformance.py",),
        "A layer that reads another layer's cache writes its own keys there.",
    ),
    Defect(
        "jax_query_lengths",
        "jax/dot_product.py",
        "real = jnp.arange(query.shape[1])[None, :, None] < call.query_lens",
        "real = jnp.arange(query.shape[1])[None, :, None] <= call.query_lens",
        ("jax/test_dot_product.py",),
        "The first row past a query's length is not 0.",
    ),
    Defect(
        "jax_replicas_in_turn",
        "jax/sharding.py",
        "(k for k in range(self.num_kv_heads) for _ in range(self.replicas))",
        "(k for _ in range(self.replicas) for k in range(self.num_kv_heads))",
        ("jax/test_sharding.py",),
        "Replicas of a kv head are not on neighbouring devices.",
    ),
    Defect(
        "jax_compilations_counted_before_warmup",
        "jax/serving.py",
        "if seconds and self._known:",
        "if seconds:",
        ("jax/test_serving.py",),
        "A step that was never warmed up warns at its first call.",
    ),
    # torch: Triton's kernels, interpreted
    Defect(
        "triton_spans_always_cut",
        "torch/backends/_triton.py",
        "span_window=bool(self.mask.span_window),",
        "span_window=True,",
        INTERPRETED,
        "The window cuts spans although the layer does not ask for it.",
    ),
    Defect(
        "triton_window_left",
        "kernels/paged_attention.py",
        "(j[None, :] >= position[:, None] - left)",
        "(j[None, :] > position[:, None] - left)",
        INTERPRETED,
        "A row does not see the first key of its window.",
    ),
    Defect(
        "triton_causal_tiles",
        "kernels/paged_attention.py",
        "tail = tl.minimum(first + right + 1, high)",
        "tail = tl.minimum(last + right + 1, high)",
        INTERPRETED,
        "A tile of keys that only the last row of a tile sees completely is not masked.",
    ),
    Defect(
        "triton_lse_base",
        "kernels/paged_attention.py",
        "tl.store(lse + head * lse_h + at, log * 0.6931471805599453, mask=live)",
        "tl.store(lse + head * lse_h + at, log, mask=live)",
        INTERPRETED,
        "The log-sum-exp is returned in base 2.",
    ),
    Defect(
        "triton_merge_v_scale",
        "kernels/paged_attention.py",
        "tl.load(v_scale + h // G * vscale_h)",
        "tl.load(v_scale + h * vscale_h)",
        INTERPRETED,
        "Merged rows are scaled by the scale of another kv head.",
    ),
    Defect(
        "triton_merge_of_another_tile",
        "kernels/paged_attention.py",
        "((item + tile * num_splits) * BLOCK_Q)",
        "(item * BLOCK_Q)",
        INTERPRETED,
        "Rows of a request's later tiles are merged from the splits of its first.",
    ),
    Defect(
        "triton_new_rows_of_the_last_split",
        "kernels/paged_attention.py",
        "since = tl.maximum(aligned, context) - context",
        "since = tl.where(stop < high, stop, context) - context",
        INTERPRETED,
        "New rows in two splits are written by the last one, before or after the other reads them.",
    ),
    Defect(
        "triton_new_rows_of_one_block",
        "kernels/paged_attention.py",
        "TOKENS: tl.constexpr = _TOGETHER if TILED else ",
        "TOKENS: tl.constexpr = 16 if TILED else ",
        INTERPRETED,
        "Of a request's new tokens in one launch with decodes, each program writes the first 16 that it reads.",
    ),
    Defect(
        "triton_wild_not_repeated",
        "kernels/paged_attention.py",
        "if tl.max(((acc - acc) != 0.0).to(tl.int32)) > 0:",
        "if tl.max(((acc - acc) != 0.0).to(tl.int32)) > 1:",
        INTERPRETED,
        "A tile with a NaN that not every row sees is not computed again.",
    ),
    Defect(
        "row_values_before_its_run",
        "torch/kernels/dense_decode.py",
        "        v_at += begin.to(tl.int64) * v_t\n",
        "",
        INTERPRETED,
        "A row with a run of keys reads its values from the first key on.",
    ),
    Defect(
        "row_counter_not_reset",
        "torch/kernels/dense_decode.py",
        "            tl.store(counters + at, 0)\n",
        "",
        INTERPRETED,
        "Only the first launch merges the splits of a row's keys.",
    ),
    Defect(
        "row_launch_of_other_splits",
        "torch/kernels/dense_decode.py",
        " | (splits > 1) << 3",
        "",
        ("torch/kernels/test_direct.py",),
        "Rows in splits are launched by the kernel for whole rows.",
    ),
    Defect(
        "launch_of_other_strides",
        "torch/kernels/direct.py",
        "return strides if functools.reduce(or_, strides) & _UNEVEN else None",
        "None",
        ("torch/kernels/test_direct.py",),
        "A kernel compiled for strides that are multiples of 16 is launched with others.",
    ),
    Defect(
        "launch_of_other_alignment",
        "torch/kernels/direct.py",
        "alignment = tuple([address & 15 == 0 for address in addresses]) if uneven else None",
        "alignment = None",
        ("torch/kernels/test_direct.py",),
        "A kernel compiled for arrays aligned to 16 bytes is launched with others.",
    ),
    Defect(
        "kept_launch_of_another_part",
        "torch/kernels/kept.py",
        "values.append(values[i] + offset)",
        "values.append(values[i])",
        ("torch/kernels/test_kept.py",),
        "A repeated launch reads keys where the values are.",
    ),
    Defect(
        "kept_launch_of_other_strides",
        "torch/arrays.py",
        "facts += x.shape, x.stride(), x.dtype,",
        "facts += x.shape, x.dtype,",
        ("torch/kernels/test_kept.py",),
        "Launches are repeated for tensors of other strides.",
    ),
    Defect(
        "torch_facts_of_absent_tensors",
        "torch/arrays.py",
        "        for i in self._absent:\n",
        "        for i in self._absent[1:]:\n",
        ("torch/test_arrays.py",),
        "A call without values is taken for one without an output.",
    ),
    Defect(
        "hopper_prefill_unit_beyond_the_last",
        "kernels/hopper_prefill.py",
        "gl.maximum(tiles - 1 - from_last, 0) * BLOCK_Q",
        "(tiles - 1 - from_last) * BLOCK_Q",
        ("kernels/test_hopper_prefill.py",),
        "A program without a unit reads spans before the first row.",
    ),
    Defect(
        "hopper_prefill_odd_results",
        "kernels/hopper_prefill.py",
        "if _have_odd(results, valid, dtype) != 0:",
        "if _have_odd(results, valid, dtype) < 0:",
        ("kernels/test_hopper_prefill.py",),
        "A NaN among values reaches rows that do not see it.",
    ),
    Defect(
        "hopper_prefill_queries_read_again",
        "kernels/hopper_prefill.py",
        "gl.convert_layout((first + row // G).to(gl.int64) * q_t",
        "gl.convert_layout((row // G).to(gl.int64) * q_t",
        ("kernels/test_hopper_prefill.py",),
        "A tile that is repeated key by key reads the queries of the request's first tokens.",
    ),
    Defect(
        "hopper_prefill_rows_without_a_maximum",
        "kernels/hopper_prefill.py",
        "full_to = context + first + ROWS // G + reach\n",
        "full_to = context + first + ROWS // G + reach + 1\n",
        ("kernels/test_hopper_prefill.py",),
        "A row whose scores are all small has seen no key before a tile that computes no maximum.",
    ),
    Defect(
        "hopper_prefill_sums_of_repeated_rows",
        "kernels/hopper_prefill.py",
        "l_i = l_i * alpha + p\n",
        "l_i = l_i + p\n",
        ("kernels/test_hopper_prefill.py",),
        "Rows that are computed again, after a weight beyond float32, are divided by another maximum's sum.",
    ),
    Defect(
        "hopper_prefill_last_row_of_a_later_consumer",
        "kernels/hopper_prefill.py",
        "if first + ROWS // G < q_len:\n",
        "if first + ROWS // G < q_len - (ROWS > 0):\n",
        ("kernels/test_hopper_prefill.py",),
        "A consumer that has only the last row of a request is taken for one without rows.",
    ),
    Defect(
        "hopper_prefill_values_after_the_last_key",
        "kernels/hopper_prefill.py",
        "            if ENDS:\n",
        "            if ENDS or PAGED:\n",
        ("kernels/test_hopper_prefill.py",),
        "Values after a request's last key are taken for the engine's zeros where its page goes on.",
    ),
    Defect(
        "hopper_prefill_equal_requests",
        "kernels/hopper_prefill.py",
        "        k_begin = r\n",
        "        k_begin = r * 0\n",
        ("kernels/test_hopper_prefill.py",),
        "Every one of equal requests reads the keys of the first.",
    ),
    Defect(
        "hopper_prefill_second_pass_over_values",
        "kernels/hopper_prefill.py",
        "d = column + FROM + gl.arange",
        "d = FROM + gl.arange",
        ("kernels/test_hopper_prefill.py",),
        "The second half of a head of 512 is stored over the first.",
    ),
    Defect(
        "hopper_prefill_few_keys_of_a_window",
        "kernels/hopper_prefill_launch.py",
        "seen = min(keys - rows / 2 if causal else keys, left)",
        "seen = keys - rows / 2 if causal else keys",
        ("kernels/test_hopper_prefill.py",),
        "Rows of a short window take tiles that are mostly masked.",
    ),
    Defect(
        "triton_plan_of_a_window",
        "torch/backends/_triton.py",
        "full = np.clip(of_rows - left - 1, 0, rows)",
        "full = 0.0",
        ("torch/backends/test_triton_attn.py",),
        "The plan counts keys that a window hides.",
    ),
    Defect(
        "kept_launch_of_vectors_on_the_host",
        "torch/backends/_paged.py",
        "if per_head is not None and per_head.device != query.device:",
        "if per_head is not None and per_head.device is None:",
        ("torch/kernels/test_kept.py",),
        "A layer repeats another's launches while its own slopes and sinks are on the host.",
    ),
    Defect(
        "kept_launch_with_vectors_of_another_layer",
        "torch/backends/_paged.py",
        "vectors = *tensors, self.sinks, self.alibi_slopes",
        "vectors = *tensors, None, None",
        ("torch/kernels/test_kept.py",),
        "A repeated launch reads the slopes and sinks of the layer that made it.",
    ),
    Defect(
        "scratch_of_ended_threads",
        "torch/kernels/direct.py",
        "class _Scratches(local):",
        "class _Scratches:",
        ("torch/kernels/test_direct.py",),
        "Threads share the scratch memory of a stream, between whose launches another's come.",
    ),
    Defect(
        "scratch_of_every_stream",
        "torch/kernels/direct.py",
        "if len(scratches) > _STREAMS:",
        "if len(scratches) > 1 << 20:",
        ("torch/kernels/test_direct.py",),
        "The scratch memory of streams that were destroyed is never freed.",
    ),
    Defect(
        "kept_launch_of_another_batch",
        "torch/metadata.py",
        "if kept is None or not all(map(is_, kept.fields, fields)):",
        "if kept is None:",
        ("torch/kernels/test_kept.py",),
        "Launches are repeated although the batch was changed.",
    ),
    Defect(
        "pages_that_two_requests_write_to",
        "backends/metadata.py",
        "return bool(np.count_nonzero(is_used) == n == np.count_nonzero(",
        "return bool(n == np.count_nonzero(",
        ("backends/test_metadata.py",),
        "Two drafts in one page count as apart, so one's launch may read what the other is yet to write.",
    ),
    Defect(
        "captured_launches_of_one_batch",
        "torch/kernels/kept.py",
        "if captured and self.of_batch:",
        "if captured and not self.of_batch:",
        ("torch/kernels/test_kept.py",),
        "A graph has the launches of a batch without decodes, and is replayed with some.",
    ),
    Defect(
        "row_of_an_invariant_layer",
        "torch/backends/_triton.py",
        "return not (self._fixed_split() or ",
        "return not (",
        INTERPRETED,
        "Rows of a layer that requests batch_invariant are split by the number of requests.",
    ),
    Defect(
        "padded_rows_join_the_next_request",
        "torch/kernels/runs.py",
        "begins + self.first, begins + end), 1)",
        "begins + self.first, begins + keys), 1)",
        INTERPRETED,
        "Rows after a run see its keys, and are not rows of their own.",
    ),
    Defect(
        "hopper_chunk_begin",
        "kernels/hopper_prefill.py",
        "gl.maximum(position, 0) // CHUNK * CHUNK",
        "gl.maximum(position + 1, 0) // CHUNK * CHUNK",
        ("kernels/test_hopper_prefill.py",),
        "The last row of a chunk sees the next chunk.",
    ),
    Defect(
        "hopper_prefix_bound",
        "kernels/hopper_prefill.py",
        "until = gl.maximum(until, shared - 1)",
        "until = gl.maximum(until, 0)",
        ("kernels/test_hopper_prefill.py",),
        "The tiles of a prefix behind its rows are not computed.",
    ),
    Defect(
        "hopper_span_apart",
        "kernels/hopper_prefill.py",
        "touches = has_span & (since <= upper + 1) & (until >= lower - 1)",
        "touches = has_span",
        ("kernels/test_hopper_prefill.py",),
        "A row sees the keys between its span and its window.",
    ),
    Defect(
        "mla_decode_selected_key",
        "kernels/mla_decode.py",
        "real = real & (position >= 0) & (position < seq_len)",
        "real = real & (position >= 0)",
        INTERPRETED,
        "A listed position after the end of the sequence counts as a key.",
    ),
    Defect(
        "torch_layer_keeps_its_dtype",
        "torch/layer.py",
        "        if dtype != self.selection.request.dtype:\n",
        "        if dtype == self.selection.request.dtype and False:\n",
        ("torch/test_layer.py",),
        "A layer does not follow the dtype of its model.",
    ),
    Defect(
        "torch_sinks_of_another_dtype_are_copied_once",
        "torch/layer.py",
        "        if self._casts_sinks:\n",
        "        if self._casts_sinks and False:\n",
        ("torch/test_layer.py",),
        "Values loaded into sinks that are a bfloat16 parameter have no effect.",
    ),
    Defect(
        "names_have_one_case",
        "backend_enum.py",
        "if known.upper() == str(name).upper()",
        "if known == str(name)",
        ("test_backend_enum.py", "test_cli.py"),
        "A backend by name is found in its registry's case only.",
    ),
    Defect(
        "drivers_words_are_anything",
        "reports/machines.py",
        "and all(map(_ADDED.fullmatch, others))",
        "and bool(own)",
        ("reports/test_machines.py",),
        "Words that no driver adds are ignored beside a product's.",
    ),
    Defect(
        "columns_is_not_obeyed",
        "tables.py",
        "    if not width:\n        return str(text)\n",
        "    if width >= 0:\n        return str(text)\n",
        ("test_tables.py", "test_cli.py"),
        "Printed text ignores COLUMNS.",
    ),
    Defect(
        "mla_decode_limits",
        "kernels/mla_decode.py",
        "seen = seq_len - q_len + token + 1",
        "seen = seq_len - q_len + token",
        INTERPRETED,
        "A row of latents does not see its own key.",
    ),
    Defect(
        "kv_write_nan",
        "kernels/kv_write.py",
        'scale = tl.where(nonfinite, float("nan"), ',
        "scale = tl.where(nonfinite, 0.0, ",
        INTERPRETED,
        "A token with a NaN is stored as a token of zeros.",
    ),
    Defect(
        "kv_write_value_scale",
        "kernels/kv_write.py",
        '"vscale_h": 1 if v_scales else 0,',
        '"vscale_h": 0,',
        INTERPRETED,
        "Values of all kv heads are divided by the first head's scale.",
    ),
    Defect(
        "latent_write_nan",
        "kernels/latent_write.py",
        'scale = tl.where(nonfinite, float("nan"), scale)',
        "scale = tl.where(nonfinite, 1.0, scale)",
        INTERPRETED,
        "A NaN does not make its whole tile NaN.",
    ),
    Defect(
        "merge_states_nan",
        "kernels/merge_states.py",
        "        empty = empty | (log != log)",
        "        empty = empty & (log == log)",
        INTERPRETED,
        "A part whose log-sum-exp is NaN is not empty.",
    ),
    Defect(
        "int8_causal_rows",
        "torch/kernels/int8_attention.py",
        "upper = row + length - rows",
        "upper = row",
        INTERPRETED,
        "The causal mask is aligned with the first key.",
    ),
    Defect(
        "launch_cut_items",
        "kernels/launch.py",
        "num_reqs * max(1, -(-tiles // fixed))",
        "num_reqs * max(1, tiles // fixed)",
        INTERPRETED,
        "There are too few work items for requests that are not a multiple of a part.",
    ),
    # jax: Triton's kernels
    Defect(
        "compiled_all_numbers_known",
        "kernels/compiled.py",
        "special = not parameter.do_not_specialize",
        "special = True",
        ("kernels/test_compiled.py",),
        "A kernel is compiled for numbers that change from batch to batch.",
    ),
    Defect(
        "gpu_values_of_keys",
        "jax/kernels/gpu/paged_attention.py",
        '{"values_at": blocks * self.numbers["k_block"]}',
        '{"values_at": 0}',
        ("jax/kernels/gpu/test_paged_attention.py",),
        "Keys are read as values.",
    ),
    Defect(
        "gpu_kernels_of_one_name",
        "jax/kernels/gpu/launch.py",
        "key = hashlib.sha256(program.image).hexdigest().encode()",
        "key = name",
        ("jax/kernels/gpu/test_launch.py",),
        "Two kernels of one name run the same code.",
    ),
    Defect(
        "gpu_alias_of_another_array",
        "jax/kernels/gpu/launch.py",
        "{places.index(name): nth for",
        "{nth: nth for",
        ("jax/backends/test_triton_attn.py", "jax/kernels/gpu/test_paged_attention.py"),
        "An array that a kernel reads is taken for the one that it writes.",
    ),
    Defect(
        "gpu_any_jaxlib",
        "jax/kernels/gpu/launch.py",
        "if SINCE <= numbers < BEFORE:",
        "if SINCE <= numbers:",
        ("jax/kernels/gpu/test_launch.py",),
        "A jaxlib that was never tried is taken.",
    ),
    # torch: latents
    Defect(
        "mla_scale_of_tile",
        "torch/backends/mla/_rows.py",
        "scale = (largest / torch.full_like(largest, 448.0)).clamp(min=_TINY)",
        "scale = largest / torch.full_like(largest, 448.0)",
        MLA,
        "A tile of zeros is divided by a scale of 0.",
    ),
    Defect(
        "mla_context_of_prompts",
        "torch/backends/mla/_metadata.py",
        "slice(span.begin, span.end)",
        "slice(0, span.end - span.begin)",
        MLA,
        "Every turn gathers the first tokens of the context.",
    ),
    Defect(
        "mla_rows_of_a_turn",
        "torch/backends/mla/_metadata.py",
        "context_spans(self.context_lens, workspace)",
        "[Span(0, len(context) - 1, *cut[2:]) for cut in context_spans(self.context_lens, workspace)]",
        ("torch/backends/mla/test_metadata.py", "torch/backends/mla/test_mla.py"),
        "Every turn attends and merges the rows of every request.",
    ),
    Defect(
        "mla_rows_before_the_sequence",
        "torch/backends/mla/_metadata.py",
        "skipped = np.maximum(rows - total, 0)",
        "skipped = np.maximum(rows - total, 0) * 0",
        MLA,
        "Rows before the start of a sequence are attended as if they were in it.",
    ),
    Defect(
        "mla_sparse_listed_twice",
        "torch/backends/mla/_sparse.py",
        "(ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)",
        "(ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] > 0)",
        ("torch/backends/mla/test_mla.py",),
        "A row that lists position 0 twice is not refused.",
    ),
    # torch: layers, batches, graphs
    Defect(
        "torch_scales_are_cast",
        "torch/layer.py",
        "self._buffers[name] = moved if values.is_meta else values.to(moved.device)",
        "self._buffers[name] = moved",
        ("torch/test_layer.py",),
        "Casting a model casts the scales of its caches.",
    ),
    Defect(
        "torch_ids_of_padding",
        "torch/metadata.py",
        "live & ((table < 0) | (table >= num_blocks))",
        "live & ((table < 0) | (table > num_blocks))",
        ("torch/test_metadata.py",),
        "The block after the last is taken for one of the cache.",
    ),
    Defect(
        "torch_stale_mirrors",
        "torch/metadata.py",
        "if self.query_start_loc_cpu is None or self.seq_lens_cpu is None:",
        "if self.query_start_loc_cpu is None and self.seq_lens_cpu is None:",
        ("torch/test_metadata.py", "torch/backends/test_ragged.py"),
        "Lengths are not fetched if only one of the mirrors is there.",
    ),
    Defect(
        "graph_of_another_batch",
        "torch/graphs.py",
        "same = batch is not None and all(",
        "same = batch is not None or all(",
        ("torch/test_graphs.py",),
        "A graph's operator takes a batch whose tensors were replaced.",
    ),
    Defect(
        "graph_sinks_of_first_layer",
        "torch/graphs.py",
        "impl = copy.copy(impl)  # another layer with these arguments may run at the same time",
        "pass",
        ("torch/test_graphs.py",),
        "Layers of one graph that differ in sinks alone share them.",
    ),
    Defect(
        "cache_padded_token",
        "torch/kv_cache.py",
        "keep = (slots < 0).view(-1, *[1] * (rows.dim() - 1))",
        "keep = (slots < -1).view(-1, *[1] * (rows.dim() - 1))",
        ("torch/test_kv_cache.py",),
        "A batch whose tokens have no slot writes slot 0.",
    ),
    Defect(
        "cache_int8_not_rounded",
        "torch/kv_cache.py",
        "x.nan_to_num(nan=0.0).round().to(element)",
        "x.nan_to_num(nan=0.0).to(element)",
        ("torch/test_kv_cache.py",),
        "Codes of int8 are cut and not rounded.",
    ),
    Defect(
        "torch_read_only_array",
        "torch/arrays.py",
        "if not array.flags.writeable:",
        "if array.flags.writeable and not array.size:",
        ("test_arrays.py",),
        "A read-only array shares its memory with a tensor that can be written.",
    ),
    Defect(
        "torch_causal_bottom_right",
        "torch/dot_product.py",
        "dtype=torch.bool, device=query.device).tril()",
        "dtype=torch.bool, device=query.device).tril(key.shape[-2] - rows)",
        ("torch/test_dot_product.py",),
        "Causality over fewer keys than rows counts from the last row.",
    ),
    # integrations
    Defect(
        "transformers_one_row_window",
        "integrations/transformers/masks.py",
        "Described(EVERYTHING, self.present[:, -keys:], 1)",
        "Described(EVERYTHING, self.present[:, :keys], 1)",
        ("integrations/transformers/test_ways.py", "integrations/test_transformers.py"),
        "A decode in a window takes the padding of the first keys for that of the last.",
    ),
    Defect(
        "transformers_window_of_all_keys",
        "integrations/transformers/masks.py",
        "None if left is None or left + 1 >= end else left + 1",
        "None if left is None or left + 2 >= end else left + 1",
        ("integrations/transformers/test_masks.py", "integrations/transformers/test_ways.py"),
        "A window that hides only the first key is dropped.",
    ),
    Defect(
        "transformers_bias_is_a_mask",
        "integrations/transformers/masks.py",
        "require(call, hidden | (mask == 0), ",
        "require(call, hidden | (mask <= 0), ",
        ("integrations/transformers/test_masks.py", "integrations/transformers/test_ways.py"),
        "A mask with values to be added is taken for one of true and false.",
    ),
    Defect(
        "transformers_padded_rows",
        "integrations/transformers/packing.py",
        "full[real] = out",
        "full[: len(out)] = out",
        ("integrations/transformers/test_packing.py", "integrations/transformers/test_ways.py"),
        "Rows are not put back to where they were between padding.",
    ),
    Defect(
        "transformers_launch_that_prepares_nothing",
        "integrations/transformers/dispatch.py",
        "return None if prepared is self.of_any else prepared",
        "return prepared",
        ("integrations/transformers/test_dispatch.py",),
        "A prompt of a second length fails where its kernel was not compiled before.",
    ),
    Defect(
        "transformers_plan_of_any_length",
        "integrations/transformers/masks.py",
        "single = rows == 1 and not draw and",
        "single = not draw and",
        ("integrations/transformers/test_dispatch.py",),
        "Several rows take the last keys of a window.",
    ),
    Defect(
        "transformers_plan_window",
        "integrations/transformers/masks.py",
        "start = end - left - 1",
        "start = end - left - 2",
        ("integrations/transformers/test_dispatch.py", "integrations/transformers/test_ways.py"),
        "A decoded token sees one key too many.",
    ),
    Defect(
        "transformers_plan_sinks",
        "integrations/transformers/dispatch.py",
        "cached[0] is not sinks or cached[1] != version",
        "cached[0] is not sinks",
        ("integrations/transformers/test_dispatch.py",),
        "Sinks that were loaded later are not used.",
    ),
    Defect(
        "transformers_warm_up_fills_the_cache",
        "integrations/transformers/batching.py",
        "min(older, rows), cache)",
        "older, cache)",
        ("integrations/transformers/test_batching.py",),
        "The warm-up of continuous batching computes attention over a whole cache.",
    ),
    Defect(
        "transformers_facts_without_the_dtype_of_sinks",
        "integrations/transformers/dispatch.py",
        "None if sinks is None else sinks.dtype, options",
        "sinks is None, options",
        ("integrations/transformers/test_dispatch.py",),
        "A prepared launch reads sinks of another dtype.",
    ),
    Defect(
        "transformers_facts_without_strides",
        "integrations/transformers/dispatch.py",
        "query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), ",
        "query.shape, key.shape, value.shape, (), (), (), ",
        ("integrations/transformers/test_dispatch.py",),
        "A prepared launch reads keys with the strides of another step.",
    ),
    Defect(
        "transformers_plan_environment",
        "integrations/transformers/__init__.py",
        "requested(selection_state(), backend, causal, sliding_window)",
        "requested(None, backend, causal, sliding_window)",
        ("integrations/transformers/test_dispatch.py",),
        "A plan outlives a change of the environment.",
    ),
    Defect(
        "transformers_plan_window_of_padding",
        "integrations/transformers/masks.py",
        "valid = None if valid is None else valid.last(left + 1)",
        "valid = valid if valid is None else None",
        ("integrations/transformers/test_dispatch.py", "integrations/transformers/test_ways.py"),
        "A single row takes all of the last keys of its window for valid.",
    ),
    Defect(
        "transformers_prompts_without_windows",
        "integrations/transformers/masks.py",
        "value[:, :, :end], layer.window[0]",
        "value[:, :, :end], None",
        ("integrations/transformers/test_dispatch.py",),
        "A prompt under a window repeats the launch of one under another.",
    ),
    Defect(
        "transformers_keys_of_another_step",
        "integrations/transformers/masks.py",
        "if version != mask._version:",
        "if version is None:",
        ("integrations/transformers/test_dispatch.py",),
        "A token reads the keys of a mask before it changed.",
    ),
    Defect(
        "transformers_plan_runs_with_gaps",
        "integrations/transformers/masks.py",
        "if self._runs is None and firsts is not None:\n",
        "firsts = firsts or [0] * len(keys)\n        if self._runs is None:\n",
        ("integrations/transformers/test_dispatch.py",),
        "Valid keys with gaps are taken for a run.",
    ),
    Defect(
        "transformers_step_of_another_batch",
        "integrations/transformers/steps.py",
        "step.cu_seq_lens() is not starts or layer_idx <= step.last",
        "step.cu_seq_lens() is not starts",
        ("integrations/transformers/test_batching.py",),
        "A step takes the lengths of the one before, if transformers writes both into one tensor.",
    ),
    Defect(
        "diffusers_causal_keys",
        "integrations/diffusers.py",
        "mask = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=query.device).tril()",
        "mask = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)",
        ("integrations/test_diffusers.py",),
        "Causality over fewer keys than rows counts from the last row.",
    ),
    Defect(
        "diffusers_lse_of_heads",
        "integrations/diffusers.py",
        "return out, lse.transpose(1, 2)",
        "return out, lse",
        ("integrations/test_diffusers.py",),
        "The log-sum-exp is returned by head and not by row.",
    ),
    Defect(
        "flax_mask_without_causality",
        "integrations/flax.py",
        "mask, causal = triangle if mask is None else mask & triangle, False",
        "mask, causal = triangle if mask is None else mask, False",
        ("integrations/test_flax.py",),
        "A causal call with a mask and other lengths is not causal.",
    ),
    Defect(
        "vllm_stale_cache",
        "integrations/_vllm.py",
        "if self._seen is None or self._seen[0] is not kv_cache:",
        "if self._seen is None:",
        ("integrations/test_vllm.py",),
        "A layer keeps the view of the first cache that it was called with.",
    ),
    Defect(
        "vllm_draft_lengths",
        "integrations/_vllm.py",
        'self.exact = getattr(vllm_config, "speculative_config", None) is None',
        "self.exact = True",
        ("integrations/test_vllm.py",),
        "Upper bounds of a draft's lengths are taken for its lengths.",
    ),
    Defect(
        "vllm_span_of_context",
        "integrations/_vllm.py",
        "mark_images(rows, lens[r] - len(rows), ranges)",
        "mark_images(rows, 0, ranges)",
        ("integrations/test_vllm.py",),
        "Spans of a later chunk are put at the rows of the first.",
    ),
    Defect(
        "tpu_inference_window",
        "integrations/_tpu_inference.py",
        "window = (attention_chunk_size - 1, None)",
        "window = (attention_chunk_size, None)",
        ("integrations/test_tpu_inference.py",),
        "A window without causality has one key too many.",
    ),
    Defect(
        "tpu_inference_images_of_full_layers",
        "integrations/_tpu_inference.py",
        "isinstance(md, ImageMetadata) and (window is not None or md.full_layers)",
        "isinstance(md, ImageMetadata)",
        ("integrations/test_tpu_inference.py",),
        "Gemma 4's full layers see images in both directions.",
    ),
    Defect(
        "tpu_inference_chunk",
        "integrations/_tpu_inference.py",
        'chunk_size=getattr(layer, "attention_chunk_size", None)',
        "chunk_size=None",
        ("integrations/test_tpu_inference.py",),
        "Llama 4's layers see keys before their chunks.",
    ),
    # serving
    Defect(
        "pool_key_of_old_content",
        "serving/block_pool.py",
        "                del self._block_of[key]\n",
        "                self._block_of.get(key)\n",
        ("serving/test_block_pool.py", "serving/test_scheduler.py"),
        "A block that was allocated again is still found by its old content.",
    ),
    Defect(
        "pool_order_of_release",
        "serving/block_pool.py",
        "for block in reversed(blocks):",
        "for block in blocks:",
        ("serving/test_block_pool.py",),
        "The beginning of a sequence is reused before its end.",
    ),
    Defect(
        "scheduler_whole_prompt_shared",
        "serving/scheduler.py",
        "sharable = (len(request.tokens) - 1) // self.block_size",
        "sharable = len(request.tokens) // self.block_size",
        ("serving/test_scheduler.py",),
        "A prompt that is found completely leaves no row to sample from.",
    ),
    Defect(
        "scheduler_revived_blocks",
        "serving/scheduler.py",
        "> self.pool.num_free - revived:",
        "> self.pool.num_free:",
        ("serving/test_scheduler.py",),
        "Shared blocks that are free count twice.",
    ),
    Defect(
        "scheduler_preempts_the_oldest",
        "serving/scheduler.py",
        "youngest = self.running.pop()",
        "youngest = self.running.pop(0)",
        ("serving/test_scheduler.py",),
        "The oldest request gives its blocks to younger ones.",
    ),
    Defect(
        "buckets_first_that_fits",
        "serving/buckets.py",
        "min(fits, key=lambda b: b.max_query_len)",
        "max(fits, key=lambda b: b.max_query_len)",
        ("serving/test_buckets.py",),
        "Every step is padded to the largest bucket.",
    ),
    # the core
    Defect(
        "batch_mixed_causality",
        "backends/metadata.py",
        "(causal != causal[:1]).any()",
        "(causal != causal[:1]).all()",
        ("backends/test_metadata.py", "torch/test_metadata.py", "jax/test_metadata.py"),
        "A batch with causal requests and others is taken for a causal one.",
    ),
    Defect(
        "batch_slot_written_twice",
        "backends/metadata.py",
        "twice &= ordered[1:] >= 0",
        "twice &= ordered[1:] > 0",
        ("backends/test_metadata.py",),
        "Two tokens that write slot 0 are accepted.",
    ),
    Defect(
        "batch_row_lacks_blocks",
        "backends/block_table.py",
        "room[room.argmin()] >= 0",
        "room[room.argmin()] >= -block_size",
        ("backends/test_metadata.py",),
        "A request with a block less than its tokens need is accepted.",
    ),
    Defect(
        "batch_row_that_goes_on",
        "backends/block_table.py",
        "if goes_on[goes_on.argmax()] or",
        "if goes_on.all() or",
        ("backends/test_metadata.py", "torch/test_metadata.py"),
        "Blocks of tokens to come do not reach the device.",
    ),
    Defect(
        "batch_largest_of_what_is_between_rows",
        "backends/block_table.py",
        "(bounds[-1, 1] == ids.size)])[::2]",
        "(bounds[-1, 1] == ids.size)])[: n]",
        ("backends/test_metadata.py", "torch/test_metadata.py"),
        "What is between the rows of a table counts as an id.",
    ),
    Defect(
        "batch_last_row_by_chunks",
        "backends/block_table.py",
        "        number[-1] = 0  # the last",
        "        number[0] = 0  # the last",
        ("backends/test_metadata.py", "torch/test_metadata.py"),
        "The first row of a long table is not copied.",
    ),
    Defect(
        "mla_repeated_with_a_negative_scale",
        "torch/backends/mla/_triton.py",
        " and self.signed_scale > 0",
        "",
        ("torch/kernels/test_kept.py",),
        "A repeated call does not negate the queries of a layer with a negative scale.",
    ),
    Defect(
        "mla_repeated_without_an_operation",
        "torch/kernels/kept.py",
        "        self._steps.append(_Operation(function, tuple(views)))",
        "        self._complete &= len(views) > 0",
        ("torch/kernels/test_kept.py",),
        "A repeated call leaves out the products between its launches.",
    ),
    Defect(
        "batch_rows_of_a_read_table",
        "backends/metadata.py",
        'return None if "block_table" in self.__dict__ else self._pages',
        "return self.__dict__.get('_pages')",
        ("backends/test_metadata.py", "torch/test_metadata.py"),
        "What a caller writes to the table of `from_lens` is ignored.",
    ),
    Defect(
        "batch_short_sequence",
        "backends/metadata.py",
        "short = (query_lens > seq) & self.causal",
        "short = (query_lens > seq + 1) & self.causal",
        ("backends/test_metadata.py",),
        "A request with one new token more than tokens is accepted.",
    ),
    Defect(
        "batch_slot_before_the_sequence",
        "backends/block_table.py",
        "return slots if inside else np.where(position < 0, PAD_SLOT_ID, slots)",
        "return slots",
        ("backends/test_metadata.py", "reference/test_reference.py"),
        "Tokens before the start of a sequence have a slot.",
    ),
    Defect(
        "selector_argument_before_force",
        "selector.py",
        '        yield _forced.get(), "context"\n        yield backend, "argument"\n',
        '        yield backend, "argument"\n        yield _forced.get(), "context"\n',
        ("test_selector.py", "selection/test_choice.py"),
        "An argument wins over a force.",
    ),
    Defect(
        "selector_force_is_kept",
        "selector.py",
        "    try:\n        yield\n    finally:\n        global_force_attn_backend(original_value)",
        "    yield\n    global_force_attn_backend(original_value)",
        ("test_selector.py",),
        "A force outlives its context after an error.",
    ),
    Defect(
        "selector_stale_choice",
        "selector.py",
        "if key == key.now():",
        "if key:",
        ("test_selector.py",),
        "A choice made while the registries changed is kept.",
    ),
    Defect(
        "verdict_swallowed_error",
        "selection/verdicts.py",
        "error = None if candidate.missing else broken",
        "error = None",
        ("selection/test_verdicts.py", "test_selector.py", "selection/test_choice.py"),
        "Why a backend that was requested by name failed to load is lost.",
    ),
    Defect(
        "preferences_measured_in_part",
        "selection/preferences.py",
        "            if batch not in times:\n                return None\n",
        "            if batch not in times:\n                continue\n",
        ("selection/test_preferences.py",),
        "A backend that was measured for some batches only is compared by these.",
    ),
    Defect(
        "capabilities_arch",
        "capabilities.py",
        "int(digits) >= int(number)",
        "int(digits) > int(number)",
        ("selection/test_verdicts.py",),
        "An architecture is not part of the range that begins with it.",
    ),
    Defect(
        "merge_infinite_part",
        "merge.py",
        "empty = xp.isinf(logs) |",
        "empty = (logs == -math.inf) |",
        ("test_merge.py",),
        "A part whose log-sum-exp is +inf takes all the weight.",
    ),
    Defect(
        "formula_cap_after_bias",
        "functional.py",
        "scores = rules.cap * xp.tanh(scores / rules.cap)",
        "scores = xp.tanh(scores / rules.cap)",
        ("test_functional.py",),
        "Capped scores are not multiplied by the cap.",
    ),
    Defect(
        "formula_lse_of_requests",
        "functional.py",
        "reshape(num_heads, batch, n).swapaxes(0, 1)",
        "reshape(batch, num_heads, n)",
        ("test_functional.py",),
        "The log-sum-exps of a backend are mixed between requests and heads.",
    ),
    Defect(
        "weights_with_sink",
        "weights.py",
        "weights * xp.where(empty, 0.0, factor)[..., None]",
        "weights / weights.sum(-1)[..., None]",
        ("test_weights.py",),
        "Weights do not leave the sink its share.",
    ),
    Defect(
        "recording_reports_success",
        "recording.py",
        'reason = "non-finite"',
        "reason = reason",
        ("test_recording.py",),
        "A call whose output is not finite is not recorded.",
    ),
    Defect(
        "report_missing_package",
        "reports/report.py",
        'return "; ".join(self.reasons) or "available"',
        'return self.reasons[0] if self.reasons else "available"',
        ("reports/test_report.py", "test_cli.py"),
        "Only the first reason is shown.",
    ),
    # attn.testing: rules that never fire
    Defect(
        "rule_of_padding",
        "testing/rules.py",
        "    if not right.all():\n",
        "    if right.size and not right.any():\n",
        ("testing/test_mutants.py", "testing/test_rules.py", "testing/test_conformance.py"),
        "One written row of padding is no violation.",
    ),
    Defect(
        "rule_of_lse",
        "testing/rules.py",
        '    yield from _at(\n        case, "D",',
        '    yield from () and _at(\n        case, "D",',
        ("testing/test_mutants.py", "testing/test_rules.py"),
        "A wrong log-sum-exp is no violation.",
    ),
    Defect(
        "rule_of_bits",
        "testing/properties.py",
        "differ = as_bytes(np.ascontiguousarray(a)) != as_bytes(np.ascontiguousarray(b))",
        "differ = ~np.isclose(a, b, equal_nan=True)",
        ("testing/test_rules.py", "testing/test_mutants.py"),
        "Bits that differ are equal if the numbers are close.",
    ),
    # attn.tools.bench, attn.tools.demo, attn.tools.aot.command, configurations
    Defect(
        "bench_last_page",
        "tools/bench/workloads.py",
        "keys = [(count - 1) * page + tail for",
        "keys = [count * page + tail for",
        ("tools/bench/test_workloads.py",),
        "A request of a workload has a page of keys too many.",
    ),
    Defect(
        "bench_best_is_worst",
        "tools/bench/summary.py",
        "worst, where = min(ratios)",
        "worst, where = max(ratios)",
        ("tools/bench/test_summary.py",),
        "The best ratio is printed as the worst.",
    ),
    Defect(
        "demo_frequencies_kept",
        "tools/demo/rope.py",
        "np.clip((turns - low) / (high - low), 0, 1)",
        "np.clip((high - turns) / (high - low), 0, 1)",
        ("tools/demo/test_checkpoint.py", "tools/demo/test_models.py"),
        "High frequencies are lowered and low ones kept.",
    ),
    Defect(
        "demo_requests_draw_alike",
        "tools/demo/engine.py",
        "(seed, request.request_id, len(request.output))",
        "(seed, len(request.output))",
        ("tools/demo/test_generate.py",),
        "All requests draw with the same random numbers.",
    ),
    Defect(
        "demo_transposed_matrix",
        "tools/demo/checkpoint.py",
        'if tuple(entry["shape"]) != known[name]:',
        'if sorted(entry["shape"]) != sorted(known[name]):',
        ("tools/demo/test_checkpoint.py",),
        "A matrix whose sides are exchanged is accepted.",
    ),
    Defect(
        "config_every_nth_layer",
        "reports/model_config.py",
        'word if (i + 1) % n else "full_attention"',
        'word if i % n else "full_attention"',
        ("reports/test_model_config.py",),
        "The first layer is full and not the n-th.",
    ),
    Defect(
        "aot_failure_swallowed",
        "tools/aot/command.py",
        'row.status, row.reason = "failed", error',
        'row.status, row.reason = "compiled", error',
        ("tools/aot/test_command.py",),
        "A case that does not compile counts as compiled.",
    ),
    Defect(
        "arguments_infinite_slope",
        "arguments.py",
        'np.isnan(numbers) if name == "sinks" else ~np.isfinite(numbers)',
        "np.isnan(numbers)",
        ("test_same_refusals.py",),
        "An infinite slope of ALiBi is accepted.",
    ),
    Defect(
        "backend_block_size_of_encoder",
        "backends/abstract.py",
        "if request.block_size is not None and request.attn_type not in ENCODER_TYPES:",
        "if request.block_size is not None:",
        ("backends/test_abstract.py", "test_selector.py", "test_records.py", "integrations/test_vllm.py"),
        "A layer without a cache is refused for its block size.",
    ),
    Defect(
        "aot_names_of_launches",
        "tools/aot/command.py",
        "names[: i + 1].count(name)",
        "names[:i].count(name)",
        ("tools/aot/test_command.py",),
        "The second launch of a kernel is called its first.",
    ),
    Defect(
        "aot_cost_of_own_key",
        "tools/aot/tpu.py",
        "scores + int(allowed.sum())",
        "scores + int(allowed.sum()) - count",
        ("tools/aot/test_tpu.py",),
        "A row's own key is not counted in the cost.",
    ),
    Defect(
        "diffusion_multiple_of_keys",
        "diffusion/backends/abstract.py",
        "if keys is not None and keys % cls.key_multiple and not causal:",
        "if keys is not None and keys % cls.key_multiple and causal:",
        ("torch/diffusion/test_backends.py", "diffusion/test_selector.py"),
        "A number of keys that a kernel does not take is refused with causality only.",
    ),
    Defect(
        "diffusion_joint_rows",
        "diffusion/parallel.py",
        "return ops_of(self.framework).concat(streams if front else streams[::-1], 1)",
        "return ops_of(self.framework).concat(streams, 1)",
        ("torch/diffusion/test_parallel.py",),
        "Rows of a second stream come first wherever they belong.",
    ),
    Defect(
        "pair_rows_of_prompts",
        "torch/backends/pair.py",
        "start = 0 if first == 0 else batches[-1].rows.stop",
        "start = 0",
        ("torch/backends/test_pair.py",),
        "The prompts' backend of a pair gets the rows of the decodes.",
    ),
    Defect(
        "pair_mask_of_whole_batch",
        "torch/backends/pair.py",
        "mask=self.visible(meta),",
        "mask=call.mask,",
        ("torch/backends/test_pair.py",),
        "A part of a batch is attended under the mask of all requests.",
    ),
    Defect(
        "pair_lse_of_first_rows",
        "torch/backends/pair.py",
        "call.lse[:, rows],",
        "call.lse,",
        ("torch/backends/test_pair.py",),
        "The log-sum-exp of prompts is stored from the batch's first row on.",
    ),
    Defect(
        "pair_sinks_of_construction",
        "torch/backends/pair.py",
        '_SHARED = ("alibi_slopes", "sinks", ',
        '_SHARED = ("alibi_slopes", ',
        ("torch/backends/test_pair.py",),
        "Both backends of a pair keep the sinks that a layer was built with.",
    ),
    Defect(
        "pair_layouts_by_shape",
        "torch/backends/pair.py",
        "        if one != other:\n",
        "        if len(one[0]) != len(other[0]):\n",
        ("torch/backends/test_pair.py",),
        "Backends whose caches have heads and tokens in another order serve one layer.",
    ),
    Defect(
        "pair_kind_without_parts",
        "torch/backends/pair.py",
        "return None if _member_batches(attn_metadata) else self._member(0)._kind_of_batch(",
        "return self._member(0)._kind_of_batch(",
        ("torch/backends/test_pair.py",),
        "A batch with prompts repeats the launches of one that the decodes' backend served whole.",
    ),
    Defect(
        "pair_of_disabled_backend",
        "selection/choice.py",
        "(member.name, *(part.name for part in member.parts))",
        "(member.name,)",
        ("torch/backends/test_pair.py",),
        "A backend that is disabled is chosen as a part of a pair.",
    ),
    Defect(
        "tune_mixed_batches_as_decodes",
        "tools/bench/tuning.py",
        "if max(q) <= FEW_ROWS])",
        "if min(q) <= FEW_ROWS])",
        ("selection/test_preferences.py",),
        "Which backend is fastest in decodes is measured by batches with prompts too.",
    ),
    Defect(
        "pair_measured_elsewhere",
        "selection/preferences.py",
        "pairs_in([entry for entry in stored if entry.serves(request)])",
        "pairs_in([])",
        ("selection/test_preferences.py",),
        "A pair that was measured to be faster than the list's first is not considered.",
    ),
    Defect(
        "fa4_masks_of_wrong_tiles",
        "torch/backends/_flash_providers.py",
        '("sm_90", MultipleOf(1, 65, 96), MASK_FEATURES,',
        '("sm_90", MultipleOf(1, 997, 998), MASK_FEATURES,',
        ("torch/backends/test_flash_attn.py",),
        "FlashAttention 4 serves masks with heads of 80 and 96, for which its tiles over pages are wrong.",
    ),
    Defect(
        "pallas_blocks_of_batch",
        "jax/kernels/tpu/_chips.py",
        "dataclasses.replace(shape, max_query_len=FIXED_ROWS, columns=FIXED_KEYS // shape.page)",
        "shape",
        ("jax/backends/test_pallas.py",),
        "The bits of a request that must not depend on its batch depend on the batch's longest sequence.",
    ),
    Defect(
        "batch_part_starts_of_whole",
        "backends/metadata.py",
        "start[first : last + 1] - start[first], seq_lens[requests]",
        "start[first : last + 1], seq_lens[requests]",
        ("torch/backends/test_pair.py",),
        "The rows of a batch's part are counted from the whole batch's first.",
    ),
)


def copy_tree(folder: Path) -> None:
    """Copy what git lists of this checkout, changes and new files included, with the compiled modules of attn."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for cached in (ROOT / "attn").rglob("__pycache__"):
        if (target := folder / cached.relative_to(ROOT)).parent.is_dir():
            shutil.copytree(cached, target, dirs_exist_ok=True)


def plant(defect: Defect, folder: Path) -> None:
    """Change a copy of the checkout."""
    path = folder / "attn" / defect.file
    path.write_text(defect.planted(path.read_text(encoding="utf-8")), encoding="utf-8")
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of the tests' processes: one thread, and attn from the copy, in their child processes too."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = [str(folder), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
    flags = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    return {**kept, **threads, **hidden, **flags, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


@contextlib.contextmanager
def checkout(defect: Defect | None) -> Iterator[Path]:
    """A copy of this checkout with a defect, or without one."""
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        copy_tree(folder)
        check = [sys.executable, "-c", "import attn; print(attn.__file__)"]
        found = subprocess.run(check, cwd=folder.parent, env=environment(folder), capture_output=True, text=True).stdout.strip()
        if found != str(folder / "attn" / "__init__.py"):
            raise RuntimeError(f"the tests of the copy in {folder} would import {found or 'no attn'}")
        if defect is not None:
            plant(defect, folder)
        yield folder


class NothingRan(Exception):
    """A test file of which no test ran."""


def run_file(folder: Path, file: str, full: bool = False, words: Sequence[str] = ()) -> str:
    """Run a test file in a copy; return the test that failed, or "" if all passed.

    Returns "collection" if the file cannot be imported, "timeout", or "signal N" if a signal ended the process.
    Raises `NothingRan` if no test ran, as where all are skipped.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", f"tests/{file}"]
    command += ["--full"] * full + list(words)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what the tests started too
        process.wait()
    if process.returncode == pytest_code("NO_TESTS_COLLECTED"):
        raise NothingRan(output.strip().splitlines()[-1])
    if process.returncode == pytest_code("OK"):
        return ""
    if process.returncode == pytest_code("USAGE_ERROR") and "conftest" not in output:
        raise RuntimeError(output.strip())
    for line in output.splitlines():
        head, _, rest = line.partition(" ")
        if head in ("FAILED", "ERROR") and (test := rest.partition("::")[2]):
            return test.partition(" - ")[0]
    return f"signal {-process.returncode}" if process.returncode < 0 else "collection"


def pytest_code(name: str) -> int:
    """Return the number of one of pytest's exit codes."""
    import pytest

    return int(pytest.ExitCode[name])


def hunt(defect: Defect, full: bool = False, all_files: bool = False, words: Sequence[str] = ()) -> Outcome:
    """Run a defect's test files until one notices, or all of them."""
    start, found = time.monotonic(), dict[str, str]()
    with checkout(defect) as folder:
        for file in defect.tests:
            try:
                found[file] = run_file(folder, file, full, words)
            except NothingRan:
                found[file] = ""
            if found[file] and not all_files:
                break
    killer = next((file for file, test in found.items() if test), "")
    return Outcome(defect.name, killer, found.get(killer, ""), round(time.monotonic() - start, 1), found)


def baseline(files: Sequence[str], full: bool = False, words: Sequence[str] = ()) -> Iterator[tuple[str, str, float]]:
    """Run test files without a defect: yield each, with the test that fails ("" for none) and its seconds."""
    with checkout(None) as folder:
        for file in files:
            start = time.monotonic()
            try:
                failed = run_file(folder, file, full, words)
            except NothingRan as reason:
                failed = f"nothing ran: {reason}"
            yield file, failed, round(time.monotonic() - start, 1)


def row(outcome: Outcome) -> str:
    """Return an outcome as a line."""
    by = f"{outcome.killer} {outcome.test}" if outcome.killer else "SURVIVES " + " ".join(outcome.files)
    return f"{outcome.name:<36} {outcome.seconds:6.1f} s  {by}"


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = lambda line: print(line, flush=True)) -> int:
    """Run the command; return its exit status."""
    global TIMEOUT
    parser = argparse.ArgumentParser(prog="python -m tests.testing.planted", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="defects; all if none is given")
    parser.add_argument("--full", action="store_true", help="run every case, also those marked `full`")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="defects at a time")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the outcomes to FILE too")
    parser.add_argument("--all-files", action="store_true", help="run all of a defect's files, also after one noticed")
    parser.add_argument("--baseline", action="store_true", help="run the test files without any defect: all must pass")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, metavar="SECONDS", help="of a test file (default: %(default)g)"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="run only tests that match, as pytest does")
    chosen = parser.parse_args(arguments)
    TIMEOUT = chosen.timeout
    known = {defect.name: defect for defect in DEFECTS}
    if unknown := sorted(set(chosen.names) - known.keys()):
        parser.error(f"no defect is named {', '.join(unknown)}")
    defects = [known[name] for name in chosen.names] or list(DEFECTS)
    words = ["-k", chosen.k] if chosen.k else []
    if chosen.baseline:
        failed = False
        for file, test, seconds in baseline(list(dict.fromkeys(f for d in defects for f in d.tests)), chosen.full, words):
            failed = failed or bool(test)
            show(f"{file:<60} {seconds:6.1f} s  {'FAILS ' + test if test else 'passes'}")
        return int(failed)
    outcomes, alive = [], []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for outcome in pool.map(lambda defect: hunt(defect, chosen.full, chosen.all_files, words), defects):
            outcomes.append(outcome)
            if outcome.killer:
                show(row(outcome))
            else:
                alive.append(outcome)
    for outcome in alive:
        show(row(outcome))
    late = sum(outcome.test == "timeout" for outcome in outcomes)
    show(f"{len(outcomes) - len(alive)} of {len(outcomes)} defects were noticed" + f", {late} by a timeout alone" * bool(late))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
