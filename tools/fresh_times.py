"""Measures products without a plan: the first, a few and many of one matrix, and new ones.

    python -m tools.fresh_times --data DIR --out DIR --part first,counts --time-limit 120

Parts: ``first`` is one product of a new matrix, ``counts`` 1 to 1,000 products of one matrix,
``one`` the kernels of 1, 8 and 16 columns, ``planning`` st.plan itself, ``breakeven`` planning
against what it saves, ``change`` a decoder whose pattern is new at each call, ``host`` the host's
time per call, ``batches`` sampled graphs and compiled steps. Torch, cuSPARSE and PyG are measured
in the same run.

The record ``fresh_times.jsonl`` (or another --record) in the folder of --out has the environment in
its first line, then one line for each figure, for what was skipped and for the seconds of each
part. Ratios above 1 mean that sparsetile is faster. Tables, and the lowest ratios of each part,
come last, and are also in a file of that name and ``.txt``. Parts share the
time limit; what does not fit is skipped and named. Exit code 1 if a figure failed or was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sparsetile.bench.environment import commit, describe_environment
from sparsetile.cli.console import note, print_table, print_text
from tools.fresh_cases import Context, Figures, matrix_names
from tools.fresh_planning import planning
from tools.fresh_products import break_even, counts, first, one
from tools.fresh_training import batches, change, host

__all__ = ["PARTS", "main"]

# Name -> how it is measured, and its share of the time limit.
PARTS: dict[str, tuple[Callable[[Context], None], float]] = {
    "first": (first, 45),
    "change": (change, 30),
    "host": (host, 15),
    "one": (one, 55),
    "planning": (planning, 20),
    "breakeven": (break_even, 75),
    "batches": (batches, 90),
    "counts": (counts, 90),
}
INDEX = {"int32": torch.int32, "int64": torch.int64}


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fresh_times", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of matrix files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--record", default="fresh_times", help="name of the record")
    parser.add_argument("--part", default=",".join(PARTS), help="parts with commas")
    parser.add_argument("--time-limit", type=float, default=400.0, help="seconds in all")
    parser.add_argument(
        "--matrices", default="core", help="core, all, a number of core ones, or names with commas"
    )
    parser.add_argument("--index", choices=INDEX, default="int64", help="type of A's indices")
    parser.add_argument("--commit", default="", help="commit to record if git is missing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes where no matrix is read")
    asked = parser.parse_args(words)
    asked.parts = [name for name in asked.part.split(",") if name]
    unknown = [name for name in asked.parts if name not in PARTS]
    if unknown:
        parser.error(f"--part must be of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if not asked.data.is_dir():
        parser.error(f"--data must be a folder, got {str(asked.data)!r}")
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, none is here. Pass --device cpu")
    return asked


def _summary(figures: Figures, parts: Sequence[str]) -> tuple[str, bool]:
    """Return tables and the lowest of each part, and whether all figures are right."""
    rows = [row for part in parts for row in figures.rows(part)]
    headings = ("part", "group", "figure", "count", "geomean", "lowest")
    with contextlib.redirect_stdout(io.StringIO()) as table:
        print_table(headings, rows, right=("count", "geomean"))
    texts, good = [table.getvalue()], True
    for part in parts:
        problems = figures.problems(part)
        good = good and not any(text.startswith(("failed", "wrong")) for text in problems)
        shown = problems[:20] + [f"and {len(problems) - 20} more"] * (len(problems) > 20)
        spent = [line["seconds"] for line in figures.of(part) if "seconds" in line]
        lowest = [f"  {line}" for line in [*figures.lowest(part), *shown]]
        texts.append("\n".join([f"{part}, {sum(spent):.1f} s, lowest:", *lowest]))
    return "\n".join(texts), good


def main(words: Sequence[str] | None = None) -> int:
    asked = _parse(words)
    begun = time.perf_counter()
    device = torch.device("cuda", 0) if asked.device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    figures = Figures(asked.out / f"{asked.record}.jsonl")
    names = matrix_names(asked.matrices, asked.data)
    environment = describe_environment(asked.device) | {
        "commit": asked.commit or commit(), "index": asked.index, "matrices": len(names)
    }  # fmt: skip
    figures.begin(environment)
    context = Context(device, asked.data, names, figures, INDEX[asked.index], asked.small)
    for place, part in enumerate(asked.parts):
        measure, share = PARTS[part]
        # Time that a part leaves is shared by those after it.
        ahead = sum(PARTS[name][1] for name in asked.parts[place:])
        started = time.perf_counter()
        left = asked.time_limit - (started - begun)
        context.deadline = started + left * share / ahead
        # Only training needs gradients, and it asks for them.
        with torch.set_grad_enabled(part in ("change", "host", "batches")):
            try:
                measure(context)
            except Exception as error:
                context.skip(part, ["the rest"], f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - started
        figures.add({"part": part, "seconds": seconds})
        note(f"fresh_times: {part}: {seconds:.1f} s, {time.perf_counter() - begun:.1f} s in all")
    text, good = _summary(figures, asked.parts)
    (asked.out / f"{asked.record}.txt").write_text(text + "\n")
    print_text(text)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
