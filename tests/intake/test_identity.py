"""A fingerprint holds while the content does, and says which half of it changed."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from tests.locks import at_once

from sparsetile.intake import as_csr, fingerprint, identity
from sparsetile.intake.identity import _device_digest

EXAMPLE = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 3.0, 0.0, 4.0]])


def edges():
    return torch.tensor([[0, 0, 1], [0, 2, 1]]), torch.tensor([1.0, 2.0, 3.0]), (2, 4)


def parts():
    return torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), torch.tensor([1.0, 2.0, 3.0]), (2, 4)


def numpy_parts():
    return tuple(p.numpy().copy() if isinstance(p, torch.Tensor) else p for p in parts())


def edge_index():
    pyg = pytest.importorskip("torch_geometric")
    return pyg.EdgeIndex([[0, 0, 1], [0, 2, 1]], sparse_size=(2, 4))


def torch_sparse():
    class SparseTensor:
        _parts = parts()

        def csr(self):
            return self._parts[:3]

        def sparse_sizes(self):
            return self._parts[3]

    SparseTensor.__module__ = "torch_sparse.tensor"
    return SparseTensor()


FORMATS = ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")


def scipy_input(name):
    return lambda: sp.csr_array(EXAMPLE.numpy()).asformat(name)


INPUTS = {
    "torch csr": lambda: EXAMPLE.to_sparse_csr(),
    "torch csc": lambda: EXAMPLE.to_sparse_csc(),
    "torch bsr": lambda: EXAMPLE.to_sparse_bsr((1, 2)),
    "torch coo": lambda: EXAMPLE.to_sparse_coo(),
    "edges": edges,
    "parts": parts,
    "numpy parts": numpy_parts,
    "edge index": edge_index,
    "torch_sparse": torch_sparse,
    "canonical": lambda: as_csr(parts()),
    **{f"scipy {name}": scipy_input(name) for name in FORMATS},
}

# Input -> writes that change its values only.
VALUE_WRITES = [
    ("torch csr", lambda A: A.values().mul_(2)),
    ("torch csr", lambda A: A.mul_(2)),
    ("torch csr", lambda A: A.values().__setitem__(0, 9.0)),
    ("torch csr", lambda A: A.values().data.mul_(2)),
    ("torch csr", lambda A: A.values().numpy().__setitem__(0, 9.0)),
    ("torch csc", lambda A: A.values().mul_(2)),
    ("torch bsr", lambda A: A.values().mul_(2)),
    ("torch coo", lambda A: A._values().mul_(2)),
    ("torch coo", lambda A: A.values().mul_(2)),
    ("torch coo", lambda A: A.mul_(2)),
    ("edges", lambda A: A[1].mul_(2)),
    ("edges", lambda A: A[1][1:].mul_(2)),
    ("edges", lambda A: A[1].detach().mul_(2)),
    ("parts", lambda A: A[2].mul_(2)),
    ("numpy parts", lambda A: A[2].__imul__(2)),
    ("torch_sparse", lambda A: A.csr()[2].mul_(2)),
    ("canonical", lambda A: A.values.mul_(2)),
    *[(f"scipy {n}", lambda A: A.data.__imul__(2)) for n in ("csr", "csc", "coo", "bsr", "dia")],
    ("scipy lil", lambda A: A.__setitem__((0, 0), 7.0)),
    ("scipy dok", lambda A: A.__setitem__((0, 0), 7.0)),
]
# Input -> writes that change its pattern.
PATTERN_WRITES = [
    ("torch csr", lambda A: A.col_indices().__setitem__(0, 1)),
    ("torch csr", lambda A: A.crow_indices().__setitem__(1, 3)),
    ("torch csc", lambda A: A.row_indices().__setitem__(0, 1)),
    ("torch csc", lambda A: A.ccol_indices().__setitem__(1, 0)),
    ("torch bsr", lambda A: A.col_indices().fill_(0)),
    ("torch coo", lambda A: A._indices().__setitem__((1, 0), 1)),
    ("torch coo", lambda A: A.add_(torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 4)))),
    ("edges", lambda A: A[0].__setitem__((1, 0), 1)),
    ("parts", lambda A: A[1].__setitem__(0, 1)),
    ("parts", lambda A: A[0].__setitem__(1, 1)),
    ("numpy parts", lambda A: A[1].__setitem__(0, 1)),
    ("edge index", lambda A: A.as_tensor().__setitem__((1, 0), 1)),
    ("torch_sparse", lambda A: A.csr()[1].__setitem__(0, 1)),
    ("canonical", lambda A: A.indices.__setitem__(0, 1)),
    ("scipy csr", lambda A: A.indices.__setitem__(0, 1)),
    ("scipy csc", lambda A: A.indices.__setitem__(0, 1)),
    ("scipy coo", lambda A: A.col.__setitem__(0, 1)),
    ("scipy dia", lambda A: A.offsets.__iadd__(1)),
    ("scipy dia", lambda A: A.data.fill(0)),  # a zero is no entry there
    ("scipy lil", lambda A: A.__setitem__((0, 1), 7.0)),
    ("scipy dok", lambda A: A.__setitem__((0, 1), 7.0)),
]


@pytest.mark.parametrize("name", INPUTS)
def test_an_untouched_matrix_keeps_its_fingerprint(name):
    A = INPUTS[name]()
    first = fingerprint(A)
    assert first is not None
    assert hash(first) == hash(fingerprint(A))
    as_csr(A)
    assert fingerprint(A) == first


@pytest.mark.parametrize(("name", "write"), VALUE_WRITES)
def test_writing_values_changes_the_values_key_alone(name, write):
    A = INPUTS[name]()
    pattern, values = fingerprint(A)
    write(A)
    new_pattern, new_values = fingerprint(A)
    assert new_values != values
    assert new_pattern == pattern
    assert fingerprint(A) == (new_pattern, new_values)


@pytest.mark.parametrize(("name", "write"), PATTERN_WRITES)
def test_writing_indices_changes_the_pattern_key(name, write):
    A = INPUTS[name]()
    pattern, _ = fingerprint(A)
    write(A)
    assert fingerprint(A)[0] != pattern


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_writing_through_the_tensor_a_sparse_matrix_was_built_from_is_noticed(layout):
    indptr, columns, values, shape = parts()
    if layout == "csr":
        A = torch.sparse_csr_tensor(indptr, columns, values, shape)
    else:
        A = torch.sparse_coo_tensor(torch.tensor([[0, 0, 1], [0, 2, 1]]), values, shape)
    pattern, before = fingerprint(A)
    values.mul_(2)
    assert A._version == 0  # torch's own count does not tell
    assert fingerprint(A)[0] == pattern
    assert fingerprint(A)[1] != before


def test_swapping_two_values_is_noticed():
    values = np.array([1.0, 2.0, 4.0, 2.0, 1.0, 8.0])
    A = (np.array([0, 6]), np.arange(6), values, (1, 6))
    before = fingerprint(A)[1]
    values[[0, 2]] = values[[2, 0]]
    assert fingerprint(A)[1] != before


def test_memory_that_numpy_also_writes_is_digested():
    memory = np.array([1.0, 2.0, 3.0])
    indptr, columns, _, shape = parts()
    A = (indptr, columns, torch.from_numpy(memory), shape)
    before = fingerprint(A)
    assert fingerprint(A) == before
    memory[1] = 9.0
    assert fingerprint(A)[1] != before[1]


def test_memory_that_other_processes_write_is_digested():
    indptr, columns, values, shape = parts()
    A = (indptr, columns, values.share_memory_(), shape)
    before = fingerprint(A)
    values.data[1] = 9.0  # as another process would: no count of this process moves
    assert fingerprint(A)[1] != before[1]


@pytest.mark.parametrize("sparse", [False, True])
def test_inference_tensors_without_a_counter_are_digested(sparse):
    with torch.inference_mode():
        A = EXAMPLE.to_sparse_csr() if sparse else parts()
        before = fingerprint(A)
        assert before is not None and fingerprint(A) == before
        (A.values() if sparse else A[2]).mul_(2)
        (A.col_indices() if sparse else A[1]).add_(1)
        after = fingerprint(A)
    assert after[0] != before[0]
    assert after[1] != before[1]


def test_a_new_tensor_at_the_address_of_an_old_one_has_another_fingerprint():
    indptr, columns, _, shape = parts()
    seen = set()
    for scale in range(64):  # each is freed before the next, so addresses come again
        seen.add(fingerprint((indptr, columns, torch.full((3,), float(scale)), shape)))
    assert len(seen) == 64


def test_threads_that_see_a_tensor_first_at_once_get_the_same_fingerprint(monkeypatch):
    together, asked = threading.Barrier(2, timeout=60), threading.local()

    class Late(dict):
        def get(self, key):
            found = super().get(key)
            if not hasattr(asked, "once"):
                asked.once = True
                together.wait()  # both have found nothing
            return found

    monkeypatch.setattr(identity, "_numbers", Late())
    edges = torch.tensor([[0, 1], [1, 0]])
    one, other = at_once(lambda: identity.tensor_key(edges))
    asked.once = True
    assert one == other == identity.tensor_key(edges)


def test_equal_sparse_tensors_share_their_pattern_key():
    assert fingerprint(EXAMPLE.to_sparse_csr())[0] == fingerprint((2 * EXAMPLE).to_sparse_csr())[0]
    assert fingerprint(EXAMPLE.to_sparse_csr()) != fingerprint(EXAMPLE.to_sparse_csc())


def test_the_block_size_is_part_of_the_pattern():
    flat = torch.ones(4, 4)
    tall, wide = flat.to_sparse_bsr((4, 1)), flat.t().contiguous().to_sparse_bsr((4, 2))
    assert fingerprint(tall)[0] != fingerprint(wide)[0]


@pytest.mark.parametrize("name", ["torch csr", "edges", "parts"])
def test_a_fingerprint_does_not_keep_the_matrix_alive(name):
    A = INPUTS[name]()
    watched = [weakref.ref(p) for p in (A if isinstance(A, tuple) else (A,)) if hasattr(p, "dtype")]
    kept = fingerprint(A)
    del A
    gc.collect()
    assert kept is not None
    assert [ref() for ref in watched] == [None] * len(watched)


def test_a_file_is_known_by_place_time_and_size(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"12345")
    before = fingerprint(path)
    assert fingerprint(str(path)) == before
    link = tmp_path / "b.npz"
    link.symlink_to(path)
    assert fingerprint(link) == before
    os.utime(path, ns=(1, 1))
    after = fingerprint(path)
    assert after[0] != before[0] and after[1] != before[1]
    path.write_bytes(b"123456")
    os.utime(path, ns=(1, 1))
    assert fingerprint(path) != after


@pytest.mark.parametrize(
    "A",
    [
        None,
        3,
        torch.ones(2, 2),
        (1, 2),
        (1, 2, (2, 2)),
        "missing.mtx",
        (torch.zeros(2, 1, dtype=torch.int64), None, "3"),
    ],
)
def test_unidentifiable_inputs_have_no_fingerprint(A):
    assert fingerprint(A) is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int32, torch.float64])
def test_the_digest_made_on_the_device_sees_every_element_and_its_place(dtype, device):
    content = torch.arange(101, device=device).to(dtype)
    seen = {_device_digest(content)}
    for at in range(101):
        changed = content.clone()
        changed[at] += 1
        seen.add(_device_digest(changed))
    for at in range(100):
        swapped = content.clone()
        swapped[at], swapped[at + 1] = content[at + 1], content[at]
        seen.add(_device_digest(swapped))
    assert len(seen) == 202
    assert _device_digest(content[:0]) == (0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["torch csr", "torch coo"])
def test_values_of_a_sparse_tensor_on_a_gpu_always_count_as_changed(name):
    A = INPUTS[name]().to("cuda")
    first, second = fingerprint(A), fingerprint(A)
    assert first[0] == second[0]
    assert first[1] != second[1]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.set_sync_debug_mode("error")
        try:
            fingerprint(A)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_edges_without_a_shape_are_identified_without_reading_them():
    edges, weight = torch.tensor([[0, 1], [1, 0]]), torch.ones(2)
    before = fingerprint((edges, weight))
    assert before == fingerprint((edges, weight, None)) != fingerprint((edges, weight, (2, 2)))
    weight.add_(1)
    after = fingerprint((edges, weight))
    assert after[0] == before[0] and after[1] != before[1]
    edges.add_(1)
    assert fingerprint((edges, weight))[0] != before[0]
