"""The only reader of ``os.environ``: every setting, its default and what it means.

Settings are read on every use and never cached, so a change of the environment takes effect at
once. There are few on purpose: what a caller may want to vary per call is an argument.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = [
    "cache_dir", "cache_limit_bytes", "data_dir", "describe_settings", "entry_limit", "tune_dir",
]  # fmt: skip

_DEFAULT_CACHE_MEGABYTES = 512
# Kernels number the entries of a matrix with 32 bits.
_DEFAULT_ENTRY_LIMIT = 2**31


def _folder(variable: str, name: str) -> Path:
    """The folder that a variable names, else one in the user's cache folder."""
    if chosen := os.environ.get(variable):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "sparsetile" / name


def cache_dir() -> Path:
    """Folder of compiled kernels: ``SPARSETILE_CACHE_DIR``, else the user's cache folder."""
    return _folder("SPARSETILE_CACHE_DIR", "kernels")


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


def describe_settings() -> dict[str, str]:
    """Name -> value in force, for ``sparsetile doctor``."""
    return {
        "SPARSETILE_CACHE_DIR": str(cache_dir()),
        "SPARSETILE_CACHE_MEGABYTES": str(cache_limit_bytes() // (1024 * 1024)),
        "SPARSETILE_DATA_DIR": str(data_dir()),
        "SPARSETILE_ENTRY_LIMIT": str(entry_limit()),
        "SPARSETILE_TUNE_DIR": str(tune_dir()),
    }
