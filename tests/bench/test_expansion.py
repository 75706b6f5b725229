"""Suites on a machine: names resolve, options narrow, what is left out is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.expansion import Entry, expand
from sparsetile.bench.suites import load_suite
from tests.bench.files import write_matrix, write_suite


@pytest.mark.parametrize("name", ["voltrix", "brp", "rsh", "acc"])
def test_paper_suites_run_without_data_on_stand_ins_and_name_what_is_missing(name: str) -> None:
    found = expand(load_suite(name), data=None, device="cuda")
    assert all(entry.matrix.source == "stand-in" for entry in found.entries)
    assert any("neither in the data folder nor a stand-in" in text for text in found.left_out)


def test_a_real_matrix_is_preferred_to_its_stand_in(tmp_path: Path) -> None:
    write_matrix(tmp_path, "reddit")
    found = expand(load_suite("acc"), data=tmp_path, device="cuda")
    sources = {entry.matrix.name: entry.matrix.source for entry in found.entries}
    assert sources["reddit"] == "file" and "reddit-like" not in sources


def test_baselines_come_before_systems_of_the_same_product(tmp_path: Path) -> None:
    write_matrix(tmp_path, "PubMed")
    found = expand(load_suite("core"), data=tmp_path, device="cuda", n=[32])
    kinds = [entry.kind for entry in found.entries]
    assert kinds == sorted(kinds) and len(set(entry.key for entry in found.entries)) == len(kinds)


def test_asking_for_one_system_brings_the_yardstick_along(tmp_path: Path) -> None:
    write_matrix(tmp_path, "PubMed")
    found = expand(load_suite("core"), data=tmp_path, device="cuda", systems=["csr"], n=[32])
    assert [entry.system for entry in found.entries] == [
        "cusparse-csr1", "cusparse-csr2", "cusparse-csr3", "csr",
    ]  # fmt: skip


def test_a_system_that_is_not_built_is_named_and_the_rest_runs(tmp_path: Path) -> None:
    path = write_suite(
        tmp_path,
        'matrices = ["road"]\nn = [8]\ndevice = "cpu"\nsystems = ["starship", "cpu"]\n'
        '[generate.road]\ngenerator = "road_grid"\nparams = { rows = 100 }\n',
    )
    found = expand(load_suite(path), data=None, device="cpu")
    assert "starship: not built yet" in found.left_out
    assert {entry.system for entry in found.entries} == {"scipy", "torch-csr", "cpu"}


def test_all_takes_every_file_of_the_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_matrix(tmp_path, name)
    (tmp_path / "notes.txt").write_text("no matrix")
    found = expand(load_suite("all"), data=tmp_path, device="cuda")
    assert {entry.matrix.name for entry in found.entries} == {"one", "two"}


def test_narrowing_by_matrix_width_and_type(tmp_path: Path) -> None:
    for name in ("PubMed", "DD"):
        write_matrix(tmp_path, name)
    found = expand(
        load_suite("core"), data=tmp_path, device="cuda",
        n=[7], dtypes=["float16"], matrices=["DD"],
    )  # fmt: skip
    assert {(e.matrix.name, e.n, e.dtype) for e in found.entries} == {("DD", 7, "float16")}


def test_row_orders_multiply_the_systems_that_tell_them_apart(tmp_path: Path) -> None:
    write_matrix(tmp_path, "PubMed")
    found = expand(
        load_suite("core"), data=tmp_path, device="cuda",
        systems=["csr", "dense"], n=[32], orders=["auto", "rcm", "affinity"],
    )  # fmt: skip
    ours = [(e.system, dict(e.config)) for e in found.entries if e.kind == "system"]
    assert ours == [
        ("csr", {}), ("csr", {"reorder": "rcm"}), ("csr", {"reorder": "affinity"}), ("dense", {}),
    ]  # fmt: skip
    assert "dense with reorder=rcm: takes rows as they come" in found.left_out
    assert len({entry.key for entry in found.entries}) == len(found.entries)


def test_a_suite_may_ask_for_row_orders_itself(tmp_path: Path) -> None:
    write_matrix(tmp_path, "one")
    path = write_suite(
        tmp_path, 'matrices = ["one"]\nn = [8]\nsystems = ["csr"]\nreorder = ["rcm"]\n'
    )
    found = expand(load_suite(path), data=tmp_path, device="cuda")
    assert [dict(e.config) for e in found.entries if e.kind == "system"] == [{"reorder": "rcm"}]


def test_a_ladder_keeps_to_its_own_widths_and_types(tmp_path: Path) -> None:
    write_matrix(tmp_path, "one")
    path = write_suite(
        tmp_path,
        'matrices = ["one"]\nn = [8, 16]\ndtypes = ["float32", "float16"]\nsystems = ["csr"]\n'
        '[[ladder]]\nname = "l"\ntitle = "L"\nn = [16]\ndtypes = ["float16"]\n'
        'steps = [{ label = "x", system = "csr", config = { reorder = "rcm" } }]\n',
    )
    steps = [e for e in expand(load_suite(path), data=tmp_path, device="cuda").entries if e.config]
    assert [(e.n, e.dtype) for e in steps] == [(16, "float16")]


def test_the_parts_of_acc_are_measured_on_real_graphs_and_stand_ins() -> None:
    suite = load_suite("acc_parts")
    names = {choice for name in suite.parts[0].matrices for choice in name.split("|")}
    assert {"usroads", "DD", "web-NotreDame", "ogbl-ddi"} <= names
    assert {"yeasth-like", "roadnet-ca-like", "reddit-like", "protein-like"} <= names
    found = expand(suite, data=None, device="cuda", matrices=["protein-like"])
    configs = [dict(e.config) for e in found.entries if e.kind == "system"]
    off = [config.get("ablation") for config in configs]
    assert len(configs) == 11 and {"no-balance", "no-stack", "no-pipeline", "bittcf"} <= set(off)
    assert {"dtc-pipeline", "pipeline", "ibd-gate"} <= set(off)


def test_a_baseline_that_is_not_installed_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_matrix(tmp_path, "PubMed")
    monkeypatch.setattr(type(BASELINES["scipy"]), "package", "no_such_package")
    found = expand(load_suite("cpu"), data=tmp_path, device="cpu", systems=["scipy", "cpu"])
    assert "scipy: no_such_package is not installed" in found.left_out
    assert "scipy" not in {entry.system for entry in found.entries}


def test_a_suite_with_nothing_to_measure_says_why() -> None:
    with pytest.raises(ValueError, match="suite core must be runnable here, got nothing"):
        expand(load_suite("core"), data=None, device="cuda")


def _suite(folder: Path, body: str, ladder: str = "") -> str:
    write_matrix(folder, "one")
    return write_suite(folder, f'matrices = ["one"]\nn = [8]\n{body}\n{ladder}')


def test_a_layout_is_recorded_in_the_configuration_and_in_the_key(tmp_path: Path) -> None:
    body = 'layouts = ["rows", "linear"]\nsystems = ["csr"]\nbaselines = ["torch-dense"]'
    body += '\nyardstick = ["torch-dense"]'
    path = _suite(tmp_path, body)
    found = expand(load_suite(path), data=tmp_path, device="cuda").entries
    assert [(e.system, dict(e.config)) for e in found] == [
        ("torch-dense", {}), ("csr", {}),
        ("torch-dense", {"layout": "linear"}), ("csr", {"layout": "linear"}),
    ]  # fmt: skip
    assert len({e.key for e in found}) == 4
    assert found[2].identity()["config"] == {"layout": "linear"}


def test_baselines_of_row_major_operands_alone_are_named_in_another_layout(tmp_path: Path) -> None:
    path = _suite(tmp_path, 'systems = ["csr"]')
    found = expand(load_suite(path), data=tmp_path, device="cuda", layouts=["linear"])
    assert {e.system for e in found.entries} == {"csr"}
    assert (
        "cusparse-csr1 in float32, layout linear: takes row-major operands, not layout linear"
        in found.left_out
    )


def test_only_the_sum_of_the_plain_product_has_the_layout_of_a_linear_layer(
    tmp_path: Path,
) -> None:
    path = _suite(tmp_path, 'layouts = ["rows", "linear"]\nsystems = ["csr"]')
    found = expand(load_suite(path), data=tmp_path, device="cuda", reduce="max")
    assert {e.config.get("layout") for e in found.entries} == {None}
    said = "csr in float32, layout linear: only the sum of the plain product has this layout"
    assert said in found.left_out


def test_who_does_not_take_fp8_says_what_it_takes(tmp_path: Path) -> None:
    path = _suite(tmp_path, 'systems = ["csr", "bcsr"]\nbaselines = ["torch-dense", "torch-bsr"]')
    found = expand(load_suite(path), data=tmp_path, device="cuda", dtypes=["float8_e4m3fn"])
    assert [(e.system, e.dtype) for e in found.entries] == [
        ("torch-dense", "float8_e4m3fn"), ("bcsr", "float8_e4m3fn"),
    ]  # fmt: skip
    assert "torch-bsr in float8_e4m3fn: does not take float8_e4m3fn" in found.left_out
    reason = next(text for text in found.left_out if text.startswith("csr in float8_e4m3fn: "))
    assert "takes float32" in reason and "bfloat16" in reason


def test_a_part_may_be_held_against_baselines_of_its_own(tmp_path: Path) -> None:
    body = 'systems = ["csr"]\nbaselines = ["torch-dense", "torch-csr"]\nslowest = 0.5\n'
    path = _suite(tmp_path, body + 'yardstick = ["torch-dense", "cusparse-csr1"]')
    found = expand(load_suite(path), data=tmp_path, device="cuda").entries
    assert [e.system for e in found] == ["torch-dense", "torch-csr", "csr"]  # none is added
    assert {e.yardstick for e in found} == {("torch-dense", "cusparse-csr1")}
    assert found[0].identity()["yardstick"] == ["torch-dense", "cusparse-csr1"]
    # What others are held against is timed however long it takes, and so are systems.
    assert [e.slowest for e in found] == [None, 0.5, None]
    narrowed = expand(load_suite(path), data=tmp_path, device="cuda", systems=["csr"])
    assert [e.system for e in narrowed.entries] == ["torch-dense", "csr"]


def test_records_of_the_usual_yardstick_do_not_repeat_it(tmp_path: Path) -> None:
    found = expand(load_suite(_suite(tmp_path, 'systems = ["csr"]')), data=tmp_path, device="cuda")
    assert all("yardstick" not in e.identity() for e in found.entries)


def test_a_step_that_a_system_does_not_have_yet_is_said_and_the_rest_runs(tmp_path: Path) -> None:
    ladder = (
        '[[ladder]]\nname = "l"\ntitle = "L"\nslowest = 0.1\nsteps = [\n'
        '{ label = "x", system = "acc", config = { ablation = "warp9" } },\n'
        '{ label = "y", system = "acc", config = { ablation = "bittcf" } }]\n'
    )
    path = _suite(tmp_path, 'systems = ["csr"]', ladder)
    found = expand(load_suite(path), data=tmp_path, device="cuda")
    assert "ladder l: acc has no warp9 yet" in found.left_out
    steps = [e for e in found.entries if e.config]
    assert [(e.config["ablation"], e.slowest) for e in steps] == [("bittcf", 0.1)]


def test_a_ladder_keeps_to_its_own_matrices_and_to_row_major_operands(tmp_path: Path) -> None:
    write_matrix(tmp_path, "two")
    path = _suite(
        tmp_path,
        'layouts = ["rows", "linear"]\nsystems = ["csr"]\n[[part]]\nmatrices = ["two"]\n',
        '[[ladder]]\nname = "l"\ntitle = "L"\nmatrices = ["t*"]\n'
        'steps = [{ label = "x", system = "csr", config = { reorder = "rcm" } }]\n',
    )
    found = expand(load_suite(path), data=tmp_path, device="cuda").entries
    steps = [(e.matrix.name, dict(e.config)) for e in found if "reorder" in e.config]
    assert steps == [("two", {"reorder": "rcm"})]


def _asyncsparse(tmp_path: Path) -> list[Entry]:
    for name in load_suite("core").parts[0].matrices:
        write_matrix(tmp_path, name)
    return list(expand(load_suite("asyncsparse"), data=tmp_path, device="cuda").entries)


def test_asyncsparse_is_measured_on_the_core_matrices_and_pruned_weights(tmp_path: Path) -> None:
    entries = _asyncsparse(tmp_path)
    core = set(load_suite("core").parts[0].matrices)
    pruned = {e.matrix.name for e in entries} - core
    assert pruned == {f"gate_proj-{share}" for share in (80, 90, 95, 99)}
    wide = [e for e in entries if e.system == "wcsr"]
    assert {(e.n, e.dtype) for e in wide} == {(n, "float32") for n in (256, 512, 1024)}
    assert {e.matrix.name for e in wide} == core
    assert {e.config.get("reorder") for e in wide} == {None, "affinity"}
    assert len(entries) < 1500  # at 0.07 s an entry the whole takes under 150 s


def test_bcsr_is_measured_in_tf32_and_in_blocks_of_three_sizes(tmp_path: Path) -> None:
    real = [e for e in _asyncsparse(tmp_path) if (e.system, e.dtype) == ("bcsr", "float32")]
    assert {e.n for e in real} == {1024} and len({e.matrix.name for e in real}) == 32
    entries = expand(load_suite("asyncsparse_blocks"), data=None, device="cuda").entries
    assert {e.matrix.name for e in entries} == {f"gate_proj-90-of-{b}" for b in (32, 64, 128)}
    assert {(e.system, e.dtype) for e in entries} == {
        (system, dtype) for system in ("bcsr", "torch-dense") for dtype in ("bfloat16", "float32")
    }


def test_pruned_weights_are_measured_in_two_types_and_layouts_up_to_65536(tmp_path: Path) -> None:
    pruned = [e for e in _asyncsparse(tmp_path) if e.matrix.name == "gate_proj-90"]
    plain = [e for e in pruned if "ablation" not in e.config]
    for system in ("bcsr", "torch-dense"):
        found = {
            (e.n, e.dtype, e.config.get("layout", "rows")) for e in plain if e.system == system
        }
        assert found == {(256, "bfloat16", "rows")} | {
            (n, dtype, layout)
            for n in (1024, 4096, 16384, 65536)
            for dtype in ("bfloat16", "float8_e4m3fn")
            for layout in ("rows", "linear")
        }
    others = {(e.system, e.slowest) for e in plain} - {("bcsr", None), ("torch-dense", None)}
    assert others == {("torch-bsr", 0.1)}  # cuSPARSE's CSR takes seconds
    assert {e.yardstick for e in pruned} == {("torch-dense",)}
    steps = {e.config["ablation"] for e in pruned if "ablation" in e.config}
    assert {"opt0", "opt1", "opt2", "opt3", "opt5", "opt6"} <= steps
