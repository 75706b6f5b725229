"""What records say of a machine: its GPU as a folder, the driver."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sparsetile.check import environment as module
from sparsetile.check.environment import driver_version, gpu_slug


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16gb"),
        ("../..", "gpu"),
    ],
)
def test_a_gpu_s_name_becomes_a_folder(name: str, slug: str):
    assert gpu_slug(name) == slug


@pytest.fixture
def driver(monkeypatch) -> SimpleNamespace:
    """A machine where the driver's tool and the kernel's file say this, or are missing."""
    said = SimpleNamespace(tool=None, file=None)

    def answer(text: str | None) -> str:
        if text is None:
            raise FileNotFoundError("nothing here")
        return text

    monkeypatch.setattr(
        module.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=answer(said.tool))
    )
    monkeypatch.setattr(module.Path, "read_text", lambda path: answer(said.file))
    return said


def test_the_driver_s_version_comes_from_its_own_tool(driver):
    driver.tool = "570.86.15\n570.86.15\n"
    assert driver_version() == "570.86.15"


def test_the_driver_s_version_comes_from_the_kernel_where_the_tool_is_missing(driver):
    driver.file = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\nGCC 13.2.0"
    )
    assert driver_version() == "570.86.15"


def test_no_driver_has_no_version(driver):
    assert driver_version() is None
