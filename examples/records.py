"""Make every file of results/<gpu> again, in calls of about nine minutes. Needs a GPU.

    python examples/records.py --data DIR           # again, until it says that all is made
    python examples/records.py --list               # the commands, and the seconds they should take

Files are made under ``--out`` (default: records). What is there already is not made again, and a
suite that ran out of time goes on with what it lacks. When all is made, compare and move
``records/<gpu>`` to ``results/<gpu>``. DIR holds the matrices of the suites.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BUDGET = 540.0
# A suite needs some seconds to start its workers and read its first matrix.
LEAST = 25.0
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Step:
    """One command and the file it makes; ``seconds`` is what it should take on an H200."""

    name: str
    file: str
    words: tuple[str, ...]
    seconds: int

    @property
    def kind(self) -> str:
        return self.words[0]

    def text(self) -> str:
        """The command as a line of the documentation."""
        line = " ".join(self.words)
        if self.kind == "bench":
            return f"sparsetile {line} --out {self.file} --data DIR"
        if self.kind == "run":
            return f"sparsetile {line} --data DIR > {self.file}"
        return f"python {line} > {self.file}" if self.kind != "verify" else f"sparsetile {line}"


def _bench(file: str, seconds: int, words: str, name: str = "") -> Step:
    stem = file.removesuffix(".jsonl")
    return Step(name or stem, file, ("bench", *words.split()), seconds)


_ORDERS = "--reorder auto,affinity"
_BOTH = f"--systems csr,acc {_ORDERS}"
_EACH = "--systems auto,csr,acc,rsh,wcsr,bcsr,voltrix,half,dense --dtype float32,float16"
# What a kernel's change is judged by comes first. Seconds are those of the committed records; those
# of acc_parts and asyncsparse were cut short, of core-torch and a cold L2 there are none yet, and
# the figure is counted from the number of entries at the pace of the others.
STEPS = (
    Step("verify", "verify.json", ("verify",), 131),
    *(
        Step(tool, "checkers.json", ("verify", "--checker", tool), 78)
        for tool in ("memcheck", "racecheck", "synccheck", "initcheck")
    ),
    _bench(
        "core.jsonl", 85,
        f"core --weights random --systems csr,acc,dense {_ORDERS} --cold",
    ),
    _bench("core.jsonl", 60, f"core --weights random {_BOTH} --dtype float16,bfloat16", "core-16"),
    _bench("core.jsonl", 20, "core --weights random --systems torch-csr,pyg", "core-torch"),
    _bench("ops.jsonl", 25, "core --weights random --systems csr --op transpose", "transpose"),
    _bench("ops.jsonl", 15, "core --weights random --systems csr --reduce max -n 128", "max"),
    _bench("ops.jsonl", 15, "core --weights random --systems csr --reduce mean -n 128", "mean"),
    _bench("ops.jsonl", 35, "core --weights random --systems csr --op sddmm -n 32,128", "sddmm"),
    _bench("large.jsonl", 40, "large --weights random --systems csr -n 128,512"),
    _bench("acc.jsonl", 90, "acc --weights random --systems csr,acc"),
    _bench("acc_parts.jsonl", 60, "acc_parts --weights random"),
    Step("run", "run.json",
         ("run", "PubMed", "bcsstk32", "CoauthorPhysics", "-n", "128", "--weighted", "--json"), 15),
    Step("host-time", "host_time.jsonl", ("examples/host_time.py",), 10),
    _bench("scaling.jsonl", 25, "scaling --weights random --systems csr,acc"),
    _bench("brp.jsonl", 30, "brp --weights random --systems auto,brp --reorder identity"),
    _bench("rsh.jsonl", 60, f"rsh --weights random {_BOTH}"),
    _bench("voltrix.jsonl", 85, f"voltrix {_BOTH}"),
    _bench("asyncsparse.jsonl", 150, "asyncsparse --weights random"),
    _bench(
        "all.jsonl", 165,
        "all --weights random --systems auto,dense --reorder auto --dtype float32,float16 "
        "-n 32,128,512",
    ),
    _bench("generated.jsonl", 120, f"generated --weights random {_EACH}"),
    _bench("hindsight.jsonl", 280, f"all --weights random {_EACH}"),
)  # fmt: skip


def listing() -> str:
    """Return the commands with their seconds, as docs/reference/cli.md has them."""
    lines = [f"{step.seconds:4d} s  {step.text()}" for step in STEPS]
    return "\n".join([*lines, f"{sum(step.seconds for step in STEPS):4d} s  in all"])


def command(step: Step, folder: Path, data: Path, commit: str, left: float) -> list[str]:
    """Return the words to run, with at most ``left`` seconds for what can be cut short."""
    limit = f"{min(left, 3.0 * step.seconds):.0f}"
    words = [sys.executable, *(() if step.kind.endswith(".py") else ("-m", "sparsetile"))]
    words += step.words
    if step.kind == "bench":
        words += ["--time-limit", limit, "--out", str(folder / step.file), "--data", str(data)]
        words += [*(("--commit", commit) if commit else ()), "--json"]
    elif step.kind == "run":
        words += ["--data", str(data)]
    elif step.kind == "verify":
        words += ["--out", str(folder.parent)]
        words += ["--time-limit", limit] if "--checker" in step.words else []
    return words


def complete(step: Step, folder: Path, code: int, printed: str) -> bool:
    """Whether a step that ended so needs no further call; keeps what it printed where that counts.

    Exit code 1 is a finding (a product that was wrong, a test that failed), not a reason to run
    again: it is in the record.
    """
    if code not in (0, 1):
        return False
    if step.kind == "bench":
        try:
            return not json.loads(printed)["not_run"]
        except (ValueError, KeyError):
            return False
    if "--checker" in step.words:
        path = folder / step.file
        return path.is_file() and step.name in json.loads(path.read_text())["checkers"]
    if step.kind == "verify":
        return (folder / step.file).is_file()
    if printed.strip() and code == 0:
        (folder / step.file).write_text(printed)
        return True
    return False


Execute = Callable[[Sequence[str], float], tuple[int, str]]


def execute(words: Sequence[str], left: float) -> tuple[int, str]:
    """Run a command in the checkout: its exit code and what it printed; 124 where time was up."""
    try:
        ended = subprocess.run(
            list(words), cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=left + 30, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    return ended.returncode, ended.stdout


def make(
    folder: Path,
    data: Path,
    *,
    digest: str,
    commit: str = "",
    budget: float = BUDGET,
    run: Execute = execute,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the steps that are not done while time is left.

    Returns 0 when all is made, 1 when a step failed, 2 when the folder is of other kernels, 3 when
    there is more to do.
    """
    begun, failed, waiting = clock(), [], []
    marks = folder / ".made"
    marks.mkdir(parents=True, exist_ok=True)
    code_file = marks / "code"
    if code_file.exists() and code_file.read_text() != digest:
        print(f"{folder} holds records of other kernels; name another --out", file=sys.stderr)
        return 2
    code_file.write_text(digest)
    for step in STEPS:
        if (marks / step.name).exists():
            continue
        left = budget - (clock() - begun)
        # A suite can be cut; what cannot waits for the next call, unless no call is long enough.
        whole = LEAST if step.kind == "bench" else min(float(step.seconds), budget)
        if left < whole:
            waiting.append(step.name)
            continue
        words = command(step, folder, data, commit, left)
        print(f"{step.name}: {left:.0f} s left", file=sys.stderr, flush=True)
        code, printed = run(words, left)
        if complete(step, folder, code, printed):
            (marks / step.name).touch()
        else:
            (waiting if code in (0, 124) else failed).append(step.name)
        if code != 0:
            print(f"{step.name}: exit code {code}", file=sys.stderr, flush=True)
    for word, names in (("failed", failed), ("left for the next call", waiting)):
        if names:
            print(f"{word}: {', '.join(names)}", file=sys.stderr)
    if failed:
        return 1
    print("the same command goes on" if waiting else f"all made: {folder}", file=sys.stderr)
    return 3 if waiting else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of matrix files")
    parser.add_argument("--out", type=Path, default=Path("records"))
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of this call")
    parser.add_argument("--commit", default="", help="commit to record where git is missing")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    asked = parser.parse_args()
    if asked.list:
        print(listing())
        return 0
    import torch

    from sparsetile.check.digest import code_digest
    from sparsetile.check.environment import gpu_slug

    if asked.data is None or not asked.data.is_dir():
        parser.error(f"--data must be an existing folder of matrices, got {asked.data}")
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed; run `sparsetile doctor` to see what is missing")
    folder = asked.out.resolve() / gpu_slug(torch.cuda.get_device_name())
    return make(
        folder, asked.data.resolve(), digest=code_digest(), commit=asked.commit,
        budget=asked.budget,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
