"""Arguments that several commands share, and their conversion for the library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from sparsetile.cli.console import printable
from sparsetile.core.checks import one_of
from sparsetile.core.errors import value_error
from sparsetile.core.files import replacing
from sparsetile.intake.csr import CSR, VALUE_DTYPES
from sparsetile.reorder import REORDERERS

__all__ = [
    "ACTIONS", "DTYPES", "Action", "Data", "Device", "Dtype", "Json", "Matrix", "Reorder",
    "Runs", "SystemName", "Tune", "Width", "check_output", "dtype_of", "load_matrix",
    "resolve_device", "write_output",
]  # fmt: skip

# Actions on files that the library stores.
ACTIONS = ["show", "clear", "path"]
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in VALUE_DTYPES}
AUTO = "auto"

_MATRIX_HELP = (
    "File (.mtx, .mtx.gz, .npz), name within --data, stand-in name such as reddit-like, "
    "or spec such as 'gen:power_law?rows=1e4&nnz=2e5'."
)
Matrix = Annotated[str, typer.Argument(metavar="MATRIX", help=_MATRIX_HELP)]
Matrices = Annotated[list[str], typer.Argument(metavar="MATRIX", help=_MATRIX_HELP)]
Width = Annotated[
    int, typer.Option("-n", "--n", min=1, metavar="N", help="Columns of the dense matrix B.")
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help=f"Type of B and C: {', '.join(DTYPES)}, or auto: float64 if A is, else float32.",
    ),
]
SystemName = Annotated[
    str, typer.Option("--system", metavar="NAME", help="auto, or a name from `sparsetile systems`.")
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto (the GPU if any), cpu, or cuda.")
]
Runs = Annotated[
    int,
    typer.Option(
        "--expected-runs", min=0, metavar="N", help="Products that the plan is made for, about."
    ),
]
Tune = Annotated[
    str, typer.Option("--tune", metavar="HOW", help="Choose the system by model or by measure.")
]
Reorder = Annotated[
    str,
    typer.Option("--reorder", metavar="ORDER", help=f"Row order: auto, {', '.join(REORDERERS)}."),
]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Folder in which names are looked up.")
]
Action = Annotated[
    str, typer.Argument(metavar="[show|clear|path]", help="What to do; show when omitted.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def dtype_of(function: str, name: str, csr: CSR | None = None) -> torch.dtype:
    """Return the torch type called ``name``; for ``auto`` float64 if A is, else float32."""
    if one_of(function, "--dtype", name, [AUTO, *DTYPES]) != AUTO:
        return DTYPES[name]
    double = csr is not None and csr.values is not None and csr.values.dtype is torch.float64
    return torch.float64 if double else torch.float32


def resolve_device(function: str, name: str) -> torch.device:
    """Return the device called ``auto``, ``cpu``, ``cuda`` or ``cuda:1``."""
    available = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if available else "cpu"
    kind, _, index = name.partition(":")
    one_of(function, "--device", kind, ["auto", "cpu", "cuda"])
    if kind == "cpu":
        return torch.device("cpu")
    if not available:
        raise value_error(
            function, "--device", "auto or cpu if torch finds no CUDA GPU", name,
            "Run `sparsetile doctor` to see what is missing",
        )  # fmt: skip
    count = torch.cuda.device_count()
    number = torch.cuda.current_device() if not index else int(index) if index.isdigit() else -1
    if not 0 <= number < count:
        names = [f"cuda:{i}" for i in range(count)]
        raise value_error(function, "--device", f"one of {names}", name, "Choose one of those")
    return torch.device("cuda", number)


def check_output(
    function: str, option: str, path: Path | None, suffixes: Sequence[str] = ()
) -> None:
    """Refuse a path that no file can be written to, before any work is done.

    ``suffixes`` are the endings that the file's name may have; any by default.
    """
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise value_error(
            function, option, f"a file named {' or '.join(suffixes)}", repr(str(path)),
            "Change its name",
        )  # fmt: skip
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise value_error(
            function, option, "a file in a folder that exists", repr(str(path)),
            "Make the folder first",
        )  # fmt: skip


def write_output(path: Path, text: str) -> None:
    """Write a file atomically: an interrupt or a full disk leaves the old one."""
    with replacing(path) as partial:
        partial.write_text(printable(text), encoding="utf-8")


def load_matrix(name: str, data: Path | None) -> CSR:
    """Read or generate the matrix that a MATRIX argument names, on the CPU."""
    from sparsetile.data.catalog import load

    return load(name, data_dir=data)
