"""Plan files that someone wrote by hand: a right checksum, and anything behind it.

Each header field and each tensor is removed and replaced by what it must not be. A file is refused
as a plan file, or gives a plan of the matrix that it holds: no crash, no other error, no memory
beyond what a plan of its tensors takes.
"""

from __future__ import annotations

import json
import math
import pickle
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import capability
from sparsetile.plan import files as module
from sparsetile.systems import SYSTEMS
from tests.contracts.cases import random_matrix

ROWS, COLS, N = 30, 20, 4
ROOM = 4 * 2**30  # bytes of address space that a load may reserve
SMALL = 10_000  # columns of A up to which the product is computed

Craft = Callable[[dict[str, Any], dict[str, Tensor]], None]


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A limit on address space: memory that a header asks for is refused, and never committed."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def saved(
    path: Path, system: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Path:
    """A plan with everything that a file can hold: orders, values, a map of entries, widths."""
    given = random_matrix(ROWS, COLS, 0.2).tocoo()
    turned = torch.arange(given.nnz).flip(0)  # out of order, so that there is a map
    edges = torch.stack([torch.from_numpy(given.row), torch.from_numpy(given.col)]).long()[
        :, turned
    ]
    A = (edges.to(device), torch.from_numpy(given.data).float()[turned].to(device), (ROWS, COLS))
    options: dict[str, Any] = {"reorder": "rcm", "reorder_columns": True, "system": system}
    st.plan(A, dtype=dtype, **options).save(path)
    return path


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as held:
        metadata = dict(held.metadata())
        tensors = {name: held.get_tensor(name).clone() for name in held.keys()}  # noqa: SIM118
    return json.loads(metadata["plan"]), tensors, metadata


def crafted(path: Path, out: Path, craft: Craft) -> Path:
    """The file with a change and a checksum that fits it."""
    header, tensors, metadata = read(path)
    craft(header, tensors)
    text = json.dumps(header, sort_keys=True)
    metadata |= {"plan": text, "sha256": module._checksum(tensors, text)}
    safetensors.torch.save_file(tensors, out, metadata=metadata)
    return out


def product_of(path: Path, B: Tensor) -> Tensor:
    """What the file says: its pattern and values, entry by entry, times the B that it takes."""
    header, tensors, _ = read(path)
    rows = header["shape"][0]
    order = tensors.get("column_order")
    B = B if order is None else B[order]
    C = torch.zeros(rows, B.shape[1], dtype=torch.float64)
    of_row = torch.repeat_interleave(torch.arange(rows), tensors["indptr"].diff())
    values = tensors.get("values", torch.ones(of_row.numel())).double()
    return C.index_add_(0, of_row, values[:, None] * B.double()[tensors["indices"].long()])


def check(path: Path) -> str | None:
    """Load; return the text of the refusal, or None if the plan is that of the file."""
    try:
        plan = st.load_plan(path)
    except st.PlanFileError as error:
        text = str(error)
        assert text.startswith("load_plan: path must be a plan file written by sparsetile, got ")
        assert text.endswith(".") and f"({path})" in text
        return text
    assert str(plan.system) in plan.explain() and plan.info["shape"] == list(plan.shape)
    if plan.shape[1] <= SMALL:
        B = torch.randn(plan.shape[1], N, generator=torch.Generator().manual_seed(0))
        given = B.to(plan.device, plan.dtype)
        C = plan @ (given if plan.column_order is None else plan.permute(given))
        tolerance = 1e-5 if plan.dtype in (torch.float32, torch.float64) else 0.1
        torch.testing.assert_close(
            C.double().cpu(), product_of(path, B), rtol=tolerance, atol=tolerance
        )
        plan.T @ torch.ones(plan.shape[0], N, dtype=plan.dtype, device=plan.device)
    map_ = plan._csr.entry_map
    values = torch.ones(plan.nnz if map_ is None else map_.numel(), dtype=plan.dtype)
    plan.update_values(values.to(plan.device))
    return None


# -- every field of the header ------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field, of dicts and lists as of what they hold."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for place in range(len(value)):
            yield from leaves(value[place], (*path, place))


def put(header: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    holder: Any = header
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value


def remove(header: dict[str, Any], path: tuple[Any, ...]) -> None:
    holder: Any = header
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]


NUMBERS = (
    -1, 0, 1, 7, 2**30, 2**31 - 1, 2**31, 2**63, 10**12, 10**400, 0.5, 1e300, math.nan, -math.inf,
)  # fmt: skip
OTHERS = (None, True, "", "nonsense", "\x1b[2J", [], {}, [[]], {"a": {"b": 1}}, ["x", "y", "z"])
# What no value makes a plan of another kind out of: the rest may be anything of its own type.
NEEDED = ("shape", "n", "dtype", "system", "reorder", "deterministic", "device", "widths", "report")


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("system", ["cpu", "dense"])
def test_every_header_field_is_checked(tmp_path, system):
    path = saved(tmp_path / "a.safetensors", system)
    header = read(path)[0]
    out, refused = tmp_path / "b.safetensors", 0
    for where in leaves(header):
        for value in (*NUMBERS, *OTHERS):
            text = check(crafted(path, out, lambda h, _, w=where, v=value: put(h, w, v)))
            refused += text is not None
    assert refused > 200


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_field_is_refused(tmp_path, name):
    path = saved(tmp_path / "a.safetensors", "cpu")
    text = check(crafted(path, tmp_path / "b.safetensors", lambda h, _: h.pop(name)))
    assert text is not None and f"no {name}" in text


@pytest.mark.usefixtures("little_memory")
def test_every_part_of_a_field_may_be_missing(tmp_path):
    path = saved(tmp_path / "a.safetensors", "cpu")
    for where in leaves(read(path)[0]):
        check(crafted(path, tmp_path / "b.safetensors", lambda h, _, w=where: remove(h, w)))


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{", "[" * 100_000], ids=len)
def test_a_header_that_is_no_object_is_refused(tmp_path, text):
    path = saved(tmp_path / "a.safetensors", "cpu")
    _, tensors, metadata = read(path)
    signed = metadata | {"plan": text, "sha256": module._checksum(tensors, text)}
    safetensors.torch.save_file(tensors, path, metadata=signed)
    assert check(path) is not None


# -- every tensor -------------------------------------------------------------------------------


def changes(tensor: Tensor) -> Iterator[Tensor]:
    """What a tensor must not be: of other lengths, types, ranks, and with numbers out of range."""
    flat = tensor.reshape(-1)
    yield flat[:0]
    yield flat[:-1]
    yield torch.cat([flat, flat[-1:]])
    yield flat[:, None]
    yield flat.flip(0)
    yield torch.zeros_like(flat)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
                  torch.complex64, torch.float8_e4m3fn):  # fmt: skip
        yield flat.to(dtype)
    for place in (0, flat.numel() // 2, flat.numel() - 1):
        for number in (-1, 1, 19, 2**30, 2**31 - 1, -(2**31)):
            other = flat.clone()
            other[place] = number
            yield other
    if tensor.dtype is torch.int64:
        for number in (2**31, 2**62, -(2**63)):
            other = flat.clone()
            other[-1] = number
            yield other


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("system", ["cpu", "dense"])
def test_every_tensor_is_checked(tmp_path, system):
    path = saved(tmp_path / "a.safetensors", system)
    held = read(path)[1]
    out, refused = tmp_path / "b.safetensors", 0
    for name, tensor in held.items():
        for other in changes(tensor):
            text = check(
                crafted(path, out, lambda _, t, n=name, o=other: t.update({n: o.contiguous()}))
            )
            refused += text is not None
        check(crafted(path, out, lambda _, t, n=name: t.pop(n)))
    assert refused > 60


@pytest.mark.parametrize("name", ["indptr", "indices"])
def test_a_missing_tensor_is_refused(tmp_path, name):
    path = saved(tmp_path / "a.safetensors", "cpu")
    text = check(crafted(path, tmp_path / "b.safetensors", lambda _, t: t.pop(name)))
    assert text is not None and f"no {name}" in text


def test_a_tensor_that_no_plan_has_is_refused(tmp_path):
    path = saved(tmp_path / "a.safetensors", "cpu")
    extra = {"built.columns": torch.full((120,), 2**30, dtype=torch.int32)}
    text = check(crafted(path, tmp_path / "b.safetensors", lambda _, t: t.update(extra)))
    assert text is not None and "built.columns" in text


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_map_of_entries_that_leaves_some_out_is_refused(tmp_path, repeats):
    path = saved(tmp_path / "a.safetensors", "cpu")

    def craft(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        wrong = tensors["entry_map"].clone()
        wrong[0] = wrong[1]
        tensors["entry_map"] = wrong.repeat(repeats)

    text = check(crafted(path, tmp_path / "b.safetensors", craft))
    assert text is not None and "entry_map" in text


# -- what is said --------------------------------------------------------------------------------


def flipped(name: str) -> Craft:
    return lambda _, tensors: tensors.update({name: tensors[name].flip(0).contiguous()})


TEXTS: dict[str, tuple[Craft, str]] = {
    "field": (lambda h, _: h.pop("n"), "header must be complete, got no n"),
    "type": (lambda h, _: h.update(n="4"), "n must be of type int, got str"),
    "types": (lambda h, _: h.update(widths=3), "widths must be of type list or NoneType, got int"),
    "number": (lambda h, _: h.update(n=-1), "n must be between 0 and 2147483647, got -1"),
    "rows": (
        lambda h, _: h.update(shape=[10**12, 50]),
        "shape[0] must be between 0 and 2147483647, got 1000000000000",
    ),
    "dtype": (lambda h, _: h.update(dtype="int8"), "dtype must be one of ['float16', "),
    "device": (lambda h, _: h.update(device="tpu"), "device must be one of ['cpu', 'cuda'], got"),
    "tensor": (lambda _, t: t.pop("indices"), "tensors must be complete, got no indices"),
    "name": (
        lambda _, t: t.update({"built.columns": torch.zeros(2)}),
        "tensor must be one of ['indptr', 'indices', 'entry_map', 'values', 'perm', ",
    ),
    "columns": (flipped("indices"), "indices must be in canonical order, got columns out of order"),
    "pointers": (flipped("indptr"), "indptr[0] must be 0, got 120"),
    "map": (
        lambda _, t: t["entry_map"].fill_(0),
        "entry_map must be int64 places among all of 120 entries, got others",
    ),
    "perm": (
        lambda _, t: t["perm"].fill_(0),
        "perm must be an int64 permutation of 30 places, got another tensor",
    ),
    "column order": (
        lambda _, t: t.update(column_order=torch.arange(3)),
        "column_order must be an int64 permutation of 20 places, got another tensor",
    ),
    "widths": (
        lambda h, _: h.update(widths=["auto"]),
        "widths must be a system and how it is tuned, got 1 names",
    ),
    "report": (
        lambda h, _: h["report"].update(seconds={"build": "x"}),
        "report must be how a plan was made, got another seconds",
    ),
    "considered": (
        lambda h, _: h["report"].update(considered={"csr": 1.0}),
        "report must be one in which cpu was considered, got ['csr']",
    ),
}


@pytest.mark.parametrize("fault", TEXTS)
def test_a_refusal_names_the_fault(tmp_path, fault):
    craft, text = TEXTS[fault]
    path = crafted(saved(tmp_path / "a.safetensors", "cpu"), tmp_path / "b.safetensors", craft)
    found = check(path)
    assert found is not None and f"got a plan whose {text}" in found
    assert found.endswith(f"({path}). Make the plan again and save it.")


def test_a_header_that_is_no_json_is_named(tmp_path):
    path = saved(tmp_path / "a.safetensors", "cpu")
    _, tensors, metadata = read(path)
    signed = metadata | {"plan": "{", "sha256": module._checksum(tensors, "{")}
    safetensors.torch.save_file(tensors, path, metadata=signed)
    assert "got a header that is no JSON (" in (check(path) or "")


# -- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [name for name in SYSTEMS if "cuda" in SYSTEMS[name].devices])
def test_every_system_of_a_gpu_comes_back_and_its_crafted_files_do_not(tmp_path, name):
    path, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    try:
        saved(path, name, device="cuda", dtype=torch.float16)
    except st.UnsupportedError as error:
        pytest.skip(str(error))
    assert check(path) is None
    for tensor in ("indptr", "indices", "perm", "column_order", "entry_map"):
        for number in (2**30, -1):

            def craft(_: object, held: dict[str, Tensor], at: str = tensor, to: int = number):
                held[at][3] = to

            assert check(crafted(path, out, craft)) is not None
    assert check(crafted(path, out, lambda h, _: h.update(shape=[10**12, COLS]))) is not None


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or capability(0) != (9, 0),
    reason="needs a Hopper GPU",
)
@pytest.mark.parametrize("how", ["save", "pickle"])
def test_a_plan_in_fp8_comes_back(tmp_path, how):
    kept = torch.zeros(128, 128, device="cuda")
    kept[:64, 64:] = torch.randn(64, 64, device="cuda")
    plan = st.plan(kept.to_sparse_csr(), 64, dtype=torch.float8_e4m3fn, system="bcsr")
    if how == "save":
        plan.save(tmp_path / "a.safetensors")
        again = st.load_plan(tmp_path / "a.safetensors")
    else:
        again = pickle.loads(pickle.dumps(plan))
    B = torch.randn(128, 64, device="cuda").to(torch.float8_e4m3fn)
    assert again.dtype is plan.dtype and torch.equal(again @ B, plan @ B)
