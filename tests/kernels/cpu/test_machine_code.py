"""Machine code on disk: a second process loads it without numba, and damage costs a compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparsetile.kernels.cpu import entries, machine_code

# What a process does: one sampled product; then whether numba was imported.
SCRIPT = """
import sys
import torch
from sparsetile.kernels.cpu import api
found = api.sampled_product_of_arrays(
    torch.tensor([0, 1, 3]), torch.tensor([2, 0, 1]), torch.eye(2), torch.arange(6.0).view(3, 2)
)
assert found.tolist() == [4.0, 1.0, 3.0], found
print("numba" in sys.modules)
"""
CODE = ("_ZN5entry", b"\x7fELF machine code\n of it" * 9)


def compiles(folder: Path) -> bool:
    """Whether a process of its own imports numba for a product."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=300,
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip() == "True"


def test_a_second_process_loads_the_code_without_numba_unless_it_is_damaged(tmp_path):
    assert [compiles(tmp_path) for _ in range(2)] == [True, False]
    (code,) = tmp_path.rglob("sddmm-*.o")
    code.write_bytes(code.read_bytes()[:1000])
    assert [compiles(tmp_path) for _ in range(2)] == [True, False]


def test_the_log_says_what_is_compiled(monkeypatch, caplog, environment, tmp_path):
    environment(XDG_CACHE_HOME=tmp_path)
    monkeypatch.setattr(entries, "compile_entry", lambda *key: CODE)
    with caplog.at_level("INFO", logger="sparsetile"):
        machine_code._find(("sddmm", "int64", "int32", "float32"))
        machine_code._find(("sddmm", "int64", "int32", "float32"))  # from the disk
    assert caplog.messages == ["compiling sddmm for this CPU: int64, int32, float32"]


def test_a_folder_that_cannot_be_written_costs_a_compilation(tmp_path):
    (tmp_path / "sparsetile").write_text("in the way")
    assert compiles(tmp_path)


def test_code_is_taken_only_if_every_byte_is_as_written(tmp_path):
    path = tmp_path / "kernel.o"
    machine_code._write(path, *CODE)
    body = path.read_bytes()
    changed = [body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :] for at in range(len(body))]
    for damaged in (*changed, *(body[:length] for length in range(len(body))), body + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"):
            machine_code._read(path)
    path.write_bytes(body)
    assert machine_code._read(path) == CODE


def test_the_oldest_files_are_deleted(tmp_path, constants):
    constants(machine_code, _MOST_FILES=3)
    for number in range(5):
        path = tmp_path / f"{number}.o"
        machine_code._write(path, *CODE)
        os.utime(path, (number, number))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.o", "3.o", "4.o"]


def test_another_source_or_processor_has_another_name(monkeypatch):
    fingerprint = machine_code._fingerprint.__wrapped__
    before = fingerprint()
    assert fingerprint() == before
    with monkeypatch.context() as patch:
        patch.setattr(machine_code.llvm, "get_host_cpu_name", lambda: "another")
        assert fingerprint() != before
    with monkeypatch.context() as patch:
        patch.setattr(machine_code.Path, "read_bytes", lambda path: path.name.encode())
        assert fingerprint() != before


def test_every_source_of_the_code_counts():
    folder = Path(machine_code.__file__).parent
    imported = {
        name.rpartition(".")[2]
        for module in (entries, entries.loops)
        for name in {getattr(each, "__module__", "") for each in vars(module).values()}
        if name.startswith("sparsetile.kernels.cpu.")
    }
    assert imported | {"entries", "loops"} == {Path(name).stem for name in machine_code._SOURCES}
    assert all((folder / name).is_file() for name in machine_code._SOURCES)


def test_two_threads_compile_once(monkeypatch):
    asked = []
    monkeypatch.setattr(machine_code, "_loaded", {})
    monkeypatch.setattr(machine_code, "_find", lambda key: (asked.append(key), b"")[::-1])
    monkeypatch.setattr(machine_code, "_bind", lambda *found: found)
    with ThreadPoolExecutor(4) as pool:
        loaded = [
            each.result()
            for each in [
                pool.submit(machine_code.load_kernel, "sddmm", "int64", "int32", "float32")
                for _ in range(8)
            ]
        ]
    assert len(asked) == 1 and len({id(each) for each in loaded}) == 1
