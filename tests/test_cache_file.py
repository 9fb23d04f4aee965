"""Files of measurements: entries are read back; files of another machine and invalid files are ignored with a reason."""

import json
import logging
from pathlib import Path

import pytest

from attn import cache_file

OWNER = {"format": 1, "device": "a GPU"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "numbers.json"
    for entries in ([1], [1, 2]):
        cache_file.write(file, OWNER, entries)
    assert cache_file.read(file, OWNER, str) == ["1", "2"] and list(file.parent.iterdir()) == [file]


def test_a_device_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))
    assert cache_file.path("launches", "NVIDIA H200 (1/7)") == tmp_path / "launches-NVIDIA-H200-1-7.json"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            json.dumps({"format": 1, "device": "another", "entries": [1]}),
            "belongs to another machine (device 'another', expected 'a GPU')",
        ),
        (
            json.dumps({"entries": [1]}),
            "belongs to another machine (format None, expected 1; device None, expected 'a GPU')",
        ),
        (json.dumps(OWNER), "is invalid (KeyError: 'entries')"),
        (json.dumps({**OWNER, "entries": ["x"]}), "is invalid (ValueError: "),
        ("[]", "is invalid (AttributeError: "),
        ("{", "is invalid (JSONDecodeError: "),
    ],
)
def test_an_unusable_file_is_ignored(text: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "numbers.json"
    file.write_text(text)
    with caplog.at_level(logging.WARNING, "attn"):
        found = [cache_file.read(file, OWNER, int) for _ in range(2)]
    assert found[0] == found[1] and str(found[0]).startswith(f"{file} is ignored: it {reason}")
    assert [record.getMessage() for record in caplog.records] == [found[0]], "logged once"
