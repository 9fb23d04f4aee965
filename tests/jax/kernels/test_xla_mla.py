"""Absorbed attention of batches of more rows than a window (about 15 s)."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn.jax.kernels import xla, xla_mla

#: Requests without rows or before their first key, cut by a window's end, and of very different lengths.
LENS = (60, 1, 65, 70, 0, 40, 55, 3, 1), (300, 40, 65, 90, 16, 700, 33, 3, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_windows_against_the_oracle(make_mla: Any, causal: bool) -> None:
    batch = make_mla(*LENS, causal=causal)
    assert batch.arguments()[0].shape[0] > xla_mla.WINDOW
    batch.check(*jax.jit(batch.layer.__call__)(*batch.arguments()))


def test_a_window_ends_with_its_longest_request(make_mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows times the keys of the longest request, summed over windows, against that of the whole batch. The rows of a prompt
    that is expanded see no key here."""
    work: list[int] = []
    real = xla._attend

    def counted(query: Any, fetch: Any, extent: Any, requests: xla.Requests, **rules: Any) -> Any:
        longest = jnp.where(jnp.diff(requests.query_start_loc) > 0, requests.seq_lens, 0).max()
        jax.debug.callback(lambda keys: work.append(query.shape[0] * int(keys)), longest)
        return real(query, fetch, extent, requests, **rules)

    monkeypatch.setattr(xla, "_attend", counted)
    batch = make_mla((600, *(60,) * 9, 1, 1), (600, *(100,) * 9, 900, 1000), heads=2)
    batch.check(*jax.jit(batch.layer.__call__)(*batch.arguments()))
    absorbed = xla_mla.WINDOW * (1000 + 100 + 100)
    prompt = xla_mla.WINDOW * 600 * 3
    assert sum(work) <= absorbed + prompt < len(batch.q) * 1000
