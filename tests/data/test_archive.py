"""Unpacking: the file asked for comes out, hostile archives are refused."""

from __future__ import annotations

import gzip
import io
import tarfile

import pytest

from sparsetile.core.errors import DataError
from sparsetile.data.archive import extract_member


def member(name, content=b"x", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def pack(path, members, **options):
    with tarfile.open(path, "w:gz", **options) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content) if info.isreg() else None)
    return path


def extract(path, name="m/m.mtx"):
    out = io.BytesIO()
    extract_member(path, name, out, function="fetch")
    return out.getvalue()


def test_the_file_asked_for_comes_out_among_others(tmp_path):
    content = b"%%MatrixMarket " + bytes(range(256)) * 20_000  # more than one block
    path = pack(
        tmp_path / "m.tar.gz",
        [
            member("m", type=tarfile.DIRTYPE),
            member("m/m_b.mtx", b"right-hand side" * 9999),
            member("m/m.mtx", content),
            member("m/" + "long" * 60 + ".mtx", b"z"),
        ],
    )
    assert extract(path) == content


@pytest.mark.parametrize("name", ["/etc/passwd", "../m.mtx", "m/../../x", "..\\x", "m/.."])
def test_paths_that_leave_the_archive_are_refused(tmp_path, name):
    path = pack(tmp_path / "m.tar.gz", [member(name), member("m/m.mtx")])
    with pytest.raises(
        DataError, match=r"fetch: m.tar.gz must be free of paths that leave it, got"
    ):
        extract(path)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE]
)
def test_links_and_devices_are_refused_even_under_the_right_name(tmp_path, kind):
    path = pack(tmp_path / "m.tar.gz", [member("m/m.mtx", b"", type=kind, linkname="/etc/passwd")])
    with pytest.raises(
        DataError, match=r"must be free of links, devices and sparse files, got 'm/m"
    ):
        extract(path)


def test_an_unsafe_member_after_the_file_asked_for_is_refused_too(tmp_path):
    path = pack(
        tmp_path / "m.tar.gz",
        [member("m/m.mtx"), member("m/link", b"", type=tarfile.SYMTYPE, linkname="/")],
    )
    with pytest.raises(DataError, match=r"must be free of links"):
        extract(path)


def test_a_sparse_file_is_refused(tmp_path):
    header = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9" * 12}
    info, content = member("m/m.mtx", b"0\n".ljust(512, b"\0"))
    info.pax_headers = header
    path = pack(tmp_path / "m.tar.gz", [(info, content)], format=tarfile.PAX_FORMAT)
    with pytest.raises(DataError, match=r"must be free of links, devices and sparse files"):
        extract(path)


def test_a_missing_member_is_named(tmp_path):
    path = pack(tmp_path / "m.tar.gz", [member("m/other.mtx")])
    with pytest.raises(
        DataError, match=r"must be an archive with the file m/m.mtx, got one without"
    ):
        extract(path)


def zeros(name: str, mebibytes: int) -> bytes:
    """A file of zeros in an archive, compressed: gzip streams may follow one another."""
    info = tarfile.TarInfo(name)
    info.size = mebibytes << 20
    return gzip.compress(info.tobuf()) + gzip.compress(bytes(1 << 20)) * mebibytes


def test_a_bomb_is_refused_whether_it_is_the_file_or_beside_it(tmp_path):
    path = tmp_path / "m.tar.gz"
    for names in (["m/m.mtx"], ["m/zeros", "m/m.mtx"], ["m/m.mtx", "m/zeros"]):
        path.write_bytes(b"".join(zeros(name, 66 // len(names)) for name in names))
        with pytest.raises(DataError, match=rf"must be at most {64 << 20} bytes when unpacked"):
            extract(path)


def test_an_oversized_header_is_refused_before_it_is_read(tmp_path):
    info, content = member("m/m.mtx")
    info.pax_headers = {"comment": "x" * (1 << 23)}
    path = pack(tmp_path / "m.tar.gz", [(info, content)], format=tarfile.PAX_FORMAT)
    with pytest.raises(DataError, match=r"must be free of oversized headers, got one of"):
        extract(path)


def test_too_many_members_are_refused(tmp_path):
    path = tmp_path / "m.tar.gz"
    path.write_bytes(gzip.compress(tarfile.TarInfo("m/m").tobuf() * 10_001))
    with pytest.raises(DataError, match=r"must be of at most 10000 files, got more"):
        extract(path)


def test_a_truncated_archive_is_refused(tmp_path):
    import random

    noise = random.Random(0).randbytes(100_000)
    path = pack(tmp_path / "m.tar.gz", [member("m/m.mtx", noise)])
    path.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(DataError, match=r"must be a whole gzip file, got a damaged one"):
        extract(path)


@pytest.mark.parametrize("cut", [1, 20])
def test_an_archive_cut_after_the_file_asked_for_is_refused_too(tmp_path, cut):
    path = pack(tmp_path / "m.tar.gz", [member("m/m.mtx")])
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=r"must be a whole gzip file, got a damaged one"):
        extract(path)


def test_a_wrong_checksum_is_noticed(tmp_path):
    path = pack(tmp_path / "m.tar.gz", [member("m/m.mtx")])
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"must be a whole gzip file, .* \(CRC check failed"):
        extract(path)


def test_gzip_of_half_a_tar_is_refused(tmp_path):
    path = pack(tmp_path / "m.tar.gz", [member("m/m.mtx", b"abc" * 1000)])
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:1500]))
    with pytest.raises(DataError, match=r"must be a whole tar archive, got a damaged one"):
        extract(path)


def test_what_is_no_tar_is_refused(tmp_path):
    path = tmp_path / "m.tar.gz"
    path.write_bytes(gzip.compress(b"not a tar archive" * 100))
    with pytest.raises(DataError, match=r"must be a whole tar archive, got a damaged one"):
        extract(path)
