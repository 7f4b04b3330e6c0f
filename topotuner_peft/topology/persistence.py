"""Row cloud → persistence diagrams of its Vietoris–Rips filtration.

*Dimension 0.* All births are 0, the finite deaths are the edge lengths of a minimum spanning tree of the cloud
[1]_, and one class, the whole cloud, never dies. Which edges the tree has is found from distances by matrix
product in float32, the same on a CPU and a GPU; their lengths are computed again from the rows in float64.

*How exact that is.* The tree is that of the squared distances of the centred points (unit rows for the metrics of
angles, whose squared chord is 2 − 2 cos). If each is off by at most ε, the sorted edges of the tree so found are
within ε of the true ones (stability of persistence [2]_), and their true lengths within ε of that. No spanning
tree's sorted edges lie below the minimum tree's. So every squared death is at least the true one and at most 2ε
above it, with ε ≤ 2(d + 6)·2⁻²⁴·r² for d columns and points within r of their mean (rounding of a dot product
[3]_): the worst case, in practice a hundredth of it, and an edge is another one at near-ties only.
``precision="float64"`` has 2⁻⁵³ for 2⁻²⁴.

*Dimensions 1 and up* come from GUDHI's `RipsPersistence`, over the field of two elements.

References
----------
.. [1] V. Robins, "Towards computing homology from finite approximations", Topology Proceedings 24, 1999.
.. [2] D. Cohen-Steiner, H. Edelsbrunner, J. Harer, "Stability of persistence diagrams", Discrete &
   Computational Geometry 37, 2007.
.. [3] N. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, SIAM, 2002, section 3.1.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

METRICS = ("cosine", "angular", "euclidean")
PRECISIONS = ("float32", "float64")

# Rows above which dimension 1 is sampled: GUDHI takes about 10 s and 0.5 GB at 2304 rows, a minute at 4096.
MAX_POINTS = {1: 2304}
# Dimension 2 has n⁴ simplices where dimension 1 has n³.
MAX_POINTS_HIGHER = 256


class SampledRowsWarning(UserWarning):
    """A matrix has more rows than homology above dimension 0 is computed for, so a seeded sample was taken."""


def check_options(metric: str, precision: str, dimensions: Sequence[int]) -> None:
    """Raise a ValueError if `persistence_diagrams` would for these options."""
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is not known; the metrics are {', '.join(METRICS)}.")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is not known; it is 'float32' or 'float64'.")
    if not len(dimensions) or min(dimensions) < 0:
        raise ValueError(f"dimensions={dimensions} must name at least one homology dimension, none negative.")


def persistence_diagrams(
    X: ArrayLike | torch.Tensor,
    *,
    metric: str = "cosine",
    dimensions: Sequence[int] = (0,),
    precision: str = "float32",
    block_size: int = 1024,
    max_points: int | None = None,
    seed: int = 0,
    name: str | None = None,
) -> list[np.ndarray]:
    """Compute the persistence diagrams of the rows of a matrix.

    Parameters
    ----------
    X : array or torch.Tensor, shape (n, d), any floating dtype
        A cloud of n points, one per row. A tensor's distances are computed on its device.
    metric : {"cosine", "angular", "euclidean"}
        ``cosine`` is 1 − cos(x, y), in [0, 2]; ``angular`` the angle in radians, in [0, π]; ``euclidean`` is in
        units of X. The first two do not see the norms of the rows. To them, rows of zeros are one point, as far
        from every other as orthogonal rows are: 1, or π/2.
    dimensions : sequence of int
        Homology dimensions. 0 is fast; 1 takes seconds at a thousand rows and grows with the cube of their number.
    precision : {"float32", "float64"}
        Arithmetic of the distances that choose the spanning tree; see the module's text for the error.
    block_size : int
        Rows per block of the distance computation; bounds its memory beside the n × n matrix itself.
    max_points : int, optional
        Above that many rows, dimensions from 1 use a random sample of that many, with a `SampledRowsWarning`. By
        default 2304 for dimension 1, 256 above.
    seed : int
        Of that sample.
    name : str, optional
        What to call the matrix in errors.

    Returns
    -------
    list of numpy.ndarray
        One (m, 2) float64 array of births and deaths per entry of ``dimensions``, in that order. Dimension 0 has
        n − 1 finite bars in ascending order, zero-length ones (of duplicate rows) included, then the essential
        class (0, inf). Bars of higher dimensions are sorted by birth, then death.

    Raises
    ------
    ValueError
        If X is not a floating (n, d) matrix with n, d ≥ 1, holds NaN or infinity, or an option is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> persistence_diagrams(np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 4.5]]), metric="euclidean")
    [array([[0. , 0.5],
           [0. , 5. ],
           [0. , inf]])]
    """
    import torch

    label = f"The matrix {name!r}" if name else "The matrix"
    check_options(metric, precision, dimensions)
    dimensions = [int(dimension) for dimension in dimensions]
    if block_size < 1:
        raise ValueError(f"block_size={block_size} must be at least 1.")
    rows = X.detach() if isinstance(X, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(X))
    if rows.dim() != 2 or rows.numel() == 0:
        raise ValueError(f"{label} has shape {tuple(rows.shape)}; a cloud is a non-empty (rows, columns) matrix.")
    if not rows.dtype.is_floating_point:
        raise ValueError(f"{label} has dtype {rows.dtype}; convert it to a floating one first.")
    if rows.is_meta:
        raise ValueError(f"{label} is on the meta device and has no values; load the weights first.")
    if rows.device.type == "mps":  # has no float64
        rows = rows.cpu()
    rows = rows.double()
    if not torch.isfinite(rows).all():
        bad = (~torch.isfinite(rows)).any(dim=1).nonzero()[:, 0]
        raise ValueError(
            f"{label} holds NaN or infinity in {len(bad)} of its {len(rows)} rows, first in row {int(bad[0])}; "
            "a diverged or damaged weight can't be measured."
        )

    cloud = _Cloud(rows, metric)
    found = {}
    if 0 in dimensions:
        found[0] = _dimension_zero(cloud, getattr(torch, precision), block_size)
    for highest in sorted({dimension for dimension in dimensions if dimension > 0}):
        limit = max_points if max_points is not None else MAX_POINTS.get(highest, MAX_POINTS_HIGHER)
        found[highest] = _higher_dimension(cloud, highest, limit, seed, block_size, label)
    return [found[dimension] for dimension in dimensions]


class _Cloud:
    """Points, and the distances between them.

    Attributes
    ----------
    points : torch.Tensor, (n, d) float64
        The rows, scaled by a power of two; for the metrics of angles, the unit rows, and 0 for rows of zeros.
    zero : torch.Tensor, (n,) bool
        Rows without a direction.
    """

    def __init__(self, rows: torch.Tensor, metric: str):
        import torch

        self.metric = metric
        self.scale = 1.0
        if metric == "euclidean":
            self.zero = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
            # Squares of tiny weights would vanish. A power of two, so that scaling is exact.
            largest = rows.abs().max().item()
            self.scale = 2.0 ** np.frexp(largest)[1] if largest else 1.0
            self.points = rows / self.scale
        else:
            largest = rows.abs().amax(dim=1, keepdim=True)
            self.zero = largest[:, 0] == 0
            rows = rows / torch.where(largest > 0, largest, 1.0)
            norms = rows.norm(dim=1, keepdim=True)
            self.points = rows / torch.where(norms > 0, norms, 1.0)

    def __len__(self) -> int:
        return len(self.points)

    def subset(self, index: np.ndarray) -> _Cloud:
        """Return the cloud of some of the points."""
        import torch

        part = object.__new__(_Cloud)
        at = torch.from_numpy(index).to(self.points.device)
        part.metric, part.scale, part.points, part.zero = self.metric, self.scale, self.points[at], self.zero[at]
        return part

    def squared_distances(self, dtype: torch.dtype, block_size: int) -> np.ndarray:
        """Return the (n, n) squared distances between the points, by matrix product in ``dtype``."""
        import torch

        # A product loses what lies below the rounding of the norms, so what all points share must go first.
        points = (self.points - self.points.mean(dim=0)).to(dtype)
        n = len(points)
        squares = (points.double() ** 2).sum(dim=1).to(dtype)
        result = np.empty((n, n), dtype=np.float32 if dtype == torch.float32 else np.float64)
        with _exact_products(points.device.type):
            for start in range(0, n, block_size):
                part = slice(start, min(start + block_size, n))
                block = squares[part, None] + squares[None, :] - 2 * (points[part] @ points.T)  # (block, n)
                if self.zero.any():
                    zero, other = self.zero[part, None], self.zero[None, :]
                    block[zero ^ other] = 2  # as for orthogonal unit rows
                    block[zero & other] = 0
                result[part] = block.clamp_(min=0).cpu().numpy()
        np.fill_diagonal(result, 0)
        return result

    def lengths(self, left: np.ndarray, right: np.ndarray, block_size: int) -> np.ndarray:
        """Return the (m,) float64 distances between points ``left[i]`` and ``right[i]``, without cancellation."""
        import torch

        result = np.empty(len(left))
        for start in range(0, len(left), block_size):
            part = slice(start, start + block_size)
            i = torch.from_numpy(left[part]).to(self.points.device)
            j = torch.from_numpy(right[part]).to(self.points.device)
            chord = (self.points[i] - self.points[j]).norm(dim=1)
            if self.metric == "euclidean":
                values = chord * self.scale
            else:
                one_zero = self.zero[i] ^ self.zero[j]
                if self.metric == "cosine":
                    values = torch.where(one_zero, 1.0, chord**2 / 2)  # of unit vectors: ‖x − y‖² = 2 − 2 cos
                else:
                    # W. Kahan's formula, exact at small and at large angles.
                    angle = 2 * torch.atan2(chord, (self.points[i] + self.points[j]).norm(dim=1))
                    values = torch.where(one_zero, np.pi / 2, angle)
            result[part] = values.cpu().numpy()
        return result


def _dimension_zero(cloud: _Cloud, dtype: torch.dtype, block_size: int) -> np.ndarray:
    """Return the (n, 2) diagram: n − 1 finite bars in ascending order and the essential class."""
    left, right = _spanning_tree(cloud.squared_distances(dtype, block_size))
    deaths = np.append(np.sort(cloud.lengths(left, right, block_size)), np.inf)
    return np.column_stack([np.zeros_like(deaths), deaths])


def _spanning_tree(distances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the n − 1 edges of a minimum spanning tree of an (n, n) matrix (Prim 1957)."""
    n = len(distances)
    nearest = np.zeros(n, dtype=np.int64)  # the tree's point that each outside point is nearest to
    gap = distances[0].copy()
    outside = np.arange(n) > 0
    gap[0] = np.inf
    left, right = np.empty(n - 1, dtype=np.int64), np.empty(n - 1, dtype=np.int64)
    for step in range(n - 1):
        new = int(gap.argmin())
        left[step], right[step] = nearest[new], new
        outside[new] = False
        row = distances[new]
        closer = (row < gap) & outside
        np.copyto(gap, row, where=closer)
        nearest[closer] = new
        gap[new] = np.inf
    return left, right


def _higher_dimension(cloud: _Cloud, dimension: int, limit: int, seed: int, block_size: int, label: str) -> np.ndarray:
    """Return the (m, 2) diagram of one dimension from 1, by GUDHI."""
    import torch
    from gudhi.sklearn import RipsPersistence

    n = len(cloud)
    if n > limit:
        warnings.warn(
            f"{label} has {n} rows; homology in dimension {dimension} is computed for a sample of {limit} of them "
            f"(seed {seed}). Pass max_points={n} for all of them.",
            SampledRowsWarning,
            stacklevel=3,
        )
        cloud = cloud.subset(np.sort(np.random.default_rng(seed).choice(n, size=limit, replace=False)))
        n = limit
    if n < dimension + 2:
        return np.empty((0, 2))
    squared = cloud.squared_distances(torch.float64, block_size)
    if cloud.metric == "euclidean":
        distances = np.sqrt(squared) * cloud.scale
    elif cloud.metric == "cosine":
        distances = squared / 2
    else:
        distances = 2 * np.arcsin(np.minimum(np.sqrt(squared) / 2, 1))
    # Only one triangle is read, so products that differ in the last bit do not matter.
    rips = RipsPersistence(
        homology_dimensions=[dimension], input_type="lower distance matrix", homology_coeff_field=2, n_jobs=1
    )
    bars = np.asarray(rips.fit_transform([distances])[0][0], dtype=np.float64).reshape(-1, 2)
    return bars[np.lexsort((bars[:, 1], bars[:, 0]))]


@contextlib.contextmanager
def _exact_products(device_type: str) -> Iterator[None]:
    """Keep float32 matrix products in float32: no TF32, no bfloat16, no autocast."""
    import torch

    before: Any = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
