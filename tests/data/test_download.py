"""Downloads, against a server on this machine and against folders: never the network."""

from __future__ import annotations

import gzip
import io
import socket
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sparsetile.core.errors import DataError
from sparsetile.data import download
from sparsetile.data.catalog import load
from sparsetile.data.download import fetch

MARKET = b"%%MatrixMarket matrix coordinate real general\n% a comment\n3 4 2\n1 2 0.5\n3 4 -1\n"


def market_archive(name="tiny", content=MARKET):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo(f"{name}/{name}.mtx")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


ARCHIVE = market_archive()


class Handler(BaseHTTPRequestHandler):
    """Serves ARCHIVE in well-behaved and in broken ways, chosen by the matrix's group."""

    requests: list[str]

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.paths.append(self.path)
        group = self.path.split("/")[2] if self.path.startswith("/MM/") else ""
        body = ARCHIVE
        if group == "Missing":
            return self.send_error(404)
        if group == "Down":
            return self.send_error(503)
        if group == "Page":
            body = b"<html>please log in</html>"
        if group == "Empty":
            body = b""
        if group == "Moved":
            self.send_response(302)
            self.send_header("Location", "/MM/Good/tiny.tar.gz")
            return self.end_headers()
        self.send_response(200)
        if group != "Unstated":
            self.send_header("Content-Length", str(len(body) + (1000 if group == "Short" else 0)))
        self.end_headers()
        if group == "Slow":
            self.wfile.write(body[:50])
            self.wfile.flush()
            time.sleep(2)
            return None
        self.wfile.write(body)
        return None


@pytest.fixture(scope="module")
def server():
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    running.paths = []
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.fixture
def site(server, environment):
    """The server's address, reached directly whatever proxies this machine has."""
    environment(no_proxy="127.0.0.1")
    server.paths.clear()
    return f"http://127.0.0.1:{server.server_port}"


def leftovers(directory):
    return [path for path in directory.rglob("*") if path.is_file()]


def test_a_suitesparse_matrix_is_fetched_unpacked_and_readable(site, tmp_path):
    path = fetch("Good/tiny", base_url=site, directory=tmp_path)
    assert path == tmp_path / "Good" / "tiny.mtx"
    assert path.read_bytes() == MARKET
    assert leftovers(tmp_path) == [path]
    matrix = load("Good/tiny", tmp_path)
    assert matrix.shape == (3, 4) and matrix.indices.tolist() == [1, 3]


def test_a_matrix_that_is_there_is_not_fetched_again_unless_forced(server, site, tmp_path):
    first = fetch("Good/tiny", base_url=site, directory=tmp_path)
    first.write_bytes(b"mine")
    assert fetch("Good/tiny", base_url=site, directory=tmp_path).read_bytes() == b"mine"
    assert len(server.paths) == 1
    assert fetch("Good/tiny", base_url=site, directory=tmp_path, force=True).read_bytes() == MARKET
    assert len(server.paths) == 2


def test_the_default_folder_is_the_one_in_the_settings(site, tmp_path, environment):
    environment(SPARSETILE_DATA_DIR=tmp_path / "chosen")
    assert fetch("Good/tiny", base_url=site) == tmp_path / "chosen" / "Good" / "tiny.mtx"


@pytest.mark.parametrize("as_url", [True, False])
def test_a_folder_with_the_same_layout_serves_as_well(tmp_path, as_url):
    mirror = tmp_path / "a mirror"
    (mirror / "MM" / "HB").mkdir(parents=True)
    (mirror / "MM" / "HB" / "tiny.tar.gz").write_bytes(ARCHIVE)
    base = mirror.as_uri() if as_url else str(mirror)
    path = fetch("HB/tiny", base_url=base, directory=tmp_path / "data")
    assert path.read_bytes() == MARKET
    with pytest.raises(DataError, match=r"HB/none.tar.gz must be there, got no such file. Check"):
        fetch("HB/none", base_url=base, directory=tmp_path / "data")


def test_redirections_are_followed(server, site, tmp_path):
    fetch("Moved/tiny", base_url=site, directory=tmp_path)
    assert server.paths == ["/MM/Moved/tiny.tar.gz", "/MM/Good/tiny.tar.gz"]


def test_progress_counts_up_to_the_size(site, tmp_path, constants):
    constants(download, BLOCK_BYTES=64)
    calls = []
    fetch("Good/tiny", base_url=site, directory=tmp_path, progress=lambda *call: calls.append(call))
    assert len(calls) > 1
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (len(ARCHIVE), len(ARCHIVE))


def test_progress_says_none_where_the_site_states_no_size(site, tmp_path):
    calls = []
    fetch(
        "Unstated/tiny",
        base_url=site,
        directory=tmp_path,
        progress=lambda *call: calls.append(call),
    )
    assert calls[-1] == (len(ARCHIVE), None)


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("Missing", "must be there, got HTTP 404 Not Found. Check the name and the collection."),
        ("Down", "must be there, got HTTP 503 Service Unavailable. Check the connection"),
        ("Page", "must be a gzip file, got something else, beginning b'<html>please log in<"),
        ("Empty", "must be a gzip file, got an empty answer. Check the name"),
        ("Short", rf"must be sent whole .*{len(ARCHIVE)}"),
        ("Slow", r"must be sent whole, got a broken connection \(silence until the timeout\)"),
    ],
)
def test_a_download_that_fails_is_one_clear_error_and_leaves_nothing(
    site, tmp_path, group, text, constants
):
    # A loaded machine may take its time to answer.
    constants(download, TIMEOUT=0.5 if group == "Slow" else 30)
    with pytest.raises(DataError, match=f"^fetch: {site}/MM/{group}/tiny.tar.gz {text}"):
        fetch(f"{group}/tiny", base_url=site, directory=tmp_path)
    assert leftovers(tmp_path) == []


def test_an_old_file_survives_a_failed_refresh(site, tmp_path):
    kept = tmp_path / "Page" / "tiny.mtx"
    kept.parent.mkdir()
    kept.write_bytes(b"old")
    with pytest.raises(DataError):
        fetch("Page/tiny", base_url=site, directory=tmp_path, force=True)
    assert leftovers(tmp_path) == [kept] and kept.read_bytes() == b"old"


def test_a_refused_connection_is_one_clear_error(tmp_path, environment):
    environment(no_proxy="127.0.0.1")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(DataError, match=r"must be reachable, got .*refused.*Check the connection"):
        fetch("Good/tiny", base_url=address, directory=tmp_path)
    assert leftovers(tmp_path) == []


def test_an_answer_that_is_not_http_is_one_clear_error(tmp_path, environment):
    environment(no_proxy="127.0.0.1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"hello, this is not HTTP\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(
            DataError, match=r"must be sent whole, got a broken connection \(BadSta"
        ):
            fetch(
                "Good/tiny",
                base_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
                directory=tmp_path,
            )
        thread.join()


def test_a_full_disk_is_foreseen(site, tmp_path, monkeypatch):
    usage = download.shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"smaller than the 10 bytes free on disk, got"):
        fetch("Good/tiny", base_url=site, directory=tmp_path)


def mirror_of(tmp_path, content, name="tiny"):
    (tmp_path / "mirror" / "MM" / "HB").mkdir(parents=True)
    (tmp_path / "mirror" / "MM" / "HB" / f"{name}.tar.gz").write_bytes(content)
    return tmp_path / "mirror"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (market_archive("other"), "tiny.tar.gz must be an archive with the file tiny/tiny.mtx"),
        (market_archive(content=b"hello"), "tiny.mtx must be a Matrix Market file, got one that"),
        (gzip.compress(b"no tar" * 99), "tiny.tar.gz must be a whole tar archive"),
        (ARCHIVE[:-20], "tiny.tar.gz must be a whole gzip file"),
    ],
    ids=["other file", "other content", "no tar", "cut short"],
)
def test_an_archive_with_something_else_in_it_is_refused(tmp_path, content, text):
    mirror, data = mirror_of(tmp_path, content), tmp_path / "data"
    with pytest.raises(DataError, match=f"^fetch: {text}"):
        fetch("HB/tiny", base_url=str(mirror), directory=data)
    assert leftovers(data) == []


@pytest.mark.parametrize(
    "name", ["tiny", "", "HB/", "/tiny", "HB/../tiny", "../HB/tiny", "HB/a b", "HB/a?b", "a/b/c"]
)
def test_a_bad_suitesparse_name_is_refused(tmp_path, name):
    with pytest.raises(
        ValueError, match=r"^fetch: name must be a SuiteSparse name Group/Name, got"
    ):
        fetch(name, directory=tmp_path)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"name": 3}, TypeError, "name must be a string, got int"),
        ({"base_url": "ftp://x"}, ValueError, "base_url must be an http, https or file URL or a"),
        ({"base_url": "http://[::1"}, ValueError, "base_url must be an http, https or file URL"),
        ({"base_url": "http://"}, ValueError, "base_url must be an http, https or file URL or a"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(tmp_path, change, kind, text):
    arguments = {"name": "HB/tiny", "base_url": "http://127.0.0.1:9", **change}
    with pytest.raises(kind, match=f"^fetch: {text}"):
        fetch(**arguments, directory=tmp_path)


def test_two_fetches_at_once_both_succeed(site, tmp_path):
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(fetch("Good/tiny", base_url=site, directory=tmp_path))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert leftovers(tmp_path) == [results[0]] and results[0].read_bytes() == MARKET
