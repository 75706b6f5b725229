"""The machine a record was made on: GPU, clocks, driver, versions, commit, command line."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import sparsetile
from sparsetile.check.environment import core_count, driver_version
from sparsetile.core.device import machine

__all__ = ["commit", "describe_environment"]

_PACKAGES = ("torch", "cuda-core", "scipy", "numba", "torch-geometric")
_CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")
_CEILINGS = ("dram", "l2_gather", "dense_flops")


def _output(command: Sequence[str], cwd: Path | None = None) -> str:
    """Return a command's output; nothing when it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def commit() -> str:
    """Return the commit of the source tree, with ``+`` when it has changes; else ``unknown``."""
    here = Path(__file__).resolve().parent
    head = _output(["git", "rev-parse", "--short=12", "HEAD"], here)
    if not head:
        return "unknown"
    return head + ("+" if _output(["git", "status", "--porcelain", "."], here) else "")


def _cpu_name() -> str:
    for line in _output(["lscpu"]).splitlines():
        if line.startswith("Model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "sparsetile": sparsetile.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _clocks(index: int) -> dict[str, float | str]:
    """Clocks and power limit of a GPU at work, by nvidia-smi; empty without it."""
    A = torch.ones(4096, 4096, device=f"cuda:{index}")
    for _ in range(20):
        A @ A
    torch.cuda.synchronize(index)
    query = f"--query-gpu={','.join(_CLOCKS)}"
    text = _output(["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", str(index)])
    found: dict[str, float | str] = {}
    for name, value in zip(_CLOCKS, text.partition("\n")[0].split(","), strict=False):
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = value.strip()
    return found if text else {}


def _version_of(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as error:  # a missing library is a fact to record, not a failure of the run
        return f"missing ({type(error).__name__})"


@functools.lru_cache(maxsize=4)
def describe_environment(device: str) -> dict[str, Any]:
    """Return a description of a worker's machine; called once per worker."""
    found: dict[str, Any] = {
        "device": device,
        "device_name": f"{_cpu_name()}, {torch.get_num_threads()} threads",
        "host": f"{platform.system()} {platform.machine()}",
        # Host times also depend on these. The load is that before the run.
        "cpu": {
            "architecture": platform.machine(),
            "cores": core_count(),
            "threads": torch.get_num_threads(),
            "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        },
        "versions": _versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if device == "cuda":
        from sparsetile.bench.cusparse import library_version
        from sparsetile.jit import nvrtc_version

        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        ceilings = asdict(machine(torch.device("cuda", index)))
        found |= {
            "device_name": properties.name,
            "gpu": {
                "sms": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
                "l2_bytes": getattr(properties, "L2_cache_size", 0),
                "capability": f"{properties.major}.{properties.minor}",
            },
            "ceilings": {name: ceilings[name] for name in _CEILINGS},
            "driver": driver_version() or "unknown",
            "clocks": _clocks(index),
        }
        found["versions"] |= {
            "cuda": str(torch.version.cuda),
            "nvrtc": _version_of(lambda: ".".join(map(str, nvrtc_version()))),
            "cusparse": _version_of(library_version),
        }
    return found
