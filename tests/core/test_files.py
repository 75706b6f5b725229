"""Files that are replaced as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsetile.core.files import replacing


def test_replaces_a_file_and_leaves_no_other(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old", "not replaced before it is complete"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_keeps_the_old_file_when_writing_fails(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(OSError, match="no space"), replacing(path) as partial:
        partial.write_text("ne")
        raise OSError("no space")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
