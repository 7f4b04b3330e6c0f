"""Run a grid's cells, one process each, a finished one never again; or report on what has been run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from .grid import HERE, Cell, digest, load_grid

RESULTS = HERE / "results"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the cells of grids that have no result yet")
    run.add_argument("grids", nargs="+", type=Path)
    run.add_argument("--data-dir", type=Path, help="folder of JSON Lines files; by default the Hub")
    run.add_argument("--results", type=Path, default=RESULTS)
    run.add_argument("--hours", type=float, help="start no further cell after so long")
    run.add_argument("--list", action="store_true", help="only say which cells there are")
    report = commands.add_parser("report", help="write benchmarks/RESULTS.md from the results there are")
    report.add_argument("--results", type=Path, default=RESULTS)
    job = commands.add_parser("job", help="what each process does; for the above to call")
    job.add_argument("job", type=Path)
    parsed = parser.parse_args(arguments)
    if parsed.command == "job":
        return _job(json.loads(parsed.job.read_text(encoding="utf-8")))
    if parsed.command == "report":
        from .report import REPORT, write_report

        write_report(parsed.results)
        print(f"Wrote {REPORT}")
        return 0
    return _run(parsed)


def _run(options: argparse.Namespace) -> int:
    cells = list({cell.id: cell for grid in options.grids for cell in load_grid(grid)}.values())
    waiting = [cell for cell in cells if not cell.path(options.results).is_file()]
    print(f"{len(cells)} cells, {len(cells) - len(waiting)} of them done", flush=True)
    if options.list:
        for cell in waiting:
            print(cell.path(options.results).relative_to(options.results))
        return 0
    started, failed = time.monotonic(), 0
    for number, cell in enumerate(waiting, 1):
        if options.hours is not None and time.monotonic() - started > 3600 * options.hours:
            print(f"Stopped after {options.hours:g} hours; {len(waiting) - number + 1} cells are left.", flush=True)
            break
        began = time.monotonic()
        ok = _run_cell(cell, options)
        failed += not ok
        print(
            f"[{number}/{len(waiting)}] {cell.values['task']} {cell.label} lr {cell.values['learning_rate']:g} seed "
            f"{cell.values['seed']}: {_result(cell, options) if ok else 'FAILED'} "
            f"({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    return 1 if failed else 0


def _result(cell: Cell, options: argparse.Namespace) -> str:
    result = json.loads(cell.path(options.results).read_text(encoding="utf-8"))
    return f"validation {result['validation']['loss']:.4f}, test {result['test']['loss']:.4f}"


def _run_cell(cell: Cell, options: argparse.Namespace) -> bool:
    """Run a cell, and before it what it needs."""
    values = cell.values
    data_dir = str(options.data_dir) if options.data_dir else None
    base = {name: values[name] for name in ("model", "task", "evaluation")}
    base_file = options.results / values["task"] / f"base-{digest(base)}.json"
    jobs = []
    if not base_file.is_file():
        jobs.append({"kind": "base", "values": base, "output": str(base_file)})
    prior_file = None
    if values["prior"] is not None:
        prior_id = digest({"prior": values["prior"], "model": values["model"]})
        prior_file = options.results / "priors" / f"{values['prior']['task']}-{prior_id}.json"
        if not prior_file.is_file():
            from topotuner_peft.demo.assets import default_cache_dir

            weights = default_cache_dir() / "benchmark-priors" / f"{prior_id}.safetensors"
            jobs.append(
                {
                    "kind": "prior",
                    "prior": values["prior"],
                    "model": values["model"],
                    "output": str(prior_file),
                    "weights": str(weights),
                }
            )
    jobs.append(
        {
            "kind": "cell",
            "label": cell.label,
            "values": values,
            "prior": str(prior_file) if prior_file else None,
            "output": str(cell.path(options.results)),
        }
    )
    for job in jobs:
        output = Path(job["output"])
        output.parent.mkdir(parents=True, exist_ok=True)
        file, log = output.with_suffix(".job"), output.with_suffix(".log")
        file.write_text(json.dumps({**job, "data_dir": data_dir}), encoding="utf-8")
        with log.open("w", encoding="utf-8") as stream:
            command = [sys.executable, "-m", "benchmarks.finetune", "job", str(file)]
            done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False, env=os.environ)
        if done.returncode or not output.is_file():
            print(f"{job['kind']} failed; see {log}", flush=True)
            return False
        file.unlink()
        log.unlink()
    return True


def _job(job: dict) -> int:
    from . import work

    data_dir = Path(job["data_dir"]) if job["data_dir"] else None
    output = Path(job["output"])
    if job["kind"] == "prior":
        work.run_prior(job["prior"], job["model"], data_dir, output, Path(job["weights"]))
    elif job["kind"] == "base":
        work.run_base(job["values"], data_dir, output)
    else:
        prior = Path(job["prior"]) if job["prior"] else None
        work.run_cell(job["label"], job["values"], data_dir, prior, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
