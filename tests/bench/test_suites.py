"""Suites: every shipped file is sound, names resolve, what is missing is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsetile.bench.expansion import expand
from sparsetile.bench.suites import ORDERS, concerns, load_suite, suite_names
from sparsetile.core.errors import DataError
from sparsetile.data.generators import GENERATORS
from sparsetile.systems import SYSTEMS
from tests.bench.files import write_suite

EXPECTED = [
    "acc", "acc_parts", "all", "asyncsparse", "asyncsparse_blocks", "brp", "core", "cpu",
    "generated", "large", "rsh", "scaling", "voltrix",
]  # fmt: skip


def test_the_suites_are_all_there() -> None:
    assert suite_names() == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_every_suite_loads_and_its_generators_exist(name: str) -> None:
    suite = load_suite(name)
    assert suite.title and suite.about
    for body in suite.generate.values():
        assert body["generator"] in GENERATORS
    for ladder in suite.ladders:
        assert ladder["steps"] and all("label" in step for step in ladder["steps"])
    for item in suite.published:
        assert item["source"] and (item.get("values") or item.get("per_matrix"))


def test_the_cpu_suite_is_compared_with_the_fastest_of_three_at_four_widths() -> None:
    (part,) = load_suite("cpu").parts
    assert part.n == (1, 8, 32, 128)
    assert part.yardstick == part.baselines == ("scipy", "torch-csr", "numba-loop")


def test_core_has_the_32_matrices_and_three_widths() -> None:
    suite = load_suite("core")
    assert len(set(suite.parts[0].matrices)) == 32
    assert suite.parts[0].n == (32, 128, 512)


def test_a_ladder_compares_with_the_step_before_or_with_its_first(tmp_path: Path) -> None:
    path = write_suite(
        tmp_path,
        'matrices = ["one"]\nn = [8]\n'
        '[[ladder]]\nname = "l"\ntitle = "L"\ncompare = "last"\nsteps = []\n',
    )
    with pytest.raises(ValueError) as caught:
        load_suite(path)
    assert str(caught.value).startswith(
        "bench: ladder.compare must be one of ['before', 'first'], got 'last'."
    )


def test_every_step_of_a_built_system_s_ladder_is_an_ablation_it_knows() -> None:
    steps = [
        (step["system"], step["config"]["ablation"])
        for name in EXPECTED
        for ladder in load_suite(name).ladders
        for step in ladder["steps"]
        if "ablation" in step["config"] and step["system"] in SYSTEMS
    ]
    assert {system for system, _ in steps} >= {"acc", "bcsr"}
    unknown = {(s, a) for s, a in steps if a not in SYSTEMS[s].ablations}
    assert not unknown, "a step that is spelled wrong is never measured"


@pytest.mark.parametrize("name", EXPECTED)
def test_every_row_order_of_a_ladder_is_one_that_plans_take(name: str) -> None:
    steps = [step for ladder in load_suite(name).ladders for step in ladder["steps"]]
    orders = {step["config"]["reorder"] for step in steps if "reorder" in step["config"]}
    assert orders <= set(ORDERS), "a step that is spelled wrong is never measured"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n = [8]\n", "suite mine must have matrices, got none"),
        ('matrices = ["a"]\nn = [8]\nwidth = 3\n', "field of suite mine must be one of"),
        ('matrices = ["a"]\nn = [8]\ndtypes = ["int8"]\n', "bench: dtypes must be one of"),
        ('matrices = ["a"]\nn = [8]\nreorder = ["up"]\n', "bench: reorder must be one of"),
        ("matrices = [", "suite must be a TOML file, got mine.toml"),
        ('matrices = ["a"]\nn = [8]\nlayouts = ["up"]\n', "bench: layouts must be one of"),
        ('matrices = ["a"]\nn = [8]\nyardstick = ["x"]\n', "bench: yardstick must be one of"),
        (
            'matrices = ["a"]\nn = [8]\n[[part]]\nlayout = "linear"\n',
            "field of a part of suite mine must be one of .*, got 'layout'",
        ),
    ],
)
def test_a_bad_suite_file_is_refused_with_the_reason(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises((DataError, ValueError), match=message):
        load_suite(write_suite(tmp_path, text))


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bench: suite must be one of"):
        load_suite("nothing")
    with pytest.raises(ValueError, match=r"suite must be a suite's name or an existing \.toml"):
        load_suite("nothing.toml")
    suite = load_suite("acc")
    with pytest.raises(ValueError, match="bench: systems must be one of"):
        expand(suite, data=None, device="cpu", systems=["starship"])
    with pytest.raises(ValueError, match="data must be an existing folder of matrices"):
        expand(suite, data=tmp_path / "none", device="cpu")
    with pytest.raises(ValueError, match="bench: weights must be one of"):
        expand(suite, data=None, device="cpu", weighted="heavy")
    with pytest.raises(ValueError, match="bench: dtype must be one of"):
        expand(suite, data=None, device="cpu", dtypes=["int8"])
    with pytest.raises(ValueError, match="bench: op must be one of"):
        expand(suite, data=None, device="cpu", op="gemm")
    with pytest.raises(ValueError, match="bench: reorder must be one of"):
        expand(suite, data=None, device="cpu", orders=["up"])
    with pytest.raises(ValueError, match="bench: layout must be one of"):
        expand(suite, data=None, device="cpu", layouts=["up"])


def test_patterns_say_which_matrices_a_ladder_or_a_figure_is_about() -> None:
    assert concerns({}, "DD")
    assert concerns({"matrices": ["gate_proj-*", "D?"]}, "DD")
    assert not concerns({"matrices": ["gate_proj-*"]}, "DD")
    assert not concerns({"without": ["gate_proj-*"]}, "gate_proj-90")
