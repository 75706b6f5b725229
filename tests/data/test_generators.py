"""What every generator promises, run on all that are registered; then specs."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from sparsetile.data.generators import GENERATORS, STAND_INS, from_spec, generate, parse_spec
from tests.data.matrix_checks import assert_canonical, is_symmetric, same

# A middling size of each; a generator that joins the registry must be added here.
EXAMPLES = {
    "power_law": {"rows": 500, "nnz": 4000},
    "road_grid": {"rows": 1000},
    "molecules": {"count": 40},
    "fem_blocks": {"nodes": 60, "dofs": 3},
    "banded": {"rows": 200, "bandwidth": 7, "density": 0.4},
    "random": {"rows": 90, "cols": 150, "density": 0.05},
    "one_dense_row": {"rows": 90, "cols": 150},
    "one_dense_column": {"rows": 90, "cols": 150},
    "pruned_weights": {"out_features": 64, "in_features": 96, "sparsity": 0.8},
}
EMPTY = {
    "power_law": [{"rows": 0, "nnz": 0}, {"rows": 7, "nnz": 0}, {"rows": 1, "nnz": 0}],
    "road_grid": [{"rows": 0}, {"rows": 1}, {"rows": 9, "mean_degree": 0}],
    "molecules": [{"count": 0}, {"count": 5, "atoms": 1}],
    "fem_blocks": [{"nodes": 0}],
    "banded": [{"rows": 0, "bandwidth": 3}, {"rows": 8, "bandwidth": 2, "density": 0}],
    "random": [
        {"rows": 0, "cols": 5, "nnz": 0},
        {"rows": 5, "cols": 0, "density": 0.5},
        {"rows": 4, "cols": 4, "nnz": 0},
    ],
    "one_dense_row": [{"rows": 0, "cols": 5}, {"rows": 5, "cols": 0}],
    "one_dense_column": [{"rows": 0, "cols": 5}, {"rows": 5, "cols": 0}],
    "pruned_weights": [
        {"out_features": 0, "in_features": 4, "sparsity": 0.5},
        {"out_features": 4, "in_features": 4, "sparsity": 1.0},
        {"out_features": 4, "in_features": 4, "sparsity": 1.0, "method": "magnitude"},
    ],
}
SYMMETRIC = ("power_law", "road_grid", "molecules", "fem_blocks")
names = pytest.mark.parametrize("name", GENERATORS)


def test_every_generator_has_an_example_here():
    assert set(EXAMPLES) == set(EMPTY) == set(GENERATORS)


@names
def test_result_is_a_canonical_pattern(name):
    matrix = generate(name, **EXAMPLES[name])
    assert_canonical(matrix)
    assert matrix.nnz > 0
    assert matrix.values is None


@names
def test_a_seed_gives_the_same_matrix_again(name):
    params = EXAMPLES[name]
    assert same(generate(name, **params, seed=5), generate(name, **params, seed=5))


@names
def test_the_seed_is_0_unless_given(name):
    assert same(generate(name, **EXAMPLES[name]), generate(name, **EXAMPLES[name], seed=0))


@names
def test_another_seed_gives_another_matrix(name):
    params = EXAMPLES[name]
    assert not same(generate(name, **params, seed=1), generate(name, **params, seed=2))


@names
def test_weighted_adds_standard_normal_float32_values_to_the_same_pattern(name):
    pattern = generate(name, **EXAMPLES[name], seed=3)
    weighted = generate(name, **EXAMPLES[name], seed=3, weighted=True)
    assert_canonical(weighted)
    assert same(pattern, weighted.with_values(None))
    values = weighted.values
    assert values is not None and values.dtype == torch.float32
    assert abs(values.mean().item()) < 0.25 and abs(values.std().item() - 1.0) < 0.25


@names
def test_empty_sizes_give_empty_matrices(name):
    for params in EMPTY[name]:
        for weighted in (False, True):
            matrix = generate(name, **params, weighted=weighted)
            if name == "molecules":
                assert matrix.shape[0] == params["count"] * params.get("atoms", 1)
            assert_canonical(matrix)
            assert matrix.nnz == 0, (name, params)


@pytest.mark.parametrize("name", SYMMETRIC)
def test_graphs_and_meshes_are_symmetric(name):
    assert is_symmetric(generate(name, **EXAMPLES[name]))


@names
@pytest.mark.parametrize("bad", [-1, 1.5, float("nan"), "3", True, None, 2**31])
def test_a_bad_size_is_refused(name, bad):
    first = next(iter(EXAMPLES[name]))
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: {first} must be "):
        generate(name, **{**EXAMPLES[name], first: bad})


@names
@pytest.mark.parametrize("bad", [-1, 0.5, "x", None])
def test_a_bad_seed_is_refused(name, bad):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: seed must be "):
        generate(name, **EXAMPLES[name], seed=bad)


def test_generate_refuses_an_unknown_name():
    with pytest.raises(ValueError, match=r"^generate: name must be one of \['power_law', .*'nope'"):
        generate("nope")


def test_generate_refuses_an_unknown_parameter():
    with pytest.raises(ValueError, match=r"^generate: parameter of banded must be one of \['rows'"):
        generate("banded", rows=3, bandwidth=1, wide=2)


def test_generate_names_missing_parameters():
    with pytest.raises(TypeError, match=r"complete for banded, got no \['bandwidth'\]"):
        generate("banded", rows=3)


def test_every_generator_documents_itself():
    for function in GENERATORS.values():
        assert inspect.getdoc(function)


# --- specs ---------------------------------------------------------------------------------------


def test_a_spec_is_the_call_it_spells():
    spec = "gen:power_law?rows=300&nnz=2e3&seed=3&exponent=2.5&symmetric=false&weighted=true"
    called = generate(
        "power_law", rows=300, nnz=2000, seed=3, exponent=2.5, symmetric=False, weighted=True
    )
    assert same(from_spec(spec), called)


def test_a_spec_reads_text_and_optional_parameters():
    name, params = parse_spec(
        "gen:pruned_weights?out_features=8&in_features=8&sparsity=.5&method=magnitude"
    )
    assert name == "pruned_weights"
    assert params == {"out_features": 8, "in_features": 8, "sparsity": 0.5, "method": "magnitude"}
    assert parse_spec("gen:random?rows=4&cols=1_000&nnz=7")[1]["nnz"] == 7


def test_a_spec_needs_no_parameters_where_all_have_defaults():
    assert parse_spec("gen:ddi-like") == ("ddi-like", {})


def test_a_spec_may_name_a_stand_in_and_its_scale():
    matrix = from_spec("gen:yeast-like?scale=0.01&seed=4")
    assert abs(matrix.shape[0] - 0.01 * STAND_INS["yeast-like"].rows) < 25


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("gen:power_lw?rows=3&nnz=2", "generator must be one of .* got 'power_lw'. Did you mean"),
        ("gen:", "generator must be one of .* got ''. Write it as gen:power_law"),
        ("gen:banded?rows=3&bandwith=1", r"parameter of banded must be one of .* got 'bandwith'"),
        ("gen:reddit-like?name=x", r"parameter of reddit-like must be one of \['scale', 'seed'\]"),
        ("gen:banded?rows=three&bandwidth=1", "rows must be a whole number, got 'three'"),
        ("gen:banded?rows=3.5&bandwidth=1", "rows must be a whole number, got '3.5'"),
        ("gen:banded?rows=&bandwidth=1", "rows must be a whole number, got ''"),
        ("gen:banded?rows=inf&bandwidth=1", "rows must be a whole number, got 'inf'"),
        ("gen:banded?rows=3&bandwidth=1&density=x", "density must be a number, got 'x'"),
        ("gen:road_grid?rows=3&weighted=maybe", "weighted must be true or false, got 'maybe'"),
        ("gen:banded?rows=3&bandwidth", "parameter must be key=value, got 'bandwidth'"),
        ("gen:banded?rows=3&rows=4&bandwidth=1", "rows must be given once, got two values"),
        ("gen:banded?rows=3", r"banded's parameters must be complete, got no \['bandwidth'\]"),
    ],
)
def test_a_bad_spec_is_one_clear_error(spec, text):
    with pytest.raises(ValueError, match=f"^from_spec: {text}"):
        from_spec(spec)


def test_a_spec_with_a_value_out_of_range_is_refused_by_its_generator():
    with pytest.raises(ValueError, match=r"^banded: density must be between 0 and 1, got nan"):
        from_spec("gen:banded?rows=3&bandwidth=1&density=nan")


def test_generators_leave_the_global_random_state_alone():
    before = np.random.get_state()[1].copy(), torch.random.get_rng_state()
    for name, params in EXAMPLES.items():
        generate(name, **params, weighted=True)
    assert (np.random.get_state()[1] == before[0]).all()
    assert torch.equal(torch.random.get_rng_state(), before[1])
