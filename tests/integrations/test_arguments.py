"""docs/reference/arguments.md: its tables have every argument of each host's interface, and say what becomes of it."""

import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from flax import nnx

import attn.jax
import attn.torch
from attn.errors import AttnError
from attn.integrations import diffusers as of_diffusers
from attn.integrations import transformers as of_transformers
from attn.integrations.flax import attention_fn
from tests.integrations.vllm_interface import STANDIN, _documented

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "arguments.md"


def tables() -> dict[str, dict[str, str]]:
    """Host -> argument -> what becomes of it."""
    sections = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    pairs = zip(sections[::2], sections[1::2], strict=True)
    return {host: dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE)) for host, text in pairs}


TABLES = tables()
ROWS = [(host, name) for host, table in TABLES.items() for name in table]


def arguments(function: Any) -> set[str]:
    skipped = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name for name, p in inspect.signature(function).parameters.items() if p.kind not in skipped and name != "self"}


def keywords_of_models() -> set[str]:
    """Every keyword with which a model of the installed transformers calls its attention function."""
    import transformers

    found: set[str] = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        source = path.read_text(encoding="utf-8")
        for begin in re.finditer(r"\battention_interface\(", source):
            found |= {keyword.arg for keyword in _call_at(source, begin.start()).keywords if keyword.arg}
    assert {"dropout", "scaling", "sliding_window", "softcap", "s_aux"} <= found
    return found


def _call_at(source: str, begin: int) -> ast.Call:
    """Parse the call that begins there, without the rest of the file."""
    ends = (match.end() for match in re.finditer(r"\)", source[begin : begin + 4000]))
    for end in ends:
        with contextlib.suppress(SyntaxError):
            (call,) = ast.parse(source[begin : begin + end].strip()).body
            assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
            return call.value
    raise AssertionError(f"no call: {source[begin : begin + 100]}")


def of_hosts(host: str) -> set[str]:
    """The arguments of the installed library, or of the stand-in of one that is not installed."""
    if host == "transformers":
        from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.utils.generic import TransformersKwargs

        declared = {*TransformersKwargs.__annotations__, *PagedAttentionArgs.__annotations__} - {"input_ids"}
        return keywords_of_models() | declared | arguments(sdpa_attention_forward) - {"module"}
    if host == "diffusers":
        from diffusers.models import attention_dispatch as dispatch

        return arguments(dispatch.dispatch_attention_fn) | arguments(dispatch._native_attention)
    if host == "torch":
        signature = re.search(r"\((.*?)\) ->", torch.nn.functional.scaled_dot_product_attention.__doc__ or "", re.DOTALL)
        assert signature is not None
        return set(re.findall(r"(\w+)(?:=[^,]+)?(?:,|$)", signature[1]))
    if host == "flax":
        from flax.linen.attention import dot_product_attention as of_linen
        from flax.nnx.nn.attention import dot_product_attention as of_nnx

        return arguments(of_linen) | arguments(of_nnx)
    if host == "vLLM":
        backend = _documented(STANDIN, "vllm.v1.attention.backend")
        fields = {field.name for field in dataclasses.fields(backend.CommonAttentionMetadata)}
        return fields | arguments(backend.AttentionImpl.__init__) | arguments(backend.AttentionImpl.forward)
    assert host == "tpu-inference", host
    from attn.integrations.tpu_inference import _ATTENTION

    common = STANDIN.parent / "tpu_inference_pkg" / "tpu_inference" / "layers" / "common" / "attention_metadata.py"
    spec = importlib.util.spec_from_file_location("documented_attention_metadata", common)
    assert spec is not None and spec.loader is not None
    metadata = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(metadata)
    batches = (metadata.AttentionMetadata, metadata.SharedAttentionMetadata)
    return {field.name for batch in batches for field in dataclasses.fields(batch)} | set(_ATTENTION) - {"self"}


@pytest.mark.parametrize("host", TABLES)
def test_a_table_has_every_argument_of_its_host(host: str) -> None:
    missing = of_hosts(host) - set(TABLES[host])
    assert not missing, f"say in {PAGE.relative_to(ROOT)} what becomes of {sorted(missing)}, and test it"


def test_a_table_has_no_argument_that_no_host_passes() -> None:
    """transformers' table covers several versions and the names that are refused in case one passes them."""
    for host in TABLES.keys() - {"transformers"}:
        assert set(TABLES[host]) <= of_hosts(host), host


X = torch.zeros(1, 4, 8, 16)


def _transformers(**options: Any) -> Any:
    module = torch.nn.Module()
    return of_transformers._function(None)(module, X, X, X, options.pop("attention_mask", None), **options)


def _flax(**options: Any) -> Iterator[Any]:
    """A call of each of this package's functions."""
    x = jnp.zeros((1, 5, 2, 16))
    yield lambda: attention_fn(attn.jax.Attention(2, 16))(x, x, x, **options)
    if "bias" not in options:
        yield lambda: attn.jax.attention_fn(x, x, x, **options)


#: A value of each argument that is refused, or of which some values are.
VALUES: dict[tuple[str, str], Any] = {
    ("transformers", "attention_mask"): torch.ones(1, 1, 8, 8, dtype=torch.long),
    ("transformers", "indices"): torch.zeros(1, 8, 2, dtype=torch.long),
    ("transformers", "cu_seq_lens_q"): torch.tensor([0, 8]),
    ("transformers", "cu_seq_lens_k"): torch.tensor([0, 8]),
    ("diffusers", "attn_mask"): torch.full((1, 4), 2),
    ("flax", "bias"): jnp.zeros((1, 2, 5, 5)),
    ("flax", "dropout_rate"): 0.5,
    ("flax", "promote_dtype"): lambda *x, **_: x,
}
#: Arguments that make the call in which another is refused.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("transformers", "dropout"): {"dropout": 0.1, "softcap": 1.0},
    ("transformers", "position_bias"): {"position_bias": torch.zeros(1, 4, 8, 8), "softcap": 1.0},
    ("transformers", "sliding_window"): {"sliding_window": 2, "is_causal": False},
    ("transformers", "indices"): {"indices": torch.zeros(1, 8, 2, dtype=torch.long), "cache": object()},
    ("transformers", "output_attentions"): {"output_attentions": True, "dropout": 0.1},
    ("diffusers", "is_causal"): {"is_causal": True, "attn_mask": torch.ones(1, 4, dtype=torch.bool)},
    ("torch", "is_causal"): {"is_causal": True, "attn_mask": torch.ones(8, 8, dtype=torch.bool)},
}
REFUSED = [
    (host, name)
    for host, name in ROWS
    if host in ("transformers", "diffusers", "torch", "flax") and "efused" in TABLES[host][name]
]


@pytest.mark.parametrize(("host", "name"), REFUSED)
def test_what_is_refused_raises(host: str, name: str) -> None:
    value = VALUES.get((host, name), torch.ones(1) if host == "transformers" else 0.5)
    options = BESIDE.get((host, name), {name: value})
    calls = {
        "transformers": lambda: [lambda: _transformers(**options)],
        "diffusers": lambda: [lambda: of_diffusers._function(None, 0.0)(X, X, X, **options)],
        "torch": lambda: [lambda: attn.torch.scaled_dot_product_attention(X, X, X, **options)],
        "flax": lambda: list(_flax(**options)),
    }[host]()
    for call in calls:
        with pytest.raises((AttnError, ValueError), match=name if host != "transformers" else "not supported"):
            call()


@pytest.mark.parametrize(("host", "name"), ROWS)
def test_a_row_says_what_the_adapter_does(host: str, name: str) -> None:
    """An argument that is used is one of the adapter's, by name; what becomes of it is tested with its integration."""
    said = TABLES[host][name]
    assert said.split(":")[0].split(";")[0].split()[0].rstrip(",") in ("used", "refused", "ignored"), said
    if not said.startswith("used"):
        return
    sources = {
        "transformers": ("attn/integrations/transformers",),
        "diffusers": ("attn/integrations/diffusers.py",),
        "torch": ("attn/torch/dot_product.py",),
        "flax": ("attn/jax/dot_product.py",),
        "vLLM": ("attn/integrations/_vllm.py",),
        "tpu-inference": ("attn/integrations/_tpu_inference.py", "attn/integrations/tpu_inference.py"),
    }[host]
    paths = [ROOT / source for source in sources]
    files = [file for path in paths for file in (path.glob("*.py") if path.is_dir() else [path])]
    assert any(re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) for file in files)


def test_flax_calls_an_attention_fn_with_listed_arguments_only() -> None:
    """nnx passes all, linen those of the signature: a name that is not there would be dropped."""
    seen: set[str] = set()

    def record(query: Any, key: Any, value: Any, **options: Any) -> Any:
        seen.update(options)
        return query

    nnx.MultiHeadAttention(2, 32, attention_fn=record, decode=False, rngs=nnx.Rngs(0))(jnp.zeros((1, 5, 32)))
    assert seen <= set(TABLES["flax"])
    for function in (attn.jax.attention_fn, attention_fn(attn.jax.Attention(2, 16))):
        assert set(TABLES["flax"]) <= arguments(function)
