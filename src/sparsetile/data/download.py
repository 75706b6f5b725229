"""Downloads from the SuiteSparse collection, for users with internet.

A file appears under its final name only when it is whole, checked and unpacked: it is written
in a hidden folder beside it and renamed. So a broken connection, a full disk or two
processes at once never leave half a matrix behind.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from sparsetile.core import settings
from sparsetile.core.errors import DataError, describe, type_error, value_error
from sparsetile.data.archive import extract_member

__all__ = ["SITE", "Progress", "fetch"]

Progress = Callable[[int, int | None], None]

SITE = "https://sparse.tamu.edu"
BLOCK_BYTES = 1 << 20
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*"
_GZIP = b"\x1f\x8b"
_AGAIN = "Check the connection and try again"
TIMEOUT = 30.0  # seconds without a byte


def fetch(
    name: str, *, base_url: str | None = None, directory: str | os.PathLike[str] | None = None,
    force: bool = False, progress: Progress | None = None,
) -> Path:  # fmt: skip
    """Download a matrix and return the path of a file that the library reads.

    ``name`` is ``"Group/Name"``, such as ``"HB/bcsstk17"`` or ``"SNAP/roadNet-CA"``. ``base_url``
    is another site or a folder with the same layout: http(s) or file URL, or a path. The file is
    ``directory/Group/Name.mtx``; the default folder is ``SPARSETILE_DATA_DIR``, else the user's
    cache folder. ``force`` downloads again. ``progress`` is called with (bytes so far, bytes in all
    or None). DataError says that the site cannot be reached, has no such matrix, broke off, or sent
    something else.
    """
    _check_name(name)
    target = (Path(directory) if directory else settings.data_dir()) / f"{name}.mtx"
    if target.exists() and not force:
        return target
    url = f"{_base(base_url or SITE)}/MM/{name}.tar.gz"
    target.parent.mkdir(parents=True, exist_ok=True)

    # A hidden folder beside the target: renaming out of it stays on one disk.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        archive = Path(folder) / url.rpartition("/")[2]
        with open(archive, "wb") as stream:
            _download(url, stream, progress)
        _unpack_market(archive, name.rpartition("/")[2], target)
    return target


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise type_error("fetch", "name", "a string", type(name).__name__, "Give its name")
    if not re.fullmatch(rf"{_WORD}/{_WORD}", name):
        raise value_error(
            "fetch", "name", "a SuiteSparse name Group/Name", repr(name),
            "Write it like HB/bcsstk17",
        )  # fmt: skip


def _base(base: str) -> str:
    if "://" not in base:
        return Path(base).resolve().as_uri()
    try:
        parts = urlsplit(base)
        usable = parts.scheme == "file" or (parts.scheme in ("http", "https") and parts.hostname)
    except ValueError:  # such as an unclosed bracket around an address
        usable = False
    if not usable:
        raise value_error(
            "fetch", "base_url", "an http, https or file URL or a path", repr(base),
            "Omit base_url=",
        )  # fmt: skip
    return base.rstrip("/")


def _failed(url: str, expected: str, actual: object, remedy: str) -> DataError:
    return DataError(describe("fetch", url, expected, actual, remedy))


def _download(url: str, out: BinaryIO, progress: Progress | None) -> None:
    """Copy ``url`` to ``out``; check its length and that it is a gzip file."""
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "sparsetile"})
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        remedy = "Check the name and the collection" if error.code == 404 else _AGAIN
        raise _failed(url, "there", f"HTTP {error.code} {error.reason}", remedy) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, FileNotFoundError):
            raise _failed(url, "there", "no such file", "Check the name and base_url") from None
        raise _failed(url, "reachable", error.reason, _AGAIN) from None
    except (OSError, http.client.HTTPException) as error:
        raise _broken(url, error) from None
    with response:
        _receive(url, response, out, progress)


def _broken(url: str, error: Exception) -> DataError:
    text = "silence until the timeout" if isinstance(error, TimeoutError) else repr(error)
    return _failed(url, "sent whole", f"a broken connection ({text})", _AGAIN)


def _receive(
    url: str, response: http.client.HTTPResponse, out: BinaryIO, progress: Progress | None
) -> None:
    """Copy the response to ``out``."""
    stated = response.headers.get("Content-Length", "")
    total = int(stated) if stated.isdecimal() else None
    free = shutil.disk_usage(Path(out.name).parent).free
    if total is not None and total > free:
        raise _failed(
            url, f"smaller than the {free} bytes free on disk", f"{total} bytes",
            "Free some space or pass another directory",
        )  # fmt: skip
    done = 0
    for block in _blocks(url, response):
        if done == 0 and not block.startswith(_GZIP):
            raise _failed(
                url, "a gzip file", f"something else, beginning {block[:20]!r}",
                "The site may answer with a page instead of the file: open the URL in a browser",
            )  # fmt: skip
        done += len(block)
        out.write(block)
        if progress is not None:
            progress(done, total)
    if total is not None and done < total:
        raise _failed(url, f"sent whole ({total} bytes)", f"{done} bytes", _AGAIN)
    if done == 0:
        raise _failed(url, "a gzip file", "an empty answer", "Check the name and the collection")


def _blocks(url: str, response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the response piece by piece; a connection that breaks is one clear error."""
    while True:
        try:
            block = response.read(BLOCK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _broken(url, error) from None
        if not block:
            return
        yield block


def _unpack_market(archive: Path, name: str, target: Path) -> None:
    market = archive.parent / f"{name}.mtx"
    with open(market, "wb") as stream:
        extract_member(archive, f"{name}/{name}.mtx", stream, function="fetch")
    with open(market, "rb") as unpacked:
        banner = unpacked.read(14)
    if banner != b"%%MatrixMarket":
        found, remedy = f"one that begins {banner!r}", "The archive is not of this collection"
        raise DataError(describe("fetch", market.name, "a Matrix Market file", found, remedy))
    os.replace(market, target)
