"""The ``sparsetile`` command before its package is there: importing torch takes seconds.

An interrupt in the middle of an import would be a traceback through torch, or be lost: some modules
catch whatever goes wrong while they are imported. Here it ends the process, with one line.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata

from sparsetile_command.interrupts import INTERRUPTED, STOPPED, interruptible

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        with interruptible():
            if sys.argv[1:] == ["--version"] and (version := _installed_version()):
                return _printed(version)
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


def _printed(text: str) -> int:
    """Write a line, also if nobody reads it; return the exit code."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
    return 0
