"""The ``sparsetile`` command before its package is there: importing torch takes seconds.

An interrupt in the middle of an import would be a traceback through torch, or be lost: some modules
catch whatever goes wrong while they are imported. Here it ends the process, with one line.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata, resources

from sparsetile_command.interrupts import INTERRUPTED, STOPPED, interruptible
from sparsetile_command.systems import quick_systems

__all__ = ["HELP_WIDTH", "main", "quick_help"]

# Columns for which help.txt is written.
HELP_WIDTH = 80


def main() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        with interruptible():
            if sys.argv[1:] == ["--version"] and (version := _installed_version()):
                return _printed(version)
            if text := quick_help(sys.argv[1:]) or quick_systems(sys.argv[1:]):
                return _printed(text)
            if sys.argv[1:3] == ["data", "list"]:
                from sparsetile_command.matrices import list_quickly  # numpy takes 0.1 s

                try:
                    if list_quickly(sys.argv[1:]):
                        return 0
                except OSError as error:  # a full disk, a folder that cannot be read
                    print(f"sparsetile: error: {error}", file=sys.stderr)
                    return 2
            if sys.argv[1:3] == ["data", "fetch"]:
                from sparsetile_command.fetch import fetch_quickly  # rich takes 0.1 s

                if (code := fetch_quickly(sys.argv[1:])) is not None:
                    return code
            from sparsetile.cli import main as command

            return command()
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return INTERRUPTED


def _installed_version() -> str:
    """Return what the package's metadata says; "" if it runs from its tree."""
    try:
        return metadata.version("sparsetile")
    except metadata.PackageNotFoundError:
        return ""


def quick_help(words: list[str]) -> str:
    """Return the help that these words ask for, as the command line would print it; "" if they ask
    for something else, or the terminal is too narrow for the stored text."""
    if not words or words[-1] not in ("-h", "--help"):
        return ""
    if shutil.get_terminal_size().columns < HELP_WIDTH:
        return ""
    stored = resources.files(__name__).joinpath("help.txt").read_text(encoding="utf-8")
    asked = " ".join(["$ sparsetile", *words[:-1], "--help"])
    _, found, rest = stored.partition(f"{asked}\n")
    return rest.partition("\n$ ")[0].rstrip("\n") if found else ""


def _printed(text: str) -> int:
    """Write text, also if nobody reads it; return the exit code."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        if not isinstance(error, BrokenPipeError):
            print(f"sparsetile: error: {error}", file=sys.stderr)
            return 2
    return 0
