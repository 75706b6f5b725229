"""Reports without a browser: what the page and the Markdown hold, and the pictures' arithmetic."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsetile.bench.record import Damage
from sparsetile.bench.report import render_markdown, render_page
from sparsetile.bench.report.pictures import FORMATS, png_mask, spy, tile_stats
from sparsetile.bench.report.svg import Axis, log_ticks
from sparsetile.data.registry import generate
from sparsetile.intake import write_npz
from sparsetile.intake.csr import CSR
from sparsetile.systems import SYSTEMS

from .fakes import a_run, failed, record


def _mask(uri: str) -> np.ndarray:
    """Read back the opacity of a mask."""
    raw = base64.b64decode(uri.partition(",")[2])
    width, height = struct.unpack(">II", raw[16:24])
    start = raw.index(b"IDAT")
    size = struct.unpack(">I", raw[start - 4 : start])[0]
    pixels = np.frombuffer(zlib.decompress(raw[start + 4 : start + 4 + size]), np.uint8)
    return pixels.reshape(height, 1 + 2 * width)[:, 2::2]


def _dense(matrix: np.ndarray) -> CSR:
    A = torch.as_tensor(matrix).to_sparse_csr()
    indices = A.col_indices().to(torch.int32)
    return CSR(A.crow_indices().long(), indices, None, tuple(matrix.shape))  # type: ignore[arg-type]


def test_the_page_needs_no_network_and_names_everything() -> None:
    page = render_page([*a_run(4), failed(matrix="PubMed", system="dense")])
    for address in re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^"\')\s>]+)', page):
        assert address.startswith(("#", "data:", "var(")), address
    assert "https://" not in page and "http://" not in page
    for text in ("Test GPU", "Core: 32 real matrices", "ended by SIGSEGV", "--data DIR"):
        assert text in page


def test_hostile_names_are_escaped() -> None:
    bad = "</script><script>alert(1)</script>"
    page = render_page([record(bad, "csr"), record(bad, "cusparse-csr1", seconds=2e-5)])
    assert "<script>alert" not in page
    body = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert body is not None and json.loads(body.group(1))["rows"][0][1] == bad


def test_published_figures_and_ladders_stand_beside_the_measured() -> None:
    records = []
    for n, seconds in ((256, 1e-5), (512, 0.5e-5)):
        for system in ("voltrix", "cusparse-csr1"):
            spent = seconds if system == "voltrix" else 2e-5
            records.append(record("DD", system, n, spent, suite="voltrix"))
    records.append(
        record("DD", "voltrix", 256, 4e-5, suite="voltrix", config={"ablation": "tma"})
    )  # fmt: skip
    page = render_page(records)
    assert "Beside the published figures" in page and "2.4" in page
    why = "not measured" if "voltrix" in SYSTEMS else "not built yet"
    assert f">{why}</td>" in page  # nothing at N = 1024
    assert f"{why.capitalize()}: + BMat, + multi-tier." in page
    text = render_markdown(records)
    assert "| voltrix | N = 256 | 2.4 | 2.00 |" in text


def test_damaged_lines_are_named_on_the_page() -> None:
    page = render_page([record()], damaged=[Damage("a.jsonl", 7, "not JSON")])
    assert "a.jsonl:7: not JSON" in page


def test_pictures_come_from_the_data_folder(tmp_path: Path) -> None:
    write_npz(tmp_path / "PubMed.npz", generate("road_grid", rows=400))
    with_data = render_page([record("PubMed"), record("Cora")], data=tmp_path)
    assert "data:image/png;base64" in with_data and "16×8" in with_data
    assert "No picture: the file is not in the data folder" in with_data


def test_nothing_to_report_is_an_error() -> None:
    with pytest.raises(ValueError, match="report: FILES must be records of at least one"):
        render_page([])
    with pytest.raises(ValueError, match="report: FILES must be records of at least one"):
        render_markdown([])


def test_a_missing_data_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="report: data must be an existing folder"):
        render_page([record()], data=tmp_path / "none")


def test_markdown_lists_every_loss() -> None:
    records = [
        record("a", "cusparse-csr1", seconds=1e-5),
        record("a", "csr", seconds=2e-5),
        failed(matrix="b", system="csr"),
    ]
    text = render_markdown(records)
    assert "- csr, N = 128, float32: a 0.50" in text
    assert "Failed: b N=128 csr: crash, ended by SIGSEGV" in text


def test_a_spy_picture_keeps_a_single_entry_of_a_large_matrix_visible() -> None:
    indptr = torch.zeros(1_000_001, dtype=torch.int64)
    indptr[500_001:] = 1
    csr = CSR(indptr, torch.tensor([250_000], dtype=torch.int32), None, (1_000_000, 1_000_000))
    mask = _mask(spy(csr, 100))
    assert mask.shape == (100, 100)
    assert np.argwhere(mask).tolist() == [[50, 25]]


def test_a_spy_picture_keeps_the_shape_of_a_rectangle() -> None:
    assert _mask(spy(_dense(np.ones((10, 40))), 20)).shape == (5, 20)


def test_tiles_are_counted_as_the_formats_count_them() -> None:
    dense = np.zeros((32, 40))
    dense[:16, 3::4] = 1  # ten distinct columns in the first window: two condensed tiles
    dense[20, 7] = 1
    found = tile_stats(_dense(dense), "16x8", 16, 8, True)
    assert found.tiles == 3 and found.mean_entries == pytest.approx(161 / 3)
    assert found.fill == pytest.approx((1 + 32 / 128 + 1 / 128) / 3)
    blocks = tile_stats(_dense(dense), "16x8", 16, 8, False)
    assert blocks.tiles == 6  # five blocks of the first window, one of the second


def test_an_empty_matrix_has_no_tiles() -> None:
    for shape in FORMATS:
        assert tile_stats(_dense(np.zeros((5, 5))), *shape).tiles == 0


def test_a_mask_holds_its_shade() -> None:
    assert _mask(png_mask(np.array([[0.0, 1.0], [0.5, 0.0]]))).tolist() == [[0, 255], [127, 0]]


@pytest.mark.parametrize(("low", "high"), [(0.3, 4.0), (1e3, 1e8), (0.9, 1.1), (5.0, 5.5)])
def test_log_ticks_are_few_and_inside(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert len(ticks) <= 12 and all(low * 0.99 <= tick <= high * 1.01 for tick in ticks)


def test_an_axis_is_monotone_and_stays_inside() -> None:
    axis = Axis.fitted([1.0, 100.0], 10, 20, log=True)
    assert 10 < axis.at(1.0) < axis.at(10.0) < axis.at(100.0) < 20
    assert axis.at(1e9) == 20 and axis.at(0.0) == 10
