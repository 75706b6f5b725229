"""Which pairs of Python and torch are tested, and what is said of those that cannot be."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools import versions as module


@pytest.mark.parametrize(
    "versions, wanted",
    [
        (["2.15.0", "2.13.0+cpu", "2.13.0", "2.10.1", "2.10.0", "2.9.1"], ["2.10.0", "2.15.0"]),
        (["2.12.0", "2.9.0"], ["2.12.0"]),
        (["2.9.1", "3.0.0rc1"], []),
        (["3.0.0", "2.11.0"], ["2.11.0", "3.0.0"]),
    ],
)
def test_the_oldest_and_the_newest_supported_torch(versions, wanted):
    assert module.supported(versions) == wanted


def answers(monkeypatch: pytest.MonkeyPatch, **codes: int) -> list[str]:
    """Commands succeed unless their word is in ``codes``; returns those that were run."""
    ran: list[str] = []

    def run(command: Any) -> subprocess.CompletedProcess[str]:
        text = " ".join(map(str, command))
        ran.append(text)
        code = next((c for word, c in codes.items() if f" {word} " in f"{text} "), 0)
        return subprocess.CompletedProcess(command, code, "5 passed in 1.0s\n", "no such wheel\n")

    monkeypatch.setattr(module, "_run", run)
    found = {"python3.11": "/bin/python3.11", "python3.13": "/bin/python3.13"}
    monkeypatch.setattr(module.shutil, "which", found.get)
    monkeypatch.setattr(module, "indexed", lambda python: ["2.15.0", "2.10.0"])
    return ran


def test_every_pair_is_installed_and_tested(monkeypatch, tmp_path: Path, capsys):
    ran = answers(monkeypatch)
    assert module.main(["--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("5 passed") == 4 and out.count("not on this machine") == 2
    assert sum("pytest" in each and " -m pytest " in each for each in ran) == 4
    assert any("torch==2.10.0" in each and "py3.13-torch2.10.0" in each for each in ran)


def test_a_pair_without_wheels_is_said_and_no_failure(monkeypatch, tmp_path: Path, capsys):
    answers(monkeypatch, install=1)
    assert module.main(["--python", "3.11", "--torch", "2.10.0", "--folder", str(tmp_path)]) == 0
    assert "not installed: no such wheel" in capsys.readouterr().out


def test_a_failed_test_is_a_failure(monkeypatch, tmp_path: Path):
    answers(monkeypatch, **{"no:cacheprovider": 1})
    assert module.main(["--python", "3.11", "--torch", "2.10.0", "--folder", str(tmp_path)]) == 1
