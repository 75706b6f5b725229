"""A comes whole, in shares, from one rank, from a file, or from a folder of parts."""

from __future__ import annotations

import json
import shutil
import zlib

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch.distributed as dist

import sparsetile as st
from sparsetile import dist as st_dist
from sparsetile.cli import main
from sparsetile.core.errors import DataError
from sparsetile.dist.folder import MANIFEST, MatrixRows
from sparsetile.dist.shares import check_entries, content_digest
from sparsetile.intake import write_npz
from tests.dist.test_products import operand, whole_numbers


def matrix() -> st.CSR:
    return whole_numbers(90, 90, 0.06)


def check(made: st_dist.DistributedPlan, csr: st.CSR) -> str:
    B = operand(csr.shape[1], 8, csr.values.dtype if csr.values is not None else torch.float32)
    C = made @ made.shard(B)
    assert torch.equal(made.gather(C), st.plan(csr, 8) @ B)
    assert made.nnz == csr.nnz and made.info["rows"][-1] == csr.shape[0]
    return made.source


# -- one rank, shares -----------------------------------------------------------------------------


def from_one(group, source: int, kind: str, partition) -> str:
    csr = matrix()
    if kind == "pattern":
        csr = csr.with_values(None)
    elif kind == "float16":
        csr = csr.with_values(csr.values.half())
    given = csr if dist.get_rank(group) == source else None
    return check(st_dist.plan(given, 8, group, partition), csr)


@pytest.mark.parametrize(
    "ranks, source, kind", [(2, 0, "float64"), (3, 1, "float16"), (4, 3, "pattern")]
)
def test_one_rank_may_hold_the_matrix(workers, ranks, source, kind):
    found = workers.run(from_one, ranks, source=source, kind=kind, partition="auto")
    assert set(found) == {f"sent by rank {source}"}


def test_one_rank_may_hold_the_matrix_and_order_it(workers):
    workers.run(from_one, 3, source=2, kind="float64", partition="rcm")


def from_shares(group, firsts: list[int], columns, skipped: int) -> str:
    csr, rank = matrix(), dist.get_rank(group)
    bounds = [*firsts, 90]
    rows = torch.arange(bounds[rank], bounds[rank + 1])
    piece = csr.select_rows(rows)[0]
    share = st_dist.Share(piece, bounds[rank] + (skipped if rank else 0), (90, 90))
    return check(st_dist.plan(share, 8, group, columns=columns), csr)


def test_each_rank_may_bring_its_rows(workers):
    found = workers.run(from_shares, 3, firsts=[0, 50, 50], columns=None, skipped=0)
    assert set(found) == {"a share from each rank"}
    workers.run(from_shares, 3, firsts=[0, 20, 50], columns=[0, 1, 2, 90], skipped=0)


def wrong_shares(group, what: str) -> str:
    rank = dist.get_rank(group)
    piece = matrix().select_rows(torch.arange(rank * 30, rank * 30 + 30))[0]
    first, shape, options = rank * 30, (90, 90), {}
    if what == "gap":
        first += rank
    elif what == "missing":
        shape = (95, 90)
    elif what == "shape":
        shape = (90, 90 + (rank == 2))
    elif what == "partition":
        options["partition"] = "even"
    with pytest.raises(ValueError) as caught:
        st_dist.plan(st_dist.Share(piece, first, shape), 8, group, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "what, text",
    [
        ("gap", "plan: first_row must be 30 on rank 1, where the share before ends, got 31."),
        ("missing", "plan: the shares of A must be 95 rows together, got 90."),
        ("partition", "plan: partition must be 'auto' if A is given as shares, got 'even'."),
    ],
)
def test_shares_that_do_not_make_a_matrix_are_one_error(workers, what, text):
    texts = workers.run(wrong_shares, 3, what=what)
    assert len(set(texts)) == 1 and texts[0].startswith(text)


def test_a_share_of_another_width_is_named(workers):
    texts = workers.run(wrong_shares, 3, what="shape")
    assert texts[2].startswith("plan: A must be of 91 columns like the whole matrix, got (30, 90)")
    assert texts[0] == texts[1] and "an error on rank 2 (ValueError: plan: A must be" in texts[0]


def test_the_digest_of_a_matrix_is_the_checksum_of_all_its_bytes():
    csr = matrix()
    parts = (csr.indptr, csr.indices, csr.values)
    whole = zlib.crc32(b"".join(part.numpy().tobytes() for part in parts))
    assert content_digest(csr) == f"90x90, {csr.nnz} entries, content {whole:08x}"
    turned = st.CSR(csr.indptr, csr.indices.flip(0), csr.values, csr.shape)
    assert content_digest(turned) != content_digest(csr)


# -- files ----------------------------------------------------------------------------------------


def from_path(group, path: str, pattern: bool = False) -> str:
    csr = matrix()
    return check(st_dist.plan(path, 8, group), csr.with_values(None) if pattern else csr)


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_rank_reads_its_own_rows_of_an_npz(workers, tmp_path, ranks):
    write_npz(tmp_path / "whole.npz", matrix())
    write_npz(tmp_path / "packed.npz", matrix().with_values(None), compress=True)
    found = workers.run(from_path, ranks, path=str(tmp_path / "whole.npz"))
    assert set(found) == {"rows of a file"}
    workers.run(from_path, ranks, path=str(tmp_path / "packed.npz"), pattern=True)


def test_other_files_are_read_whole(workers, tmp_path):
    csr = matrix()
    scipy = sp.csr_array((csr.values, csr.indices, csr.indptr), shape=csr.shape)
    sp.save_npz(tmp_path / "scipy.npz", scipy)
    found = workers.run(from_path, 2, path=str(tmp_path / "scipy.npz"))
    assert set(found) == {"whole on every rank"}


def test_rows_of_a_file_are_read_without_the_others(tmp_path):
    csr = matrix()
    write_npz(tmp_path / "whole.npz", csr)
    rows = MatrixRows(tmp_path / "whole.npz", "plan")
    assert rows.whole is None and rows.nnz == csr.nnz
    part = rows.read(17, 60)
    expected = csr.select_rows(torch.arange(17, 60))[0]
    for name in ("indptr", "indices", "values"):
        assert torch.equal(getattr(part, name), getattr(expected, name))
    assert rows.whole is None, "the rest was read"


def test_a_file_cut_short_is_refused(tmp_path):
    csr = matrix()
    np.savez(
        tmp_path / "short.npz", indptr=csr.indptr.numpy(), indices=csr.indices.numpy()[:-9],
        shape=np.array(csr.shape),
    )  # fmt: skip
    with pytest.raises(DataError, match=r"plan: short\.npz must be a 1-D array indices\.npy of"):
        MatrixRows(tmp_path / "short.npz", "plan").read(0, 90)


def test_totals_may_pass_two_to_the_31_where_shares_do_not(tmp_path):
    # Row pointers of 3·10^9 entries; the entries themselves are not there to be read.
    pointers = torch.arange(0, 3001, dtype=torch.int64) * 1_000_000
    np.savez(
        tmp_path / "huge.npz", indptr=pointers.numpy(), indices=np.zeros(0, np.int32),
        shape=np.array((3000, 3000)),
    )  # fmt: skip
    rows = MatrixRows(tmp_path / "huge.npz", "plan")
    assert rows.nnz == 3_000_000_000
    with pytest.raises(ValueError, match="a rank's share must be below 2147483648 entries"):
        rows.read(0, 3000)
    with pytest.raises(ValueError, match=r"got 3000000000\. Use more ranks"):
        st_dist.write_folder(tmp_path / "huge.npz", 1, tmp_path / "parts")
    check_entries("plan", 2**31 - 1)


# -- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["auto", "rcm"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_ranks_share_the_parts_of_a_folder(workers, tmp_path, partition, ranks):
    folder = st_dist.write_folder(matrix(), 5, tmp_path / "parts", partition=partition)
    assert folder.partition.parts == 5 and folder.nnz == matrix().nnz
    found = workers.run(from_path, ranks, path=str(tmp_path / "parts"))
    assert set(found) == {"a folder of parts"}


def refused_folder(group, path: str) -> str:
    with pytest.raises(ValueError) as caught:
        st_dist.plan(path, 8, group)
    return str(caught.value)


def test_a_damaged_part_stops_every_rank(workers, tmp_path):
    st_dist.write_folder(matrix(), 3, tmp_path / "parts")
    part = tmp_path / "parts" / "part-00001.npz"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    texts = workers.run(refused_folder, 3, path=str(tmp_path / "parts"))
    assert texts[1].startswith("plan: part-00001.npz must be the part that partition.json")
    assert "an error on rank 1 (DataError: plan: part-00001.npz" in texts[0]


def test_a_folder_with_too_few_parts_or_none_is_refused(workers, tmp_path):
    st_dist.write_folder(matrix(), 2, tmp_path / "parts")
    texts = workers.run(refused_folder, 3, path=str(tmp_path / "parts"))
    assert set(texts) == {
        "plan: A must be in at least 3 parts, one per rank, got 2. Partition it again with more "
        "parts, or use fewer ranks."
    }
    (tmp_path / "empty").mkdir()
    texts = workers.run(refused_folder, 2, path=str(tmp_path / "empty"))
    assert texts[0].startswith("plan: A must be a folder with partition.json, got")


def test_partition_command_resumes_and_keeps_what_is_right(tmp_path, capsys):
    write_npz(tmp_path / "a.npz", matrix())
    command = ["partition", str(tmp_path / "a.npz"), "--parts", "4", "--out"]
    assert main([*command, str(tmp_path / "parts"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["nnz"] == matrix().nnz and len(made["parts"]) == 4
    assert sum(part["entries"] for part in made["parts"]) == matrix().nnz
    # What an interrupted run leaves: a manifest without the last checksums, a damaged file.
    folder = tmp_path / "parts"
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][3].update(nnz=None, sha256=None)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (folder / "part-00003.npz").unlink()
    (folder / "part-00001.npz").write_bytes(b"damaged")
    with pytest.raises(DataError, match="a finished partition, got 1 parts missing"):
        st_dist.open_folder(folder)
    kept = (folder / "part-00000.npz").stat().st_mtime_ns
    assert main([*command, str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == made
    assert (folder / "part-00000.npz").stat().st_mtime_ns == kept, "a finished part was written"
    assert st_dist.open_folder(folder).read(0, 4).nnz == matrix().nnz


def test_partition_command_refuses_a_folder_of_another_matrix(tmp_path, capsys):
    write_npz(tmp_path / "a.npz", matrix())
    write_npz(tmp_path / "b.npz", matrix().with_values(matrix().values + 1))
    options = ["--parts", "3", "--out", str(tmp_path / "parts")]
    assert main(["partition", str(tmp_path / "a.npz"), *options]) == 0
    assert "part-00002.npz" in capsys.readouterr().out
    assert main(["partition", str(tmp_path / "b.npz"), *options]) == 2
    assert "--out must be a folder of this partition, or an empty one" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "parts")
    (tmp_path / "parts").write_text("a file")
    assert main(["partition", str(tmp_path / "a.npz"), *options]) == 2
    assert "partition: --out must be a folder" in capsys.readouterr().err
