"""The harness of the controlled experiments: what is run, once, and the arithmetic of the report."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.finetune import report  # noqa: E402
from benchmarks.finetune.__main__ import main  # noqa: E402
from benchmarks.finetune.grid import HERE, Cell, GridError, load_grid  # noqa: E402
from benchmarks.finetune.statistics import mean_interval, paired, regress  # noqa: E402

GRID = """
model: some-model
prior: {task: gsm8k, steps: 4}
training: {steps: 8, batch: 2, schedule: linear}
evaluation: {validation: 4, test: 4, at: [8], forgetting: {}}
stages:
  - tasks: [sentiment, boolq]
    seeds: [0, 1]
    methods:
      - {label: high, kind: topo, projections: [v], learning_rate: 1.0e-3}
      - {label: random, kind: topo, draws: 2, projections: [v], learning_rate: {sentiment: 1.0e-3, boolq: 2.0e-3}}
      - {label: full, kind: full, learning_rate: [1.0e-5, 2.0e-5]}
"""


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text(GRID)
    return path


def test_a_grid_is_every_combination_seed_by_seed(grid):
    cells = load_grid(grid)
    assert len(cells) == 2 * 2 * (1 + 2 + 2)
    assert [cell.values["seed"] for cell in cells] == [0] * 10 + [1] * 10
    assert [cell.label for cell in cells[:5]] == ["high", "random0", "random1", "full", "full"]
    assert {cell.values["learning_rate"] for cell in cells if cell.label == "random1"} == {1e-3, 2e-3}
    seeds = [cell.values["method"]["seed"] for cell in cells if cell.label.startswith("random")]
    assert sorted(set(seeds)) == [0, 1, 100, 101]
    # Only what a prior run decides depends on it.
    assert {cell.label for cell in cells if cell.values["prior"]} == {"high"}


def test_a_cell_has_one_file_whatever_grid_it_is_in(grid, tmp_path):
    again = tmp_path / "again.yaml"
    again.write_text(GRID.replace("seeds: [0, 1]", "seeds: [1, 2]").replace("label: high", "label: highest"))
    first, second = load_grid(grid), load_grid(again)
    shared = {cell.id for cell in first} & {cell.id for cell in second}
    assert len(shared) == 10  # seed 1: the label does not decide the result
    assert len({cell.path(tmp_path) for cell in first}) == len(first)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kind: full", "kind: fool", "method 'full' has kind 'fool'"),
        ("boolq: 2.0e-3", "arc: 1", "method 'random' has no learning rate for the task 'boolq'"),
        ("prior: {task: gsm8k, steps: 4}", "", "method 'high' chooses by a prior run"),
        ("model: some-model", "", "has no 'model'"),
    ],
)
def test_a_grid_that_makes_no_sense_is_named(grid, old, new, message):
    grid.write_text(GRID.replace(old, new))
    with pytest.raises(GridError, match=message):
        load_grid(grid)


def result_of(cell: Cell, loss: float) -> dict:
    scores = {"loss": loss, "loss_se": 0.1, "accuracy": 0.5, "accuracy_se": 0.1}
    return {
        "label": cell.label, "cell": cell.values, "test": scores, "validation": scores, "train": scores,
        "trainable_share": 0.01, "adapter_bytes": 1e6, "matrices": None, "seconds": {"step": 1.0},
        "forgetting": {}, "machine": {"cpu": "x", "threads": 1}, "versions": {},
    }  # fmt: skip


def test_a_finished_cell_is_never_run_again(grid, tmp_path, monkeypatch, capsys):
    """Only what has no result is started, and what fails is said and tried again next time."""
    ran, broken = [], []

    def run_cell(cell, options):
        ran.append(cell.label)
        if cell.label == "random1" and not broken:
            broken.append(cell)
            return False
        path = cell.path(options.results)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result_of(cell, 0.5)))
        return True

    monkeypatch.setattr("benchmarks.finetune.__main__._run_cell", run_cell)
    command = ["run", str(grid), "--results", str(tmp_path / "results")]
    assert main(command) == 1
    assert len(ran) == 20
    assert "random1 lr 0.001 seed 0: FAILED" in capsys.readouterr().out
    ran.clear()
    assert main(command) == 0
    assert ran == ["random1"]
    ran.clear()
    assert main(command) == 0
    assert ran == []
    assert "20 cells, 20 of them done" in capsys.readouterr().out


def test_paired_differences_are_over_shared_seeds():
    difference = paired({0: 1.0, 1: 2.0, 2: 4.0, 9: 7.0}, {0: 0.5, 1: 1.0, 2: 2.5, 8: 1.0})
    assert (difference.mean, difference.seeds) == (1.0, 3)
    # Student's t for two degrees of freedom, 4.3027; standard deviation 0.5.
    assert difference.high - difference.mean == pytest.approx(4.3027 * 0.5 / math.sqrt(3), rel=1e-4)
    assert not difference.excludes_zero
    assert paired({0: 1.0}, {1: 1.0}) is None
    assert math.isnan(mean_interval([1.0])[1])
    assert "one seed" in str(paired({0: 1.0}, {0: 0.5}))


def test_the_regression_finds_what_was_put_in_within_groups():
    generator = np.random.default_rng(0)
    x, z = generator.normal(size=(2, 200))
    groups = generator.integers(4, size=200)
    outcome = 0.3 * x + 10 * groups + 0.01 * generator.normal(size=200)
    fit = regress({"x": x, "z": z, "constant": np.ones(200)}, outcome, groups)
    assert fit.names == ("x", "z")
    assert fit.coefficients == pytest.approx([0.3, 0.0], abs=0.02)
    assert fit.r_squared > 0.99
    with pytest.raises(ValueError, match="3 cells are too few"):
        regress({"x": [1, 2, 4], "z": [1, 5, 2]}, [1, 2, 3], [0, 0, 0])


def test_the_report_says_what_the_cells_say(tmp_path, monkeypatch):
    configs = tmp_path / "configs"
    configs.mkdir()
    text = GRID.replace(
        "full, kind: full, learning_rate: [1.0e-5, 2.0e-5]", "lora-r16, kind: lora, rank: 16, learning_rate: 1.0e-3"
    )
    (configs / "stage_b.yaml").write_text(text.replace("seeds: [0, 1]", "seeds: [0, 1, 2]"))
    (configs / "stage_a.yaml").write_text(GRID.replace("seeds: [0, 1]", "seeds: [0]"))
    monkeypatch.setattr(report, "CONFIGS", configs)
    losses = {"high": 0.40, "random0": 0.52, "random1": 0.48, "lora-r16": 0.41, "full": 0.6}
    for grid in configs.iterdir():
        for cell in load_grid(grid):
            if cell.values["task"] == "boolq":
                continue
            noise = 0.01 * cell.values["seed"] * (cell.label == "high")
            path = cell.path(tmp_path / "results")
            path.parent.mkdir(parents=True, exist_ok=True)
            loss = losses[cell.label] + noise + 1e4 * (cell.label == "full") * (cell.values["learning_rate"] - 1e-5)
            path.write_text(json.dumps(result_of(cell, loss)))
    text = report.write_report(tmp_path / "results", tmp_path / "RESULTS.md", tmp_path / "figures")
    assert (tmp_path / "figures" / "sentiment.png").stat().st_size > 5000
    first = text.split("\n\n")[1]
    # high is 0.40, 0.41, 0.42; random 0.50 in each seed; LoRA 0.41.
    assert "better than a random choice (-0.090 [-0.115, -0.065])" in first
    assert "not distinguishable from LoRA r16 (+0.000 [-0.025, +0.025])" in first
    assert "12 of 24 planned cells" in first
    assert "| full | **0.600** | 0.700 |" in text.replace("|  |", "|").replace("|  ", "| ")
    assert "lowest tried" in text
    assert "Not enough random draws yet" in text
    assert text.count("stage_b.yaml`: 12 of 24 cells run") == 1


def test_the_grids_in_the_repository_are_whole():
    for grid in sorted((HERE / "configs").glob("*.yaml")):
        assert load_grid(grid), grid


def test_batches_by_length_pad_less_and_are_the_same_for_every_method_of_a_seed():
    from benchmarks.finetune.work import order_by_length

    rows = [{"prompt": "x" * n, "completion": " y"} for n in np.random.default_rng(0).permutation(64)]
    ordered = order_by_length(rows, 8, 3)
    assert sorted(map(str, ordered)) == sorted(map(str, rows))
    lengths = np.array([len(row["prompt"]) for row in ordered]).reshape(8, 8)
    assert (np.ptp(lengths, axis=1) == 7).all()
    assert list(lengths[:, 0]) != sorted(lengths[:, 0])
    assert order_by_length(rows, 8, 3) == ordered != order_by_length(rows, 8, 4)
