"""Plans on disk: one safetensors file with a version and a checksum.

A file holds the canonical pattern, A's values, the row and column orders, the built parts and the
recipe, so loading does no planning. Anything that is not exactly what was written is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.errors import PlanFileError
from sparsetile.intake import CSR
from sparsetile.plan.plan import Plan
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, Request, Stage

__all__ = ["FORMAT_VERSION", "load_plan", "save_plan"]

FORMAT_VERSION = 2
_MAGIC = "sparsetile-plan"


def _checksum(tensors: dict[str, Tensor], header: str) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        if tensor.numel():  # torch refuses to view some empty tensors as bytes
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write ``plan`` to ``path``, replacing the file at once or not at all."""
    from safetensors.torch import save_file

    csr = plan._csr
    named = {
        "indptr": csr.indptr,
        "indices": csr.indices,
        "entry_map": csr.entry_map,
        "values": plan.values,
        "perm": plan._permutation.perm,
        "column_order": plan.column_order,
        **{f"part{i}": part for i, part in enumerate(plan._stage.parts)},
    }
    # safetensors refuses tensors that share memory, so each is written as its own copy.
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in named.items()
        if tensor is not None
    }
    header = json.dumps(
        {
            "shape": list(plan.shape),
            "n": plan.n,
            "dtype": str(plan.dtype).removeprefix("torch."),
            "device": plan.device.type,
            "system": plan.system,
            "recipe": plan._stage.recipe,
            "choices": dict(plan._stage.choices),
            "reorder": plan.reorder,
            "deterministic": plan.deterministic,
            "report": plan._report,
        },
        sort_keys=True,
    )
    metadata = {
        "kind": _MAGIC,
        "version": str(FORMAT_VERSION),
        "plan": header,
        "sha256": _checksum(tensors, header),
    }
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _refuse(path: Path, found: str, remedy: str) -> PlanFileError:
    return PlanFileError(
        f"load_plan: path must be a plan file written by sparsetile, got {found} ({path}). "
        f"{remedy}."
    )


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    again = "Make the plan again and save it"
    if not path.is_file():
        raise FileNotFoundError(
            f"load_plan: path must be an existing file, got {path}. Check the name."
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise _refuse(path, f"a damaged or foreign file: {error}", again) from None
    if metadata.get("kind") != _MAGIC:
        raise _refuse(path, "a safetensors file of another kind", "Give a file from plan.save")
    if metadata.get("version") != str(FORMAT_VERSION):
        raise _refuse(
            path, f"version {metadata.get('version')}, this release reads {FORMAT_VERSION}", again
        )
    header = metadata.get("plan", "")
    if metadata.get("sha256") != _checksum(tensors, header):
        raise _refuse(path, "a file whose checksum does not match its content", again)
    return tensors, json.loads(header)


def load_plan(path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> Plan:
    """Return the plan that :meth:`Plan.save` wrote; nothing is planned anew.

    Parameters
    ----------
    path : path
    device : torch.device, optional
        Where to put it: the kind of device it was planned for (its current one) when None.

    Raises
    ------
    PlanFileError
        The file is damaged, truncated, of another version or not a plan.
    """
    path = Path(path)
    tensors, header = _read(path)
    kind = header["device"]
    target = torch.device(kind if device is None else device)
    if target.type != kind:
        raise _refuse(
            path, f"a plan for {kind}, wanted on {target.type}", f"Plan on {target.type} instead"
        )
    if target.type == "cuda":
        if not torch.cuda.is_available():
            raise _refuse(path, "a plan for a GPU, and there is none here", "Plan on the CPU")
        index = torch.cuda.current_device() if target.index is None else target.index
        target = torch.device("cuda", index)
    if header["system"] not in SYSTEMS:
        raise _refuse(path, f"a plan of unknown system {header['system']!r}", "Make it again")
    held = {name: tensor.to(target) for name, tensor in tensors.items()}
    csr = CSR(
        held["indptr"],
        held["indices"],
        held.get("values"),
        (header["shape"][0], header["shape"][1]),
        held.get("entry_map"),
    )
    parts = tuple(held[f"part{i}"] for i in range(len(held)) if f"part{i}" in held)
    stage = Stage(header["system"], parts, header["recipe"], header["choices"])
    dtype = getattr(torch, header["dtype"])
    permutation = Permutation(header["reorder"], held.get("perm"))
    request = Request(csr, header["n"], dtype, permutation, header["deterministic"])
    reasons = SYSTEMS[header["system"]].reasons(request)
    if reasons:
        raise _refuse(path, f"a plan that cannot run here: {'; '.join(reasons)}", "Plan anew")
    return Plan(
        csr, header["n"], dtype, stage, permutation,
        deterministic=header["deterministic"], report=header["report"],
        column_order=held.get("column_order"),
    )  # fmt: skip
