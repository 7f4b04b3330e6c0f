"""Two persistence diagrams → their p-Wasserstein distance.

Points are matched to points or to the diagonal; the cost of a matching is the p-th root of the sum of p-th powers
of the distances moved [1]_. Points on the diagonal cost nothing. Essential classes can only be matched to each
other: different numbers of them make the distance infinite, equal numbers are matched in order of birth.

*One dimension.* Where all births are one number, as in dimension 0 of a Vietoris–Rips filtration, it is a problem
on the line: two bars of lengths a, b cost |a − b|, leaving a bar out costs κa with κ = 1/2 for the ground metric
L∞ and 1/√2 for L2. Because |·|^p is convex, those bars that are matched are matched in ascending order, so a
dynamic programme over (i, j) is exact. It has one shortcut. For equal numbers of bars, let S(i) be the cost of
matching the i shortest in order. A cheaper path leaves the main diagonal at some s, by leaving out one of the
s-th bars, and comes back at some e ≥ s, by leaving out one of the e-th of the other side. If for all s ≤ e that
costs at least S(e) − S(s − 1), matching in order is optimal. Drift between two states of one matrix nearly always
passes that test, which takes microseconds.

*Two dimensions.* GUDHI: exact optimal transport by POT for small diagrams, Hera [2]_ with a relative error of at
most 10⁻⁶ for large ones.

References
----------
.. [1] H. Edelsbrunner, J. Harer, "Computational Topology: an Introduction", AMS, 2010, section VIII.2.
.. [2] M. Kerber, D. Morozov, A. Nigmetov, "Geometry helps to compare persistence diagrams", ACM Journal of
   Experimental Algorithmics 22, 2017.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

# POT takes memory and time with the product of the sizes: half a second at this product, five at 4000².
POT_PAIRS = 1000**2
HERA_ERROR = 1e-6


class WassersteinError(RuntimeError):
    """A solver did not reach the optimum, so there is no distance to report."""


def check_options(order: float, internal_p: float) -> None:
    """Raise a ValueError if `wasserstein_distance` would for these options."""
    if not (order >= 1 and math.isfinite(order)):
        raise ValueError(f"order={order} must be a finite number from 1; for infinity use gudhi.bottleneck_distance.")
    if internal_p not in (2, math.inf):
        raise ValueError(f"internal_p={internal_p} is not supported; it is 2 or inf.")


def wasserstein_distance(a: ArrayLike, b: ArrayLike, *, order: float = 1.0, internal_p: float = math.inf) -> float:
    """Return the Wasserstein distance of two persistence diagrams.

    Parameters
    ----------
    a, b : array, shape (n, 2) and (m, 2)
        Births and deaths; a death may be infinite. Empty diagrams are allowed.
    order : float
        The exponent p ≥ 1. Finite: for the bottleneck distance use `gudhi.bottleneck_distance`.
    internal_p : {inf, 2}
        Ground metric between two points.

    Returns
    -------
    float
        In units of the filtration. 0 exactly for equal diagrams; symmetric to the last bit; infinite if the
        numbers of essential classes differ.

    Raises
    ------
    ValueError
        If a diagram has another shape, NaN, an infinite birth or a death before its birth, or an option is
        out of range.
    WassersteinError
        If a solver stops before the optimum.

    Examples
    --------
    >>> wasserstein_distance([[0, 1], [0, 2]], [[0, 2], [0, 3]])
    2.0
    >>> wasserstein_distance([[0, 1], [0, 2], [0, 3]], [[0, 2], [0, 3], [0, 4]])  # in order it would be 3
    2.5
    """
    check_options(order, internal_p)
    (a, births_a), (b, births_b) = _split(a, "first"), _split(b, "second")
    if len(births_a) != len(births_b):
        return math.inf
    essential = np.abs(births_a - births_b)

    starts = np.concatenate([a[:, 0], b[:, 0]])
    if not len(starts):
        finite = 0.0
    elif (starts == starts[0]).all():
        lengths = np.sort(a[:, 1] - a[:, 0]), np.sort(b[:, 1] - b[:, 0])
        finite = _on_the_line(*lengths, order, 1 / 2 if internal_p == math.inf else math.sqrt(1 / 2))
    else:
        finite = _in_the_plane(a, b, order, internal_p)
    return _norm(np.append(essential, finite), order)


def _split(diagram: ArrayLike, which: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the finite bars that are not of length zero, (n, 2), and the sorted births of the essential classes."""
    diagram = np.asarray(diagram, dtype=np.float64)
    if diagram.size == 0:
        return np.empty((0, 2)), np.empty(0)
    if diagram.ndim != 2 or diagram.shape[1] != 2:
        raise ValueError(f"The {which} diagram has shape {diagram.shape}; it must be (bars, 2): births and deaths.")
    births, deaths = diagram.T
    if np.isnan(diagram).any() or np.isinf(births).any():
        raise ValueError(f"The {which} diagram holds NaN or an infinite birth.")
    if (deaths < births).any():
        at = int((deaths < births).argmax())
        raise ValueError(f"The {which} diagram's bar {at} dies at {deaths[at]}, before its birth at {births[at]}.")
    finite = np.isfinite(deaths)
    return diagram[finite & (deaths > births)], np.sort(births[~finite])


def _norm(values: np.ndarray, order: float) -> float:
    """Return the p-norm of non-negative numbers, without overflow."""
    largest = values.max(initial=0.0)
    if largest == 0 or math.isinf(largest):
        return float(largest)
    return float(largest * ((values / largest) ** order).sum() ** (1 / order))


def _on_the_line(a: np.ndarray, b: np.ndarray, order: float, kappa: float) -> float:
    """Return the distance of two ascending arrays of positive bar lengths."""
    if np.array_equal(a, b):
        return 0.0
    # Scaled, so that no power over- or underflows.
    scale = max(a.max(initial=0.0), b.max(initial=0.0))
    a, b = a / scale, b / scale
    drop_a, drop_b = (kappa * a) ** order, (kappa * b) ** order
    if len(a) == len(b):
        moved = np.abs(a - b) ** order
        if _in_order_is_optimal(moved, drop_a, drop_b):
            return float(scale * moved.sum() ** (1 / order))
    return float(scale * _programme(a, b, drop_a, drop_b, order) ** (1 / order))


def _in_order_is_optimal(moved: np.ndarray, drop_a: np.ndarray, drop_b: np.ndarray) -> bool:
    """Tell whether matching in order provably costs least; see the module's text."""
    total = np.cumsum(moved)
    least = np.minimum(drop_a, drop_b)
    # An excursion over one index leaves out both of its bars; a longer one at least the lesser of either end.
    alone = (moved <= drop_a + drop_b).all()
    leave = np.minimum.accumulate(total - moved + least)  # min over s ≤ e of S(s − 1) + least(s)
    return bool(alone and (total[1:] - least[1:] <= leave[:-1]).all())


def _programme(a: np.ndarray, b: np.ndarray, drop_a: np.ndarray, drop_b: np.ndarray, order: float) -> float:
    """Return the least cost Σ moved^p over all monotone matchings of ascending a (n,) and b (m,).

    cost(i, j) = min(cost(i−1, j) + drop_a(i), cost(i, j−1) + drop_b(j), cost(i−1, j−1) + |a_i − b_j|^p), one
    antidiagonal i + j = k after the other, each as one array over i.
    """
    n, m = len(a), len(b)
    before, last = np.empty(0), np.zeros(1)  # antidiagonals k − 2 and k − 1
    before_from, last_from = 0, 0  # the i of their first entries
    for k in range(1, n + m + 1):
        first, stop = max(0, k - m), min(n, k) + 1
        cost = np.full(stop - first, np.inf)
        low = max(first, 1)  # i ≥ 1: from (i − 1, j)
        if low < stop:
            cost[low - first :] = last[low - 1 - last_from : stop - 1 - last_from] + drop_a[low - 1 : stop - 1]
        high = min(stop, k)  # i ≤ k − 1: from (i, j − 1), with j = k − i
        if first < high:
            leave = last[first - last_from : high - last_from] + drop_b[k - high : k - first][::-1]
            np.minimum(cost[: high - first], leave, out=cost[: high - first])
        if low < high:
            moved = np.abs(a[low - 1 : high - 1] - b[k - high : k - low][::-1])
            if order != 1:
                moved **= order
            moved += before[low - 1 - before_from : high - 1 - before_from]
            part = cost[low - first : high - first]
            np.minimum(part, moved, out=part)
        before, before_from, last, last_from = last, last_from, cost, first
    return float(last[0])


def _in_the_plane(a: np.ndarray, b: np.ndarray, order: float, internal_p: float) -> float:
    """Return the distance of two (n, 2) and (m, 2) diagrams of finite bars."""
    a, b = (x[np.lexsort((x[:, 1], x[:, 0]))] for x in (a, b))
    if np.array_equal(a, b):
        return 0.0
    # Solvers need not be symmetric to the last bit; a fixed order of the two makes the result so.
    if (len(a), a.tobytes()) > (len(b), b.tobytes()):
        a, b = b, a
    if not len(a):
        kappa = 1 / 2 if internal_p == math.inf else math.sqrt(1 / 2)
        return _norm(kappa * (b[:, 1] - b[:, 0]), order)
    # POT's tolerances are absolute: a diagram of tiny bars would count as solved before it is.
    offset, scale = min(a[:, 0].min(), b[:, 0].min()), max((a[:, 1] - a[:, 0]).max(), (b[:, 1] - b[:, 0]).max())
    a, b = (a - offset) / scale, (b - offset) / scale
    solve = _by_pot if len(a) * len(b) <= POT_PAIRS else _by_hera
    return scale * solve(a, b, order, internal_p)


def _by_pot(a: np.ndarray, b: np.ndarray, order: float, internal_p: float) -> float:
    from gudhi.wasserstein import wasserstein_distance as solve

    with warnings.catch_warnings():
        # POT says that it ran out of iterations in a warning and returns a wrong number.
        warnings.simplefilter("error")
        try:
            return float(solve(a, b, order=order, internal_p=internal_p))
        except UserWarning as warning:
            raise WassersteinError(
                f"POT did not solve the matching of {len(a)} and {len(b)} bars: {warning}"
            ) from warning


def _by_hera(a: np.ndarray, b: np.ndarray, order: float, internal_p: float) -> float:
    from gudhi.hera import wasserstein_distance as solve

    distance = float(solve(a, b, order=order, internal_p=internal_p, delta=HERA_ERROR))
    if not math.isfinite(distance):
        raise WassersteinError(f"Hera gave {distance} for the matching of {len(a)} and {len(b)} bars.")
    return distance
