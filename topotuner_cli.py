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
    return parser


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
