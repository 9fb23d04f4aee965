"""Recorded calls: what is recorded and when, and their replay on backends of both frameworks (about 30 s)."""

import itertools
import json
import logging
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attn
from attn import recording
from attn.backends.registry import register_backend
from attn.cli import main
from attn.errors import ShapeError
from attn.reference import visible_mask
from attn.testing import runner_for
from attn.tools.recorded import as_smaller, call_of, outcome_of, read, snapshot_of
from attn.torch.backends.mla.torch_mla import TorchMLABackend
from attn.torch.backends.sdpa import TorchSDPABackend, TorchSDPAImpl
from tests.served import Q_LENS, Served

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")

FP8 = {"kv_cache_dtype": "fp8", "k_scale": 0.03, "v_scale": 0.05}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_RECORD", str(tmp_path / "records"))
    monkeypatch.setattr(recording, "_requested", 0)
    return tmp_path / "records"


@pytest.mark.parametrize(
    ("kind", "backend", "more", "other"),
    [
        ("torch", "TORCH_SDPA", {"sinks": [0.5] * 4, "sliding_window": 9, **FP8, "return_lse": True}, "XLA_ATTN"),
        ("torch", "TORCH_SDPA", {"kv_cache_dtype": "int8_per_token_head", "logits_soft_cap": 5.0}, "TORCH_SDPA"),
        ("torch", "TORCH_SDPA", {"attn_type": "encoder_only", "alibi_slopes": [0.1, 0.2, 0.3, 0.4]}, "CPU_ATTN"),
        ("torch", "TORCH_SDPA", {"kv_sharing_target_layer_name": "first"}, "CPU_ATTN"),
        ("jax", "XLA_ATTN", {"dtype": jnp.bfloat16, "scale": -0.3}, "TORCH_SDPA"),
        ("torch MLA", "TORCH_MLA", {}, "XLA_MLA"),
        ("jax MLA", "XLA_MLA", {}, "TORCH_MLA"),
    ],
    ids=str,
)
def test_a_call_is_replayed_in_either_framework(kind, backend, more, other, folder, capsys):
    served = Served(kind, backend, **more)
    if more.get("dtype") == jnp.bfloat16:
        served.rows = [x.astype(jnp.bfloat16) for x in served.rows]
    attn.record_next()
    served()
    served()  # one call was requested
    [path] = folder.iterdir()
    assert main(["replay", str(path), "--backend", other, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["recorded"]["reason"] == "requested" and said["recorded"]["backend"] == backend
    [row] = said["rows"]
    assert row["backend"] == other and row["status"] == "ok" and 0 < row["error"] < 1e-2
    call, _ = read(path)
    if not served.encoder:  # the pages of the batch only
        assert len(call.key_cache) == 6 and call.batch.block_table.max() == 5
    assert list(call.case.query_lens) == Q_LENS


def seen(call, r):
    """The keys that request r's rows see, by the oracle."""
    case, batch, spans = call.case, call.batch, call.batch.spans[call.rows(r)]
    rules = {"causal": bool(batch.causal[r]), "window": case.window, "span_window": case.span_window}
    rules |= {"spans": spans, "prefix": int(batch.prefix[r]), "chunk_size": case.chunk_size or None}
    return visible_mask(case.query_lens[r], case.seq_lens[r], **rules)


@pytest.mark.parametrize(
    ("more", "matter"),
    [
        ({"sliding_window": 9, "span_window": True}, ["spans", "prefix", "sliding_window"]),
        ({"chunk_size": 8}, ["spans", "causal", "chunk_size"]),
    ],
    ids=["window", "chunks"],
)
def test_what_rows_see_is_recorded(more, matter, folder):
    """Spans, prefixes, chunks and requests that are not causal: the replay differs without any of them."""
    spans = np.full((9, 2), -1)
    spans[:5] = (0, 4)
    served = Served("torch", "TORCH_SDPA", {"spans": spans, "prefix": [0, 3, 0], "causal": [True, True, False]}, **more)
    attn.record_next()
    out = served()
    [path] = folder.iterdir()
    call, _ = read(path)
    run = runner_for(TorchSDPABackend)
    assert outcome_of(call, run).failure == ""
    np.testing.assert_array_equal(run(call).output, out.numpy())
    assert outcome_of(call_of(snapshot_of(call)), run).failure == ""
    off = {"spans": None, "prefix": None, "causal": True}
    for name in matter:
        changed = (
            call.with_batch(**{name: off[name]}) if name in off else call.but(**{name: 0 if name == "chunk_size" else None})
        )
        assert not np.array_equal(run(changed).output, out.numpy()), name
    weights = served(return_weights=True)[1]
    assert [(w > 0).sum(-1)[0].tolist() for w in weights] == [seen(call, r).sum(-1).tolist() for r in range(3)]


@pytest.mark.parametrize("kind", ["torch", "jax", "torch MLA", "jax MLA"])
def test_what_fails_is_recorded(kind, folder, caplog):
    served = Served(kind, "TORCH_MLA" if kind == "torch MLA" else "TORCH_SDPA" if kind == "torch" else None)
    served()
    assert not folder.exists()
    wild = [x.copy() for x in served.rows]
    wild[1][6, ..., 0] = np.nan
    with caplog.at_level(logging.WARNING, logger="attn"):
        served(wild)
    with pytest.raises(ShapeError):
        served([served.rows[0], *(x[..., :4] for x in served.rows[1:])])
    first, second = sorted(folder.iterdir())
    assert "non-finite" in first.name and str(first) in caplog.text and "refused" in second.name
    assert np.isnan(read(first)[0].key).sum() == (1 if "MLA" in kind else 2)  # in each kv head
    with pytest.raises(attn.UnsupportedError, match="(?s)its arguments cannot be called: .*shape.*refused: ShapeError"):
        read(second)


def test_inputs_that_are_not_finite_are_no_failure_of_a_backend(folder, capsys):
    served = Served("torch", "TORCH_SDPA")
    served.rows[2][0] = np.inf
    served()
    [path] = folder.iterdir()
    assert main(["replay", str(path), "--backend", "TORCH_SDPA"]) == 0
    assert "20 rows are expected to be non-finite" in capsys.readouterr().out
    assert main(["replay", str(path), "--backend", "TORCH_SDPA", "--shrink", str(folder / "small")]) == 2
    assert "nothing to shrink" in capsys.readouterr().err
    assert main(["replay", str(path), "--shrink", "/nowhere/small"]) == 2
    assert capsys.readouterr() == ("", "attn: /nowhere/small: No such file or directory\n"), "before any backend runs"


class Broken(TorchSDPABackend):
    name = "BROKEN"


class BrokenImpl(TorchSDPAImpl, backend=Broken):
    """Reads its last keys as NaN in kv head 1 of requests of more than 20 keys."""

    traceable = False

    def _attend(self, call: Any) -> None:
        super()._attend(call)
        for r, length in enumerate(call.meta.seq_lens.tolist()):
            if length > 20:
                start, end = call.meta.query_start_loc[r : r + 2].tolist()
                call.output[start:end, call.output.shape[1] // 2 :] = torch.nan


def test_a_failing_backend_is_shown_and_its_call_made_smaller(folder, capsys):
    register_backend("BROKEN", Broken)
    served = Served("torch", "BROKEN", sinks=[0.5] * 4, logits_soft_cap=30.0)
    assert served().isnan().any()
    [path] = folder.iterdir()
    small = folder.parent / "small.safetensors"
    command = ["replay", str(path), "--backend", "TORCH_SDPA", "--backend", "BROKEN", "--shrink", str(small)]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert said.count(" ok ") == 1 and "FAILED" in said and "rule A" in said
    call, about = read(small)
    assert about["backend"] == "BROKEN" and (call.case.query_lens, call.case.seq_lens) == ((1,), (21,))
    assert (call.case.num_heads, call.case.num_kv_heads) == (1, 1) and call.sinks is None and not call.case.logits_soft_cap
    assert small.stat().st_size < path.stat().st_size / 4
    assert main(["replay", str(small), "--backend", "BROKEN"]) == 1
    assert main(["replay", str(small), "--backend", "TORCH_SDPA"]) == 0


def test_latent_calls_are_made_smaller(folder):
    attn.record_next()
    Served("torch MLA", "TORCH_MLA")()
    call, _ = read(next(folder.iterdir()))

    def wrong(one: Any) -> Any:
        result = runner_for(TorchMLABackend)(one)
        result.output[:, -1] += float(len(one.query) > 1)
        return result

    small = as_smaller(call, wrong, lambda case: True)
    assert sum(small.case.query_lens) == 2 and small.case.num_heads == 1 and small.kv_b_proj.shape == (32, 1, 32)
    assert max(small.case.seq_lens) <= 2


def test_the_folder_is_bounded_and_the_oldest_are_kept(folder, monkeypatch, caplog):
    monkeypatch.setattr(recording, "MAX_FILES", 2)
    served = Served("torch", "TORCH_SDPA")
    attn.record_next(4)
    for _ in range(4):
        served()
    kept = sorted(folder.iterdir())
    assert len(kept) == 2
    assert sum("is full (2 files)" in record.getMessage() for record in caplog.records) == 1
    monkeypatch.setattr(recording, "MAX_FILES", 9)
    monkeypatch.setattr(recording, "MAX_BYTES", 1000)
    attn.record_next()
    served()
    assert sorted(folder.iterdir()) == kept and "does not fit" in caplog.text


def test_a_process_with_an_earlier_ones_number_keeps_its_recordings(folder, monkeypatch):
    """In a container every server has the same process id: its first recording must not replace that of the last run."""
    served = Served("torch", "TORCH_SDPA")
    for _ in range(2):
        monkeypatch.setattr(recording, "_numbers", itertools.count(1))
        attn.record_next()
        served()
    assert len(list(folder.iterdir())) == 2


def test_a_share_of_calls_is_recorded(folder, monkeypatch):
    monkeypatch.setattr(recording, "MAX_FILES", 1000)
    monkeypatch.setenv("ATTN_RECORD_SAMPLE", "0.25")
    served = Served("torch", "TORCH_SDPA")
    recording._chance.seed(0)
    before = np.random.get_state()[1].tolist()
    for _ in range(40):
        served()
    same = random.Random(0)
    assert len(list(folder.glob("*sampled*"))) == sum(same.random() < 0.25 for _ in range(40)) > 0
    assert np.random.get_state()[1].tolist() == before
    for value in ("2", "much"):
        monkeypatch.setenv("ATTN_RECORD_SAMPLE", value)
        with pytest.raises(ValueError, match=f"ATTN_RECORD_SAMPLE='{value}' must be a number between 0 and 1"):
            Served("torch", "TORCH_SDPA")


def test_without_the_variable_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.delenv("ATTN_RECORD", raising=False)
    for kind in ("torch", "jax", "torch MLA", "jax MLA"):
        assert Served(kind).layer.recorder is None
    with pytest.raises(ValueError, match="record_next.. needs a folder: set ATTN_RECORD"):
        attn.record_next()


def test_calls_without_values_are_not_recorded_which_is_said_once(folder, caplog):
    served = {kind: Served(kind) for kind in ("torch", "jax")}
    attn.record_next(9)
    with caplog.at_level(logging.WARNING, logger="attn"):
        for _ in range(2):
            torch.compile(lambda *rows: served["torch"](rows), backend="eager", fullgraph=True)(*served["torch"].rows)
            one = served["jax"]
            jax.jit(lambda *rows: one.layer(*rows, one.cache, one.metadata))(*one.given())  # noqa: B023
    said = [record.getMessage() for record in caplog.records if "ATTN_RECORD" in record.getMessage()]
    assert len(said) == 2 and "in a graph of torch.compile" in said[0] and "transformation of JAX" in said[1]
    assert not folder.exists()


def test_a_recorder_that_fails_does_not_break_the_call(folder, monkeypatch, caplog):
    def full(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(recording, "write", full)
    served = Served("torch", "TORCH_SDPA")
    attn.record_next()
    assert served().isfinite().all() and "not recorded: OSError: no space left" in caplog.text


def test_files_that_are_no_recordings(tmp_path, capsys):
    from safetensors.numpy import save_file

    plain, text = tmp_path / "plain.safetensors", tmp_path / "text.safetensors"
    save_file({"x": np.zeros(2)}, plain)
    text.write_text("no tensors")
    for path, said in (
        (plain, "not a recording of format 1"),
        (text, "not a safetensors file"),
        (tmp_path / "gone", "no such file"),
    ):
        assert main(["replay", str(path)]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
