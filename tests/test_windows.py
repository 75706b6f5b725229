"""sparsetile without POSIX: what Windows lacks is not needed for importing it or for a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparsetile.cli import doctor

# Modules and functions that Windows does not have.
_WITHOUT_POSIX = """
import os, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "crypt"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
"""
_CHILD = (
    _WITHOUT_POSIX
    + """
import torch, numpy, scipy.sparse, numba, safetensors.torch, typer, rich  # other people's imports
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hidden())
for name in ("sched_getaffinity", "fork", "getuid", "geteuid", "getloadavg", "uname"):
    if hasattr(os, name):
        delattr(os, name)
import pkgutil, importlib
import sparsetile as st
left = {"sparsetile.__main__", "sparsetile.pyg"}
for found in pkgutil.walk_packages(st.__path__, "sparsetile."):
    if found.name not in left and not found.name.startswith("sparsetile.pyg."):
        importlib.import_module(found.name)
A = scipy.sparse.random_array((50, 40), density=0.1, dtype="float32", format="csr")
B = torch.randn(40, 8)
torch.testing.assert_close(st.spmm(A, B), torch.from_numpy(A.toarray()) @ B)
torch.testing.assert_close(st.plan(A, 8) @ B, torch.from_numpy(A.toarray()) @ B)
print("whole")
"""
)


def test_everything_imports_and_multiplies_without_posix_modules():
    found = subprocess.run(
        [sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0 and found.stdout.strip().endswith("whole"), found.stderr[-2000:]


def test_doctor_says_what_gpu_kernels_need_on_windows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.sys, "platform", "win32")
    found = {each.name: each for each in doctor._gpus()}
    assert found["Windows"].status == "missing"
    assert "GPU products need Linux, also in WSL 2" in found["Windows"].advice
