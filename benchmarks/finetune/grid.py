"""From a YAML file to the list of cells: every combination of task, method, learning rate and seed, in order."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
# Orders that rank by what a prior run did to the matrices.
NEEDS_PRIOR = ("drift", "norm", "euclidean", "early2", "early4", "early10")
KINDS = ("full", "lora", "shira", "topo")


class GridError(ValueError):
    """A grid file that makes no sense; the message names the file and the place."""


def digest(values: Any) -> str:
    """Return a short hash of JSON-able values, the same for the same content."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Cell:
    """One training run: all that decides its result.

    Attributes
    ----------
    label : str
        The method's name in tables; does not decide the result.
    values : dict
        ``model``, ``task``, ``method``, ``learning_rate``, ``seed``, ``training``, ``evaluation``, ``prior`` (None
        where the method needs none).
    """

    label: str
    values: dict[str, Any]

    @property
    def id(self) -> str:
        """Hash of the values: cells of different grids that are the same run share a file."""
        return digest(self.values)

    def path(self, folder: Path) -> Path:
        """Return the file of the cell's result."""
        values = self.values
        rate = f"{values['learning_rate']:g}"
        return folder / values["task"] / f"{self.label}-lr{rate}-seed{values['seed']}-{self.id}.json"


def load_grid(path: Path) -> list[Cell]:
    """Read a grid file.

    Parameters
    ----------
    path : pathlib.Path
        YAML with ``model``, ``prior``, ``training``, ``evaluation`` and ``stages``: a list of ``tasks``, ``seeds``
        and ``methods``; each method has a ``label``, a ``kind``, a ``learning_rate`` (one, several, or a mapping
        from task to one), and what its kind takes. ``draws: n`` makes n random draws per seed.

    Returns
    -------
    list of Cell
        Stage by stage; in a stage seed by seed, so that what was run first can be compared in pairs.
    """
    grid = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    for name in ("model", "training", "evaluation", "stages"):
        if name not in grid:
            raise GridError(f"{path} has no {name!r}.")
    cells: dict[str, Cell] = {}
    for stage in grid["stages"]:
        for seed in stage["seeds"]:
            for task in stage["tasks"]:
                for method in stage["methods"]:
                    for cell in _expand(grid, task, seed, dict(method), path):
                        cells.setdefault(cell.id, cell)
    return list(cells.values())


def _expand(grid: dict, task: str, seed: int, method: dict, path: Path) -> list[Cell]:
    label, rates, draws = method.pop("label"), method.pop("learning_rate"), method.pop("draws", None)
    if method.get("kind") not in KINDS:
        raise GridError(f"{path}: method {label!r} has kind {method.get('kind')!r}; expected one of {KINDS}.")
    if isinstance(rates, dict):
        if task not in rates:
            raise GridError(f"{path}: method {label!r} has no learning rate for the task {task!r}.")
        rates = rates[task]
    rates = [float(rate) for rate in (rates if isinstance(rates, list) else [rates])]
    variants = [(label, method)]
    if draws is not None:
        # No two seeds share a draw: the more draws, the more is learned about draws.
        variants = [(f"{label}{n}", {**method, "order": "random", "seed": 100 * seed + n}) for n in range(draws)]
    needs_prior = method["kind"] == "topo" and variants[0][1].get("order", "drift") in NEEDS_PRIOR
    if needs_prior and "prior" not in grid:
        raise GridError(f"{path}: method {label!r} chooses by a prior run, and there is no 'prior'.")
    prior = grid["prior"] if needs_prior else None
    return [
        Cell(
            name,
            {
                "model": grid["model"],
                "task": task,
                "method": variant,
                "learning_rate": rate,
                "seed": seed,
                "training": grid["training"],
                "evaluation": grid["evaluation"],
                "prior": prior,
            },
        )
        for rate in rates
        for name, variant in variants
    ]
