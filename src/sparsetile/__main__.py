"""``python -m sparsetile``: the command line."""

from __future__ import annotations

import sys

from sparsetile_command import main

if __name__ == "__main__":
    sys.exit(main())
