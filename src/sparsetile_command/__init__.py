"""The ``sparsetile`` command before its package is there: importing torch takes seconds.

An interrupt in the middle of an import would be a traceback through torch, or be lost: some modules
catch whatever goes wrong while they are imported. Here it ends the process, with one line.
"""

from __future__ import annotations

import sys

from sparsetile_command.interrupts import INTERRUPTED, STOPPED, interruptible

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        with interruptible():
            from sparsetile.cli import main as command

            return command()
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return INTERRUPTED
