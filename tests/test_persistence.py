"""Persistence diagrams of row clouds, against ripser, GUDHI and formulas."""

import warnings

import gudhi
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ripser import ripser
from scipy.spatial.distance import cdist

from topotuner_peft import persistence_diagrams
from topotuner_peft.topology import persistence
from topotuner_peft.topology.persistence import METRICS, SampledRowsWarning


def cloud(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def distances(X, metric):
    """The textbook formulas, in float64 and with no blocks."""
    X = np.asarray(X, dtype=np.float64)
    if metric == "euclidean":
        return cdist(X, X)
    cosine = cdist(X, X, "cosine")
    np.fill_diagonal(cosine, 0)
    return cosine if metric == "cosine" else np.arccos(np.clip(1 - cosine, -1, 1))


def deaths(X, **options):
    (diagram,) = persistence_diagrams(X, **options)
    assert (diagram[:, 0] == 0).all()
    assert np.isinf(diagram[-1, 1])
    assert np.isfinite(diagram[:-1]).all()
    return diagram[:-1, 1]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("shape", [(60, 8), (150, 64), (40, 200)])
def test_dimension_zero_is_what_ripser_and_gudhi_compute(shape, metric):
    X = cloud(*shape)
    matrix = distances(X, metric)
    (found,) = persistence_diagrams(X, metric=metric)
    by_ripser = ripser(matrix, maxdim=0, distance_matrix=True)["dgms"][0]
    tree = gudhi.RipsComplex(distance_matrix=matrix).create_simplex_tree(max_dimension=1)
    tree.compute_persistence()
    by_gudhi = tree.persistence_intervals_in_dimension(0)
    # ripser computes in float32.
    np.testing.assert_allclose(found, by_ripser[np.argsort(by_ripser[:, 1])], rtol=2e-6, atol=2e-7)
    np.testing.assert_allclose(found, by_gudhi[np.argsort(by_gudhi[:, 1])], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("metric", METRICS)
def test_dimension_one_is_what_ripser_computes(metric):
    X = cloud(80, 5)
    _, found = persistence_diagrams(X, metric=metric, dimensions=(0, 1))
    expected = ripser(distances(X, metric), maxdim=1, distance_matrix=True)["dgms"][1]
    assert len(found) == len(expected) > 10
    expected = expected[np.lexsort((expected[:, 1], expected[:, 0]))]
    np.testing.assert_allclose(np.sort(found[:, 1] - found[:, 0]), np.sort(expected[:, 1] - expected[:, 0]), atol=1e-6)
    np.testing.assert_allclose(found[:, 0], expected[:, 0], atol=1e-6)


def test_dimension_one_sees_a_circle_and_two_a_sphere():
    angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    circle = np.column_stack([np.cos(angle), np.sin(angle)])
    (bars,) = persistence_diagrams(circle, metric="euclidean", dimensions=(1,))
    assert len(bars) == 1
    # Born at the side of the 40-gon, dead at the side of the inscribed triangle of 13, 13 and 14 steps.
    np.testing.assert_allclose(bars[0], [2 * np.sin(np.pi / 40), 2 * np.sin(14 * np.pi / 40)], rtol=1e-12)
    octahedron = np.vstack([np.eye(3), -np.eye(3)])
    (bars,) = persistence_diagrams(octahedron, metric="euclidean", dimensions=(2,))
    np.testing.assert_allclose(bars, [[np.sqrt(2), 2]])


def test_dimensions_come_in_the_order_asked_for():
    X = cloud(30, 4)
    one, zero = persistence_diagrams(X, dimensions=(1, 0))
    assert np.isinf(zero[-1, 1])
    assert np.isfinite(one).all()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_one_two_and_three_points(n, metric):
    X = cloud(n, 5)
    zero, one = persistence_diagrams(X, metric=metric, dimensions=(0, 1))
    assert zero.shape == (n, 2)
    assert one.shape == (0, 2)
    pairs = np.sort(distances(X, metric)[np.triu_indices(n, 1)])
    np.testing.assert_allclose(zero[:-1, 1], pairs[: n - 1], atol=1e-12)


def test_a_diagonal_of_1e_9_with_duplicate_rows_gave_twenty_bars():
    # gudhi issue 723: duplicates and a diagonal that is not quite zero. Here the diagonal is zero, always.
    X = np.repeat(cloud(5, 7), 2, axis=0)
    for metric in METRICS:
        found = deaths(X, metric=metric)
        assert len(found) == 9
        assert (found[:5] == 0).all()
        assert (found[5:] > 0.01).all()
    assert len(persistence_diagrams(X, dimensions=(0, 1))[1]) == len(persistence_diagrams(X[::2], dimensions=(1,))[0])


def test_zero_length_bars_of_duplicate_rows_are_kept():
    assert (deaths(np.ones((6, 3))) == 0).all()
    assert len(deaths(np.ones((6, 3)))) == 5


@pytest.mark.parametrize(("metric", "far"), [("cosine", 1.0), ("angular", np.pi / 2)])
def test_rows_of_zeros_are_one_point_orthogonal_to_all(metric, far):
    X = np.vstack([np.zeros((2, 3)), [[1, 0, 0], [1, 0, 0]]])
    np.testing.assert_array_equal(deaths(X, metric=metric), [0, 0, far])
    # Nearer to nothing than an opposite row is: the tree goes through the zeros.
    X = np.array([[1.0, 0], [-1.0, 0], [0, 0]])
    np.testing.assert_array_equal(deaths(X, metric=metric), [far, far])
    # A zero row must not join what is two apart in dimension 1 either.
    persistence_diagrams(np.vstack([cloud(10, 3), np.zeros((2, 3))]), metric=metric, dimensions=(1,))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nan_row_gave_n_infinite_bars_and_no_complaint(bad):
    X = cloud(6, 3)
    X[4, 1] = bad
    with pytest.raises(ValueError, match=r"'model\.layers\.3\.self_attn\.v_proj' holds NaN .* first in row 4"):
        persistence_diagrams(X, name="model.layers.3.self_attn.v_proj")


@pytest.mark.parametrize(
    ("X", "options", "message"),
    [
        (np.ones(5), {}, r"shape \(5,\)"),
        (np.ones((2, 3, 4)), {}, "shape"),
        (np.ones((0, 3)), {}, r"shape \(0, 3\)"),
        (np.ones((3, 0)), {}, r"shape \(3, 0\)"),
        (np.ones((3, 2), dtype=int), {}, "dtype torch.int64"),
        (torch.ones(3, 2, device="meta"), {}, "meta device"),
        (np.ones((3, 2)), {"metric": "manhattan"}, "metric='manhattan'"),
        (np.ones((3, 2)), {"precision": "float16"}, "precision='float16'"),
        (np.ones((3, 2)), {"dimensions": ()}, "dimensions"),
        (np.ones((3, 2)), {"dimensions": (-1,)}, "dimensions"),
        (np.ones((3, 2)), {"block_size": 0}, "block_size"),
    ],
)
def test_bad_input_is_named(X, options, message):
    with pytest.raises(ValueError, match=message):
        persistence_diagrams(X, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_floating_dtype_torch_or_numpy(dtype):
    X = torch.from_numpy(cloud(20, 6)).to(dtype).requires_grad_()
    expected = deaths(X.detach().double().numpy())
    np.testing.assert_array_equal(deaths(X), expected)


def test_the_matrix_stays_as_it_is():
    X = cloud(20, 6)
    before = X.copy()
    for metric in METRICS:
        persistence_diagrams(X, metric=metric, dimensions=(0, 1))
    np.testing.assert_array_equal(X, before)


def squared_chords(found, metric):
    """Deaths as the squared distances that the tree is made of."""
    return {"euclidean": found**2, "cosine": 2 * found, "angular": 2 - 2 * np.cos(found)}[metric]


@pytest.mark.parametrize("metric", METRICS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_death_is_at_least_the_true_one_and_within_the_stated_bound(metric, data):
    n, d = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 60))
    X = cloud(n, d, data.draw(st.integers(0, 2**32 - 1)))
    if data.draw(st.booleans()):  # rows that barely differ
        X = X[:1] + data.draw(st.sampled_from([1e-2, 1e-4, 1e-6])) * X
    true = deaths(X, metric=metric, precision="float64")
    found = deaths(X, metric=metric)
    assert (found >= true - 1e-9 * true).all()
    points = X if metric == "euclidean" else X / np.linalg.norm(X, axis=1, keepdims=True)
    radius = np.linalg.norm(points - points.mean(axis=0), axis=1).max()
    bound = 2 * 2 * (d + 6) * 2.0**-24 * radius**2
    assert (squared_chords(found, metric) - squared_chords(true, metric) <= bound).all()


@pytest.mark.parametrize("metric", METRICS)
def test_order_of_rows_block_size_and_threads_change_nothing(metric):
    X = cloud(300, 40)
    expected = deaths(X, metric=metric)
    order = np.random.default_rng(1).permutation(300)
    np.testing.assert_allclose(deaths(X[order], metric=metric), expected, rtol=1e-12)
    for block_size in (1, 7, 300, 5000):
        np.testing.assert_allclose(deaths(X, metric=metric, block_size=block_size), expected, rtol=1e-12)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        np.testing.assert_allclose(deaths(X, metric=metric), expected, rtol=1e-12)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("factor", [1e-150, 1e-6, 1e6, 1e150])
def test_scaling_changes_the_scale_and_nothing_else(factor):
    X = cloud(100, 20)
    np.testing.assert_allclose(deaths(X * factor), deaths(X), rtol=1e-9)
    np.testing.assert_allclose(
        deaths(X * factor, metric="euclidean"), factor * deaths(X, metric="euclidean"), rtol=1e-9
    )


def test_cosine_does_not_see_the_norms_of_rows():
    X = cloud(50, 10)
    norms = np.random.default_rng(3).uniform(0.1, 10, (50, 1))
    np.testing.assert_allclose(deaths(X * norms), deaths(X), rtol=1e-9)


@pytest.mark.parametrize("metric", METRICS)
def test_the_gram_trick_in_float32_is_off_on_close_rows(metric):
    # scikit-learn issue 9354: distances of rows with a common offset, by matrix product. The tree may be another
    # one, its lengths may not be off.
    X = (1 + 1e-3 * cloud(200, 64)).astype(np.float32)
    np.testing.assert_allclose(deaths(X, metric=metric), deaths(X, metric=metric, precision="float64"), rtol=1e-6)
    np.testing.assert_allclose(deaths(X[:2], metric=metric), distances(X[:2], metric)[0, 1:], rtol=1e-7)


def test_tf32_and_autocast_do_not_reach_the_distances():
    X = torch.from_numpy(cloud(200, 64)).float()
    expected = deaths(X)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            np.testing.assert_array_equal(deaths(X), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_above_the_limit_dimension_one_is_a_seeded_sample_and_says_so():
    X = cloud(60, 4)
    with pytest.warns(SampledRowsWarning, match=r"'w' has 60 rows; .* sample of 40 of them \(seed 5\)"):
        zero, one = persistence_diagrams(X, dimensions=(0, 1), max_points=40, seed=5, name="w")
    assert len(zero) == 60  # dimension 0 uses all rows
    kept = np.sort(np.random.default_rng(5).choice(60, size=40, replace=False))
    np.testing.assert_array_equal(one, persistence_diagrams(X[kept], dimensions=(1,))[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        persistence_diagrams(X, dimensions=(0, 1))


def test_the_default_limit_of_dimension_one_is_the_documented_one():
    assert persistence.MAX_POINTS[1] == 2304
    assert "2304" in persistence_diagrams.__doc__


@pytest.mark.slow
def test_real_attention_matrices_agree_with_ripser(real_matrix):
    for metric in METRICS:
        found = deaths(real_matrix, metric=metric)
        expected = ripser(distances(real_matrix, metric), maxdim=0, distance_matrix=True)["dgms"][0][:-1, 1]
        np.testing.assert_allclose(found, np.sort(expected), rtol=1e-5, atol=1e-6)
