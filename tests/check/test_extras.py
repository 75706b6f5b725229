"""What `import sparsetile` leaves alone, and what happens without the extra [report]."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparsetile.check.extras import MissingPackageError, report_package
from tests.cli.conftest import Cli, assert_refused, cli, folder

__all__ = ["cli", "folder"]  # fixtures

EXTRA = "Run pip install 'sparsetile[report]'."


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib cannot be imported."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "matplotlib":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


@pytest.mark.parametrize("name", ["matplotlib", "matplotlib.figure"])
def test_a_missing_package_names_the_extra(absent: None, name: str):
    package = name.partition(".")[0]
    with pytest.raises(MissingPackageError) as caught:
        report_package("inspect", name)
    assert str(caught.value) == (
        f"inspect: {package} must be installed, got no such package. {EXTRA}"
    )


def test_a_package_that_lacks_something_of_its_own_is_not_called_missing():
    with pytest.raises(ModuleNotFoundError) as caught:
        report_package("inspect", "matplotlib.no_such_module")
    assert not isinstance(caught.value, MissingPackageError)


def test_pictures_are_refused_in_one_line(cli: Cli, absent, tmp_path: Path):
    file = tmp_path / "a.png"
    outcome = cli("inspect", "gen:banded?rows=30&bandwidth=1", "--png", file)
    assert_refused(outcome, "inspect: matplotlib must be installed", EXTRA)
    assert not file.exists()


def test_everything_else_works_without_the_extra(cli: Cli, absent, folder: Path):
    for words in (
        ("inspect", "weighted"),
        ("inspect", "weighted", "--reorder", "rcm"),
        ("run", "weighted", "-n", 8, "--repeats", 2, "--device", "cpu"),
        ("systems",),
    ):
        data = () if words == ("systems",) else ("--data", folder)
        outcome = cli(*words, *data)
        assert outcome.code == 0, outcome.err
