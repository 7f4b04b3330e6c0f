"""``benchmarks/RESULTS.md`` and its figures, from the cells' files alone: no number in it is typed."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from .grid import HERE, Cell, load_grid
from .statistics import Difference, mean_interval, paired, regress

CONFIGS = HERE / "configs"
FIGURES = HERE / "figures"
REPORT = HERE.parent / "RESULTS.md"


def write_report(results: Path, output: Path = REPORT, figures: Path = FIGURES) -> str:
    """Write the report and its figures.

    Parameters
    ----------
    results : pathlib.Path
        Folder of the cells' files.
    output : pathlib.Path
        The Markdown file.
    figures : pathlib.Path
        Folder of the pictures.

    Returns
    -------
    str
        The text.
    """
    rates = _results(CONFIGS / "stage_a.yaml", results)
    control = _results(CONFIGS / "stage_b.yaml", results)
    parts = [
        "# Is the drift doing anything that chance would not do?",
        answer(control),
        _setting(control or rates),
        "## Learning rates",
        rate_text(rates),
        "## Drift against its controls",
        *comparison_text(control, results),
        "## What explains a choice's loss",
        explanation_text(control),
        "## What was not run",
        missing_text(results),
    ]
    done = [entry for _, entry in control if entry]
    if done:
        figures.mkdir(parents=True, exist_ok=True)
        for task in sorted({entry["cell"]["task"] for entry in done}):
            file = figures / f"{task}.png"
            draw_loss_against_time([entry for entry in done if entry["cell"]["task"] == task], file)
            parts.insert(3, f"![Test loss against training time, {task}]({file.relative_to(output.parent)})")
    text = "\n\n".join(part for part in parts if part) + "\n"
    output.write_text(text, encoding="utf-8")
    return text


def _results(grid: Path, folder: Path) -> list[tuple[Cell, dict[str, Any] | None]]:
    """Return every cell of a grid with its result, None where it has not been run."""
    if not grid.is_file():
        return []
    return [(cell, _read(cell.path(folder))) for cell in load_grid(grid)]


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def family(label: str) -> str:
    """Return a method's label without the number of a random draw."""
    return label.rstrip("0123456789") if label.startswith("random") else label


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; all but the first column are right-aligned."""
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


# Sections


def scopes(control) -> list[tuple[str, str]]:
    """Return the (task, projections) pairs that have results, in the grid's order."""
    found: dict[tuple[str, str], None] = {}
    for cell, entry in control:
        if entry and cell.values["method"]["kind"] == "topo":
            found[cell.values["task"], _scope(cell)] = None
    return list(found)


def _scope(cell: Cell) -> str:
    projections = cell.values["method"].get("projections")
    return " + ".join(projections).upper() if projections else "Q + K + V + O"


def by_seed(control, task: str, scope: str | None, name: str, value=lambda entry: entry["test"]["loss"]):
    """Return a method's value per seed, averaged over the draws of a seed."""
    values = defaultdict(list)
    for cell, entry in control:
        if not entry or cell.values["task"] != task or family(cell.label) != name:
            continue
        if cell.values["method"]["kind"] == "topo" and scope is not None and _scope(cell) != scope:
            continue
        values[cell.values["seed"]].append(value(entry))
    return {seed: float(np.mean(each)) for seed, each in values.items()}


def names_of(control, task: str, scope: str) -> list[str]:
    """Return the methods with results on a task and scope, in the grid's order; those without a scope are in all."""
    found: dict[str, None] = {}
    for cell, entry in control:
        if not entry or cell.values["task"] != task:
            continue
        if cell.values["method"]["kind"] != "topo" or _scope(cell) == scope:
            found[family(cell.label)] = None
    return list(found)


def answer(control) -> str:
    """Return the first paragraph: whether choosing by drift beats choosing at random, by depth, by norm."""
    done = sum(entry is not None for _, entry in control)
    if not done:
        return (
            "**Not answered yet: no cell of the control question has been run.** What there is so far are learning "
            "rates."
        )
    sentences = [f"From {done} of {len(control)} planned cells."]
    for task, scope in scopes(control):
        high = by_seed(control, task, scope, "high")
        parts = []
        for rival, words in (
            ("random", "a random choice"),
            ("first", "the first layers"),
            ("last", "the last layers"),
            ("norm", "the largest change of norm"),
            ("low", "the lowest drift"),
            ("lora-r16", "LoRA r16"),
        ):
            difference = paired(high, by_seed(control, task, scope, rival))
            if difference is not None:
                parts.append(f"{_verdict(difference)} {words} ({difference})")
        if parts:
            sentences.append(f"On {task}, {scope}, the highest drift is {'; '.join(parts)}.")
    sentences.append(
        "Differences are of the mean negative log-probability of the right answer among the choices on held-out "
        "data, paired by seed, with 95 % intervals over seeds; negative is better for drift."
    )
    return " ".join(sentences)


def _verdict(difference: Difference) -> str:
    if math.isnan(difference.low):
        return "on one seed compared with"
    if not difference.excludes_zero:
        return "not distinguishable from"
    return "better than" if difference.mean < 0 else "worse than"


def _setting(cells) -> str:
    done = [entry for _, entry in cells if entry]
    if not done:
        return ""
    entry = done[-1]
    training, evaluation = entry["cell"]["training"], entry["cell"]["evaluation"]
    return (
        f"Model {entry['cell']['model']}, float32, {training['steps']} steps × {training['batch']}, "
        f"{training['schedule']} learning rate after a warm-up of 4 steps, AdamW without weight decay; "
        f"{evaluation['test']} test rows, {evaluation['validation']} validation rows, the same for all. Run on "
        f"{entry['machine']['cpu']}, {entry['machine']['threads']} threads, with "
        f"torch {entry['versions'].get('torch')}, transformers {entry['versions'].get('transformers')}, "
        f"peft {entry['versions'].get('peft')}, trl {entry['versions'].get('trl')}. Losses do not depend on the "
        "machine's load; seconds do, and are those of a machine that did other work as well."
    )


def rate_text(rates) -> str:
    """Return the table of learning rates: validation loss of each method at each, the best marked."""
    done = [(cell, entry) for cell, entry in rates if entry]
    if not done:
        return "Not run yet."
    sections = []
    for task in dict.fromkeys(cell.values["task"] for cell, _ in done):
        losses: dict[str, dict[float, float]] = defaultdict(dict)
        for cell, entry in done:
            if cell.values["task"] == task:
                losses[family(cell.label)][cell.values["learning_rate"]] = entry["validation"]["loss"]
        columns = sorted({rate for values in losses.values() for rate in values})
        rows = []
        for name, values in losses.items():
            best = min(values, key=values.get)
            row = [name]
            for rate in columns:
                text = f"{values[rate]:.3f}" if rate in values else ""
                row.append(f"**{text}**" if rate == best else text)
            rows.append([*row, bracket(values)])
        head = ["method", *(f"{rate:g}" for rate in columns), "best is"]
        sections.append(f"Validation loss on {task}, one seed:\n\n{table(head, rows)}")
    return "\n\n".join(sections)


def bracket(losses: dict[float, float]) -> str:
    """Say whether the best learning rate has a worse one on both sides."""
    best = min(losses, key=losses.get)
    if best == min(losses):
        return "lowest tried" if len(losses) > 1 else "the only one tried"
    return "highest tried" if best == max(losses) else "bracketed"


def comparison_text(control, results: Path) -> list[str]:
    """Return a table per task and scope."""
    sections = []
    for task, scope in scopes(control):
        rows = []
        random = by_seed(control, task, scope, "random")
        lora = by_seed(control, task, scope, "lora-r16")
        for name in names_of(control, task, scope):
            entries = [
                entry
                for cell, entry in control
                if entry
                and cell.values["task"] == task
                and family(cell.label) == name
                and (cell.values["method"]["kind"] != "topo" or _scope(cell) == scope)
            ]
            losses = by_seed(control, task, scope, name)
            mean, *_ = mean_interval(list(losses.values()))
            rows.append(
                [
                    name,
                    f"{len(entries)}",
                    f"{entries[0]['cell']['learning_rate']:g}",
                    f"{np.mean([entry['trainable_share'] for entry in entries]):.2%}",
                    f"{mean:.3f}",
                    f"{np.mean([entry['test']['accuracy'] for entry in entries]):.3f}",
                    "–" if name == "random" else str(paired(losses, random) or "–"),
                    "–" if name == "lora-r16" else str(paired(losses, lora) or "–"),
                    f"{np.mean([entry['test']['loss'] - entry['train']['loss'] for entry in entries]):+.3f}",
                    f"{np.median([entry['seconds']['step'] for entry in entries]):.2f}",
                    f"{np.mean([entry['adapter_bytes'] for entry in entries]) / 1e6:.1f}",
                ]
            )
        columns = [
            "method", "cells", "rate", "trains", "test loss", "accuracy", "against random", "against LoRA r16",
            "test − train loss", "s/step", "MB",
        ]  # fmt: skip
        rows.sort(key=lambda row: float(row[4]))
        base = _base(control, task, results)
        note = f" Untrained: loss {base['test']['loss']:.3f}, accuracy {base['test']['accuracy']:.3f}." if base else ""
        sections.append(f"**{task}, {scope}.**{note}\n\n{table(columns, rows)}")
        forgetting = forgetting_text(control, task, scope, base)
        if forgetting:
            sections.append(forgetting)
    return sections or ["Not run yet."]


def _base(control, task: str, results: Path) -> dict[str, Any] | None:
    files = sorted((results / task).glob("base-*.json"))
    wanted = next((cell.values["evaluation"] for cell, _ in control if cell.values["task"] == task), None)
    for file in files:
        entry = _read(file)
        if entry["cell"]["evaluation"] == wanted:
            return entry
    return None


def forgetting_text(control, task: str, scope: str, base: dict[str, Any] | None) -> str:
    """Return how the loss on tasks not trained on changed against the untrained model."""
    if base is None:
        return ""
    names = list(base["forgetting"])
    rows = []
    for name in names_of(control, task, scope):
        cells = [by_seed(control, task, scope, name, lambda entry, n=n: entry["forgetting"][n]) for n in names]
        rows.append(
            [
                name,
                *(
                    f"{np.mean(list(c.values())) - base['forgetting'][n]:+.3f}"
                    for n, c in zip(names, cells, strict=True)
                ),
            ]
        )
    return "Change of the loss per token on what was not trained on:\n\n" + table(["method", *names], rows)


def explanation_text(control) -> str:
    """Return the regression of the loss of random draws on where their parameters lie and how those drifted."""
    draws = [(cell, entry) for cell, entry in control if entry and family(cell.label) == "random" and entry["matrices"]]
    ranks = _drift_ranks(control)
    if len(draws) < 12 or not ranks:
        return f"Not enough random draws yet: {len(draws)}."
    predictors: dict[str, list[float]] = {"mean layer": [], "share of V": [], "share of K": [], "drift rank": []}
    for _, entry in draws:
        matrices = entry["matrices"]
        predictors["mean layer"].append(np.mean([_layer(name) for name in matrices]))
        for letter in "vk":
            share = np.mean([name.endswith(f"{letter}_proj") for name in matrices])
            predictors[f"share of {letter.upper()}"].append(share)
        predictors["drift rank"].append(np.mean([ranks[name] for name in matrices]))
    groups = [(cell.values["task"], _scope(cell), cell.values["seed"]) for cell, _ in draws]
    try:
        fit = regress(predictors, [entry["test"]["loss"] for _, entry in draws], groups)
    except ValueError as error:
        return str(error)
    rows = [[name, f"{c:+.4f}", f"{e:.4f}"] for name, c, e in zip(fit.names, fit.coefficients, fit.errors, strict=True)]
    return (
        f"Over {fit.cells} random draws, within task, scope and seed: change of the test loss for one standard deviation "
        f"of each (R² {fit.r_squared:.2f}).\n\n" + table(["predictor", "change", "standard error"], rows)
    )


def _layer(name: str) -> int:
    from topotuner_peft.projections import layer_index

    return layer_index(name)


def _drift_ranks(control) -> dict[str, float]:
    """Return each matrix's rank by drift per row in the prior run, from 0 (lowest) to 1."""
    folder = HERE / "results" / "priors"
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        return {}
    rows = _read(files[0])["drift"]["rows"]
    per_row = {row["id"]: row["drift"]["0"] / row["shape"][0] for row in rows}
    order = sorted(per_row, key=per_row.get)
    return {name: index / (len(order) - 1) for index, name in enumerate(order)}


def missing_text(results: Path) -> str:
    """Return how many cells of each grid have no result."""
    lines = []
    for grid in sorted(CONFIGS.glob("stage_*.yaml")):
        cells = _results(grid, results)
        left = [cell for cell, entry in cells if entry is None]
        lines.append(f"- `{grid.name}`: {len(cells) - len(left)} of {len(cells)} cells run.")
    return "\n".join(lines)


# The figure


def draw_loss_against_time(entries: list[dict[str, Any]], path: Path) -> None:
    """Draw one point per method: mean training time against mean test loss, with the interval over cells."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        groups[family(entry["label"])].append(entry)
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, cells in groups.items():
        steps = cells[0]["cell"]["training"]["steps"]
        seconds = np.median([cell["seconds"]["step"] for cell in cells]) * steps
        mean, low, high = mean_interval([cell["test"]["loss"] for cell in cells])
        spread = [[0.0], [0.0]] if math.isnan(low) else [[mean - low], [high - mean]]
        axes.errorbar([seconds], [mean], yerr=spread, fmt="o", capsize=3)
        axes.annotate(name, (seconds, mean), textcoords="offset points", xytext=(6, 4), fontsize=9)
    axes.set_xlabel("training time (s)")
    axes.set_ylabel("test loss of the right answer")
    axes.set_title(f"{entries[0]['cell']['task']}: lower and further left is better", fontsize=10)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
