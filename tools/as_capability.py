"""Records of a GPU that was treated as an older one (``SPARSETILE_CAPABILITY``).

They lie in a folder of their own, such as ``results/h200/as-sm80``, and lack the systems that need
instructions of a newer one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sparsetile.systems.registry import SYSTEMS

__all__ = ["capability_of", "runs_as"]


def runs_as(system: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU of a compute capability, sm_80 or newer, has what a system needs.

    >>> runs_as("wcsr", (8, 0)), runs_as("acc", (8, 0))
    (False, True)
    """
    needed = SYSTEMS[system].architectures
    return {"sm_90a": capability == (9, 0), "sm_90 and newer": capability >= (9, 0)}.get(
        needed, True
    )


def capability_of(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the capability that the GPU of a record was treated as; None if as itself.

    >>> capability_of({"gpu": {"slug": "h200/as-sm80"}})
    (8, 0)
    """
    gpu = record.get("gpu")
    slug = gpu.get("slug", "") if isinstance(gpu, dict) else ""
    found = re.search(r"/as-sm(\d+)(\d)$", slug)
    return None if found is None else (int(found[1]), int(found[2]))
