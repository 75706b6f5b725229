"""The machine a record was made on: GPU, clocks, driver, versions, commit, command line."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sparsetile.bench.busy import core_count
from sparsetile.core.device import machine

__all__ = ["commit", "describe_environment", "host_facts"]

_PACKAGES = ("sparsetile", "torch", "cuda-core", "scipy", "numba", "torch-geometric")
_SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")


def _output(command: Sequence[str], cwd: Path | None = None) -> str | None:
    """Return a command's output, or None when it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            list(command), cwd=cwd, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> str:
    """Return the commit of the source tree, with ``+`` when it has changes; else ``unknown``."""
    here = Path(__file__).resolve().parent
    head = _output(["git", "rev-parse", "--short=12", "HEAD"], here)
    if not head:
        return "unknown"
    return head + ("+" if _output(["git", "status", "--porcelain", "."], here) else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    # Kernels for Arm name no model; lscpu knows it from the numbers they give.
    for line in (_output(["lscpu"]) or "").splitlines():
        if line.startswith("Model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "sparsetile" not in found:
        import sparsetile

        found["sparsetile"] = sparsetile.__version__
    return found


def _gpu_state(index: int) -> dict[str, Any]:
    query = f"--query-gpu={','.join(_SMI_FIELDS)}"
    text = _output(["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", str(index)])
    if not text:
        return {}
    values = [part.strip() for part in text.splitlines()[0].split(",")]
    state: dict[str, Any] = dict(zip(_SMI_FIELDS, values, strict=False))
    return {
        "driver": state.pop("driver_version", "unknown"),
        "clocks": {name: _number(value) for name, value in state.items()},
    }


def _busy(index: int) -> None:
    """Give the GPU some work, so that the clocks read next are those of work and not of rest."""
    A = torch.ones(4096, 4096, device=f"cuda:{index}")
    for _ in range(20):
        A @ A
    torch.cuda.synchronize(index)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _cpu_state() -> dict[str, Any]:
    """What the host's times depend on beside its name. The load is that before the run."""
    return {
        "architecture": platform.machine(),
        "cores": core_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def host_facts(environment: Mapping[str, Any]) -> list[str]:
    """Say what a record knows of the host's cores, for a reader of its times."""
    cpu = environment.get("cpu")
    if not cpu:  # a record from before these were kept
        return []
    facts = [f"{cpu['architecture']}, {cpu['cores']} cores"]
    if cpu.get("load_average") is not None:
        facts.append(f"load average {cpu['load_average']:g} before")
    return facts


@functools.lru_cache(maxsize=4)
def describe_environment(device: str) -> dict[str, Any]:
    """Return what a worker knows of its machine; asked once per worker."""
    found: dict[str, Any] = {
        "device": device,
        "device_name": f"{_cpu_name()}, {torch.get_num_threads()} threads",
        "host": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_state(),
        "versions": _versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if device == "cuda":
        from sparsetile.jit import nvrtc_version

        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        found["device_name"] = properties.name
        found["gpu"] = {
            "sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", 0),
            "capability": f"{properties.major}.{properties.minor}",
        }
        ceilings = machine(torch.device("cuda", index))
        found["ceilings"] = {
            "dram": ceilings.dram,
            "l2_gather": ceilings.l2_gather,
            "dense_flops": ceilings.dense_flops,
        }
        found["versions"]["cuda"] = str(torch.version.cuda)
        _busy(index)
        found.update(_gpu_state(index))
        try:
            found["versions"]["nvrtc"] = ".".join(map(str, nvrtc_version()))
        except Exception as error:  # no NVRTC is a fact to record, not a failure of the run
            found["versions"]["nvrtc"] = f"missing ({type(error).__name__})"
        try:
            from sparsetile.bench.cusparse import library_version

            found["versions"]["cusparse"] = library_version()
        except (RuntimeError, OSError) as error:
            found["versions"]["cusparse"] = f"missing ({type(error).__name__})"
    return found
