"""Facts about a machine for records and ``sparsetile doctor``: driver, NVRTC, GPU name."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from sparsetile.jit import compiler_available, nvrtc_version

__all__ = ["core_count", "driver_version", "gpu_slug", "nvrtc_text"]

# Words of a GPU's name that identify nothing.
_FILLER = {"nvidia", "geforce", "tesla", "quadro", "graphics", "device", "gpu"}


def core_count() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_slug(name: str) -> str:
    """Return a GPU's name as a folder: ``NVIDIA H200`` -> ``h200``."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    return "-".join(word for word in words if word not in _FILLER) or "gpu"


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel driver, None if there is none."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        return asked.stdout.split("\n")[0].strip() or None
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module\D*?(\d+\.\d+(?:\.\d+)?)", text)
    return found.group(1) if found else None


def nvrtc_text() -> str | None:
    """Return the version of NVRTC as text, None if it does not load."""
    if compiler_available() is not None:
        return None
    major, minor = nvrtc_version()
    return f"{major}.{minor}"
