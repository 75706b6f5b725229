"""The application: registers the commands, and turns every error into one line and an exit code."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from sparsetile.check.extras import MissingPackageError
from sparsetile.cli import (
    bench,
    cache,
    compile,
    data,
    doctor,
    inspect,
    partition,
    plan,
    report,
    run,
    systems,
    tune,
    verify,
)
from sparsetile.cli.console import note, print_text, usable_streams
from sparsetile.core.errors import CompileError, UnsupportedError
from sparsetile_command.interrupts import INTERRUPTED, STOPPED, interruptible

__all__ = ["app", "main"]

FAILED, USAGE = 1, 2

app = typer.Typer(
    name="sparsetile",
    help="Sparse x dense matrix products: run, check and time them, and look inside.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("doctor")(doctor.doctor)
app.command("systems")(systems.systems)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("partition")(partition.partition)
app.command("compile")(compile.compile_kernels)
app.command("verify")(verify.verify)
app.command("cache")(cache.cache)
app.command("tune")(tune.tune)
app.command("bench")(bench.bench)
app.command("report")(report.report)
app.add_typer(data.app, name="data")


class _Options:
    """The options before the command's name."""

    traceback = False


class _Lines(logging.Handler):
    """Log lines to the current stderr, so that progress bars are redrawn below them."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"sparsetile: {record.getMessage()}")


@app.callback(invoke_without_command=True)
def _before(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No log lines, only errors on stderr.")
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from, for bug reports.")
    ] = False,
) -> None:
    _Options.traceback = show_traceback
    if quiet:
        logging.getLogger("sparsetile").setLevel(logging.ERROR)
    if version:
        import sparsetile

        print_text(sparsetile.__version__)
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        note(context.get_help())
        raise typer.Exit(USAGE)


def _one_line(error: BaseException) -> str:
    """Return an error's text on one line; lists of reasons are joined by semicolons."""
    head, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return f"{head} {'; '.join(rest)}".strip()


def _is_usage_error(error: Exception) -> bool:
    # Releases of typer differ in where the base class of their own errors lives.
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _report(error: Exception) -> int:
    """Print the error to stderr; return the exit code."""
    if _Options.traceback:
        traceback.print_exception(error)
    if _is_usage_error(error):
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "sparsetile"
        text = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
        note(f"sparsetile: error: {text}. Try `{where} --help`.")
        return USAGE
    if isinstance(error, CompileError):
        note(f"sparsetile: error: {error}")
        return FAILED
    if _out_of_memory(error):
        note(f"sparsetile: error: not enough memory here: {_one_line(error)}")
        return USAGE
    expected = (ValueError, TypeError, OSError, UnsupportedError, MissingPackageError)
    if isinstance(error, expected):
        note(f"sparsetile: error: {_one_line(error)}")
        return USAGE
    hint = "" if _Options.traceback else " Add --traceback before the command for a bug report."
    note(f"sparsetile: error: {type(error).__name__}: {_one_line(error)}{hint}")
    return FAILED


def _out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "allocate memory" in text)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        Words after the program's name; those of this process when None.
    """
    with usable_streams():
        return _run(sys.argv[1:] if arguments is None else list(arguments))


def _run(words: list[str]) -> int:
    log, handler = logging.getLogger("sparsetile"), _Lines()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    _Options.traceback = False
    try:
        with interruptible():
            command = typer.main.get_command(app)
            code = command.main(args=words, prog_name="sparsetile", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        note(STOPPED)
        return INTERRUPTED
    except typer.Abort:
        return FAILED
    except Exception as error:
        return _report(error)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
