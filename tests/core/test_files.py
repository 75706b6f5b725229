"""Files that are replaced as a whole."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path, mask: int):
    old = os.umask(mask)
    try:
        with replacing(tmp_path / "a.json") as partial:
            assert partial.stat().st_mode & 0o777 == 0o666 & ~mask, "also while it is written"
            partial.write_text("new")
    finally:
        os.umask(old)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_link_is_replaced_and_not_followed(tmp_path: Path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "a.json").symlink_to(tmp_path / "victim")
    with replacing(tmp_path / "a.json") as partial:
        partial.write_text("new")
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "a.json").read_text() == "new"


def test_partial_files_have_unpredictable_names(tmp_path: Path):
    """A link that someone put there would lead elsewhere."""
    seen = set()
    for _ in range(5):
        with replacing(tmp_path / "a.json") as partial:
            seen.add(partial)
    assert len(seen) == 5


def test_keeps_the_old_file_when_writing_fails(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(OSError, match="no space"), replacing(path) as partial:
        partial.write_text("ne")
        raise OSError("no space")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
