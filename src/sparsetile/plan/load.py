"""``load_plan``: a plan from its file, with nothing planned again."""

from __future__ import annotations

import json
import os

import torch

from sparsetile.intake import CSR
from sparsetile.plan.devices import usable_device
from sparsetile.plan.dispatch import lasting, untraced
from sparsetile.plan.files import plan_path, read_plan_file, refuse
from sparsetile.plan.placement import place
from sparsetile.plan.plan import Plan
from sparsetile.plan.widths import Widths
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, BuiltSystem, Request

__all__ = ["load_plan"]


@untraced("A file is read once. Call sparsetile.load_plan outside of what is compiled")
@lasting
def load_plan(path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> Plan:
    """Return the plan that :meth:`Plan.save` wrote. Loading does not plan again.

    Parameters
    ----------
    path : path
    device : torch.device, optional
        Where to put it. When None: the current device of the kind that it was planned for. On
        another kind, or if the plan's system cannot run there, tiles and schedule are built again
        (the row order is kept), as in :meth:`Plan.to`.

    Raises
    ------
    PlanFileError
        The file is damaged, truncated, of another version or not a plan.

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
    kind = header["device"]
    if device is None and kind == "cuda" and not torch.cuda.is_available():
        raise refuse(
            path, "a plan for a GPU, and there is none here", 'Pass device="cpu" to build it there'
        )
    target = usable_device("load_plan", kind if device is None else device)
    if header["system"] not in SYSTEMS:
        raise refuse(path, f"a plan of unknown system {header['system']!r}", "Make it again")
    held = {name: tensor.to(target) for name, tensor in tensors.items()}
    csr = CSR(
        held["indptr"],
        held["indices"],
        held.get("values"),
        (header["shape"][0], header["shape"][1]),
        held.get("entry_map"),
    )
    names = json.loads(header["recipe"].partition(":")[2])["tensors"]
    tensors = {name: held[f"built.{name}"] for name in names}
    built = BuiltSystem(header["system"], tensors, header["recipe"], header["choices"])
    dtype = getattr(torch, header["dtype"])
    permutation = Permutation(header["reorder"], held.get("perm"))
    request = Request(csr, header["n"], dtype, permutation, header["deterministic"])
    reasons = SYSTEMS[header["system"]].reasons(request)
    widths = header.get("widths")
    if device is not None and (reasons or target.type != kind):
        made = place(
            "load_plan", csr, header["n"], dtype, permutation, system=header["system"],
            deterministic=header["deterministic"], column_order=held.get("column_order"),
        )  # fmt: skip
    elif reasons:
        raise refuse(path, f"a plan that cannot run here: {'; '.join(reasons)}", "Make a new plan")
    else:
        made = Plan(
            csr, header["n"], dtype, built, permutation,
            deterministic=header["deterministic"], report=header["report"],
            column_order=held.get("column_order"),
        )  # fmt: skip
    if widths:
        made._keep_widths(Widths(*widths))
    return made
