"""Today's code was run on a GPU: every part of it, as the committed records say."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.record import RECORD_NAME, ROOT, check_record

from tests.conftest import GPU_TESTS

RESULTS = ROOT / "results"
RECORDS = sorted(RESULTS.glob(f"*/{RECORD_NAME}"))


def test_there_is_a_record_of_the_h200():
    assert (RESULTS / "h200" / RECORD_NAME).is_file(), (
        "run `sparsetile verify` on an H200 and commit results/h200/verify.json"
    )


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_every_record_is_of_today_s_code_whole_and_without_failures(
    path: Path, pytestconfig: pytest.Config
):
    """Whole: it has every GPU test that this run of pytest found, so CI compares them all."""
    assert check_record(path, pytestconfig.stash[GPU_TESTS]) == []
