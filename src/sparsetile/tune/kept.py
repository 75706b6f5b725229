"""The timings that ``tune="measure"`` found, kept on disk: one small file per key.

A key holds the pattern of A, its row order, N, the type, the supported systems, and the machine:
GPU, driver, PyTorch, and the kernels' sources. Only a timing with exactly the same key is used.
Files are replaced atomically, so that processes may share the folder; a file that cannot be read or
written only costs a measurement.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetile._version import __version__
from sparsetile.core import settings
from sparsetile.core.device import machine
from sparsetile.core.files import PARTIAL, replacing
from sparsetile.engines.request import Request
from sparsetile.intake.csr import CSR
from sparsetile.jit.source import device_tree_digest

__all__ = ["KeptTimings", "Timing", "fingerprint", "kept_timings", "key_of"]

SCHEMA = 2  # 1: times included the host's launches
# Most files kept; above that, the oldest tenth is deleted.
MOST_FILES = 4096
# Entries hashed at a time.
CHUNK_ENTRIES = 1 << 24
_PRIMES = (0x9E3779B97F4A7C15 - 2**64, 0xC2B2AE3D27D4EB4F - 2**64, 0x165667B19E3779F9)


def _mixed(numbers: Tensor, factor: int) -> int:
    """Return a 64-bit wrapping sum over int64 numbers that depends on each of them."""
    total = 0
    for chunk in numbers.split(CHUNK_ENTRIES):
        mixed = (chunk + 1) * factor
        mixed = (mixed ^ ((mixed >> 29) & ((1 << 35) - 1))) * _PRIMES[2]
        total += int((mixed ^ ((mixed >> 32) & (2**32 - 1))).sum())
    return total % 2**64


def fingerprint(csr: CSR) -> str:
    """Return a text that differs between patterns, computed on A's device."""
    rows, cols = csr.shape
    hashes = [_mixed(csr.indptr.to(torch.int64), factor) for factor in _PRIMES[:2]]
    for factor in _PRIMES[:2]:
        total = 0
        for begin in range(0, csr.nnz, CHUNK_ENTRIES):
            chunk = csr.indices[begin : begin + CHUNK_ENTRIES].to(torch.int64)
            place = torch.arange(begin, begin + chunk.numel(), device=csr.device)
            total += _mixed(place * max(cols, 1) + chunk, factor)
        hashes.append(total % 2**64)
    return f"{rows}x{cols}-{csr.nnz}-" + "".join(f"{each:016x}" for each in hashes)


def key_of(request: Request, able: Sequence[str]) -> dict[str, Any]:
    """Return the key of a request on this machine, as plain data."""
    csr, perm = request.csr, request.permutation.perm
    on_gpu = request.device.type == "cuda"
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)() if on_gpu else 0
    order = request.permutation.name
    if order == "given" and perm is not None:
        placed = torch.arange(perm.numel(), device=perm.device) * perm.numel() + perm
        order += "-" + "".join(f"{_mixed(placed, factor):016x}" for factor in _PRIMES[:2])
    return {
        "matrix": fingerprint(csr), "weighted": csr.values is not None, "order": order,
        "n": request.n, "dtype": str(request.dtype).removeprefix("torch."),
        "deterministic": request.deterministic, "tf32": bool(torch.backends.cuda.matmul.allow_tf32),
        "systems": sorted(able), "device": machine(request.device).name,
        "threads": 0 if on_gpu else torch.get_num_threads(), "driver": driver,
        "torch": torch.__version__, "sparsetile": __version__, "kernels": device_tree_digest(),
    }  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """The fastest system, seconds by system, and which of them were measured."""

    key: dict[str, Any]
    system: str
    seconds: dict[str, float]
    measured: frozenset[str]
    date: float


def _timing(stored: Any) -> Timing:
    """Parse a file's content; raises ValueError, TypeError or KeyError if it is not ours."""
    if stored["schema"] != SCHEMA or not isinstance(stored["key"], dict):
        raise ValueError("another schema")
    seconds = {str(name): float(each) for name, each in stored["seconds"].items()}
    measured = frozenset(str(name) for name in stored["measured"])
    if stored["system"] not in measured or not measured <= set(seconds):
        raise ValueError("no measured system")
    return Timing(stored["key"], stored["system"], seconds, measured, float(stored["date"]))


# Incomplete timings, by the path that their file would have.
MOST_IN_PROCESS = 256
_in_process: dict[Path, Timing] = {}
_lock = threading.Lock()


class KeptTimings:
    """Timings in a folder, by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(key, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def get(self, key: Mapping[str, Any]) -> Timing | None:
        """Return the timing of exactly this key; None without a readable one."""
        path = self._path(key)
        for found in (self._read(path), _in_process.get(path)):
            if found is not None and found.key == dict(key):
                return found
        return None

    @staticmethod
    def _read(path: Path) -> Timing | None:
        try:
            return _timing(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def put(
        self, key: Mapping[str, Any], system: str, seconds: Mapping[str, float],
        measured: frozenset[str], *, complete: bool = True,
    ) -> None:  # fmt: skip
        """Keep a timing; does nothing if the folder is not writable.

        An incomplete one is kept for this process only: a system was not timed, for lack of time or
        because its kernels are not compiled. The next process may have compiled them.
        """
        if not complete:
            with _lock:
                if len(_in_process) >= MOST_IN_PROCESS:
                    _in_process.pop(next(iter(_in_process)))
                _in_process[self._path(key)] = Timing(
                    dict(key), system, dict(seconds), measured, time.time()
                )
            return
        stored = {
            "schema": SCHEMA, "key": dict(key), "system": system, "seconds": dict(seconds),
            "measured": sorted(measured), "date": time.time(),
        }  # fmt: skip
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._path(key)) as partial:
                partial.write_text(json.dumps(stored))
            self._forget_oldest()

    def _files(self) -> list[Path]:
        return list(self.folder.glob("*.json")) if self.folder.is_dir() else []

    def _forget_oldest(self) -> None:
        files = self._files()
        if len(files) > MOST_FILES:
            by_age = sorted(files, key=lambda path: path.stat().st_mtime)
            for path in by_age[: len(files) - MOST_FILES + MOST_FILES // 10]:
                path.unlink(missing_ok=True)

    def entries(self) -> list[Timing]:
        """Every readable timing, the newest first."""
        found = [timing for path in self._files() if (timing := self._read(path)) is not None]
        return sorted(found, key=lambda timing: -timing.date)

    def clear(self) -> int:
        """Remove all timings, damaged ones too; return the number of files."""
        _in_process.clear()
        removed = 0
        for path in [*self._files(), *self.folder.glob(f"*{PARTIAL}")]:
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        return removed


def kept_timings() -> KeptTimings:
    """Return the timings in the folder of the settings."""
    return KeptTimings(settings.tune_dir())
