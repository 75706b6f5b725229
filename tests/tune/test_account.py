"""What comparing all systems may save: from traffic, and from what neighbouring rows share."""

from __future__ import annotations

import pytest
import torch

from sparsetile.core.device import H200
from sparsetile.engines.request import Request
from sparsetile.engines.rows import build as rows_build
from sparsetile.engines.rows.build import entries_per_read
from sparsetile.engines.tiles.hybrid_cost import foreseen_seconds
from sparsetile.engines.tiles.short_cost import predict_short_windows
from sparsetile.formats.units import RowUnits
from sparsetile.intake.csr import CSR
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS
from sparsetile.tune import account, choose_quickly
from tests.contracts.cases import csr_of, random_matrix


def request(csr: CSR, n: int = 512) -> Request:
    return Request(csr, n, torch.float32, Permutation("identity", None), ceilings=H200)


def stacked(alike: int, groups: int = 2000, entries: int = 40) -> CSR:
    """Groups of ``alike`` equal rows."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 50_000, (groups, entries), generator=generator).sort(1).values
    rows += torch.arange(entries)  # distinct columns
    columns = rows.repeat_interleave(alike, 0).flatten().int()
    indptr = torch.arange(0, groups * alike * entries + 1, entries)
    return CSR(indptr, columns, torch.ones(columns.numel()), (groups * alike, 50_100))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch):
    """Windows, entries and columns that a GPU would count."""

    def answer(*counts: int) -> list[int]:
        asked: list[int] = []
        monkeypatch.setattr(RowUnits, "count_shared", lambda *_: asked.append(1) or counts)
        return asked

    return answer


def test_entries_per_read_are_those_of_all_rows_and_counted_once(shared):
    wanted = request(csr_of(random_matrix(300, 200, 0.05)))
    asked = shared(10, 1000, 400)
    for _ in range(2):
        assert entries_per_read(wanted) == wanted.csr.nnz / (wanted.csr.nnz - 600)
    assert len(asked) == 1


def test_entries_per_read_are_not_known_without_a_count_or_entries(shared):
    wanted = request(csr_of(random_matrix(300, 200, 0.05)))
    assert entries_per_read(wanted) is None, "no kernel counts on a host"
    shared(0, 0, 0)
    assert entries_per_read(request(csr_of(random_matrix(300, 200, 0.0)))) is None
    assert entries_per_read(request(csr_of(random_matrix(300, 200, 0.05)), n=8)) is None


@pytest.mark.parametrize("alike", [4, 8])
def test_what_tiles_are_foreseen_to_take_is_near_their_prediction(alike: int):
    csr = stacked(alike)
    assert foreseen_seconds(request(csr), 4.0) == pytest.approx(
        predict_short_windows(request(csr)), rel=0.6
    )


def test_more_sharing_is_foreseen_to_take_less():
    wanted = request(stacked(4))
    times = [foreseen_seconds(wanted, sharing) for sharing in (1.5, 2.0, 3.0, 4.0)]
    assert times == sorted(times, reverse=True)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch):
    """Let the CPU's exact system start quickly as on a GPU, where TF32 is allowed."""
    monkeypatch.setattr(type(SYSTEMS["cpu"]), "quick_on", ("cpu",))
    monkeypatch.setattr(account, "tile_reasons", lambda request: [])

    class _Device:
        type = "cuda"

    def saved(wanted: Request) -> float:
        with monkeypatch.context() as inside:
            inside.setattr(Request, "device", _Device())
            return account._saved_by_tiles(wanted, 1.0)

    return saved


def test_tiles_count_if_rows_share_columns(on_gpu, monkeypatch):
    wanted = request(stacked(4))
    for sharing, saves in ((None, False), (1.2, False), (3.0, True)):
        monkeypatch.setattr(account, "entries_per_read", lambda request, sharing=sharing: sharing)
        assert (on_gpu(wanted) > 0) == saves
    monkeypatch.setattr(account, "tile_reasons", lambda request: ["rounds"])
    assert on_gpu(wanted) == 0, "no tiles where they may not round"


def test_an_account_takes_the_larger_saving(on_gpu, monkeypatch):
    wanted = request(stacked(4))
    found = []
    for saved in (0.0, 1.0):
        monkeypatch.setattr(account, "_saved_by_tiles", lambda *_, saved=saved: saved)
        pair = choose_quickly(wanted, None)
        assert pair is not None
        found.append(pair[1])
    assert found[1].saves == 1.0 and found[1].products < found[0].products


def test_few_products_need_no_count(on_gpu, monkeypatch):
    def refused(*_: object) -> float:
        raise AssertionError("asked for")

    monkeypatch.setattr(account, "_saved_by_tiles", refused)
    assert choose_quickly(request(stacked(4)), 1) is not None


def test_a_build_uses_the_same_count(shared):
    wanted = request(csr_of(random_matrix(300, 200, 0.05)))
    units, _ = rows_build._counted_units(wanted)
    again, _ = rows_build._counted_units(wanted.changed(dtype=torch.float16))
    assert units is again


@pytest.mark.parametrize(("density", "chosen"), [(0.5, "dense"), (0.02, "cpu")])
def test_a_nearly_dense_matrix_takes_what_is_clearly_faster_at_once(
    monkeypatch, density, chosen, constants
):
    monkeypatch.setattr(type(SYSTEMS["cpu"]), "quick_on", ("cpu",))
    monkeypatch.setattr(type(SYSTEMS["dense"]), "quick_on", ("cpu",))
    constants(account, BESIDE_SECONDS=(1.0, 0.0))
    for dense, expected in ((0.7e-5, chosen), (0.9e-5, "cpu")):
        monkeypatch.setattr(SYSTEMS["cpu"], "predict", lambda request: 1e-5)
        monkeypatch.setattr(SYSTEMS["dense"], "predict", lambda request, dense=dense: dense)
        found = choose_quickly(request(csr_of(random_matrix(300, 200, density))), None)
        assert found is not None and found[0].system == expected
