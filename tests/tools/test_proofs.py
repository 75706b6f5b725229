"""How old the proofs of a checkout are."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tools.parts import host_digests
from tools.proofs import RELEASE, RELEASE_AS, RELEASE_ON_CPU, ages

from tests.today import digests_of_today


def write(root: Path, name: str, **record: object) -> None:
    path = root / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def test_each_proof_says_its_date_and_what_changed_since(tmp_path: Path):
    now = datetime.now(UTC)
    before, today = (now - timedelta(days=3, minutes=1)).isoformat(), now.isoformat()
    parts = digests_of_today()
    write(tmp_path, "h200/verify", date=today, parts=parts)
    write(tmp_path, "h200/fuzz", date=before, parts={**parts, "brp": "0", "shared": "0"})
    write(tmp_path, "h200/soak", date=before, code_digest="0")
    write(tmp_path, "h200/stress", date="no date", parts=parts)
    entries = {"memcheck": {"date": today}, "racecheck": {"date": before}}
    write(tmp_path, "h200/checkers", checkers=entries, parts=parts)
    packages = {**host_digests(), "dist": "0"}
    write(tmp_path, "cpu/mutations_host", date=before, packages=packages)
    found = {age.name: age for age in ages(tmp_path)}
    on_cpu = [f"cpu/{name}" for name in RELEASE_ON_CPU]
    assert list(found) == [*on_cpu, "h200/verify", *(f"h200/{name}" for name in RELEASE)]
    assert found["cpu/mutations_host"].text == f"{before[:10]}, 3 days old; changed: dist"
    assert found["h200/verify"].text == f"{today[:10]}, of today's code"
    assert found["h200/fuzz"].text == f"{before[:10]}, 3 days old; changed: shared, brp"
    assert found["h200/soak"].text.endswith("changed: some part")
    assert found["h200/checkers"].date == before[:10] and found["h200/checkers"].today
    for name in ("cpu/fuzz", "h200/stress", "h200/mutations"):
        assert found[name].text == "no record yet" and not found[name].today


def test_proofs_as_another_capability_are_those_of_a_folder_of_their_own(tmp_path: Path):
    today = datetime.now(UTC).isoformat()
    write(tmp_path, "h200/verify", date=today, parts=digests_of_today())
    write(tmp_path, "h200/as-sm80/verify", date=today, parts=digests_of_today())
    found = {age.name: age for age in ages(tmp_path)}
    assert list(found)[-len(RELEASE_AS) :] == [f"h200/as-sm80/{name}" for name in RELEASE_AS]
    assert found["h200/as-sm80/verify"].today and not found["h200/as-sm80/fuzz"].today


def test_commits_since_are_counted(tmp_path: Path):
    named = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for _ in range(2):
        words = ["git", *named, "commit", "-q", "--allow-empty", "-m", "Change"]
        subprocess.run(words, cwd=tmp_path, check=True)
    before = datetime.now(UTC) - timedelta(days=3, minutes=1)
    write(tmp_path, "cpu/fuzz", date=before.isoformat(), parts={**digests_of_today(), "acc": "0"})
    found, *_ = ages(tmp_path)
    assert "2 commits and 3 days old; changed: acc" in found.text
