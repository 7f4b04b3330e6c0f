"""From a drift table, a rule and a budget to the matrices that train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..projections import PROJECTIONS

if TYPE_CHECKING:
    from ..drift import DriftTable, MatrixDrift

DEFAULT_BUDGET = 0.015


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
    order : {"drift", "random"}
        ``"random"`` is the control: the same budget over the same candidates in a random order.
    seed : int or None
        Seed of the random order.
    """

    train: Literal["high", "low"] | None = None
    freeze: Literal["high", "low"] | None = None
    budget: float | None = None
    k: int | None = None
    projections: tuple[str, ...] | None = None
    normalise: Literal["points", "total", "none"] = "points"
    order: Literal["drift", "random"] = "drift"
    seed: int | None = None

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
        if self.freeze is None and self.train is None:
            object.__setattr__(self, "train", "high")
        if self.budget is None and self.k is None:
            object.__setattr__(self, "budget", DEFAULT_BUDGET)
        if self.budget is not None and not 0 < self.budget <= 1:
            raise ValueError(
                f"budget={self.budget} is no share of the parameters; expected more than 0 and at most 1 "
                "(0.015 trains 1.5 %)."
            )
        if self.k is not None and (self.k < 1 or int(self.k) != self.k):
            raise ValueError(f"k={self.k} is no number of matrices; expected 1 or more.")
        if self.normalise not in ("points", "total", "none"):
            raise ValueError(f"normalise={self.normalise!r} is unknown; expected 'points', 'total' or 'none'.")
        if self.order not in ("drift", "random"):
            raise ValueError(f"order={self.order!r} is unknown; expected 'drift' or 'random'.")
        if self.order == "random" and self.seed is None:
            raise ValueError("A random order needs a `seed`, so that it can be drawn again.")
        if self.projections is not None:
            given = (self.projections,) if isinstance(self.projections, str) else tuple(self.projections)
            if not given:
                raise ValueError("`projections` is empty: nothing could be chosen.")
            object.__setattr__(self, "projections", given)

    def describe(self) -> str:
        """Return the rule in words."""
        where = f" of {', '.join(self.projections)}" if self.projections else ""
        if self.order == "random":
            return f"a random draw{where} (seed {self.seed}), {self._size()}"
        if self.freeze is not None:
            return f"freeze the {self.k} of {self.freeze}est drift in each projection{where}, train the others"
        unit = {"points": " per row", "total": " relative to the diagram", "none": ""}[self.normalise]
        return f"train the {self.train}est drift{unit if self.k is None else ''}{where}, {self._size()}"

    def _size(self) -> str:
        return f"{self.k} in each projection" if self.k is not None else f"at most {self.budget:.2%} of all parameters"

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as JSON-able values."""
        values = asdict(self)
        values["projections"] = list(self.projections) if self.projections is not None else None
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SelectionRule:
        """Return the rule that `to_dict` wrote."""
        return cls(**values)


def scores(rows: Sequence[MatrixDrift], rule: SelectionRule) -> np.ndarray:
    """Return one number per matrix; the highest is chosen first.

    Returns
    -------
    numpy.ndarray
        (len(rows),) float64, finite.
    """
    if rule.order == "random":
        return np.random.default_rng(rule.seed).permutation(len(rows)).astype(np.float64)
    drift = np.array(
        [{"points": row.per_point, "total": row.relative, "none": row.drift[0]}[rule.normalise] for row in rows]
    )
    if not np.isfinite(drift).all():
        bad = rows[int(np.flatnonzero(~np.isfinite(drift))[0])]
        raise ValueError(f"The drift of {bad.id!r} is not a finite number and can't be ranked.")
    wanted = rule.train or rule.freeze
    return drift if wanted == "high" else -drift


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
        chosen = _walk_budget(ranked, rule.budget, table.base["parameters"])
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


def _walk_budget(ranked: Sequence[MatrixDrift], budget: float, parameters: int) -> set[str]:
    """Take matrices in order while they fit; skip one that does not and go on to smaller ones."""
    left = budget * parameters
    chosen = set()
    for row in ranked:
        if row.size <= left:
            chosen.add(row.id)
            left -= row.size
    if not chosen:
        smallest = min(ranked, key=lambda row: row.size)
        raise ValueError(
            f"A budget of {budget:.4%} of {parameters:,} parameters holds none of the {len(ranked)} matrices; the "
            f"smallest, {smallest.id!r}, is {smallest.size / parameters:.4%}. Raise the budget."
        )
    return chosen
