"""The capability table that ``sparsetile.systems()`` returns."""

from __future__ import annotations

from typing import Any

from sparsetile.systems.registry import SYSTEMS

__all__ = ["systems"]


def systems() -> list[dict[str, Any]]:
    """Return one row per system: what it supports, its devices, whether it is reproducible.

    Returns
    -------
    list of dict
        Keys ``name, summary, devices, architectures, dtypes, weighted, deterministic, reduces``.
        The exact system of the device computes max and min, whichever system was chosen.

    Examples
    --------
    >>> import sparsetile as st
    >>> by_name = {row["name"]: row for row in st.systems()}
    >>> by_name["cpu"]["devices"], by_name["cpu"]["deterministic"]
    (['cpu'], True)
    """
    return [
        {
            "name": system.name, "summary": system.summary, "devices": list(system.devices),
            "architectures": system.architectures,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in system.dtypes],
            "weighted": True, "deterministic": system.deterministic,
            "reduces": ["sum", "mean", *(["max", "min"] if system.exact_on else [])],
        }
        for system in SYSTEMS.values()
    ]  # fmt: skip
