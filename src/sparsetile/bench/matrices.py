"""The matrix files of a run: those of the data folder, and generated ones, made once and kept.

Generated matrices lie in the user's data folder under ``generated``, named by what they are and a
digest of how they were made, so that every worker reads the same file and the next run does too.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from sparsetile import __version__
from sparsetile.bench.expansion import MatrixSpec
from sparsetile.core import settings
from sparsetile.data.registry import generate
from sparsetile.data.standins import STAND_INS, stand_in
from sparsetile.intake import write_npz

__all__ = ["generated_folder", "materialise"]


def generated_folder() -> Path:
    """Return the folder in which generated matrices are kept."""
    return settings.data_dir() / "generated"


def _file(spec: MatrixSpec, folder: Path) -> Path:
    if spec.source == "stand-in":
        recipe = repr(STAND_INS[spec.name])
    else:
        recipe = f"{spec.generator}({sorted(spec.params.items())})"
    digest = hashlib.sha256(f"{__version__} {recipe}".encode()).hexdigest()[:8]
    return folder / f"{spec.name}-{digest}.npz"


def materialise(spec: MatrixSpec, folder: Path | None = None) -> str:
    """Return the path of a matrix file, generating it where it is no file yet."""
    if spec.path is not None:
        return spec.path
    folder = folder or generated_folder()
    path = _file(spec, folder)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if spec.source == "stand-in":
            csr = stand_in(spec.name)
        else:
            csr = generate(str(spec.generator), **dict(spec.params))
        write_npz(path, csr)
    return str(path)
