"""``sparsetile systems``: what each system can do."""

from __future__ import annotations

import sparsetile
from sparsetile.cli.console import print_text
from sparsetile.cli.options import Json
from sparsetile_command.systems import shown_systems

__all__ = ["systems"]


def systems(as_json: Json = False) -> int:
    """List the systems: where each runs, what it supports, whether it is reproducible."""
    print_text(shown_systems(sparsetile.systems(), as_json))
    return 0
