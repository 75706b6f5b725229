"""Unpacks downloaded archives, which are not trusted.

Only the requested file is unpacked, to a path of the caller's choice, so a path inside an archive
never becomes a path on disk. Archives with absolute paths, ``..``, links or devices are refused
too: no collection ships them. The reader counts what it decompresses and stops bombs.
"""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from sparsetile.core.errors import DataError, describe

__all__ = ["LimitedGzip", "extract_member"]

_MIB = 1 << 20
# Matrices as text shrink by 3 to 40; a small file may hold one long repetition.
_MAX_RATIO = 200
_FREE_BYTES = 64 * _MIB
# tarfile reads extended headers in one piece, of a size that the archive states.
_MAX_READ = 4 * _MIB
_MAX_MEMBERS = 10_000


class LimitedGzip(gzip.GzipFile):
    """Read a gzip file; stop if it decompresses to far more than a matrix would."""

    def __init__(self, path: Path, function: str) -> None:
        super().__init__(path, "rb")
        self._path, self._function = path, function
        self._limit = max(_FREE_BYTES, _MAX_RATIO * path.stat().st_size)

    def read(self, size: int | None = -1) -> bytes:
        """Read ``size`` bytes, fewer only at the end of the file."""
        if size is None or not 0 <= size <= _MAX_READ:
            raise self.damaged("free of oversized headers", f"one of {size} bytes")
        with _whole(self):
            data = super().read(size)
        self._check(self.tell())
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek from the start; tarfile skips members like that."""
        self._check(offset)
        with _whole(self):
            return super().seek(offset, whence)

    def damaged(self, expected: str, actual: object) -> DataError:
        """Build the error that says what is wrong with this archive."""
        remedy = "The download is damaged or hostile: fetch it again from the collection's site"
        return DataError(describe(self._function, self._path.name, expected, actual, remedy))

    def _check(self, position: int) -> None:
        if position > self._limit:
            raise self.damaged(
                f"at most {self._limit} bytes when unpacked", "more (a decompression bomb)"
            )


@contextmanager
def _whole(reader: LimitedGzip) -> Iterator[None]:
    """Turn the several exceptions of a damaged gzip stream into one DataError."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise reader.damaged("a whole gzip file", f"a damaged one ({error})") from None


def extract_member(archive: Path, member: str, out: BinaryIO, *, function: str) -> None:
    """Write the file ``member`` of a .tar.gz to ``out``, after checking every entry."""
    found = False
    with LimitedGzip(archive, function) as reader:
        try:
            with tarfile.open(fileobj=reader, mode="r:") as tar:  # type: ignore[arg-type]
                for count, entry in enumerate(tar):
                    if count >= _MAX_MEMBERS:
                        raise reader.damaged(f"of at most {_MAX_MEMBERS} files", "more")
                    _refuse_unsafe(reader, entry)
                    if entry.name == member and entry.isfile() and not found:
                        # Not None for a file; a short one raises ReadError.
                        shutil.copyfileobj(cast(BinaryIO, tar.extractfile(entry)), out, _MIB)
                        found = True
            # The checksum of everything follows the tar's end.
            while reader.read(_MIB):
                pass
        except tarfile.TarError as error:
            raise reader.damaged("a whole tar archive", f"a damaged one ({error})") from None
        if not found:
            raise reader.damaged(f"an archive with the file {member}", "one without it")


def _refuse_unsafe(reader: LimitedGzip, entry: tarfile.TarInfo) -> None:
    path = PurePosixPath(entry.name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise reader.damaged("free of paths that leave it", repr(entry.name))
    # A sparse file states a size that no stored byte backs.
    if entry.issparse() or not (entry.isfile() or entry.isdir()):
        raise reader.damaged("free of links, devices and sparse files", repr(entry.name))
