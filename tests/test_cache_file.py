"""Files of measurements: what is written is read, another machine's and a broken one are ignored with the reason."""

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
    ("text", "said"),
    [
        (json.dumps({"format": 1, "device": "another", "entries": [1]}), "another machine's (device 'another', here 'a GPU')"),
        (json.dumps({"entries": [1]}), "another machine's (format None, here 1; device None, here 'a GPU')"),
        (json.dumps(OWNER), "broken (KeyError: 'entries')"),
        (json.dumps({**OWNER, "entries": ["x"]}), "broken (ValueError: "),
        ("[]", "broken (AttributeError: "),
        ("{", "broken (JSONDecodeError: "),
    ],
)
def test_a_file_that_does_not_count_is_ignored(text: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "numbers.json"
    file.write_text(text)
    with caplog.at_level(logging.WARNING, "attn"):
        found = [cache_file.read(file, OWNER, int) for _ in range(2)]
    assert found[0] == found[1] and str(found[0]).startswith(f"{file} is ignored: it is {said}")
    assert [record.getMessage() for record in caplog.records] == [found[0]], "said once"
