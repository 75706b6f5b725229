"""Cost-model coefficients fitted on this machine, kept on disk: one file per GPU.

A file holds for one GPU and one version of the kernels and is ignored for others. It is replaced
atomically, so that processes may share the folder. An unreadable file counts as missing.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparsetile.core import settings
from sparsetile.core.files import replacing

__all__ = [
    "Fitted", "SystemModel", "clear_fitted", "fitted_folder", "keep_fitted", "kept_fits",
    "read_fitted",
]  # fmt: skip

SCHEMA = 2  # 2: also a model of each system


@dataclass(frozen=True)
class SystemModel:
    """How a system's time follows its own prediction on one GPU: ``fixed + scale * prediction``.

    Fitted to a number of ``products``, whose times have the R² ``r2`` and the ``worst`` factor
    between prediction and time.
    """

    scale: float
    fixed: float
    products: int
    r2: float
    worst: float

    @property
    def sound(self) -> bool:
        numbers = (self.scale, self.fixed, self.r2, self.worst)
        return all(math.isfinite(n) for n in numbers) and self.scale > 0 and self.fixed >= 0


@dataclass(frozen=True)
class Fitted:
    """Coefficients by name for one GPU, and the share of the variance that they explain (R²).

    ``r2_others`` is the R² of products that the coefficients were not fitted to. These are of
    Equation 1; ``systems`` has the models of systems, by name and bytes of an element: ``csr/4``.
    """

    gpu: str
    kernels: str
    coefficients: Mapping[str, float]
    r2_fitted: float
    r2_others: float
    date: float
    systems: Mapping[str, SystemModel] = field(default_factory=dict)


def fitted_folder() -> Path:
    """Return the folder of the files."""
    return settings.tune_dir() / "fitted"


def _path(gpu: str) -> Path:
    return _path_in(settings.tune_dir(), gpu)


@functools.lru_cache(maxsize=8)
def _path_in(folder: Path, gpu: str) -> Path:
    return folder / "fitted" / f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def _read(path: Path) -> Fitted | None:
    try:
        stored = json.loads(path.read_text())
        if stored["schema"] != SCHEMA:
            return None
        coefficients = {str(name): float(each) for name, each in stored["coefficients"].items()}
        if not all(math.isfinite(each) and each >= 0 for each in coefficients.values()):
            return None
        systems = {str(name): SystemModel(**each) for name, each in stored["systems"].items()}
        if not all(each.sound for each in systems.values()):
            return None
        return Fitted(
            str(stored["gpu"]), str(stored["kernels"]), coefficients,
            float(stored["r2_fitted"]), float(stored["r2_others"]), float(stored["date"]),
            systems,
        )  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def read_fitted(gpu: str) -> Fitted | None:
    """Return the coefficients fitted on the GPU of that name; None without a readable file."""
    path = _path(gpu)
    try:
        stat = os.stat(path)
    except OSError:
        return None
    found = _read_once(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return found if found is not None and found.gpu == gpu else None


@functools.lru_cache(maxsize=8)
def _read_once(path: Path, stamp: tuple[int, ...]) -> Fitted | None:
    """Read a file once per version: every prediction asks for it."""
    return _read(path)


def keep_fitted(
    gpu: str, kernels: str, coefficients: Mapping[str, float], r2_fitted: float, r2_others: float,
    systems: Mapping[str, SystemModel] = MappingProxyType({}),
) -> Path:  # fmt: skip
    """Write a file and return its path."""
    stored: dict[str, Any] = {
        "schema": SCHEMA, "gpu": gpu, "kernels": kernels, "coefficients": dict(coefficients),
        "r2_fitted": r2_fitted, "r2_others": r2_others, "date": time.time(),
        "systems": {name: asdict(each) for name, each in systems.items()},
    }  # fmt: skip
    path = _path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(json.dumps(stored))
    return path


def kept_fits() -> list[Fitted]:
    """Return the content of every readable file, by GPU."""
    folder = fitted_folder()
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return [found for path in paths if (found := _read(path)) is not None]


def clear_fitted() -> int:
    """Remove all files and return their number."""
    folder = fitted_folder()
    paths = list(folder.glob("*")) if folder.is_dir() else []
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)
