"""The arithmetic of the report: paired differences, their intervals, and a regression over cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Difference:
    """A mean difference between two methods over seeds.

    Attributes
    ----------
    mean : float
    low, high : float
        95 % interval over seeds (Student's t); NaN for one seed.
    seeds : int
    """

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.mean:+.3f} (one seed)"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval by Student's t; NaN bounds for one value."""
    values = np.asarray(values, dtype=np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return mean, mean - half, mean + half


def paired(ours: dict[int, float], theirs: dict[int, float]) -> Difference | None:
    """Return ours − theirs over the seeds that both have, or None where there is none."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    mean, low, high = mean_interval([ours[seed] - theirs[seed] for seed in seeds])
    return Difference(mean, low, high, len(seeds))


@dataclass(frozen=True)
class Regression:
    """Ordinary least squares on standardised predictors.

    Attributes
    ----------
    names : tuple of str
    coefficients, errors : numpy.ndarray
        Change of the outcome for one standard deviation of each predictor, and the standard error.
    r_squared : float
    cells : int
    """

    names: tuple[str, ...]
    coefficients: np.ndarray
    errors: np.ndarray
    r_squared: float
    cells: int


def regress(predictors: dict[str, Sequence[float]], outcome: Sequence[float], groups: Sequence) -> Regression:
    """Explain an outcome by predictors, within groups: each group's mean is taken off first.

    Parameters
    ----------
    predictors : dict of str to sequence of float
        Those that do not vary are left out.
    outcome : sequence of float
    groups : sequence
        What the cells share that is not to be explained: task and seed.
    """
    labels = np.unique([str(group) for group in groups], return_inverse=True)[1]

    def centred(values):
        values = np.asarray(values, dtype=np.float64)
        means = np.array([values[labels == label].mean() for label in range(labels.max() + 1)])
        return values - means[labels]

    y = centred(outcome)
    columns, names = [], []
    for name, values in predictors.items():
        column = centred(values)
        if column.std() > 1e-12:
            columns.append(column / column.std())
            names.append(name)
    x = np.stack(columns, axis=1)
    coefficients, *_ = np.linalg.lstsq(x, y, rcond=None)
    residual = y - x @ coefficients
    freedom = len(y) - len(names) - (labels.max() + 1)
    if freedom < 1:
        raise ValueError(f"{len(y)} cells are too few for {len(names)} predictors and {labels.max() + 1} groups.")
    variance = float(residual @ residual) / freedom
    errors = np.sqrt(np.diag(variance * np.linalg.pinv(x.T @ x)))
    return Regression(tuple(names), coefficients, errors, 1 - float(residual @ residual) / float(y @ y), len(y))
