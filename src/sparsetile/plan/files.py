"""Plans on disk: one safetensors file with a version and a checksum.

A file holds the canonical pattern, A's values, the row and column orders, and what was asked for
and chosen. Anything that is not exactly what was written is refused.
This module knows tensors and a header; ``plan/load.py`` makes a plan of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sparsetile.core.errors import PlanFileError, type_error, value_error
from sparsetile.core.files import replacing

__all__ = ["FORMAT_VERSION", "plan_path", "read_plan_file", "refuse", "write_plan_file"]

FORMAT_VERSION = 5
_MAGIC = "sparsetile-plan"


def _checksum(tensors: dict[str, Tensor], header: str) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        if tensor.numel():  # torch refuses to view some empty tensors as bytes
            digest.update(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def plan_path(function: str, path: object) -> Path:
    """Return ``path`` as a path, or raise one clear error."""
    if not isinstance(path, (str, os.PathLike)):
        raise type_error(
            function, "path", "a string or a path", type(path).__name__, "Name a .safetensors file"
        )
    return Path(path)


def write_plan_file(
    path: str | os.PathLike[str], fields: dict[str, Any], named: dict[str, Tensor | None]
) -> None:
    """Write tensors and header fields to ``path``, replacing the file at once or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # safetensors refuses tensors that share memory, so each is written as its own copy.
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in named.items()
        if tensor is not None
    }
    header = json.dumps(fields, sort_keys=True)
    metadata = {
        "kind": _MAGIC,
        "version": str(FORMAT_VERSION),
        "plan": header,
        "sha256": _checksum(tensors, header),
    }
    path = plan_path("save", path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise value_error(
            "save", "path", "a file in a folder that exists", repr(str(path)),
            "Make the folder first, or name a file",
        )  # fmt: skip
    try:
        with replacing(path) as partial:
            save_file(tensors, partial, metadata=metadata)
    except SafetensorError as error:  # a full disk, for one
        raise OSError(
            f"save: path must be writable, got {error} ({path}). Make room, or name another folder."
        ) from None


def refuse(path: Path, found: str, remedy: str) -> PlanFileError:
    """Build the error of a file that is not a plan that can be loaded here."""
    return PlanFileError(
        f"load_plan: path must be a plan file written by sparsetile, got {found} ({path}). "
        f"{remedy}."
    )


def read_plan_file(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors and the header (any JSON) that :func:`write_plan_file` wrote."""
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
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise refuse(path, f"a damaged or foreign file: {error}", again) from None
    if metadata.get("kind") != _MAGIC:
        raise refuse(path, "a safetensors file of another kind", "Give a file from plan.save")
    if metadata.get("version") != str(FORMAT_VERSION):
        raise refuse(
            path, f"version {metadata.get('version')}, this release reads {FORMAT_VERSION}", again
        )
    header = metadata.get("plan", "")
    if metadata.get("sha256") != _checksum(tensors, header):
        raise refuse(path, "a file whose checksum does not match its content", again)
    try:
        return tensors, json.loads(header)
    except (ValueError, RecursionError):
        raise refuse(path, "a header that is no JSON", again) from None
