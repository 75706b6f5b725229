"""``partition.json``, the manifest of a folder of parts: its fields and files.

A manifest is not trusted. Each field is checked, the name of a part's file follows from its
number, and links are refused.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import NoneType
from typing import Any, TypeGuard

from sparsetile.core.checks import MAX_DIM
from sparsetile.core.errors import DataError, describe
from sparsetile.core.files import replacing

__all__ = [
    "MANIFEST", "MOST_PARTS", "VERSION", "damaged_part", "own_file", "part_name", "read_manifest",
    "sha256", "write_manifest",
]  # fmt: skip

MANIFEST = "partition.json"
VERSION = 1
MOST_PARTS = 100_000  # names of parts have five digits


def damaged_part(function: str, file: Path, expected: str, actual: object) -> DataError:
    """Build the error of a damaged file of the folder."""
    remedy = "The file is damaged or of another kind: write it again"
    return DataError(describe(function, file.name, expected, actual, remedy))


def part_name(part: int) -> str:
    """The only name that a part's file may have."""
    return f"part-{part:05d}.npz"


def own_file(file: Path, function: str) -> Path:
    """Return a file of the folder, or raise for a link, which may lead out of it."""
    if file.is_symlink():
        raise damaged_part(function, file, "a file", "a link")
    return file


def read_manifest(folder: Path, function: str) -> dict[str, Any] | None:
    """Return the manifest of a folder, every field checked; None if it has none."""
    file = own_file(folder / MANIFEST, function)
    if not file.is_file():
        return None
    try:
        text = json.loads(file.read_text())
    except (ValueError, RecursionError):
        raise damaged_part(function, file, "JSON", "other text") from None
    if not isinstance(text, dict) or text.get("kind") != "sparsetile-partition":
        raise damaged_part(function, file, "a partition's manifest", "another file")
    if text.get("version") != VERSION:
        raise damaged_part(function, file, f"of version {VERSION}", repr(text.get("version"))[:80])
    wrong = _wrong_field(text)
    if wrong is not None:
        raise damaged_part(function, file, "a partition's manifest", f"another {wrong}")
    return text


def _wrong_field(text: dict[str, Any]) -> str | None:
    """Name a field of the manifest that is missing, or not what ``write_folder`` writes."""
    for name in ("source", "partition"):
        if not isinstance(text.get(name), str):
            return name
    if not isinstance(text.get("order", 0), (str, NoneType)):
        return "order"
    shape, files = text.get("shape"), text.get("files")
    if not _are_counts(shape) or len(shape) != 2 or max(shape) > MAX_DIM:
        return "shape"
    if not isinstance(files, list) or not 1 <= len(files) <= MOST_PARTS:
        return "files"
    for name, end in (("rows", shape[0]), ("columns", shape[1])):
        bounds = text.get(name)
        if not _are_counts(bounds) or len(bounds) != len(files) + 1:
            return name
        if bounds != sorted(bounds) or bounds[0] != 0 or bounds[-1] != end:
            return name
    for part, entry in enumerate(files):
        if not isinstance(entry, dict) or entry.get("name") != part_name(part):
            return f"name of part {part}"
        written = isinstance(entry.get("sha256"), str) and _are_counts([entry.get("nnz")])
        if not written and (entry.get("sha256"), entry.get("nnz")) != (None, None):
            return f"part {part}"
    whole = all(entry["sha256"] is not None for entry in files)
    if not _are_counts([text.get("nnz")]):
        return "nnz"
    return "nnz" if whole and sum(entry["nnz"] for entry in files) != text["nnz"] else None


def _are_counts(numbers: object) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(
        type(number) is int and number >= 0 for number in numbers
    )


def write_manifest(folder: Path, text: dict[str, Any]) -> None:
    """Replace the manifest as a whole."""
    with replacing(folder / MANIFEST) as partial:
        partial.write_text(json.dumps(text))


def sha256(file: Path) -> str:
    """Checksum of a file."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
