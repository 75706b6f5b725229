"""Which systems a GPU runs that is treated as an older one, and whose records are of one."""

from __future__ import annotations

import pytest
from tools.as_capability import capability_of, runs_as

from sparsetile.systems import SYSTEMS


@pytest.mark.parametrize(
    "capability, lacking",
    [
        ((8, 0), {"bcsr", "voltrix", "wcsr"}),
        ((8, 9), {"bcsr", "voltrix", "wcsr"}),
        ((9, 0), set()),
        ((12, 0), {"bcsr", "wcsr"}),
    ],
)
def test_a_gpu_lacks_the_systems_that_need_instructions_of_another(capability, lacking):
    assert {name for name in SYSTEMS if not runs_as(name, capability)} == lacking


@pytest.mark.parametrize(
    "record, capability",
    [
        ({"gpu": {"slug": "h200/as-sm80"}}, (8, 0)),
        ({"gpu": {"slug": "h200/as-sm120"}}, (12, 0)),
        ({"gpu": {"slug": "h200"}}, None),
        ({"gpu": {}}, None),
        ({"cpu": "x86_64"}, None),
    ],
)
def test_the_folder_of_a_record_says_what_its_gpu_was_treated_as(record, capability):
    assert capability_of(record) == capability
