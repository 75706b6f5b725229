from __future__ import annotations

import pytest

from sparsetile.cache import arrays


@pytest.fixture
def planned_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan CSR arrays on the CPU as those of other devices."""
    monkeypatch.setattr(arrays, "UNPLANNED_ON_CPU", False)
