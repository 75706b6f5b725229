"""Records of the tools say which code they are of: its digests are taken once for all tests."""

from __future__ import annotations

import pytest

from tests.today import digests_of_today, gpu_tests_of_today
from tools import checkers, fuzz_pool, mutate, parts, record


@pytest.fixture(autouse=True)
def _digests_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/check has the tests of digests; reading the whole package takes longer than these."""
    for module in (parts, checkers, fuzz_pool, mutate, record):
        monkeypatch.setattr(module, "part_digests", digests_of_today)
    monkeypatch.setattr(record, "GpuTests", lambda root: gpu_tests_of_today())
