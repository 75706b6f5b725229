"""``load_plan``: a plan from its file. Neither system nor order is chosen again.

What the file says is checked (``plan/saved.py``), and tiles and schedule are built from it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from sparsetile.core.checks import one_of
from sparsetile.plan.devices import usable_device
from sparsetile.plan.files import plan_path, read_plan_file, refuse
from sparsetile.plan.modes import outside_modes, untraced
from sparsetile.plan.plan import Plan
from sparsetile.plan.saved import checked_report, named_field, placed, saved_plan
from sparsetile.systems import SYSTEMS

__all__ = ["load_plan"]


@untraced("A file is read once. Call sparsetile.load_plan outside of what is compiled")
@outside_modes
def load_plan(path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> Plan:
    """Return the plan that :meth:`Plan.save` wrote, with the system and the row order it had.

    Tiles and schedule are built again, from a matrix and an order that are checked.

    Parameters
    ----------
    path : path
    device : torch.device, optional
        Where to put it. When None: the current device of the kind that it was planned for. On
        another kind, or if the plan's system cannot run there, a system is chosen (the row order
        is kept), as in :meth:`Plan.to`.

    Raises
    ------
    PlanFileError
        The file is damaged, truncated, of another version, not a plan, or contradicts itself.

    Examples
    --------
    >>> import torch
    >>> import sparsetile as st
    >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
    >>> plan = st.plan(A, n=2)
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plan.save(f"{folder}/a.safetensors")
    ...     st.load_plan(f"{folder}/a.safetensors")
    Plan(2x3, 3 entries, weighted, n=2, float32, cpu, system=cpu)
    """
    path = plan_path("load_plan", path)
    tensors, header = read_plan_file(path)
    with _of_file(path):
        kind = one_of("load", "device", named_field(header, "device", str), ("cpu", "cuda"))
    if device is None and kind == "cuda" and not torch.cuda.is_available():
        raise refuse(
            path, "a plan for a GPU, and there is none here", 'Pass device="cpu" to build it there'
        )
    target = usable_device("load_plan", kind if device is None else device)
    with _of_file(path):
        saved = saved_plan(header, {name: tensor.to(target) for name, tensor in tensors.items()})
        report = checked_report(header, saved.system)
    if saved.system not in SYSTEMS:
        raise refuse(path, f"a plan of unknown system {saved.system!r}", "Make it again")
    reasons = SYSTEMS[saved.system].reasons(saved.request)
    if device is not None and (reasons or target.type != kind):
        return Plan(placed("load_plan", saved))
    if reasons:
        raise refuse(path, f"a plan that cannot run here: {'; '.join(reasons)}", "Make a new plan")
    return Plan(placed("load_plan", saved, report))


@contextlib.contextmanager
def _of_file(path: Path) -> Iterator[None]:
    """Turn what checks say of a file's content into the error of a file that is no plan."""
    try:
        yield
    except (TypeError, ValueError) as error:
        fault = str(error).partition(". ")[0].removeprefix("load: ")
        raise refuse(path, f"a plan whose {fault}", "Make the plan again and save it") from None
