"""Parts of the code: which files each has, and whose digests a change of a file changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.digest import PACKAGE, code_digest, code_files
from tools.parts import LAYERS, SHARED, changed_parts, part_digests, part_files

from sparsetile.systems import SYSTEMS
from tests.today import digests_of_today
from tests.tools.test_digest import package as package

CPU_SYSTEM = 'DEVICES = ("cpu",)\n'


def changed(package: Path) -> set[str]:
    """Parts of a copy of the package whose digests are not those of the package."""
    found, today = part_digests(package), digests_of_today()
    return {name for name in {*found, *today} if found.get(name) != today.get(name)}


def edit(path: Path) -> None:
    path.write_text(path.read_text() + ("\nx = 1\n" if path.suffix == ".py" else "\nint x;\n"))


def test_there_is_a_part_for_every_system_of_a_gpu_and_a_shared_one():
    assert set(digests_of_today()) == {
        SHARED,
        LAYERS,
        *(n for n in SYSTEMS if "cuda" in SYSTEMS[n].devices),
    }


def test_every_file_that_counts_is_in_a_part_but_those_of_the_cpu_s_system():
    files = part_files()
    left = set(code_files()) - set().union(*files.values())
    assert left and all(path.is_relative_to(PACKAGE / "systems" / "cpu") for path in left)
    assert not any(files[SHARED] & files[name] for name in files if name != SHARED)


def test_a_copy_has_the_digests_of_the_package(package: Path):
    assert changed(package) == set()


# Files, and the parts that change with them.
USED_BY = {
    "kernels/cuda/windows/spmm_wcsr.cu": "wcsr",
    "kernels/cuda/windows/wcsr.cuh": "wcsr",
    "kernels/cuda/rows/spmm_half.cu": "half",
    "kernels/half.py": "half",
    "systems/voltrix/runner.py": "voltrix",
    "systems/bcsr/tf32_operand.py": "bcsr layers",
    "kernels/cuda/attention/spmm_gat.cu": LAYERS,
    # What two systems use is in both parts.
    "kernels/cuda/windows/spmm_bittcf.cu": "acc wcsr",
    "engines/tiles/tile_runner.py": "acc voltrix wcsr",
    "kernels/cuda/windows/window_sums.cuh": "brp rsh",
    # What code outside the systems uses, and the exact system, which repairs for all.
    "plan/traced/operators.py": SHARED,
    "systems/registry.py": SHARED,
    "engines/rows/runner.py": SHARED,
    "kernels/cuda/rows/spmm_csr.cu": SHARED,
    "kernels/cuda/ptx/element.cuh": SHARED,
    "kernels/cuda/pack/pack_cells.cu": SHARED,
    "formats/cells.py": SHARED,
    "jit/loader.py": SHARED,
    # Systems of the CPU alone.
    "systems/cpu/runner.py": "",
}


def test_a_changed_file_changes_the_parts_that_use_it(package: Path):
    found = {}
    for name in USED_BY:
        before = (package / name).read_text()
        edit(package / name)
        found[name] = changed(package)
        (package / name).write_text(before)
    assert found == {name: set(parts.split()) for name, parts in USED_BY.items()}


def test_a_kernel_that_another_system_begins_to_use_joins_its_part(package: Path):
    runner = package / "systems" / "half" / "runner.py"
    runner.write_text(runner.read_text() + "\nfrom sparsetile.kernels import wcsr\n")
    assert changed(package) == {"half"}
    edit(package / "kernels" / "cuda" / "windows" / "spmm_wcsr.cu")
    assert changed(package) == {"half", "wcsr"}
    before = part_digests(package)["half"]
    edit(package / "kernels" / "cuda" / "windows" / "spmm_wcsr.cu")
    assert part_digests(package)["half"] != before


@pytest.mark.parametrize(
    "line",
    ["from ...kernels import wcsr", "import sparsetile.kernels.wcsr", "SYSTEMS['wcsr'].build(1)",
     "KernelSource.make('windows/spmm_wcsr.cu')",
     "def f():\n    from sparsetile.kernels.wcsr import WCSR"],
)  # fmt: skip
def test_every_way_to_use_a_file_is_followed(package: Path, line: str):
    edit_me = package / "systems" / "half" / "cost.py"
    edit_me.write_text(f"{edit_me.read_text()}\n{line}\n")
    assert package / "kernels" / "cuda" / "windows" / "spmm_wcsr.cu" in part_files(package)["half"]


def test_files_that_move_to_their_system_stay_in_its_part(package: Path):
    kernels = package / "kernels"
    (kernels / "half.py").rename(package / "systems" / "half" / "kernel.py")
    moved = package / "systems" / "half" / "spmm_half.cu"
    (kernels / "cuda" / "rows" / "spmm_half.cu").rename(moved)
    for path in (package / "systems" / "half").glob("*.py"):
        text = path.read_text()
        path.write_text(text.replace("sparsetile.kernels.half", "sparsetile.systems.half.kernel"))
    assert changed(package) == {"half"}
    assert moved in part_files(package)["half"]


def test_a_file_that_nobody_uses_is_shared(package: Path):
    (package / "kernels" / "cuda" / "pack" / "lonely.cu").write_text("int x;\n")
    assert changed(package) == {SHARED}


def test_a_new_system_of_the_cpu_changes_no_part(package: Path):
    folder = package / "systems" / "loops"
    folder.mkdir()
    (folder / "__init__.py").write_text(CPU_SYSTEM)
    (folder / "loops.py").write_text("from sparsetile.kernels.cpu import loops\n")
    assert changed(package) == set() and code_digest(package) != code_digest()


@pytest.mark.parametrize(
    "text",
    [
        CPU_SYSTEM.replace('("cpu",)', '("cpu", "cuda")'),
        CPU_SYSTEM.replace('("cpu",)', "EVERYWHERE"),
        "",
        CPU_SYSTEM + "SPEC = KernelSpec(file='pack/gather_rows.cu')\n",
    ],
)
def test_a_new_system_that_may_run_on_a_gpu_is_a_part_of_its_own(package: Path, text: str):
    (package / "systems" / "loops").mkdir()
    (package / "systems" / "loops" / "__init__.py").write_text(text)
    assert changed(package) == {"loops"}


def test_a_system_that_becomes_exact_on_gpus_is_shared(package: Path):
    path = package / "systems" / "half" / "__init__.py"
    path.write_text(path.read_text() + "EXACT_ON = GPUS\n")
    assert part_files(package)[SHARED] >= {
        path,
        package / "kernels" / "cuda" / "rows" / "spmm_half.cu",
    }


def test_a_record_says_which_parts_changed_since():
    today = digests_of_today()
    assert changed_parts({"parts": today}) == []
    assert changed_parts({"parts": {**today, "acc": "0"}}) == ["acc"]
    assert changed_parts({"parts": {n: d for n, d in today.items() if n != "brp"}}) == ["brp"]
    assert changed_parts({"parts": {**today, "gone": "0"}}) == []
    assert changed_parts({"parts": None}) == list(today)


def test_a_record_with_one_digest_of_all_code_is_of_today_or_of_some_other_day():
    assert changed_parts({"code_digest": code_digest()}) == []
    assert changed_parts({"code_digest": "0"}) == changed_parts({}) == ["some part"]
