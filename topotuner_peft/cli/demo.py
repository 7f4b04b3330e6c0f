"""``topotuner demo``."""

from __future__ import annotations

import argparse


def run(options: argparse.Namespace) -> None:
    """Run the demo with the parsed options."""
    from ..extras import require

    require("demo", "gguf", "matplotlib", "accelerate")
    from ..demo.run import run_demo

    run_demo(
        options.output_dir,
        model=options.model,
        seed=options.seed,
        fast=options.fast,
        restart=options.restart,
        echo=lambda line: print(line, flush=True),
    )
