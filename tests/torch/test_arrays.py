"""What is known of a call's tensors beside their values; conversions are tested with the calls that make them."""

import copy
import pickle
from typing import Any

import pytest
import torch

from attn.torch import arrays
from attn.torch.arrays import Facts, facts_of
from attn.torch.layer import Attention


def tensors() -> list[Any]:
    return [torch.zeros(3, 4, 8), torch.zeros(3, 2, 8), torch.zeros(2, 5, 8), None]


def known(given: list[Any]) -> Facts:
    """The facts of tensors, which know others by a comparison."""
    facts = facts_of(given, None)
    assert facts is not None and facts_of(given, facts) is facts and facts.hold(given)
    return facts


def test_facts_of_equal_calls_are_one_object() -> None:
    facts = known(tensors())
    assert facts.hold(tensors()) and facts_of(tensors(), None) is facts
    other = known([torch.zeros(3, 4, 9), *tensors()[1:]])
    assert other is not facts and facts_of(tensors(), other) is facts and facts_of(tensors(), facts) is facts


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.zeros(4, 3, 8).transpose(0, 1),
        lambda x: x.double(),
        lambda x: x[:2],
        lambda x: x[None],
        lambda x: x.to("meta"),
        lambda x: x.requires_grad_(),
        lambda x: None,
        torch.nn.Parameter,
    ],
)
def test_what_differs_has_other_facts(change: Any) -> None:
    facts, changed = known(tensors()), tensors()
    changed[0] = change(changed[0])
    assert not facts.hold(changed)
    assert facts_of(changed, facts) is not facts
    if changed[0] is not None and type(changed[0]) is torch.Tensor:
        assert known(changed).hold(changed)


def test_another_one_is_absent() -> None:
    facts = known([torch.zeros(3), None, torch.zeros(3)])
    assert not facts.hold([torch.zeros(3), torch.zeros(3), None]) and not facts.hold([torch.zeros(3)] * 2)


def test_gradients_that_are_recorded_are_a_fact() -> None:
    facts = known(tensors())
    with torch.no_grad():
        assert not facts.hold(tensors()) and facts_of(tensors(), facts) is not facts


def test_without_guards_the_facts_are_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are private to torch, so another release may lack them."""
    assert arrays._Guards is not None
    monkeypatch.setattr(arrays, "_Guards", None)
    arrays._facts.cache_clear()
    given = [torch.zeros(7, 4, 8), None]
    facts = facts_of(given, None)
    assert facts is not None and facts_of(given, facts) is facts is facts_of(given, facts) and not facts.hold(given)
    assert facts_of([1], facts) is None is facts_of([torch.nn.Parameter(given[0])], facts)


def test_one_tensor_twice_has_the_facts_of_two() -> None:
    facts, x = known(tensors()), torch.zeros(3, 2, 8)
    given = [tensors()[0], x, tensors()[2], None]
    assert facts_of(given, facts) is facts
    twice = known([torch.zeros(3), torch.zeros(3)])
    assert facts_of([x[0, 0, :3], x[0, 0, :3]], twice) is twice


def test_a_batch_and_a_layer_that_were_called_are_copied() -> None:
    layer = Attention(2, 16, num_kv_heads=1, dtype=torch.float32, block_size=16, backend="TORCH_SDPA")
    from attn.backends.metadata import CommonAttentionMetadata

    metadata = layer.build(CommonAttentionMetadata.from_lens([1], [3], [[0]], 16))
    cache, x = layer.new_kv_cache(2), [torch.zeros(1, h, 16) for h in (2, 1, 1)]
    expected = [layer(*x, cache, metadata) for _ in range(4)][-1]
    for copied in (copy.copy(metadata), copy.deepcopy(metadata), pickle.loads(pickle.dumps(metadata))):
        assert torch.equal(copy.deepcopy(layer)(*x, cache, copied), expected)
