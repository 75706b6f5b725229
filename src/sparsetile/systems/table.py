"""The capability table that ``sparsetile.systems()`` returns."""

from __future__ import annotations

from typing import Any

from sparsetile.systems.registry import PATTERN_SYSTEMS, SYSTEMS

__all__ = ["systems"]


def systems() -> list[dict[str, Any]]:
    """Return one row per system: what it takes, where it runs, whether it is reproducible.

    Returns
    -------
    list of dict
        Keys ``name, summary, devices, architectures, dtypes, weighted, deterministic, reduces``.
        Max and min are served by the exact system of the device, whichever system was chosen.
    """
    exact = {system.name for system in PATTERN_SYSTEMS.values()}
    return [
        {
            "name": system.name,
            "summary": system.summary,
            "devices": list(system.devices),
            "architectures": system.architectures,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in system.dtypes],
            "weighted": True,
            "deterministic": system.deterministic,
            "reduces": ["sum", "mean", *(["max", "min"] if system.name in exact else [])],
        }
        for system in SYSTEMS.values()
    ]
