"""Topological drift: how far each attention matrix's persistence diagram moved between two sets of weights."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import projections as _projections
from .projections import PROJECTIONS, Projection
from .sources import Selection, Source, is_adapter, model_info, open_source
from .topology import persistence, persistence_diagrams, wasserstein, wasserstein_distance
from .versions import package_versions

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import nn

    Weights = nn.Module | Mapping[str, torch.Tensor] | str | os.PathLike[str]

SCHEMA = 1
# Part of the cache's keys; to be raised when the diagrams of the same matrix change.
DIAGRAM_VERSION = 1


@dataclass(frozen=True)
class DriftSettings:
    """What a drift was measured with. Drifts of unlike settings are not compared.

    Attributes
    ----------
    metric : {"cosine", "angular", "euclidean"}
        Distance between two rows. Cosine, the authors' choice, ignores the rows' norms.
    dimensions : tuple of int
        Homology dimensions; 0 is needed for ranking and always there.
    order : float
        Order p of the Wasserstein distance.
    internal_p : float
        Ground metric between two points of a diagram: ``inf`` or 2.
    precision : {"float32", "float64"}
        Arithmetic of the distances that choose the spanning tree.
    """

    metric: str = "cosine"
    dimensions: tuple[int, ...] = (0,)
    order: float = 1.0
    internal_p: float = math.inf
    precision: str = "float32"

    def __post_init__(self):
        object.__setattr__(self, "dimensions", tuple(sorted({int(d) for d in self.dimensions})))
        # Here, so that a training run with a wrong setting does not first train for an epoch.
        persistence.check_options(self.metric, self.precision, self.dimensions)
        wasserstein.check_options(self.order, self.internal_p)
        if 0 not in self.dimensions:
            raise ValueError(f"dimensions={self.dimensions} lacks 0, which drift tables rank by; use e.g. (0, 1).")

    def diagrams(self, weight: Any, name: str) -> list[np.ndarray]:
        """Return the persistence diagrams of one matrix, one (m, 2) float64 array per dimension."""
        return persistence_diagrams(
            weight, metric=self.metric, dimensions=self.dimensions, precision=self.precision, name=name
        )

    def distances(self, a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> dict[int, float]:
        """Return the Wasserstein distance of two lists of diagrams per dimension."""
        return {
            dimension: wasserstein_distance(left, right, order=self.order, internal_p=self.internal_p)
            for dimension, left, right in zip(self.dimensions, a, b, strict=True)
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-able values; an infinite ground metric is ``"inf"``."""
        values = asdict(self)
        values["dimensions"] = list(self.dimensions)
        values["internal_p"] = "inf" if math.isinf(self.internal_p) else self.internal_p
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DriftSettings:
        """Return the settings that `to_dict` wrote."""
        values = dict(values)
        values["dimensions"] = tuple(values["dimensions"])
        values["internal_p"] = float(values["internal_p"])
        return cls(**values)


@dataclass(frozen=True)
class MatrixDrift:
    """The drift of one matrix.

    Attributes
    ----------
    id : str
        Matrix id, see `topotuner_peft.projections`.
    layer : int
    projection : str
    shape : tuple of int
        (rows, columns): points of the cloud and their dimension.
    drift : dict of int to float
        Wasserstein distance per homology dimension, in units of the metric.
    total_persistence : float
        Sum of the finite bars of the pretrained diagram in dimension 0: the mass that could have moved.
    relative_norm : float or None
        ‖W − W₀‖ / ‖W₀‖ in the Frobenius norm; a companion and control. None if the base weights were not kept.
    spectral_norm : float or None
        ‖W − W₀‖₂, the largest singular value of the change; likewise.
    scores : dict of str to float
        Other numbers to choose by, see `DriftTable.with_scores`.
    """

    id: str
    layer: int
    projection: str
    shape: tuple[int, int]
    drift: dict[int, float]
    total_persistence: float
    relative_norm: float | None = None
    spectral_norm: float | None = None
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def per_point(self) -> float:
        """Drift in dimension 0 divided by the number of rows, so that matrices of unlike height compare."""
        return self.drift[0] / self.shape[0]

    @property
    def relative(self) -> float:
        """Drift in dimension 0 as a share of the pretrained diagram's total persistence."""
        return self.drift[0] / self.total_persistence if self.total_persistence else 0.0

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.shape[0] * self.shape[1]

    @property
    def head(self) -> int | None:
        """The attention head, where the matrix is a single one."""
        return _projections.head_index(self.id)


@dataclass
class DriftTable:
    """The drift of every matrix scanned, with what it was measured on and with.

    Attributes
    ----------
    rows : list of MatrixDrift
        One per matrix, in the order of the model's modules.
    settings : DriftSettings
    base : dict
        The pretrained model: ``name``, ``revision``, ``model_type``, ``parameters`` (tied ones once) and
        ``fingerprint``.
    tuned : dict
        What it was compared with; at least ``name``.
    note : str
        How the numbers came about where it is not one comparison of two models.
    versions : dict of str to str
        Packages that computed it.
    """

    rows: list[MatrixDrift]
    settings: DriftSettings
    base: dict[str, Any]
    tuned: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    versions: dict[str, str] = field(default_factory=package_versions)

    def __post_init__(self):
        if not self.rows:
            raise ValueError("A drift table needs at least one matrix.")
        for row in self.rows:
            bad = [value for value in row.drift.values() if not math.isfinite(value) or value < 0]
            if bad:
                raise ValueError(f"The drift of {row.id!r} is {bad[0]}, which can't be ranked; look at its weights.")

    @property
    def metric(self) -> str:
        """The metric between rows."""
        return self.settings.metric

    @property
    def order(self) -> float:
        """The order of the Wasserstein distance."""
        return self.settings.order

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, matrix_id: str) -> MatrixDrift:
        for row in self.rows:
            if row.id == matrix_id:
                return row
        raise KeyError(
            f"{matrix_id!r} is not in this drift table, which has "
            f"{_projections.summarise_names(row.id for row in self.rows)}."
        )

    def __repr__(self) -> str:
        drifts = [row.per_point for row in self.rows]
        return (
            f"DriftTable({len(self.rows)} matrices of {self.base.get('name') or 'an unnamed model'}, "
            f"metric={self.metric!r}, per point {min(drifts):.3g} to {max(drifts):.3g})"
        )

    def with_scores(self, name: str, values: Mapping[str, float]) -> DriftTable:
        """Return the table with one more number per matrix, to choose matrices by: ``order=name`` in a rule.

        Parameters
        ----------
        name : str
            What to call it.
        values : mapping of str to float
            Matrix id → number, for every matrix of the table. See `topotuner_peft.profile.scores` for some.

        Raises
        ------
        ValueError
            If a matrix has no value, or one that is not finite.
        """
        for row in self.rows:
            if not math.isfinite(values.get(row.id, math.nan)):
                raise ValueError(f"The {name} of {row.id!r} is {values.get(row.id)}, which can't be ranked.")
        rows = [replace(row, scores={**row.scores, name: float(values[row.id])}) for row in self.rows]
        return replace(self, rows=rows)

    def to_text(self, *, limit: int | None = None, width: int | None = None) -> str:
        """Return a table for the terminal, highest drift per point first, at most ``limit`` rows."""
        from .report.terminal import render_table

        ranked = sorted(self.rows, key=lambda row: -row.per_point)[:limit]
        higher = [dimension for dimension in self.settings.dimensions if dimension]
        columns = [
            "matrix",
            "rows",
            "drift",
            *(f"drift H{d}" for d in higher),
            "per row",
            "of total",
            "norm change",
        ]
        lines = [
            [
                row.id,
                str(row.shape[0]),
                f"{row.drift[0]:.4g}",
                *(f"{row.drift[d]:.4g}" for d in higher),
                f"{row.per_point:.3g}",
                f"{row.relative:.2%}",
                "–" if row.relative_norm is None else f"{row.relative_norm:.2%}",
            ]
            for row in ranked
        ]
        text = render_table(columns, lines, width=width)
        left_out = len(self.rows) - len(ranked)
        return text + (f"\n… and {left_out} more" if left_out else "")

    def to_pandas(self) -> pd.DataFrame:
        """Return the table as a data frame, one row per matrix."""
        import pandas as pd

        return pd.DataFrame(
            {
                "id": row.id,
                "layer": row.layer,
                "projection": row.projection,
                "rows": row.shape[0],
                "columns": row.shape[1],
                **{f"drift_h{dimension}": value for dimension, value in row.drift.items()},
                "per_point": row.per_point,
                "total_persistence": row.total_persistence,
                "relative": row.relative,
                "relative_norm": row.relative_norm,
                "spectral_norm": row.spectral_norm,
                **row.scores,
            }
            for row in self.rows
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON-able values."""
        return {
            "kind": "topotuner drift table",
            "schema": SCHEMA,
            "base": self.base,
            "tuned": self.tuned,
            "note": self.note,
            "settings": self.settings.to_dict(),
            "versions": self.versions,
            "rows": [
                {**asdict(row), "shape": list(row.shape), "drift": {str(d): v for d, v in row.drift.items()}}
                for row in self.rows
            ],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DriftTable:
        """Return the table that `to_dict` wrote.

        Raises
        ------
        ValueError
            If it is no drift table, or one of a newer schema.
        """
        if values.get("kind") != "topotuner drift table":
            raise ValueError(f"This is no drift table: its kind is {values.get('kind')!r}.")
        if values["schema"] > SCHEMA:
            raise ValueError(
                f"This drift table has schema {values['schema']}; this version of topotuner_peft reads up to "
                f"{SCHEMA}. It was written by topotuner-peft {values.get('versions', {}).get('topotuner-peft', '?')}: "
                "install that or a newer version."
            )
        rows = [
            MatrixDrift(
                **{
                    **row,
                    "shape": tuple(row["shape"]),
                    "drift": {int(dimension): value for dimension, value in row["drift"].items()},
                }
            )
            for row in values["rows"]
        ]
        return cls(
            rows=rows,
            settings=DriftSettings.from_dict(values["settings"]),
            base=values["base"],
            tuned=values["tuned"],
            note=values.get("note", ""),
            versions=values["versions"],
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DriftTable:
        """Read a table that `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


def write_json(path: str | os.PathLike[str], values: Any) -> None:
    """Write JSON that a person can read, whole or not at all; NaN and infinity are refused."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


@dataclass
class Snapshot:
    """The diagrams of a model at one moment, without its weights.

    Attributes
    ----------
    settings : DriftSettings
    projections : list of Projection
    diagrams : dict of str to list of numpy.ndarray
        Matrix id → one (m, 2) float64 array per homology dimension.
    info : dict
        The model, as in `DriftTable.base`.
    """

    settings: DriftSettings
    projections: list[Projection]
    diagrams: dict[str, list[np.ndarray]]
    info: dict[str, Any]


def select_matrices(found: Sequence[Projection], matrices: Iterable[str] | None) -> list[Projection]:
    """Return the projections of the given ids, or all of them for None.

    Raises
    ------
    ValueError
        If an id has no such matrix among ``found``, or if there are no ids.
    """
    if matrices is None:
        return list(found)
    wanted = list(matrices)
    by_id = {projection.id: projection for projection in found}
    matched = _projections.match_ids(wanted, by_id)
    missing = [name for name, match in matched.items() if match is None]
    if missing or not wanted:
        raise ValueError(
            f"The model has no matrices {missing}; it has {_projections.summarise_names(by_id)}."
            if missing
            else "An empty list of matrices was asked for."
        )
    chosen = set(matched.values())
    return [projection for projection in found if projection.id in chosen]


def take_snapshot(
    model: nn.Module,
    *,
    settings: DriftSettings | None = None,
    projections: Sequence[str] = PROJECTIONS,
    pattern: str | None = None,
    matrices: Iterable[str] | None = None,
    heads: bool = False,
    effective: bool = True,
    progress: bool = False,
) -> Snapshot:
    """Compute the persistence diagrams of a model's attention matrices, to compare later with `measure_drift`.

    Parameters
    ----------
    model : torch.nn.Module
    settings : DriftSettings, optional
    projections, pattern
        Which matrices, see `find_projections`.
    matrices : iterable of str, optional
        Only these ids.
    heads : bool
        Take single heads instead of whole matrices, see `topotuner_peft.projections.split_heads`.
    effective : bool
        Whether active adapters count. False snapshots the base weights under them.
    progress : bool
        Show a progress bar on stderr.
    """
    from tqdm.auto import tqdm

    settings = settings or DriftSettings()
    found = _projections.find_projections(model, projections=projections, pattern=pattern, heads=heads)
    found = select_matrices(found, matrices)
    modules = _projections.matrix_modules(model)
    diagrams = {}
    for projection in tqdm(found, desc="Diagrams", unit="matrix", disable=not progress, leave=False):
        weight = _projections.read_weight(modules[projection.module], projection, effective=effective)
        diagrams[projection.id] = settings.diagrams(weight, projection.id)
    return Snapshot(settings, found, diagrams, model_info(model, found))


def relative_norm(base: torch.Tensor, tuned: torch.Tensor) -> float:
    """Return ‖tuned − base‖ / ‖base‖ in the Frobenius norm, computed in float64."""
    base = base.detach().double()
    norm = base.norm().item()
    change = (tuned.detach().double().to(base.device) - base).norm().item()
    return change / norm if norm else math.inf if change else 0.0


def spectral_norm(base: torch.Tensor, tuned: torch.Tensor) -> float:
    """Return ‖tuned − base‖₂, the largest singular value of the change.

    By Lanczos iteration (`scipy.sparse.linalg.svds`), to 10⁻⁶ relative; densely where a side is below 32.
    """
    from scipy.sparse.linalg import svds

    change = (tuned.detach().double().to(base.device) - base.detach().double()).cpu().numpy()
    if not change.any():
        return 0.0
    if min(change.shape) < 32:
        return float(np.linalg.norm(change, 2))
    scale = np.abs(change).max()
    start = np.random.default_rng(0).standard_normal(min(change.shape))
    change = (change / scale).astype(np.float32)
    return float(scale * svds(change, k=1, tol=1e-6, v0=start, return_singular_vectors=False)[0])


def measure_drift(
    base: Weights | Snapshot,
    tuned: Weights | Snapshot | None = None,
    *,
    metric: str = "cosine",
    dimensions: Sequence[int] = (0,),
    order: float = 1.0,
    internal_p: float = math.inf,
    precision: str = "float32",
    projections: Sequence[str] = PROJECTIONS,
    pattern: str | None = None,
    matrices: Iterable[str] | None = None,
    heads: bool = False,
    config: Any = None,
    n_jobs: int = 1,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> DriftTable:
    """Measure how far the persistence diagram of each attention matrix moved.

    The rows of a matrix are a point cloud; its Vietoris–Rips filtration has a persistence diagram; the drift is
    the Wasserstein distance between the diagrams of the pretrained and the tuned matrix (Erol et al. 2026,
    "TopoTuner"). Zero drift does not mean zero change: with the cosine metric the diagram ignores the norms of
    rows and rotations of the whole cloud.

    Parameters
    ----------
    base : torch.nn.Module, mapping, str, path or Snapshot
        The pretrained weights: a live model, a state dict, a folder of safetensors (sharded or not), a Hub id,
        ``id@revision`` if need be, or a GGUF file. With ``tuned=None``, a PEFT model or an adapter's folder or Hub
        id: the base weights are compared with what they become under the active adapters.
    tuned : torch.nn.Module, mapping, str, path or Snapshot, optional
        The fine-tuned weights, any of these; a PEFT adapter sits on ``base``.
    metric, dimensions, order, internal_p, precision
        See `DriftSettings`. If one side is a snapshot, its settings must be these.
    projections : sequence of str
        Which of ``"q"``, ``"k"``, ``"v"``, ``"o"`` to measure.
    pattern : str, optional
        For models of other names, see `topotuner_peft.projections.describe_projections`.
    matrices : iterable of str, optional
        Measure only these ids.
    heads : bool
        Measure single heads instead of whole matrices, each by the cloud of its own rows (of o: all rows, in the
        head's columns), see `topotuner_peft.projections.split_heads`.
    config : object or dict, optional
        The model's configuration, for state dicts of models with fused q, k and v.
    n_jobs : int
        Threads that share the matrices; each holds a few matrices in memory. −1 for one per processor.
    cache_dir : path, optional
        Keep diagrams here by the content of the matrix, so that a second scan on the same base computes half as
        much and an interrupted one goes on where it was.
    progress : bool
        Show a progress bar with the time left on stderr.

    Returns
    -------
    DriftTable
        Under ``torchrun`` or ``accelerate launch``, with `torch.distributed` initialised, the ranks share the
        matrices and each gets the whole table.

    Raises
    ------
    ValueError
        If no matrix is found, the two models do not have the same ones, their shapes differ, a weight holds a
        NaN or infinity (the message names the matrix), or a snapshot was taken with other settings.
    TypeError
        If a source is neither a model nor a snapshot.
    """
    settings = DriftSettings(metric, tuple(dimensions), order, internal_p, precision)
    selection = Selection(tuple(projections), pattern, heads)
    before, after = open_pair(base, tuned, selection, config=config)
    for side in (before, after):
        if isinstance(side, Snapshot) and side.settings != settings:
            raise ValueError(f"The snapshot was taken with {side.settings}, the drift is asked with {settings}.")

    pairs = _pair_up(before, after, matrices)
    cache = DiagramCache(cache_dir) if cache_dir is not None else None

    def measure(pair: tuple[Projection, Projection]) -> MatrixDrift:
        first, second = pair
        weights = _weight(before, first), _weight(after, second)
        diagrams = [
            _diagrams(side, projection, weight, settings, cache)
            for side, projection, weight in zip((before, after), pair, weights, strict=True)
        ]
        norms = (None, None)
        if weights[0] is not None and weights[1] is not None:
            norms = relative_norm(*weights), spectral_norm(*weights)
        return matrix_drift(first, settings, *diagrams, *norms)

    rank, ranks = _rank()
    rows = _in_parallel(measure, pairs[rank::ranks], n_jobs, progress and rank == 0)
    if ranks > 1:
        rows = _gather(rows, ranks, len(pairs))
    return DriftTable(rows, settings, before.info, {"name": after.info["name"]})


def open_pair(
    base: Weights | Snapshot, tuned: Weights | Snapshot | None, selection: Selection, *, config: Any = None
) -> tuple[Source | Snapshot, Source | Snapshot]:
    """Return the two sides of a drift; an adapter sits on the base it is compared with."""
    if tuned is None:
        if hasattr(base, "peft_config"):
            return (
                open_source(base, selection, effective=False),
                open_source(base, selection, effective=True),
            )
        if not is_adapter(base):
            raise TypeError(
                "With one model, it must be a PEFT model or an adapter: its base weights are compared with its tuned "
                "ones."
            )
        adapted = open_source(base, selection)
        return adapted.base, adapted
    before = base if isinstance(base, Snapshot) else open_source(base, selection, config=config)
    if isinstance(tuned, Snapshot):
        return before, tuned
    on = before if isinstance(before, Source) else None
    return before, open_source(tuned, selection, base=on, config=config)


def _pair_up(
    before: Source | Snapshot, after: Source | Snapshot, matrices: Iterable[str] | None
) -> list[tuple[Projection, Projection]]:
    """Return the matrices to measure, each with its partner on the other side."""
    chosen = select_matrices(before.projections, matrices)
    by_id = {projection.id: projection for projection in after.projections}
    partners = _projections.match_ids([p.id for p in chosen], by_id)
    missing = [name for name, partner in partners.items() if partner is None]
    if missing:
        raise ValueError(
            f"The tuned model lacks {len(missing)} of the base model's {len(chosen)} matrices, {missing[0]!r} among "
            f"them; it has {_projections.summarise_names(by_id)}."
        )
    pairs = [(projection, by_id[partners[projection.id]]) for projection in chosen]
    for projection, partner in pairs:
        if partner.shape != projection.shape:
            raise ValueError(
                f"{projection.id!r} is {projection.shape} in the base model, {partner.shape} in the tuned."
            )
    return pairs


def _weight(side: Source | Snapshot, projection: Projection) -> torch.Tensor | None:
    return None if isinstance(side, Snapshot) else side.weight(projection)


def _diagrams(
    side: Source | Snapshot,
    projection: Projection,
    weight: torch.Tensor | None,
    settings: DriftSettings,
    cache: DiagramCache | None,
) -> list[np.ndarray]:
    if isinstance(side, Snapshot):
        return side.diagrams[projection.id]
    if cache is None:
        return settings.diagrams(weight, projection.id)
    return cache.diagrams(settings, weight, projection.id)


class DiagramCache:
    """Diagrams on disk, found by the content of the matrix and the settings they were computed with.

    Parameters
    ----------
    folder : path
        Made when first written to. Files are safe to delete and to share between processes.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder).expanduser()

    def diagrams(self, settings: DriftSettings, weight: torch.Tensor, name: str) -> list[np.ndarray]:
        """Return the diagrams of a matrix, computed only if they are not there yet."""
        from safetensors.numpy import load_file, save_file

        path = self.folder / f"{self.key(settings, weight)}.safetensors"
        if path.exists():
            stored = load_file(path)
            return [stored[str(dimension)] for dimension in settings.dimensions]
        found = settings.diagrams(weight, name)
        self.folder.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, also where two processes write the same one.
        partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
        save_file({str(d): np.ascontiguousarray(x) for d, x in zip(settings.dimensions, found, strict=True)}, partial)
        partial.replace(path)
        return found

    @staticmethod
    def key(settings: DriftSettings, weight: torch.Tensor) -> str:
        """Return what a matrix's diagrams are called: a hash of its values, dtype, shape and the settings."""
        import torch

        values = weight.detach().cpu().contiguous()
        what = [DIAGRAM_VERSION, settings.metric, settings.precision, list(settings.dimensions)]
        digest = hashlib.blake2b(json.dumps([*what, str(values.dtype), list(values.shape)]).encode(), digest_size=20)
        digest.update(values.view(torch.uint8).numpy())
        return digest.hexdigest()


def _in_parallel(
    measure: Callable[[Any], MatrixDrift], pairs: Sequence[Any], n_jobs: int, progress: bool
) -> list[MatrixDrift]:
    """Return ``measure`` of each pair, in order; the first error ends it."""
    from tqdm.auto import tqdm

    if n_jobs == 0 or n_jobs < -1:
        raise ValueError(f"n_jobs={n_jobs} must be a positive number of threads, or -1 for one per processor.")
    workers = min(os.cpu_count() or 1, max(len(pairs), 1)) if n_jobs == -1 else n_jobs
    with tqdm(total=len(pairs), desc="Drift", unit="matrix", disable=not progress, leave=False) as bar:
        if workers == 1:
            rows = []
            for pair in pairs:
                rows.append(measure(pair))
                bar.update()
            return rows
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(measure, pair) for pair in pairs]
            try:
                for future in as_completed(futures):
                    future.result()
                    bar.update()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in futures]


def _rank() -> tuple[int, int]:
    """Return this process's rank and how many there are."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _gather(rows: list[MatrixDrift], ranks: int, total: int) -> list[MatrixDrift]:
    """Return the rows of all ranks, in the order of the matrices, which the ranks took in turn."""
    import torch.distributed as dist

    parts: list[list[MatrixDrift]] = [[] for _ in range(ranks)]
    dist.all_gather_object(parts, rows)
    return [parts[index % ranks][index // ranks] for index in range(total)]


def matrix_drift(
    projection: Projection,
    settings: DriftSettings,
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
    relative_norm: float | None = None,
    spectral_norm: float | None = None,
) -> MatrixDrift:
    """Return the drift between two lists of diagrams of one matrix."""
    bars = before[0]
    finite = np.isfinite(bars[:, 1])
    return MatrixDrift(
        id=projection.id,
        layer=projection.layer,
        projection=projection.projection,
        shape=projection.shape,
        drift=settings.distances(before, after),
        total_persistence=float((bars[finite, 1] - bars[finite, 0]).sum()),
        relative_norm=relative_norm,
        spectral_norm=spectral_norm,
    )
