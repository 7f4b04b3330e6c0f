"""The ``topotuner`` command: parses and calls.

It stands outside the package so that ``topotuner --help`` does not import torch: importing the package registers
the method with PEFT. What a command does is in ``topotuner_peft.cli``, imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="topotuner",
        description="Measure which attention matrices of a language model reorganise, and train only those.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")

    demo = commands.add_parser(
        "demo",
        parents=[common],
        help="the whole idea on a real model and task, in about 15 minutes on two cores",
        description="Measure drift on a prior task, make a profile, train with it until the matrices settle, and "
        "compare the result with LoRA, full fine-tuning and a random choice. Leaves report.html in the output folder. "
        "Stopped with Ctrl-C it goes on where it was when called again.",
    )
    demo.add_argument(
        "--fast", action="store_true", help="two to three minutes: shows that it runs, not what it can do"
    )
    demo.add_argument("--model", metavar="NAME", help="folder or Hub id of another causal language model")
    demo.add_argument(
        "--output-dir", metavar="DIR", default="topotuner-demo", help="where results go (default: %(default)s)"
    )
    demo.add_argument("--seed", type=int, default=0, help="order of examples and random draws (default: %(default)s)")
    demo.add_argument("--restart", action="store_true", help="replace an earlier run in the output folder")

    matrices = argparse.ArgumentParser(add_help=False)
    matrices.add_argument(
        "--projections",
        metavar="LIST",
        type=_letters,
        default=("q", "k", "v", "o"),
        help="such as v,o (default: q,k,v,o)",
    )
    matrices.add_argument(
        "--pattern", metavar="REGEX", help="for models of other module names: groups 'layer' and 'projection'"
    )
    matrices.add_argument("--heads", action="store_true", help="single attention heads instead of whole matrices")
    matrices.add_argument("--metric", choices=("cosine", "angular", "euclidean"), default="cosine", help="between rows")
    matrices.add_argument("--json", action="store_true", help="print JSON instead of a table")
    sources = "a folder of safetensors, a Hub id (owner/name or owner/name@revision), or a GGUF file"

    drift = commands.add_parser(
        "drift",
        parents=[common, matrices],
        help="how far the persistence diagram of each attention matrix moved between two checkpoints",
        description="Measure the topological drift of every attention matrix. Weights are read one matrix at a time; "
        "a scan that was stopped goes on where it was if it is called again with the same --cache.",
    )
    drift.add_argument("base", metavar="BASE", help=f"the pretrained weights: {sources}; or an adapter, without TUNED")
    drift.add_argument("tuned", metavar="TUNED", nargs="?", help="the fine-tuned weights: the same, or a PEFT adapter")
    drift.add_argument(
        "--dims", metavar="LIST", type=_dimensions, default=(0,), help="homology dimensions, such as 0,1 (default: 0)"
    )
    drift.add_argument("--order", metavar="P", type=float, default=1.0, help="of the Wasserstein distance (default: 1)")
    drift.add_argument("-o", "--output", metavar="FILE", help="save the drift table, for profiles")
    drift.add_argument("--limit", metavar="N", type=int, help="show the N matrices of the highest drift only")
    drift.add_argument("--jobs", metavar="N", type=int, default=1, help="threads over matrices; -1: one per processor")
    drift.add_argument("--cache", metavar="DIR", help="keep diagrams here, by the content of the matrix")

    scan = commands.add_parser(
        "scan",
        parents=[common, matrices],
        help="which attention matrices a model has, and what measuring their drift would cost",
        description="List the attention matrices of a model with their sizes, and time the diagrams of one of each "
        "shape to say how long a drift run takes here.",
    )
    scan.add_argument("model", metavar="MODEL", help=sources)
    return parser


def _letters(text: str) -> tuple[str, ...]:
    letters = tuple(part.strip() for part in text.split(","))
    if not letters or not set(letters) <= set("qkvo"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of q, k, v and o, such as v,o")
    return letters


def _dimensions(text: str) -> tuple[int, ...]:
    try:
        dimensions = tuple(int(part) for part in text.split(","))
    except ValueError:
        dimensions = (-1,)
    if min(dimensions) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of homology dimensions, such as 0,1")
    return dimensions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns
    -------
    int
        Exit status: 0 done, 2 wrong use, 1 anything else.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.version:
        from importlib.metadata import version

        print(f"topotuner {version('topotuner-peft')}")
        return 0
    if options.command is None:
        parser.print_help()
        return 2
    try:
        command = importlib.import_module(f"topotuner_peft.cli.{options.command}")
        command.run(options)
    except KeyboardInterrupt:
        print(f"\ntopotuner {options.command}: stopped", file=sys.stderr)
        return 1
    except Exception as error:
        if options.debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"topotuner {options.command}: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
