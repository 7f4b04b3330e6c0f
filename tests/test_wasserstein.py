"""Wasserstein distances of persistence diagrams, against POT, Hera, brute force and the axioms."""

import itertools
import math
import warnings

import gudhi.hera
import gudhi.wasserstein
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topotuner_peft import persistence_diagrams, wasserstein_distance
from topotuner_peft.topology import wasserstein
from topotuner_peft.topology.wasserstein import WassersteinError

GROUNDS = [math.inf, 2]


def line(lengths, essential=1):
    """A diagram of dimension 0."""
    deaths = np.append(np.asarray(lengths, dtype=float), [math.inf] * essential)
    return np.column_stack([np.zeros_like(deaths), deaths])


def plane(n, seed):
    rng = np.random.default_rng(seed)
    births = rng.uniform(0, 1, n)
    return np.column_stack([births, births + rng.exponential(0.2, n)])


def brute_force(a, b, order, internal_p):
    """All matchings of two small diagrams of finite bars."""

    def to_diagonal(bar):
        return (bar[1] - bar[0]) / (2 if internal_p == math.inf else math.sqrt(2))

    best = math.inf
    for size in range(min(len(a), len(b)) + 1):
        for left in itertools.combinations(range(len(a)), size):
            for right in itertools.permutations(range(len(b)), size):
                cost = sum(
                    np.linalg.norm(a[i] - b[j], ord=internal_p) ** order for i, j in zip(left, right, strict=True)
                )
                cost += sum(to_diagonal(a[i]) ** order for i in range(len(a)) if i not in left)
                cost += sum(to_diagonal(b[j]) ** order for j in range(len(b)) if j not in right)
                best = min(best, cost)
    return best ** (1 / order)


lengths = st.lists(st.floats(0, 10, allow_nan=False).map(lambda x: round(x, 3)), min_size=0, max_size=12)
orders = st.sampled_from([1.0, 1.5, 2.0, 3.0])
grounds = st.sampled_from(GROUNDS)


@given(a=lengths, b=lengths, order=orders, internal_p=grounds)
@settings(max_examples=200, deadline=None)
def test_on_the_line_it_is_what_pot_computes(a, b, order, internal_p):
    a, b = line([1.5, *a]), line([2.5, *b])  # POT divides by zero for diagrams of no length
    expected = gudhi.wasserstein.wasserstein_distance(a, b, order=order, internal_p=internal_p)
    found = wasserstein_distance(a, b, order=order, internal_p=internal_p)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-7)


@given(a=lengths.filter(lambda x: len(x) <= 4), b=lengths.filter(lambda x: len(x) <= 4), order=orders, p=grounds)
@settings(max_examples=60, deadline=None)
def test_on_the_line_no_matching_is_cheaper(a, b, order, p):
    a, b = line(a, essential=0), line(b, essential=0)
    assert wasserstein_distance(a, b, order=order, internal_p=p) == pytest.approx(brute_force(a, b, order, p), abs=1e-9)


@pytest.mark.parametrize("internal_p", GROUNDS)
@pytest.mark.parametrize("order", [1, 2])
def test_in_the_plane_no_matching_is_cheaper(order, internal_p):
    for seed in range(5):
        a, b = plane(4, seed), plane(3, seed + 100)
        expected = brute_force(a, b, order, internal_p)
        assert wasserstein_distance(a, b, order=order, internal_p=internal_p) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("internal_p", GROUNDS)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("sizes", [(50, 50), (300, 220), (1, 40)])
def test_the_two_solvers_agree(sizes, order, internal_p):
    a, b = plane(sizes[0], 1), plane(sizes[1], 2)
    by_pot = wasserstein._by_pot(a, b, order, internal_p)
    by_hera = wasserstein._by_hera(a, b, order, internal_p)
    assert by_hera == pytest.approx(by_pot, rel=2e-6)
    assert wasserstein_distance(a, b, order=order, internal_p=internal_p) == pytest.approx(by_pot, rel=2e-6)


def test_large_diagrams_go_to_hera(monkeypatch):
    a, b = plane(1200, 1), plane(1100, 2)
    monkeypatch.setattr(wasserstein, "_by_pot", lambda *_: pytest.fail("POT would take seconds and gigabytes here"))
    assert wasserstein_distance(a, b) == pytest.approx(gudhi.hera.wasserstein_distance(a, b, delta=1e-4), rel=2e-4)


def test_in_order_is_not_always_optimal():
    # Deaths 1..n against 2..n + 1: in order costs n; leaving out the ends costs (n + 2) / 2.
    for n in (5, 50, 500):
        a, b = np.arange(1.0, n + 1), np.arange(2.0, n + 2)
        assert wasserstein_distance(line(a), line(b)) == pytest.approx((n + 2) / 2)


@given(
    a=st.lists(st.floats(1e-6, 10), min_size=1, max_size=30),
    noise=st.lists(st.floats(-1, 1), min_size=30, max_size=30),
    size=st.sampled_from([1e-6, 1e-3, 0.3, 3]),
    order=orders,
    kappa=st.sampled_from([1 / 2, math.sqrt(1 / 2)]),
)
@settings(max_examples=200, deadline=None)
def test_the_shortcut_and_the_programme_agree(a, noise, size, order, kappa):
    a = np.sort(a)
    b = np.sort(np.abs(a + size * np.asarray(noise[: len(a)])) + 1e-9)
    drops = (kappa * a) ** order, (kappa * b) ** order
    moved = np.abs(a - b) ** order
    exact = wasserstein._programme(a, b, *drops, order)
    if wasserstein._in_order_is_optimal(moved, *drops):
        assert exact == pytest.approx(moved.sum(), rel=1e-9)
    assert exact <= moved.sum() * (1 + 1e-12)


def test_the_shortcut_is_taken_for_a_small_change(monkeypatch):
    monkeypatch.setattr(wasserstein, "_programme", lambda *_: pytest.fail("the programme ran"))
    a = np.sort(np.random.default_rng(0).uniform(0.5, 1, 4095))
    b = np.sort(a * (1 + 1e-4 * np.random.default_rng(1).standard_normal(4095)))
    assert wasserstein_distance(line(a), line(b)) == pytest.approx(np.abs(a - b).sum())


@given(a=lengths, b=lengths, c=lengths, order=orders, p=grounds)
@settings(max_examples=100, deadline=None)
def test_it_is_a_metric_on_the_line(a, b, c, order, p):
    a, b, c = line(a), line(b), line(c)

    def distance(x, y):
        return wasserstein_distance(x, y, order=order, internal_p=p)

    assert distance(a, a) == 0
    assert distance(a, b) == distance(b, a)
    assert distance(a, c) <= (distance(a, b) + distance(b, c)) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("p", GROUNDS)
@pytest.mark.parametrize("order", [1, 2])
def test_it_is_a_metric_in_the_plane(order, p):
    diagrams = [plane(size, seed) for seed, size in enumerate((20, 25, 30))]
    for a, b, c in itertools.permutations(diagrams):
        ab, bc, ac = (wasserstein_distance(x, y, order=order, internal_p=p) for x, y in ((a, b), (b, c), (a, c)))
        assert ac <= (ab + bc) * (1 + 1e-9)
        assert ab == wasserstein_distance(b, a, order=order, internal_p=p)
    shuffled = diagrams[0][np.random.default_rng(0).permutation(20)]
    assert wasserstein_distance(diagrams[0], shuffled, order=order, internal_p=p) == 0


def test_infinite_bars_were_dropped():
    # persim issue 105. Their number is compared first, then their births, in order.
    assert wasserstein_distance(line([1, 2], essential=1), line([1, 2], essential=2)) == math.inf
    assert wasserstein_distance(line([1, 2], essential=0), line([1, 2], essential=1)) == math.inf
    a = np.array([[0.0, math.inf], [1.0, math.inf], [0.5, 1.0]])
    b = np.array([[1.5, math.inf], [0.25, math.inf], [0.5, 1.25]])
    assert wasserstein_distance(a, b) == pytest.approx(0.25 + 0.5 + 0.25)
    assert wasserstein_distance(a, b, order=2) == pytest.approx(math.sqrt(0.25**2 + 0.5**2 + 0.25**2))
    expected = gudhi.wasserstein.wasserstein_distance(a, b, order=2, internal_p=2)
    assert wasserstein_distance(a, b, order=2, internal_p=2) == pytest.approx(expected)


@pytest.mark.parametrize("empty", [[], np.empty((0, 2)), line([], essential=0), line([0, 0], essential=0)])
def test_empty_diagrams_failed(empty):
    # persim issue 28.
    assert wasserstein_distance(empty, empty) == 0
    bars = line([1, 3], essential=0)
    assert wasserstein_distance(empty, bars) == wasserstein_distance(bars, empty) == pytest.approx(2)
    assert wasserstein_distance(empty, bars, internal_p=2) == pytest.approx(4 / math.sqrt(2))
    assert wasserstein_distance(empty, plane(5, 0)) == pytest.approx(np.diff(plane(5, 0)).sum() / 2)


def test_zero_length_bars_cost_nothing():
    assert wasserstein_distance(line([0, 0, 1, 2]), line([1, 2])) == 0
    in_plane = plane(6, 0)
    assert wasserstein_distance(np.vstack([in_plane, [[0.3, 0.3]]]), in_plane) == 0


@pytest.mark.parametrize("scale", [1e-200, 1e-9, 1e9, 1e200])
@pytest.mark.parametrize("order", [1, 3])
def test_the_scale_of_the_filtration_is_the_scale_of_the_distance(scale, order):
    for a, b in ((line([1, 2, 5], 0), line([1, 4], 0)), (plane(10, 0), plane(12, 1))):
        expected = scale * wasserstein_distance(a, b, order=order)
        assert wasserstein_distance(a * scale, b * scale, order=order) == pytest.approx(expected, rel=1e-9)


def test_numitermax_reached_was_only_a_warning(monkeypatch):
    # POT issue 93: a wrong distance and a warning. Here it is an error.
    def gives_up(*_, **__):
        warnings.warn("numItermax reached before optimality", UserWarning, stacklevel=1)
        return 0.123

    monkeypatch.setattr(gudhi.wasserstein, "wasserstein_distance", gives_up)
    with pytest.raises(WassersteinError, match="numItermax"):
        wasserstein_distance(plane(5, 0), plane(5, 1))


@pytest.mark.parametrize(
    ("a", "options", "message"),
    [
        ([[0, 1, 2]], {}, r"shape \(1, 3\)"),
        ([1.0, 2.0], {}, r"shape \(2,\)"),
        ([[0, math.nan]], {}, "NaN"),
        ([[math.inf, math.inf]], {}, "infinite birth"),
        ([[0, 1], [2, 1]], {}, "bar 1 dies at 1.0, before its birth at 2.0"),
        ([[0, 1]], {"order": 0.5}, "order=0.5"),
        ([[0, 1]], {"order": math.inf}, "bottleneck"),
        ([[0, 1]], {"order": math.nan}, "order=nan"),
        ([[0, 1]], {"internal_p": 1}, "internal_p=1"),
    ],
)
def test_bad_input_is_named(a, options, message):
    with pytest.raises(ValueError, match=message):
        wasserstein_distance(a, [[0, 1]], **options)
    with pytest.raises(ValueError, match=message):
        wasserstein_distance([[0, 1]], a, **options)


def test_a_relative_drift_of_a_thousandth_is_recovered_to_one_percent():
    X = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)
    moved = X + 1e-3 * np.random.default_rng(1).standard_normal(X.shape).astype(np.float32)
    for metric in ("cosine", "euclidean"):
        options = {"metric": metric}
        found = wasserstein_distance(*(persistence_diagrams(x, **options)[0] for x in (X, moved)))
        true = wasserstein_distance(*(persistence_diagrams(x, precision="float64", **options)[0] for x in (X, moved)))
        assert found == pytest.approx(true, rel=0.01)


@pytest.mark.slow
def test_drift_of_a_real_matrix_is_what_gudhi_computes(real_matrix):
    rng = np.random.default_rng(0)
    moved = real_matrix + 1e-3 * real_matrix.std() * rng.standard_normal(real_matrix.shape)
    a, b = (persistence_diagrams(x)[0] for x in (real_matrix, moved))
    assert wasserstein_distance(a, b) == pytest.approx(gudhi.hera.wasserstein_distance(a, b, delta=1e-6), rel=1e-5)
