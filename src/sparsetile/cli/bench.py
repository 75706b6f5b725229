"""``sparsetile bench``: run a suite, or compare two runs."""

from __future__ import annotations

import dataclasses
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sparsetile.cli.console import note, note_some, print_json, print_text
from sparsetile.core.checks import one_of
from sparsetile.core.errors import value_error

if TYPE_CHECKING:
    from sparsetile.bench.figures import Figure
    from sparsetile.bench.suites import Suite

__all__ = ["bench"]

MATRIX_SUFFIXES = (".npz", ".mtx", ".mtx.gz")

_DEVICES = ("auto", "cuda", "cpu")


def _names(texts: list[str] | None) -> list[str]:
    """Split ``--systems csr,dense --systems auto`` into names."""
    return [name for text in texts or [] for name in text.split(",") if name]


def _numbers(texts: list[str] | None) -> list[int]:
    found = []
    for name in _names(texts):
        if not name.isdigit() or int(name) < 1:
            raise value_error(
                "bench", "-n", "whole numbers from 1 up", repr(name), "Write -n 32,128"
            )
        found.append(int(name))
    return found


def _seconds(option: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise value_error("bench", option, "seconds above 0", value, f"Write {option} 120")
    return value


def bench(
    suite: Annotated[
        str | None,
        typer.Argument(
            help="Suite or .toml file (--list shows them), a paper's figure (paper:voltrix/fig9), "
            "or your own matrix file or folder."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of matrix files (.npz, .mtx, .mtx.gz).")
    ] = None,
    systems: Annotated[
        list[str] | None, typer.Option(help="Systems and baselines, comma-separated.")
    ] = None,
    n: Annotated[list[str] | None, typer.Option("-n", help="Widths of B, comma-separated.")] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="float32, float16, bfloat16, float8_e4m3fn; comma-separated."),
    ] = None,
    matrices: Annotated[
        list[str] | None, typer.Option(help="Only these matrices, comma-separated.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="asis, pattern or random.")] = None,
    op: Annotated[str | None, typer.Option(help="spmm, transpose or sddmm.")] = None,
    reduce: Annotated[str | None, typer.Option(help="sum, mean, max or min.")] = None,
    reorder: Annotated[
        list[str] | None,
        typer.Option(
            help="Row orders: auto, identity, rcm, lsh, affinity, locality; comma-separated."
        ),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="rows, linear (B = X.T, C = Y.T); comma-separated.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (the suite's own), cuda or cpu.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Records file; what it holds is not measured again.")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure failed entries again.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds an entry may take.")] = 120.0,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="Seconds the whole run may take; the same command goes on with the rest."
        ),
    ] = None,
    commit: Annotated[str, typer.Option(help="Commit to record if git is missing.")] = "",
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Compare two records files instead of measuring."),
    ] = None,
    list_suites: Annotated[bool, typer.Option("--list", help="List the suites.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Measure a suite of matrices against the best baselines, or compare two runs."""
    if list_suites:
        from sparsetile.bench.suites import load_suite, suite_names

        for name in suite_names():
            print_text(f"{name:12s} {load_suite(name).title}")
        return
    if compare is not None:
        raise typer.Exit(_compare(compare[0], compare[1], as_json))
    narrowed = {
        "systems": _names(systems), "n": _numbers(n), "dtypes": _names(dtype),
        "matrices": _names(matrices), "weighted": weights, "op": op, "reduce": reduce,
        "orders": _names(reorder), "layouts": _names(layout),
    }  # fmt: skip
    if suite is not None and suite.startswith("paper:"):
        from sparsetile.bench.figures import figure

        found = figure(suite).runnable()
        note(f"{found.name}: {found.shows}. The paper: {found.paper}. Why ours differ: {found.why}")
        if found.tool:
            raise typer.Exit(_run_tool(found, data, out))
        suite = found.suite
        narrowed = {key: given or found.options.get(key, given) for key, given in narrowed.items()}
    limit = None if time_limit is None else _seconds("--time-limit", time_limit)
    run = {
        "retry": retry, "timeout": _seconds("--timeout", timeout), "time_limit": limit,
        "commit": commit,
    }  # fmt: skip
    raise typer.Exit(_run(suite, data, device, out, narrowed, run, as_json))


def _run_tool(figure: Figure, data: Path | None, out: Path | None) -> int:
    """Run the tool of a figure, which is part of a checkout and not of the package."""
    if not Path("tools", f"{figure.tool}.py").is_file():
        raise value_error(
            "bench", "SUITE", "a figure of a suite outside a checkout",
            f"{figure.name}, which tools/{figure.tool}.py measures",
            "Run it in the root of a checkout",
        )  # fmt: skip
    path = out or Path(f"sparsetile-{figure.name.replace('/', '-')}.json")
    words = [*figure.arguments, "--out", str(path), *(["--data", str(data)] if data else [])]
    command = [sys.executable, "-m", f"tools.{figure.tool}", *words]
    return subprocess.run(command, check=False).returncode


def _command_line(words: list[str]) -> str:
    """The command as recorded: of absolute paths, which mean nothing elsewhere, the last part."""
    shown = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return shlex.join(["sparsetile", *shown])


def _compare(old: Path, new: Path, as_json: bool) -> int:
    from sparsetile.bench.compare import compare, comparison_lines
    from sparsetile.bench.record import read_records

    files = [read_records(path) for path in (old, new)]
    for _, damaged in files:
        note_some([f"skipped {line}" for line in damaged])
    found = compare(files[0][0], files[1][0])
    if as_json:
        print_json(found.as_dict())
    else:
        print_text("\n".join(comparison_lines(found)))
    return 1 if found.regressions else 0


def _chosen_device(asked: str, suite_device: str) -> str:
    import torch

    one_of("bench", "device", asked, _DEVICES)
    device = suite_device if asked == "auto" else asked
    if device == "cuda" and not torch.cuda.is_available():
        raise value_error(
            "bench", "device", "a CUDA GPU for this suite", "none",
            "Add --device cpu to run it on the CPU, or run the cpu suite",
        )  # fmt: skip
    return device


def _names_matrices(name: str) -> bool:
    from sparsetile.bench.suites import suite_names

    path = Path(name)
    file = path.is_file() and name.endswith(MATRIX_SUFFIXES)
    return file or bool(name and path.is_dir() and name not in suite_names())


def _own_suite(path: Path, data: Path | None, asked_device: str) -> tuple[Suite, Path]:
    """Return what measures a file, or every file of a folder, on the device; and the folder."""
    import torch

    from sparsetile.bench.suites import load_suite

    if data is not None:
        raise value_error(
            "bench", "--data", "omitted with a file or folder of matrices", repr(str(data)),
            "Name one of both",
        )  # fmt: skip
    on_gpu = asked_device != "cpu" and torch.cuda.is_available()
    base = load_suite("all" if on_gpu else "cpu")
    end = next((end for end in MATRIX_SUFFIXES if path.name.endswith(end)), "")
    stem = path.resolve().name.removesuffix(end)
    names = ("*",) if path.is_dir() else (stem,)
    part = dataclasses.replace(base.parts[0], matrices=names)
    own = dataclasses.replace(
        base, name=stem, title=stem, about="", parts=(part,), ladders=(), published=()
    )
    return own, path if path.is_dir() else path.parent


def _run(
    name: str | None, data: Path | None, asked_device: str, out: Path | None,
    narrowed: dict[str, Any], run: dict[str, Any], as_json: bool,
) -> int:  # fmt: skip
    from sparsetile.bench.driver import Options, run_suite
    from sparsetile.bench.expansion import expand
    from sparsetile.bench.record import read_records
    from sparsetile.bench.suites import load_suite, suite_names
    from sparsetile.bench.summary import summary_data, summary_lines

    known = suite_names()
    if name is None:
        raise value_error("bench", "SUITE", f"one of {known}", "nothing", "Name a suite")
    if _names_matrices(name):
        suite, data = _own_suite(Path(name), data, asked_device)
    else:
        if name not in known and not name.endswith(".toml"):
            raise value_error(
                "bench", "suite", f"one of {known}, a matrix file or a folder", repr(name),
                "Choose a suite, or give the path of a file",
            )  # fmt: skip
        suite = load_suite(name)
    device = _chosen_device(asked_device, suite.device)
    expansion = expand(suite, data=data, device=device, **narrowed)
    path = out or Path(f"sparsetile-{suite.name}.jsonl")
    if path.is_dir():
        raise value_error(
            "bench", "--out", "a file for the records", f"the folder {str(path)!r}", "Name a file"
        )
    command = _command_line(sys.argv[1:])
    options = Options(device=device, out=path, command=command, **run)
    try:
        outcome = run_suite(expansion, options, console=Console(stderr=True))
    except KeyboardInterrupt:
        note(f"interrupted: the same command goes on where it stopped ({path} is kept)")
        raise
    keys = {entry.key for entry in expansion.entries}
    written = read_records(path)[0] if path.exists() else []
    records = [record for record in written if record["key"] in keys]
    ends = (expansion.left_out, outcome.troubles, outcome.not_run)
    if as_json:
        print_json(summary_data(records, *ends))
    else:
        print_text("\n".join(summary_lines(records, *ends)).strip())
    note(
        f"{outcome.measured} measured in {outcome.seconds:.0f} s, {outcome.resumed} already in "
        f"{path}"
    )
    if outcome.not_run:
        note(
            f"time limit of {options.time_limit:g} s: {len(outcome.not_run)} entries not run; the "
            "same command goes on with them"
        )
    # A wrong baseline was reported above; it is not a failure of sparsetile.
    ours = (record for record in records if record["kind"] == "system")
    return 1 if any(record["status"] == "wrong" for record in ours) else 0
