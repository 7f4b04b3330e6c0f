"""From a drift table, a rule and a budget to the matrices that train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..projections import PROJECTIONS

if TYPE_CHECKING:
    from ..drift import DriftTable, MatrixDrift

DEFAULT_BUDGET = 0.015


# Orders that need no measurement of the matrices.
_PLACES = ("random", "first", "last")


@dataclass(frozen=True)
class SelectionRule:
    """How the trained matrices are chosen from a drift table.

    Attributes
    ----------
    train : {"high", "low"} or None
        Train the matrices of the highest or of the lowest drift. ``"high"`` if neither this nor ``freeze`` is
        given.
    freeze : {"high", "low"} or None
        The authors' rule: in each of ``projections`` freeze the ``k`` of the highest or of the lowest drift and
        train all others of those projections.
    budget : float or None
        Largest share of the model's parameters to train, above 0 and at most 1. The ranking is walked and what no
        longer fits is skipped, so it is an upper bound.
    k : int or None
        Instead of a budget, the number of matrices per projection.
    projections : tuple of str or None
        Choose among these only; None for all that were scanned.
    normalise : {"points", "total", "none"}
        What drift is divided by before matrices of unlike shape are ranked together: the number of rows, the
        pretrained diagram's total persistence, or nothing. With ``k`` the ranking is inside a projection type.
    order : str
        What is ranked: ``"drift"``, ``"norm"`` (the relative Frobenius norm of the change), or the name of a score
        that the table has (see `DriftTable.with_scores`). The controls ``"random"``, ``"first"`` and ``"last"``
        (layers) look at no measurement.
    seed : int or None
        Seed of the random order.
    dimensions : tuple of int
        Homology dimensions whose drifts are added up.
    balanced : bool
        Divide the budget among the projections in proportion to their parameters, so that each trains the same
        share of its matrices.
    per_layer : int or None
        With a budget, at most so many matrices of one layer.
    every : int or None
        With a budget, every ``every`` consecutive layers first get their best matrix, then the rest of the budget
        follows the ranking: a spread over the depth.
    """

    train: Literal["high", "low"] | None = None
    freeze: Literal["high", "low"] | None = None
    budget: float | None = None
    k: int | None = None
    projections: tuple[str, ...] | None = None
    normalise: Literal["points", "total", "none"] = "points"
    order: str = "drift"
    seed: int | None = None
    dimensions: tuple[int, ...] = (0,)
    balanced: bool = False
    per_layer: int | None = None
    every: int | None = None

    def __post_init__(self):
        if self.train is not None and self.freeze is not None:
            raise ValueError("Give either `train` or `freeze`, not both: each names the whole rule.")
        for name, value in (("train", self.train), ("freeze", self.freeze)):
            if value not in (None, "high", "low"):
                raise ValueError(f"{name}={value!r} is unknown; expected 'high' or 'low'.")
        if self.freeze is not None and self.budget is not None:
            raise ValueError(
                "`freeze` takes a number `k` of matrices per projection, not a budget; use `train` with a budget."
            )
        if self.budget is not None and self.k is not None:
            raise ValueError("Give either `budget` or `k`, not both.")
        if self.freeze is not None and self.k is None:
            raise ValueError("`freeze` needs `k`, the number of matrices to freeze in each projection.")
        if self.order in _PLACES and (self.train == "low" or self.freeze is not None):
            raise ValueError(f"order={self.order!r} ranks by no measurement: `train` and `freeze` do not go with it.")
        if self.freeze is None and self.train is None:
            object.__setattr__(self, "train", "high")
        if self.budget is None and self.k is None:
            object.__setattr__(self, "budget", DEFAULT_BUDGET)
        if self.budget is not None and not 0 < self.budget <= 1:
            raise ValueError(
                f"budget={self.budget} is no share of the parameters; expected more than 0 and at most 1 "
                "(0.015 trains 1.5 %)."
            )
        for name in ("k", "per_layer", "every"):
            value = getattr(self, name)
            if value is not None and (value < 1 or int(value) != value):
                raise ValueError(f"{name}={value} is no number of matrices or layers; expected 1 or more.")
        if self.k is not None and (self.balanced or self.per_layer or self.every):
            raise ValueError("`balanced`, `per_layer` and `every` spread a budget; `k` is a number per projection.")
        if self.normalise not in ("points", "total", "none"):
            raise ValueError(f"normalise={self.normalise!r} is unknown; expected 'points', 'total' or 'none'.")
        if self.order == "random" and self.seed is None:
            raise ValueError("A random order needs a `seed`, so that it can be drawn again.")
        if self.projections is not None:
            given = (self.projections,) if isinstance(self.projections, str) else tuple(self.projections)
            if not given:
                raise ValueError("`projections` is empty: nothing could be chosen.")
            object.__setattr__(self, "projections", given)
        object.__setattr__(self, "dimensions", tuple(sorted({int(d) for d in self.dimensions})))
        if not self.dimensions:
            raise ValueError("`dimensions` is empty: there is no drift to rank by.")

    def describe(self) -> str:
        """Return the rule in words."""
        where = f" of {', '.join(self.projections)}" if self.projections else ""
        if self.order == "random":
            return f"a random draw{where} (seed {self.seed}), {self._size()}"
        if self.order in _PLACES:
            return f"the {self.order} layers{where}, {self._size()}"
        what = {"drift": "drift", "norm": "relative norm of the change"}.get(self.order, self.order)
        if self.dimensions != (0,) and self.order == "drift":
            what += f" in dimensions {', '.join(map(str, self.dimensions))}"
        if self.freeze is not None:
            return f"freeze the {self.k} of {self.freeze}est {what} in each projection{where}, train the others"
        unit = {"points": " per row", "total": " relative to the diagram", "none": ""}[self.normalise]
        unit = unit if self.k is None and self.order == "drift" else ""
        return f"train the {self.train}est {what}{unit}{where}, {self._size()}"

    def _size(self) -> str:
        if self.k is not None:
            return f"{self.k} in each projection"
        spread = [
            "divided evenly among the projections" if self.balanced else "",
            f"at most {self.per_layer} in a layer" if self.per_layer else "",
            f"some in every {self.every} layers" if self.every else "",
        ]
        return ", ".join([f"at most {self.budget:.2%} of all parameters", *filter(None, spread)])

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as JSON-able values."""
        values = asdict(self)
        values["projections"] = list(self.projections) if self.projections is not None else None
        values["dimensions"] = list(self.dimensions)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SelectionRule:
        """Return the rule that `to_dict` wrote."""
        return cls(**{**values, "dimensions": tuple(values.get("dimensions", (0,)))})


def scores(rows: Sequence[MatrixDrift], rule: SelectionRule) -> np.ndarray:
    """Return one number per matrix; the highest is chosen first.

    Returns
    -------
    numpy.ndarray
        (len(rows),) float64, finite.
    """
    if rule.order == "random":
        return np.random.default_rng(rule.seed).permutation(len(rows)).astype(np.float64)
    if rule.order in _PLACES:
        layers = np.array([row.layer for row in rows], dtype=np.float64)
        return -layers if rule.order == "first" else layers
    values = np.array([_measured(row, rule) for row in rows], dtype=np.float64)
    if not np.isfinite(values).all():
        bad = rows[int(np.flatnonzero(~np.isfinite(values))[0])]
        raise ValueError(f"The {rule.order} of {bad.id!r} is not a finite number and can't be ranked.")
    wanted = rule.train or rule.freeze
    return values if wanted == "high" else -values


def _measured(row: MatrixDrift, rule: SelectionRule) -> float:
    if rule.order == "norm":
        if row.relative_norm is None:
            raise ValueError(
                f"The table has no norm of the change of {row.id!r}: it was made from diagrams alone. Measure the "
                "drift between two models."
            )
        return row.relative_norm
    if rule.order != "drift":
        if rule.order not in row.scores:
            known = ["drift", "norm", *_PLACES, *sorted(row.scores)]
            raise ValueError(f"order={rule.order!r} is unknown; this table can be ranked by {known}.")
        return row.scores[rule.order]
    lacking = [dimension for dimension in rule.dimensions if dimension not in row.drift]
    if lacking:
        raise ValueError(
            f"The drift was not measured in dimensions {lacking}, only in {sorted(row.drift)}; measure it with "
            f"`dimensions={rule.dimensions}`."
        )
    drift = sum(row.drift[dimension] for dimension in rule.dimensions)
    if rule.normalise == "total":
        return drift / row.total_persistence if row.total_persistence else 0.0
    return drift / row.shape[0] if rule.normalise == "points" else drift


def select(table: DriftTable, rule: SelectionRule) -> list[str]:
    """Choose the matrices that train.

    Parameters
    ----------
    table : DriftTable
    rule : SelectionRule

    Returns
    -------
    list of str
        Matrix ids, in the table's order.

    Raises
    ------
    ValueError
        If the rule chooses nothing or asks for projections the table lacks.
    """
    present = {row.projection for row in table.rows}
    wanted = rule.projections or tuple(sorted(present, key=_projection_order))
    lacking = [name for name in wanted if name not in present]
    if lacking:
        raise ValueError(f"The drift table has no projections {lacking}; it has {sorted(present)}.")
    candidates = [row for row in table.rows if row.projection in wanted]
    score = scores(candidates, rule)
    # A stable sort of the negated score: ties go to the earlier layer, on every machine.
    ranked = [candidates[index] for index in np.argsort(-score, kind="stable")]

    if rule.budget is not None:
        total = table.base["parameters"]
        if rule.balanced:
            size = sum(row.size for row in candidates)
            chosen = set()
            for projection in wanted:
                own = [row for row in ranked if row.projection == projection]
                share = rule.budget * sum(row.size for row in own) / size
                chosen |= _walk_budget(own, share, total, rule)
        else:
            chosen = _walk_budget(ranked, rule.budget, total, rule)
    else:
        chosen = set()
        for projection in wanted:
            ids = [row.id for row in ranked if row.projection == projection]
            if rule.k > len(ids) or (rule.freeze and rule.k == len(ids)):
                what = "leaves none to train" if rule.k == len(ids) else "asks for more than there are"
                raise ValueError(f"k={rule.k} {what}: the table has {len(ids)} {projection} matrices.")
            chosen.update(ids[rule.k :] if rule.freeze else ids[: rule.k])
    return [row.id for row in table.rows if row.id in chosen]


def _projection_order(name: str) -> tuple[int, str]:
    return (PROJECTIONS.index(name) if name in PROJECTIONS else len(PROJECTIONS), name)


def _walk_budget(ranked: Sequence[MatrixDrift], budget: float, parameters: int, rule: SelectionRule) -> set[str]:
    """Take matrices in order while they fit; skip one that does not and go on to smaller ones."""
    left = budget * parameters
    chosen: set[str] = set()
    in_layer: Counter[int] = Counter()
    covered: set[int] = set()

    def take(row: MatrixDrift) -> bool:
        nonlocal left
        if row.id in chosen or row.size > left or (rule.per_layer and in_layer[row.layer] >= rule.per_layer):
            return False
        chosen.add(row.id)
        in_layer[row.layer] += 1
        left -= row.size
        return True

    if rule.every:
        for row in ranked:
            window = row.layer // rule.every
            if window not in covered and take(row):
                covered.add(window)
    for row in ranked:
        take(row)
    if not chosen:
        smallest = min(ranked, key=lambda row: row.size)
        raise ValueError(
            f"A budget of {budget:.4%} of {parameters:,} parameters holds none of the {len(ranked)} matrices; the "
            f"smallest, {smallest.id!r}, is {smallest.size / parameters:.4%}. Raise the budget."
        )
    return chosen
