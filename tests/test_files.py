"""Files that are there as a whole or not at all."""

import pytest

import blockopt.files


def test_a_file_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    blockopt.files.write_whole(path, "first é")
    assert path.read_text(encoding="utf-8") == "first é"

    def full(_):
        raise OSError("full")

    monkeypatch.setattr(blockopt.files.os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        blockopt.files.write_whole(path, "second")
    assert path.read_text(encoding="utf-8") == "first é"
