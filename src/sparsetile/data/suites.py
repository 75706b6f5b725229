"""The matrices of the suite ``core``: where each comes from, and how to know that it is the one.

``core.tsv`` lists them. Those of the SuiteSparse collection can be fetched; for the others it names
the public file they were read from. A matrix is known by a digest of its pattern: benchmarks draw
values at random.
"""

from __future__ import annotations

import csv
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sparsetile.data.download import Progress, fetch
from sparsetile.intake.csr import CSR

__all__ = ["SUITES", "Member", "fetch_member", "members", "pattern_digest"]

_FOLDER = Path(__file__).resolve().parent
SUITES = ("core",)


@dataclass(frozen=True)
class Member:
    """A matrix of a suite."""

    name: str
    collection: str  # Group/Name in SuiteSparse; "-" if it is not there
    rows: int
    columns: int
    entries: int
    pattern: str  # what pattern_digest returns
    source: str


def members(suite: str) -> list[Member]:
    """Return the matrices of a suite in its order."""
    text = (_FOLDER / f"{suite}.tsv").read_text(encoding="utf-8")
    return [
        Member(
            row["name"], row["collection"], int(row["rows"]), int(row["columns"]),
            int(row["entries"]), row["pattern"], row["source"],
        )
        for row in csv.DictReader(text.splitlines(), delimiter="\t")
    ]  # fmt: skip


def pattern_digest(csr: CSR) -> str:
    """Return the SHA-256 of a matrix's shape, row pointers and columns."""
    found = hashlib.sha256(f"{csr.shape[0]} {csr.shape[1]}\n".encode())
    found.update(csr.indptr.numpy().astype("<i8", copy=False).tobytes())
    found.update(csr.indices.numpy().astype("<i4", copy=False).tobytes())
    return found.hexdigest()


def fetch_member(
    member: Member, folder: Path, *, base_url: str | None = None, progress: Progress | None = None
) -> Path:
    """Download a matrix to ``folder/name.mtx``, where a suite looks for it."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{member.name}.mtx"
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as partial:
        path = fetch(member.collection, base_url=base_url, directory=partial, progress=progress)
        os.replace(path, target)
    return target
