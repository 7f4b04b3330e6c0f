"""``topotuner drift``."""

from __future__ import annotations

import argparse
import json


def run(options: argparse.Namespace) -> None:
    """Measure the drift between two sources, show it, and save it if asked to."""
    from ..drift import measure_drift

    table = measure_drift(
        options.base,
        options.tuned,
        metric=options.metric,
        dimensions=options.dims,
        order=options.order,
        projections=options.projections,
        pattern=options.pattern,
        heads=options.heads,
        n_jobs=options.jobs,
        cache_dir=options.cache,
    )
    # Saved before it is shown: what took an hour must not be lost to a closed pipe.
    if options.output:
        table.save(options.output)
    if options.json:
        print(json.dumps(table.to_dict(), allow_nan=False))
        return
    print(table.to_text(limit=options.limit))
    if options.output:
        print(f"Saved: {options.output}")
