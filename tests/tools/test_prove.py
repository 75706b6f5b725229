"""One command for all proofs: what it runs, what it brings along, and what it calls fresh."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
import torch
from tools.checkers import PARTIAL_NAME, SCHEMA, TOOLS
from tools.proofs import RELEASE, RELEASE_ON_CPU
from tools.prove import PROOFS, Asked, commands, fresh, lacking, main

from tests.today import digests_of_today
from tools import prove


def checkers(
    folder: Path, *tools: str, errors: int = 0, parts: dict[str, str] | None = None
) -> Path:
    entry = {"date": "2026-01-02T03:04:05+00:00", "errors": errors, "exit": 0, "products": 3}
    record = {
        "schema": SCHEMA, "parts": digests_of_today() if parts is None else parts,
        "checkers": dict.fromkeys(tools, entry),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "checkers.json"
    path.write_text(json.dumps(record))
    return path


def test_tools_without_a_clean_entry_of_today_are_lacking(tmp_path: Path):
    assert lacking(tmp_path / "checkers.json") == list(TOOLS)
    assert lacking(checkers(tmp_path, *TOOLS[:1])) == list(TOOLS[1:])
    assert lacking(checkers(tmp_path, *TOOLS)) == []
    assert lacking(checkers(tmp_path, *TOOLS, errors=1)) == list(TOOLS)
    assert lacking(checkers(tmp_path, *TOOLS, parts={})) == list(TOOLS)


def test_a_record_of_some_tools_is_not_fresh(tmp_path: Path):
    checkers(tmp_path, *TOOLS[:-1])
    assert not fresh("checkers", tmp_path) and not fresh("verify", tmp_path)
    checkers(tmp_path, *TOOLS)
    assert fresh("checkers", tmp_path)
    checkers(tmp_path, *TOOLS, parts={**digests_of_today(), "acc": "0"})
    assert not fresh("checkers", tmp_path)


def test_only_what_is_asked_for_and_not_fresh_is_run(tmp_path: Path):
    checkers(tmp_path, "memcheck", "synccheck")
    asked = Asked(tmp_path, ("fuzz", "stress", "checkers"), 33.0, 44.0, 100.0)
    found = commands(asked, tmp_path)
    assert list(found) == ["fuzz", "stress", "checkers"]
    words = found["checkers"]
    assert words[:3] == [sys.executable, "-m", "tools.verify"]
    assert words[words.index("--checker") + 1] == "racecheck,initcheck"
    assert words[words.index("--time-limit") + 1] == "50", "the limit is for each tool"
    assert found["fuzz"][found["fuzz"].index("--seconds") + 1] == "33"
    assert found["stress"][found["stress"].index("--seconds") + 1] == "44"
    assert int(found["stress"][found["stress"].index("--processes") + 1]) > 1
    checkers(tmp_path, *TOOLS)
    assert list(commands(Asked(tmp_path), tmp_path)) == ["verify", "fuzz", "stress", "soak"]


@pytest.mark.usefixtures("checkout", "facts")
def test_what_results_hold_is_gone_on_with(tmp_path: Path, capsys):
    held = tmp_path / "results" / "h200"
    checkers(held, "memcheck")
    (held / PARTIAL_NAME).write_text("{}")
    out = tmp_path / "out"
    assert main(["--out", str(out), "--only", "checkers", "--list"]) == 0
    assert "racecheck,synccheck,initcheck" in capsys.readouterr().out
    assert (out / "h200" / PARTIAL_NAME).read_text() == "{}"
    (out / "h200" / PARTIAL_NAME).write_text("newer")
    main(["--out", str(out), "--only", "checkers", "--list"])
    assert (out / "h200" / PARTIAL_NAME).read_text() == "newer", "what is there stays"


@pytest.mark.usefixtures("checkout", "facts")
def test_the_exit_code_says_whether_all_is_fresh(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(prove, "make_proofs", lambda asked, folder: checkers(folder, *TOOLS))
    assert main(["--out", str(tmp_path), "--only", "checkers"]) == 0
    assert main(["--out", str(tmp_path), "--only", "checkers,soak"]) == 1
    assert "soak is not fresh" in capsys.readouterr().err


def test_proofs_run_in_order_and_soak_beside_the_checkers(tmp_path: Path, monkeypatch):
    log = tmp_path / "log"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $1 >> {log}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    wanted = {name: [str(program), name] for name in PROOFS}
    monkeypatch.setattr(prove, "commands", lambda asked, folder: wanted)
    prove.make_proofs(Asked(tmp_path), tmp_path)
    lines = log.read_text().splitlines()
    assert lines[:3] == ["verify", "fuzz", "stress"]
    assert sorted(lines[3:]) == ["checkers", "soak"]


@pytest.mark.usefixtures("checkout")
def test_a_release_needs_every_proof_of_today_s_code_and_no_gpu(tmp_path, capsys, constants):
    """Each is shown with its age; CI asks for none of them."""
    whole = {name: [] for name in prove.CHECKS}
    checks = {name: lambda path, name=name: whole[name] for name in whole}
    constants(prove, CHECKS=checks)
    record = {"date": "2026-01-02T03:04:05+00:00", "parts": digests_of_today()}
    on_cpu = [f"cpu/{name}" for name in RELEASE_ON_CPU]
    names = [*on_cpu, "h200/verify", *(f"h200/{name}" for name in RELEASE)]
    for name in names:
        path = tmp_path / "results" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
    assert main(["--release"]) == 0
    assert capsys.readouterr().out.count("2026-01-02, of today's code") == len(names)
    path.write_text(json.dumps({**record, "parts": {**digests_of_today(), "acc": "0", "rsh": "0"}}))
    assert main(["--release"]) == 1
    assert "days old; changed: acc, rsh" in capsys.readouterr().out
    path.unlink()
    assert main(["--release"]) == 1 and "no record yet" in capsys.readouterr().out
    path.write_text(json.dumps(record))
    whole["soak"] = ["soak.json: 3 wrong"]
    assert main(["--release"]) == 1 and "3 wrong" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--only", "verify,luck"]])
@pytest.mark.usefixtures("facts")
def test_an_unknown_proof_is_refused(words, capsys):
    assert main(words) == 2
    assert "--only" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_is_refused(capsys):
    assert main(["--list"]) == 2
    assert "GPU" in capsys.readouterr().err
