"""The matrix files of a run: those of the data folder, and generated ones, made once and kept.

Generated matrices are in the user's data folder under ``generated``. Their names contain a digest
of their parameters, so that every worker and the next run read the same file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from sparsetile import __version__
from sparsetile.bench.expansion import MatrixSpec
from sparsetile.core import settings
from sparsetile.data.generators import generate
from sparsetile.data.standins import STAND_INS, stand_in
from sparsetile.intake import write_npz

__all__ = ["materialise"]


def materialise(spec: MatrixSpec, folder: Path | None = None) -> str:
    """Return the path of a matrix file, generating it if it does not exist."""
    if spec.path is not None:
        return spec.path
    standin = spec.source == "stand-in"
    made_by = f"{spec.generator}({sorted(spec.params.items())})"
    recipe = repr(STAND_INS[spec.name]) if standin else made_by
    digest = hashlib.sha256(f"{__version__} {recipe}".encode()).hexdigest()[:8]
    path = (folder or settings.data_dir() / "generated") / f"{spec.name}-{digest}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        csr = stand_in(spec.name) if standin else generate(str(spec.generator), **spec.params)
        write_npz(path, csr)
    return str(path)
