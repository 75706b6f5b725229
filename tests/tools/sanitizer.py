"""A stand-in for compute-sanitizer: its options, log, summary lines and exit codes, and no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

VERSION = "2025.3.1.0 (build 36398880) (public-release)"
GPU = {"name": "NVIDIA H200", "slug": "h200"}
FACTS = {"gpu": GPU, "driver": "580.1", "torch": "2.13.0", "nvrtc": "13.0"}
CLEAN = "========= ERROR SUMMARY: 0 errors"
CLEAN_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"

_PROGRAM = """#!{python}
import json, os, subprocess, sys, time
from pathlib import Path

words = sys.argv[1:]
here = Path(__file__).parent
if words == ["--version"]:
    print("NVIDIA (R) Compute Sanitizer")
    print("Copyright (c) 2020-2025 NVIDIA Corporation")
    print("Version {version}")
    sys.exit(0)
start = words.index("-c") - 1
options, child = words[:start], words[start:]
given = dict(zip(options, options[1:]))
system = child[child.index("--systems") + 1]
called = here / f"called-{{system}}-{{os.getpid()}}.json"
called.write_text(json.dumps([options, child, os.getcwd()]))
script = json.loads((here / "script.json").read_text())
script = script.get(given["--tool"], script.get("any"))
if script.get("sleep"):
    slept = subprocess.Popen(["sleep", "60"])
    (here / ("slept-" + system)).write_text(str(slept.pid))
    slept.wait()
code = script["child_exit"]
if script["real"]:
    code = subprocess.run(child).returncode
elif script["report"] is not None:
    Path(child[5]).write_text(json.dumps(script["report"]))
if script["summary"] is not None:
    log = "========= COMPUTE-SANITIZER\\n" + script["summary"] + "\\n"
    Path(given["--log-file"]).write_text(log)
if script["errors"]:
    code = int(given["--error-exitcode"])
sys.exit(code)
"""


def ran(products: int = 12, failure: str = "") -> dict[str, object]:
    """What the products report of themselves."""
    return {"matrices": ["odd sizes", "wide"], "products": products, "failure": failure}


def how(**changes: object) -> dict[str, object]:
    """How a tool behaves: clean unless told otherwise."""
    clean: dict[str, object] = {
        "report": ran(), "summary": CLEAN, "child_exit": 0, "errors": False, "real": False,
    }  # fmt: skip
    return {**clean, **changes}


def install(folder: Path, **tools: dict[str, object]) -> Path:
    """Write the stand-in into a folder for PATH; ``any`` is for tools that are not named."""
    folder.mkdir(exist_ok=True)
    program = folder / "compute-sanitizer"
    program.write_text(_PROGRAM.format(python=sys.executable, version=VERSION))
    program.chmod(0o755)
    (folder / "script.json").write_text(json.dumps(tools or {"any": how()}))
    return folder
