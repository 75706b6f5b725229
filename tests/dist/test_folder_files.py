"""Folders of parts: no file outside the folder is read or written, whatever the manifest says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsetile import dist as st_dist
from sparsetile.core.errors import DataError
from sparsetile.dist.manifest import MANIFEST, sha256
from sparsetile.intake import read_matrix, write_npz
from tests.dist.test_products import whole_numbers

PARTS = 3


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    st_dist.write_folder(whole_numbers(90, 90, 0.06), PARTS, tmp_path / "parts", partition="rcm")
    return tmp_path / "parts"


def again(parts: Path) -> None:
    st_dist.write_folder(whole_numbers(90, 90, 0.06), PARTS, parts, partition="rcm")


def manifest(parts: Path) -> dict[str, Any]:
    return json.loads((parts / MANIFEST).read_text())


def write_manifest(parts: Path, text: dict[str, Any]) -> None:
    (parts / MANIFEST).write_text(json.dumps(text))


def refused(parts: Path) -> str:
    """The text with which both opening and continuing refuse a folder."""
    with pytest.raises(DataError) as caught:
        st_dist.open_folder(parts).read(0, PARTS)
    with pytest.raises((DataError, ValueError)):
        again(parts)
    text = str(caught.value)
    assert text.startswith("plan: ") and text.endswith(".")
    return text


@pytest.mark.parametrize(
    "name",
    ["../victim.npz", "{folder}/victim.npz", "victim.npz", "part-00001.npz", "part-0.npz", "", ".",
     "part-00000.npz/../../victim.npz", 3, None],
)  # fmt: skip
def test_only_a_part_s_own_name_is_read_or_written(parts, name):
    victim = parts.parent / "victim.npz"
    write_npz(victim, whole_numbers(2, 2, 0.5))
    before, text = victim.read_bytes(), manifest(parts)
    if isinstance(name, str):
        name = name.format(folder=parts.parent)
    text["files"][0] |= {"name": name, "sha256": None}
    write_manifest(parts, text)
    assert "must be a partition's manifest" in refused(parts)
    text["files"][0]["sha256"] = sha256(victim)
    write_manifest(parts, text)
    assert "must be a partition's manifest" in refused(parts)
    assert victim.read_bytes() == before and not (parts / "victim.npz").exists()


@pytest.mark.parametrize("name", ["part-00001.npz", "order.npy", "partition.json"])
def test_nothing_is_read_through_a_link(parts, name):
    outside = parts.parent / "outside"
    (parts / name).rename(outside)
    (parts / name).symlink_to(outside)
    assert "got a link" in refused(parts)


@pytest.mark.parametrize("name", ["part-00001.npz", "order.npy", "partition.json"])
def test_nothing_is_written_through_a_link(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / name).symlink_to(victim)
    with pytest.raises(DataError, match=r"^partition: .* must be a file, got a link\."):
        again(tmp_path / "parts")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("when", ["written", "renamed"])
def test_the_order_is_written_whole_or_not_at_all(tmp_path, monkeypatch, when):
    target, failing = (Path, "write_bytes") if when == "written" else (os, "replace")
    original = getattr(target, failing)

    def half(first: Path, second: Any) -> None:
        if "order.npy" not in str(first):
            original(first, second)
            return
        if when == "written":
            original(first, second[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(target, failing, half)
    with pytest.raises(OSError, match="No space left"):
        again(tmp_path / "parts")
    assert not list((tmp_path / "parts").glob("order*"))
    monkeypatch.undo()
    again(tmp_path / "parts")
    assert st_dist.open_folder(tmp_path / "parts").partition.order is not None


def test_a_folder_of_another_partition_keeps_its_order(parts):
    before = (parts / "order.npy").read_bytes()
    with pytest.raises(ValueError, match="a folder of this partition, or an empty one"):
        st_dist.write_folder(whole_numbers(80, 80, 0.2), PARTS, parts, partition="rcm")
    assert (parts / "order.npy").read_bytes() == before
    assert st_dist.open_folder(parts).read(0, PARTS).nnz == whole_numbers(90, 90, 0.06).nnz


def test_a_damaged_order_is_written_again(parts):
    (parts / "order.npy").write_bytes(b"half an or")
    with pytest.raises(DataError, match=r"order\.npy must be the order that partition\.json names"):
        st_dist.open_folder(parts)
    again(parts)
    assert st_dist.open_folder(parts).read(0, PARTS).nnz == whole_numbers(90, 90, 0.06).nnz


@pytest.mark.parametrize("name", ["kind", "version", "source", "shape", "nnz", "partition", "rows",
                                  "columns", "order", "files"])  # fmt: skip
@pytest.mark.parametrize("value", [None, -1, 2**40, "x", [], {}, [0, 10**12], "absent"], ids=repr)
def test_every_field_of_the_manifest_is_checked(parts, name, value):
    text = manifest(parts)
    if value == "absent":
        del text[name]
    else:
        text[name] = value
    write_manifest(parts, text)
    # Labels, and an order that the folder need not have.
    if (name, value) in (("source", "x"), ("partition", "x"), ("order", None)):
        assert st_dist.open_folder(parts).read(0, PARTS).nnz == text["nnz"]
        return
    with pytest.raises(DataError, match=r"^plan: "):
        st_dist.open_folder(parts).read(0, PARTS)


@pytest.mark.parametrize(
    "change",
    [{"nnz": 1}, {"nnz": None}, {"nnz": "x"}, {"sha256": 3}, {"sha256": None}, {"sha256": "x"}],
    ids=repr,
)
def test_every_field_of_a_part_is_checked(parts, change):
    text = manifest(parts)
    text["files"][1] |= change
    write_manifest(parts, text)
    with pytest.raises(DataError):
        st_dist.open_folder(parts).read(0, PARTS)


@pytest.mark.parametrize("order", ["short", "twice", "floats", "far", "huge"])
def test_an_order_that_is_no_permutation_is_refused(parts, order):
    held = np.load(parts / "order.npy")
    changed = {
        "short": held[:-1], "twice": np.zeros_like(held), "floats": held.astype(np.float64),
        "far": held + 2**40, "huge": held,
    }[order]  # fmt: skip
    np.save(parts / "order.npy", changed)
    if order == "huge":  # claims more numbers than there are
        body = (parts / "order.npy").read_bytes()
        (parts / "order.npy").write_bytes(body.replace(b"(90,), }    ", b"(90000000,),}"[:12]))
    write_manifest(parts, manifest(parts) | {"order": sha256(parts / "order.npy")})
    with pytest.raises(DataError, match=r"order\.npy must be a permutation of 90 rows"):
        st_dist.open_folder(parts)


@pytest.mark.parametrize("what", ["no such file", "another checksum"])
def test_a_part_that_is_gone_or_another_is_called_so(parts, what):
    folder, part = st_dist.open_folder(parts), parts / "part-00001.npz"
    if what == "no such file":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes() + b"x")
    with pytest.raises(DataError, match=f"the part that partition.json describes, got {what}"):
        folder.read(1, 2)


def test_parts_must_all_have_values_or_none(parts):
    text = manifest(parts)
    part = parts / "part-00001.npz"
    write_npz(part, read_matrix(part).with_values(None))
    text["files"][1]["sha256"] = sha256(part)
    write_manifest(parts, text)
    with pytest.raises(DataError, match="all of them with values or none"):
        st_dist.open_folder(parts).read(0, PARTS)
    assert st_dist.open_folder(parts).read(1, 2).values is None


@pytest.mark.parametrize("parts_wanted", [91, 10**9, 100_000, 0, -1])
def test_more_parts_than_rows_are_one_error(tmp_path, parts_wanted):
    with pytest.raises(ValueError) as caught:
        st_dist.write_folder(whole_numbers(90, 90, 0.06), parts_wanted, tmp_path / "parts")
    assert str(caught.value) == (
        f"partition: --parts must be from 1 to 90, the rows of A, got {parts_wanted}. "
        + ("Ask for fewer parts." if parts_wanted > 0 else "Ask for more parts.")
    )
    assert not (tmp_path / "parts").exists()


def test_a_name_has_five_digits(tmp_path):
    rows = torch.eye(3).to_sparse_csr()
    folder = st_dist.write_folder(rows, 3, tmp_path / "parts")
    assert [entry["name"] for entry in folder.files] == [
        f"part-0000{part}.npz" for part in range(3)
    ]
    wide = (torch.zeros(100_002, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), None,
            (100_001, 4))  # fmt: skip
    with pytest.raises(ValueError, match=r"--parts must be from 1 to 100000, got 100001\."):
        st_dist.write_folder(wide, 100_001, tmp_path / "more")
