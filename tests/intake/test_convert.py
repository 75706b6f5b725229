"""The door itself: what it refuses, where it puts the result, what it does not import."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparsetile.intake import CSR, as_csr

ACCEPTED = (
    "Pass a torch sparse tensor, a scipy or cupyx sparse matrix, a PyG Data, EdgeIndex or "
    "SparseTensor, "
    "(edge_index, weight), (edge_index, weight, shape), (indptr, indices, values, shape), "
    "or a path to .mtx, .mtx.gz or .npz."
)


@pytest.mark.parametrize(
    ("thing", "called"),
    [
        (None, "NoneType"),
        (3, "int"),
        (np.ones((2, 2)), "ndarray"),
        ((1, 2), "a tuple of 2 elements"),
        ([[1, 0], [0, 1]], "a list of 2 elements"),
        (b"a.mtx", "bytes"),
    ],
)
def test_rejects_other_objects_and_lists_the_supported_inputs(thing, called):
    with pytest.raises(TypeError) as refused:
        as_csr(thing)
    assert str(refused.value) == f"plan: A must be a sparse matrix, got {called}. {ACCEPTED}"


def test_a_canonical_matrix_is_returned_as_it_is():
    csr = as_csr(sp.eye_array(3))
    assert as_csr(csr) is csr
    assert as_csr(csr, device="cpu") is csr


def test_errors_begin_with_the_name_of_the_function_called():
    with pytest.raises(TypeError, match=r"^spmm: A must be a sparse matrix, got int"):
        as_csr(1, function="spmm")


def test_the_result_lies_on_the_device_asked_for(device):
    csr = as_csr((torch.tensor([[1, 0], [0, 0]]), torch.ones(2), (2, 2)), device=device)
    parts = (csr.indptr, csr.indices, csr.values, csr.entry_map)
    assert {part.device.type for part in parts} == {device}


def test_rejects_an_invalid_device():
    with pytest.raises(ValueError) as refused:
        as_csr(sp.eye_array(2), device="nowhere")
    assert str(refused.value) == (
        "plan: device must be a torch device, got 'nowhere'. Use 'cpu' or 'cuda'."
    )


def test_reading_imports_no_library_that_the_caller_did_not(interpreter):
    code = (
        "import sys, torch, sparsetile.intake as intake\n"
        "intake.as_csr((torch.tensor([[0], [1]]), None, (2, 2)))\n"
        "intake.fingerprint((torch.tensor([[0], [1]]), None, (2, 2)))\n"
        "foreign = {'torch_geometric', 'torch_sparse', 'cupy', 'cupyx'} & set(sys.modules)\n"
        "assert not foreign, foreign\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = interpreter(code)
    assert done.returncode == 0, done.stderr


def by_hand(**changes: object) -> CSR:
    parts: dict[str, object] = {
        "indptr": torch.tensor([0, 2, 3]),
        "indices": torch.tensor([0, 2, 2], dtype=torch.int32),
        "values": torch.tensor([1.0, 2.0, 3.0]),
        "shape": (2, 3),
    }
    return CSR(**(parts | changes))  # type: ignore[arg-type]


def test_what_was_checked_while_it_was_read_is_not_checked_again():
    given = torch.eye(3).to_sparse_csr()
    for form in (given, given.to_sparse_coo(), given.to_sparse_csc()):
        assert as_csr(form).checked


def test_a_matrix_made_by_hand_is_checked_once():
    given = by_hand()
    found = as_csr(given)
    assert found.checked and not given.checked and as_csr(found) is found
    assert found.indptr is given.indptr and found.values is given.values
    for derived in (
        found.with_values(None), found.transposed(), found.select_rows(torch.tensor([1]))[0]
    ):  # fmt: skip
        assert derived.checked and not by_hand().transposed().checked


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"indptr": torch.tensor([0, 2, 3], dtype=torch.int32)}, TypeError, "A.indptr must be"),
        ({"indptr": [0, 2, 3]}, TypeError, "A.indptr must be a tensor of torch.int64, got list"),
        ({"indices": torch.tensor([0, 2, 2])}, TypeError, "A.indices must be a tensor of torch.i"),
        ({"indices": torch.tensor([0, 3, 2], dtype=torch.int32)}, ValueError, "indices must be"),
        ({"indices": torch.tensor([2, 0, 2], dtype=torch.int32)}, ValueError, "strictly increas"),
        ({"indices": torch.tensor([2, 2, 2], dtype=torch.int32)}, ValueError, "strictly increas"),
        ({"indptr": torch.tensor([0, 2, 4])}, ValueError, r"indptr\[-1\] must"),
        ({"indptr": torch.tensor([0, 3])}, ValueError, "indptr must"),
        ({"values": torch.ones(2)}, ValueError, "values must"),
    ],
)
def test_a_matrix_made_by_hand_that_is_not_canonical_is_refused(changes, kind, text):
    """Its tensors went to kernels as they were: an illegal address on a GPU."""
    with pytest.raises(kind, match=text):
        as_csr(by_hand(**changes))
