"""``sparsetile run --against``: other libraries on the same product."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sparsetile.bench.baselines import Scipy
from sparsetile.cli.against import LIBRARIES, pays_from
from tests.cli.conftest import Cli, assert_refused

pytestmark = pytest.mark.usefixtures("no_gpu")

FAST = ("--repeats", 2)


def test_every_library_has_a_line_for_each_width_and_each_product_a_sentence(
    cli: Cli, folder: Path
) -> None:
    outcome = cli(
        "-q", "run", "weighted", "--data", folder, *FAST, "-n", "1,8", "--against",
        "scipy,torch,dense,cusparse",
    )  # fmt: skip
    assert outcome.code == 0 and outcome.err == ""
    lines = [line.split() for line in outcome.out.splitlines()]
    for n in ("1", "8"):
        for library in ("scipy", "torch", "dense"):
            (found,) = [line for line in lines if line[:3] == ["weighted", n, library]]
            assert float(found[5]) > 0 and 0 <= float(found[8]) <= 1
        (absent,) = [line for line in lines if line[:3] == ["weighted", n, "cusparse"]]
        assert " ".join(absent).endswith("does not run on cpu")
        assert f"weighted, N = {n}: " in outcome.out
    assert outcome.out.count("planning (") == 2


def test_json_has_the_same_figures(cli: Cli, folder: Path) -> None:
    rows = cli(
        "run", "weighted", "--data", folder, *FAST, "-n", "4,2", "--against", "scipy,cusparse",
        "--json",
    ).json  # fmt: skip
    assert [row["n"] for row in rows] == [4, 2]
    for row in rows:
        ours, (scipy, cusparse) = row["seconds"], row["against"]
        assert cusparse == {
            "matrix": "weighted", "n": row["n"], "library": "cusparse",
            "reason": "does not run on cpu",
        }  # fmt: skip
        assert scipy["baseline"] == "scipy" and scipy["ok"] and scipy["prepare_seconds"] == 0
        assert scipy["over_sparsetile"] == pytest.approx(scipy["seconds"] / ours)
        planning = row["plan_again_seconds"]
        assert scipy["pays_from"] == pays_from(planning, ours, 0.0, scipy["seconds"])


def test_a_wrong_product_of_another_library_shows_its_error(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Scipy.prepare

    def wrong(self: Scipy, operands):  # type: ignore[no-untyped-def]
        prepared = right(self, operands)
        run = prepared.run
        prepared.run = lambda: run() + 1
        return prepared

    monkeypatch.setattr(Scipy, "prepare", wrong)
    (row,) = cli(
        "run", "weighted", "--data", folder, *FAST, "-n", "4", "--against", "scipy", "--json"
    ).json
    assert row["ok"] and not row["against"][0]["ok"] and row["against"][0]["error"] > 1


def test_reductions_that_no_library_has_are_said_so(cli: Cli, folder: Path) -> None:
    outcome = cli(
        "run", "weighted", "--data", folder, *FAST, "-n", "4", "--reduce", "max", "--against",
        ",".join(LIBRARIES),
    )  # fmt: skip
    assert outcome.code == 0
    assert "N = 4: no other library can compute this product here." in outcome.out


@pytest.mark.parametrize(
    ("planning", "seconds", "preparation", "others", "expected"),
    [
        (1e-3, 1e-5, 0.0, 3e-5, 50), (1e-3, 1e-5, 9e-4, 3e-5, 5), (1e-3, 3e-5, 0.0, 1e-5, None),
        (1e-3, 1e-5, 0.0, 1e-5, None), (1e-3, 1e-5, 2e-3, 1e-5, 1), (1.0, 0.5, 0.0, math.inf, 1),
    ],
)  # fmt: skip
def test_when_a_plan_pays(
    planning: float, seconds: float, preparation: float, others: float, expected: int | None
) -> None:
    assert pays_from(planning, seconds, preparation, others) == expected


@pytest.mark.parametrize("given", ["0", "1,0", "x", "1,,2", "", "-3", "1.5"])
def test_widths_that_are_none_are_refused(cli: Cli, folder: Path, given: str) -> None:
    outcome = cli("run", "weighted", "--data", folder, f"--n={given}")
    assert_refused(outcome, "run: -n must be whole numbers above 0, such as 1,32,128")


def test_a_library_that_is_none_is_refused(cli: Cli, folder: Path) -> None:
    outcome = cli("run", "weighted", "--data", folder, "--against", "scipy,numpy")
    assert_refused(outcome, "run: --against must be")
