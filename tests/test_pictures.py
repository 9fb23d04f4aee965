"""Pictures agree with the code: pixels are compared with independent definitions, texts with what is drawn. Ten seconds."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attn import pictures
from attn.backends.metadata import CommonAttentionMetadata
from attn.cli import main
from attn.reports import report
from attn.tools.bench import chart

pytest.importorskip("matplotlib")


def pixels(picture: pictures.Picture, axis: int = 0) -> Any:
    return np.asarray(picture.figure.axes[axis].images[0].get_array())


def by_hand(n: int, m: int, sees: Any) -> Any:
    """What row i (at position p) sees of key j, asked key by key."""
    return np.array([[bool(sees(i + m - n, j)) for j in range(m)] for i in range(n)])


N = 12
MASKS = {
    "full (encoder)": (N, N, lambda p, j: True),
    "causal": (N, N, lambda p, j: j <= p),
    "causal after a context": (N // 2, N, lambda p, j: j <= p),
    "cross (encoder's keys)": (N // 2, N, lambda p, j: True),
    "sliding window of 4": (N, N, lambda p, j: p - 4 < j <= p),
    "two-sided window (2, 2)": (N, N, lambda p, j: abs(p - j) <= 2),
    "chunks of 4 (Llama 4)": (N, N, lambda p, j: j <= p and j // 4 == p // 4),
    "prefix of 4 (both ways)": (N, N, lambda p, j: j <= p or (j < 4 and p < 4)),
    "spans (images), causal": (N, N, lambda p, j: j <= p or (p // 3 % 2 == 1 and j // 3 == p // 3)),
    "block-sparse: 1 local, every 3rd": (N, N, lambda p, j: j <= p and (p // 2 == j // 2 or (j // 2 + 1) % 3 == 0)),
    "more rows than keys": (N, N // 2, lambda p, j: j <= p),
}


def test_every_kind_of_mask_is_drawn_as_it_is_defined() -> None:
    picture = pictures.masks(N)
    drawn = {axis.get_title(): np.asarray(axis.images[0].get_array()) for axis in picture.figure.axes if axis.images}
    assert drawn.keys() == MASKS.keys() | {"tree after a context", "chosen keys (sparse MLA)"}
    for name, (n, m, sees) in MASKS.items():
        assert (drawn[name] == by_hand(n, m, sees)).all(), name
    chosen = drawn["chosen keys (sparse MLA)"]
    assert (chosen.sum(1) == np.minimum(np.arange(N) + 1, 4)).all() and not np.triu(chosen, 1).any()


def test_one_mask_and_one_a_head() -> None:
    assert (pixels(pictures.mask(5, causal=True)) == np.tri(5, dtype=bool)).all()
    heads = np.stack([np.eye(3, dtype=bool), np.ones((3, 3), bool)])
    picture = pictures.mask(3, mask=heads, title="mine")
    assert [axis.get_title() for axis in picture.figure.axes] == ["mine head 0", "mine head 1"]
    assert (pixels(picture, 1) == 1).all() and (pixels(picture) == np.eye(3)).all()


def test_a_tree_and_its_mask() -> None:
    choices = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    picture = pictures.tree(choices, context=3)
    seen = pixels(picture, 1)
    assert seen[:, :3].all()
    paths = [(), *choices]
    want = [[b == a[: len(b)] for b in paths] for a in paths]
    assert (seen[:, 3:] == np.array(want)).all()
    nodes = {text for text in picture.texts if text.isdigit()}
    assert {str(n) for n in range(7)} <= nodes
    lines = [line for line in picture.figure.axes[0].lines]
    assert len(lines) == 6, "an edge a node but the root"
    for line in lines:  # from depth d to d + 1
        y = line.get_ydata()
        assert y[0] - y[1] == 1


def test_weights_are_those_of_a_softmax() -> None:
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((5, 2, 8)), rng.standard_normal((5, 1, 8))
    picture = pictures.weights(query, key, causal=True, sinks=[0.0, 1.5], labels=list("abcde"))
    for head, sink in enumerate((0.0, 1.5)):
        scores = query[:, head] @ key[:, 0].T / 8**0.5
        scores[~np.tri(5, dtype=bool)] = -np.inf
        scores = np.concatenate([scores, np.full((5, 1), sink)], 1)
        want = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        np.testing.assert_allclose(pixels(picture, head), want, atol=1e-12)
    assert {"a", "e", "sink", "head 0", "head 1"} <= set(picture.texts)
    assert len(pictures.weights(query, key, heads=[1]).figure.axes) == 2  # the map and its scale
    assert len(pictures.weights(query, key).figure.axes) == 3  # one scale of both


def test_a_key_that_is_not_seen_differs_from_a_weight_of_zero() -> None:
    query, key = np.full((3, 1, 4), 100.0), np.repeat([[1.0], [2.0], [3.0]], 4, 1)[:, None]
    picture = pictures.weights(query, key, causal=True, alibi_slopes=[1e4], sinks=[0.0])
    cells = picture.figure.axes[0].images[0].get_array()
    want = np.concatenate([~np.tri(3, dtype=bool), np.zeros((3, 1), bool)], 1)
    assert (np.ma.getmaskarray(cells) == want).all() and cells.data[2, 0] == 0, "weight 0, seen"
    assert "not seen" in picture.texts and {"0", "1", "2", "sink"} <= set(picture.texts)
    assert "not seen" not in pictures.weights(query, key).texts


def test_the_cache_as_a_map() -> None:
    batch = CommonAttentionMetadata.from_lens([3, 1], [3, 6], [[2], [0, 3]], 4)
    picture = pictures.pages(batch, 5)
    cells = pixels(picture).reshape(-1)
    #             block 0      1            2            3            4
    assert cells[:20].tolist() == [1, 1, 1, 1, -1, -1, -1, -1, 0, 0, 0, -1, 1, 1, -1, -1, -1, -1, -1, -1]
    assert (cells[20:] == -2).all()
    frames = [patch for patch in picture.figure.axes[0].patches if patch.get_edgecolor()[:3] == (0, 0, 0)]
    assert sorted(round(patch.get_x() + 0.5) for patch in frames) == [8, 9, 10, 13], "slots written, of blocks side by side"
    assert {"request 0: 3 tokens", "request 1: 6 tokens", "free"} <= set(picture.texts) and "shared" not in picture.texts
    shared = CommonAttentionMetadata.from_lens([1, 1], [5, 6], [[0, 1], [0, 2]], 4)
    assert pixels(pictures.pages(shared, 3)).reshape(-1)[:4].tolist() == [2] * 4
    assert "shared" in pictures.pages(shared, 3).texts
    with pytest.raises(ValueError, match="block_table"):
        pictures.pages(shared, 2)


def test_the_capability_matrix_is_the_records() -> None:
    table = report.backends("attention")
    picture = pictures.capabilities(table, groups=("dtypes", "features"))
    axis = picture.figure.axes[0]
    columns = [text.get_text() for text in axis.get_xticklabels()]
    names = [text.get_text() for text in axis.get_yticklabels()]
    cells = pixels(picture)
    assert {row.name for row in table if row.capabilities} == set(names)
    for at, name in enumerate(names):
        row = table[name]
        for column, value in enumerate(columns):
            served = value in row.capabilities.dtypes or value in row.features
            assert cells[at, column] == (0 if not served else 1 if row.reasons else 2), (name, value)
    with pytest.raises(ValueError, match="groups='colour' is unknown"):
        pictures.capabilities(table, groups=("colour",))


# times

ROWS = [
    {
        "batch": batch, "heads": "4/2", "head_size": 64, "block_size": 16, "dtype": "float32", "kv_cache_dtype": "auto",
        "backend": name, "framework": framework, "ms": ms, "ms_p20": 0.9 * ms, "ms_p80": 1.2 * ms, "right": name != "BROKEN",
        "chosen": chosen, "peer": False, "gb_per_s": 5.0, "of_copy": 0.5, "tflop_per_s": 0.02, "of_gemm": 0.1,
    }
    for batch in ("q1s1k", "q64")
    for name, framework, ms, chosen in (
        ("CPU_ATTN", "torch", 1.0, True), ("TORCH_SDPA", "torch", 2.0, False), ("BROKEN", "torch", 0.1, False),
        ("XLA_ATTN", "jax", 1.5, True),
    )
]  # fmt: skip
REPORT = {"torch": {"device": "a CPU"}, "jax": {"device": "the CPU"}, "date": "2026-01-01", "rows": ROWS}


def test_times_and_roofline() -> None:
    picture = chart(REPORT)
    *roofs, bars = picture.figure.axes
    assert [axis.get_title() for axis in roofs] == ["a CPU (torch), 2026-01-01", "the CPU (jax), 2026-01-01"]
    roof = roofs[0].lines[0]
    assert max(roof.get_ydata()) == pytest.approx(0.2), "the matrix product: 0.02 TFLOP/s are a tenth of it"
    x, y = roof.get_xdata(), roof.get_ydata()
    assert y[0] / x[0] == pytest.approx(0.01), "the copy: 5 GB/s are half of it, in TB/s"
    labels = [text.get_text() for text in roofs[0].texts]
    assert labels == ["copy: 10 GB/s", "matrix product: 0.2 TFLOP/s", "q1s1k", "q64"] and roofs[0].get_ylim()[1] > 0.2 * 2
    assert "framed, round: the selector's choice" in picture.texts
    assert len(roofs[0].lines) == 1 + 4 and len(roofs[1].lines) == 1 + 2
    assert sorted(patch.get_width() for patch in bars.patches) == [1.0, 1.0, 1.5, 1.5, 2.0, 2.0]
    assert "BROKEN" not in picture.texts and {"CPU_ATTN", "TORCH_SDPA", "XLA_ATTN"} <= set(picture.texts)
    with pytest.raises(ValueError, match="no right row"):
        chart({"rows": [row for row in ROWS if not row["right"]]})


def test_a_file_of_rows_is_drawn_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({**REPORT, "rows": [row for row in ROWS if row["right"]]}))
    for name in ("times.svg", "times.png"):
        assert main(["bench", "--judge", str(tmp_path / "rows.json"), "--plot", str(tmp_path / name)]) == 0
    assert f"drawn: {tmp_path / 'times.svg'}" in capsys.readouterr().out
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
    root = ElementTree.parse(tmp_path / "times.svg").getroot()
    words = " ".join(root.itertext())
    assert "CPU_ATTN" in words and "matrix product" in words
    assert main(["bench", "q4", "--plot", "times.xyz"]) == 2
    assert "times.xyz: the extension must be one of .svg, .png, .pdf" in capsys.readouterr().err


def test_times_of_dense_backends_have_no_roofline() -> None:
    row = {"shape": "1x8x2x64", "name": "Flux", "backend": "TORCH_SDPA", "right": True, "refused": "", "chosen": True}
    row |= {"ms": 2.0, "ms_p20": 1.9, "ms_p80": 2.1}
    refused = {**row, "backend": "CUDNN_ATTN", "refused": "platform=cpu", "ms": 0.0, "chosen": False}
    picture = chart({"device": "a CPU", "rows": [row, refused]})
    [bars] = picture.figure.axes
    assert [patch.get_width() for patch in bars.patches] == [2.0] and "Flux 1x8x2x64" in picture.texts


# what all share


def test_the_same_picture_is_the_same_file_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for extension in (".svg", ".png", ".pdf"):
        for name, seconds in (("a", "0"), ("b", "86400")):  # the time that matplotlib would write
            monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)
            pictures.mask(4, causal=True).save(tmp_path / (name + extension))
        assert (tmp_path / f"a{extension}").read_bytes() == (tmp_path / f"b{extension}").read_bytes()
    assert pictures.mask(4)._repr_png_().startswith(b"\x89PNG")
    shown = pictures.mask(4)._repr_svg_()
    assert shown.lstrip().startswith("<?xml") and ElementTree.fromstring(shown).tag.endswith("svg")
    assert repr(pictures.mask(4, title="m")) == "<Picture 'm', 2.2 x 1.5 inches: .save('picture.svg') writes it to a file>"
    assert repr(pictures.mask(4)).startswith("<Picture, 2.2")
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_without_matplotlib_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from attn.pictures import picture

    monkeypatch.setattr(picture, "installed", lambda module: False)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        pictures.mask(4)


@pytest.mark.parametrize("count", ["12", -3, 0, 1.5, True, None])
def test_a_picture_has_a_positive_number_of_rows(count):
    for call in (pictures.mask, pictures.masks, pictures.visible):
        with pytest.raises(ValueError, match=f"n={count!r} must be a positive int"):
            call(count)
    if count is not None:
        with pytest.raises(ValueError, match=f"m={count!r} must be a positive int"):
            pictures.mask(3, count)


def test_weights_of_no_head_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"heads=\[\]: must name at least one of 2 heads"):
        pictures.weights(np.ones((3, 2, 4)), np.ones((3, 2, 4)), heads=[])
