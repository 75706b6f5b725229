"""The only reader of ``os.environ``: every setting, its default and what it means.

Settings are read on every use and never cached, so a change of the environment takes effect at
once. There are few on purpose: what a caller may want to vary per call is an argument.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ChosenGPU", "cache_dir", "cache_limit_bytes", "chosen_gpu", "cpu_code_dir", "data_dir",
    "describe_settings", "entry_limit", "tune_dir",
]  # fmt: skip

_DEFAULT_CACHE_MEGABYTES = 512
# Kernels number the entries of a matrix with 32 bits.
_DEFAULT_ENTRY_LIMIT = 2**31


def _folder(variable: str, name: str) -> Path:
    """The folder that a variable names, else one in the user's cache folder."""
    read = os.environ.get
    return _folder_of(read(variable), read("XDG_CACHE_HOME"), read("HOME"), name)


@functools.lru_cache(maxsize=32)
def _folder_of(chosen: str | None, cache: str | None, home: str | None, name: str) -> Path:
    """The same for values of variables: plans ask often, and paths take long to join."""
    if chosen:
        return Path(chosen)
    return Path(cache or os.path.join(os.path.expanduser("~"), ".cache")) / "sparsetile" / name


def cache_dir() -> Path:
    """Folder of compiled kernels: ``SPARSETILE_CACHE_DIR``, else the user's cache folder."""
    return _folder("SPARSETILE_CACHE_DIR", "kernels")


def cpu_code_dir() -> Path:
    """Folder of the CPU kernels' machine code, in the user's cache folder."""
    return _folder_of(None, os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"), "cpu")


def cache_limit_bytes() -> int:
    """Size limit of the kernel cache: ``SPARSETILE_CACHE_MEGABYTES``, default 512."""
    text = os.environ.get("SPARSETILE_CACHE_MEGABYTES", "")
    try:
        megabytes = int(text) if text else _DEFAULT_CACHE_MEGABYTES
    except ValueError:
        megabytes = 0
    if megabytes <= 0:
        raise ValueError(
            "settings: SPARSETILE_CACHE_MEGABYTES must be a positive whole number, "
            f"got {text!r}. Unset it or give a size in megabytes."
        )
    return megabytes * 1024 * 1024


def entry_limit() -> int:
    """Entries from which a matrix is multiplied in pieces: ``SPARSETILE_ENTRY_LIMIT``, at most and
    by default 2^31. Tests lower it, so that small matrices take the path of large ones."""
    text = os.environ.get("SPARSETILE_ENTRY_LIMIT", "")
    if not text:
        return _DEFAULT_ENTRY_LIMIT
    try:
        limit = int(text)
    except ValueError:
        limit = 0
    if not 1 < limit <= _DEFAULT_ENTRY_LIMIT:
        raise ValueError(
            "settings: SPARSETILE_ENTRY_LIMIT must be a whole number from 2 to 2147483648, "
            f"got {text!r}. Unset it: only tests need it."
        )
    return limit


def data_dir() -> Path:
    """Folder of downloaded matrices: ``SPARSETILE_DATA_DIR``, else the user's cache folder."""
    return _folder("SPARSETILE_DATA_DIR", "data")


def tune_dir() -> Path:
    """Folder of kept timings: ``SPARSETILE_TUNE_DIR``, else the user's cache folder."""
    return _folder("SPARSETILE_TUNE_DIR", "tuned")


@dataclass(frozen=True)
class ChosenGPU:
    """The GPU that plans are made and kernels compiled for, in place of the real one.

    ``processors`` and ``l2_bytes`` are None for those of the real GPU.
    """

    capability: tuple[int, int]
    processors: int | None = None
    l2_bytes: int | None = None

    @property
    def slug(self) -> str:
        """Name of the capability in a folder: ``sm80``."""
        return f"sm{self.capability[0]}{self.capability[1]}"


_CHOSEN = re.compile(r"(\d{1,2})\.(\d)(?::([1-9]\d*)(?::([1-9]\d*))?)?")


def chosen_gpu() -> ChosenGPU | None:
    """GPU chosen by ``SPARSETILE_CAPABILITY``, for tests; None: the one at hand.

    ``8.0`` is a compute capability; ``8.0:108:40`` also gives SMs and megabytes of L2. A process
    must not change it after its first product: kernels stay loaded.
    """
    text = os.environ.get("SPARSETILE_CAPABILITY", "").strip()
    if not text:
        return None
    found = _CHOSEN.fullmatch(text)
    if found is None or int(found[1]) < 8:
        raise ValueError(
            "settings: SPARSETILE_CAPABILITY must be a compute capability from 8.0 on, such as 8.0 "
            f"or, with SMs and megabytes of L2, 8.0:108:40, got {text!r}. Unset it or give one of "
            "those."
        )
    major, minor, processors, megabytes = found.groups()
    return ChosenGPU(
        (int(major), int(minor)), None if processors is None else int(processors),
        None if megabytes is None else int(megabytes) * 2**20,
    )  # fmt: skip


def describe_settings() -> dict[str, str]:
    """Name -> value in force, for ``sparsetile doctor``."""
    return {
        "SPARSETILE_CACHE_DIR": str(cache_dir()),
        "SPARSETILE_CACHE_MEGABYTES": str(cache_limit_bytes() // (1024 * 1024)),
        "SPARSETILE_CAPABILITY": (
            "not set" if chosen_gpu() is None else os.environ["SPARSETILE_CAPABILITY"].strip()
        ),
        "SPARSETILE_DATA_DIR": str(data_dir()),
        "SPARSETILE_ENTRY_LIMIT": str(entry_limit()),
        "SPARSETILE_TUNE_DIR": str(tune_dir()),
    }
