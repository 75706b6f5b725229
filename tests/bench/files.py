"""Files that a run of a suite reads, as small as they can be."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_matrix(folder: Path, name: str) -> None:
    """Two by two, two entries, under ``name``."""
    np.savez(
        folder / f"{name}.npz",
        indptr=np.array([0, 1, 2]),
        indices=np.array([0, 1], dtype=np.int32),
        shape=np.array([2, 2]),
    )


def write_suite(folder: Path, text: str) -> str:
    """A suite of the caller's own; its path."""
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)
