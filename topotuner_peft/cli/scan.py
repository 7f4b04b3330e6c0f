"""``topotuner scan``."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..sources import Source


def run(options: argparse.Namespace) -> None:
    """List a model's attention matrices and what a drift run would cost."""
    from ..drift import DriftSettings
    from ..sources import Selection, open_source

    source = open_source(options.model, Selection(options.projections, options.pattern, options.heads))
    found = scan(source, DriftSettings(metric=options.metric))
    print(json.dumps(found, allow_nan=False) if options.json else to_text(found))


def scan(source: Source, settings: Any) -> dict[str, Any]:
    """Return the matrices of a source by projection and shape, and the expected cost of measuring drift.

    Parameters
    ----------
    source : Source
    settings : DriftSettings

    Returns
    -------
    dict
        ``model``, ``parameters``, ``matrices`` (a list by projection and shape: ``projection``, ``rows``,
        ``columns``, ``count``, ``layers``, ``dtype``, ``share`` of all parameters, ``seconds`` for the diagram of
        one, measured on the first of its kind), and ``pair_seconds``: the diagrams of two models, one thread over
        matrices.
    """
    from ..projections import PROJECTIONS

    groups: dict[tuple[str, tuple[int, int]], list] = {}
    for projection in source.projections:
        groups.setdefault((projection.projection, projection.shape), []).append(projection)
    parameters = source.info["parameters"]
    matrices = []
    for (letter, shape), members in sorted(groups.items(), key=lambda item: (PROJECTIONS.index(item[0][0]), item[0])):
        weight = source.weight(members[0])
        started = time.perf_counter()
        settings.diagrams(weight, members[0].id)
        seconds = time.perf_counter() - started
        matrices.append(
            {
                "projection": letter,
                "rows": shape[0],
                "columns": shape[1],
                "count": len(members),
                "layers": len({member.layer for member in members}),
                "dtype": str(weight.dtype).removeprefix("torch."),
                "share": len(members) * shape[0] * shape[1] / parameters,
                "seconds": seconds,
            }
        )
    return {
        "model": source.name,
        "model_type": source.info["model_type"],
        "parameters": parameters,
        "metric": settings.metric,
        "matrices": matrices,
        "pair_seconds": 2 * sum(entry["count"] * entry["seconds"] for entry in matrices),
    }


def to_text(found: dict[str, Any]) -> str:
    """Return the scan as a table for the terminal."""
    from ..report.terminal import render_table

    lines = [
        [
            entry["projection"],
            f"{entry['count']} in {entry['layers']} layers",
            f"{entry['rows']} × {entry['columns']}",
            entry["dtype"],
            f"{entry['share']:.2%}",
            f"{entry['share'] / entry['count']:.3%}",
            f"{entry['seconds']:.3f} s",
        ]
        for entry in found["matrices"]
    ]
    columns = ["projection", "matrices", "shape", "dtype", "share", "one's share", "one diagram"]
    total = sum(entry["count"] for entry in found["matrices"])
    share = sum(entry["share"] for entry in found["matrices"])
    seconds = found["pair_seconds"]
    about = f"{max(seconds, 1):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    return (
        f"{found['model']} ({found['model_type'] or 'unknown architecture'}): {found['parameters']:,} parameters\n\n"
        f"{render_table(columns, lines)}\n\n"
        f"{total} attention matrices, {share:.2%} of all parameters. Their drift ({found['metric']}, dimension 0)\n"
        f"takes about {about} here, reading the files not counted."
    )
