"""The demo: its plan, and the whole of it."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from topotuner_peft.demo.evaluation import paired_difference
from topotuner_peft.demo.plan import FAST, FULL, Plan, make_plan, time_steps

HALF_STEPS = {"full": 2.5, "lora": 1.9, "topotuner": 1.8, "prior": 3.5}
SCORING = (0.12, 2.0)
LONG = replace(FULL, seconds=10_000, target_batch=16, prior_batch=8, most_steps=10_000)


def at_speed(factor, limits, **more):
    half_steps = {name: factor * value for name, value in HALF_STEPS.items()}
    return make_plan(half_steps, tuple(factor * value for value in SCORING), limits, **more)


@pytest.mark.parametrize("limits", [FULL, LONG, replace(LONG, seconds=2000)])
@pytest.mark.parametrize("factor", [0.3, 1.0, 2.0])
def test_the_plan_fits_its_time_and_uses_most_of_it(limits, factor):
    plan = at_speed(factor, limits, spent=60)
    expected = sum(plan.estimate.values())
    assert expected <= limits.seconds
    if plan.target.steps_per_epoch < limits.most_steps and plan.prior.steps_per_epoch < limits.most_steps:
        assert expected > 0.85 * limits.seconds


def test_what_was_spent_before_is_not_spent_again():
    early, late = at_speed(1.0, LONG), at_speed(1.0, LONG, spent=3000)
    assert late.target.steps < 0.75 * early.target.steps
    assert sum(late.estimate.values()) <= LONG.seconds


def test_every_method_gets_the_same_steps():
    plan = at_speed(1.0, LONG)
    steps = {name: plan.estimate[name] / plan.step_seconds[name] for name in ("topotuner", "lora", "full")}
    assert set(np.round(list(steps.values()), 9)) == {plan.target.steps}
    assert plan.estimate["random"] == plan.estimate["topotuner"]
    assert plan.target.examples == plan.target.steps_per_epoch * 16
    assert plan.step_seconds["full"] == 2 * HALF_STEPS["full"]


def test_a_fast_machine_gets_no_more_than_the_most_steps():
    plan = at_speed(0.01, FULL)
    assert plan.target.steps_per_epoch == plan.prior.steps_per_epoch == FULL.most_steps
    assert plan.limits.test_rows == FULL.test_rows


def test_a_slow_machine_halves_the_batch_and_scores_fewer_reviews_before_it_loses_its_steps():
    plan = at_speed(1.5, FULL, spent=100)
    assert (plan.target.batch_size, plan.prior.batch_size) == (4, 2)
    assert plan.target.steps_per_epoch > 4
    assert plan.step_seconds["full"] == 1.5 * HALF_STEPS["full"]
    assert FULL.least_test_rows <= plan.limits.test_rows < FULL.test_rows
    assert f"{plan.limits.test_rows} held-out reviews" in " ".join(plan.sentences())


def test_a_machine_too_slow_for_the_time_is_told_so():
    plan = at_speed(100, FAST)
    assert plan.target.steps_per_epoch == plan.prior.steps_per_epoch == 2
    assert sum(plan.estimate.values()) > FAST.seconds
    minutes = sum(plan.estimate.values()) / 60
    assert f"{minutes:.0f} minutes in all" in " ".join(plan.sentences())


def test_a_plan_survives_its_file():
    plan = at_speed(1.0, FULL)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_timing_a_step_trains_nothing():
    model = tiny.build("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    batch = {"input_ids": tiny.INPUT_IDS, "attention_mask": torch.ones_like(tiny.INPUT_IDS), "labels": tiny.INPUT_IDS}
    assert time_steps(model, [batch, batch]) > 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_paired_difference_is_its_formula():
    mean, error = paired_difference([3.0, 5.0, 4.0], [1.0, 1.0, 3.0])
    assert mean == pytest.approx(7 / 3)
    assert error == pytest.approx(np.std([2, 4, 1], ddof=1) / math.sqrt(3))


@pytest.mark.slow
def test_the_whole_demo_fast(tmp_path, smollm2_dir):
    from topotuner_peft import FreezingProfile
    from topotuner_peft.demo.run import run_demo

    folder, said = tmp_path / "demo", []
    results = run_demo(folder, fast=True, echo=said.append)
    text = "\n".join(said)
    for name in ("report.html", "results.json", "profile.json", "drift.json", "drift.png", "stopping.png"):
        assert (folder / name).stat().st_size > 1000, name
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size == pytest.approx(
        results["adapter"]["bytes"], rel=0.05
    )
    assert results["reload"]["bit_equal"]
    rows = {row["key"]: row for row in results["methods"]}
    assert list(rows) == ["base", "topotuner", "random", "lora", "full"]
    assert rows["topotuner"]["trainable"] == rows["random"]["trainable"]
    assert rows["topotuner"]["trainable_share"] <= 0.015
    assert rows["full"]["trainable_share"] == 1
    assert len({(row["steps"], row["epochs"]) for key, row in rows.items() if key != "base"}) == 1
    for row in rows.values():
        assert all(math.isfinite(row[name]) for name in ("accuracy", "choice_loss", "prior_loss", "text_loss"))
    assert rows["topotuner"]["choice_loss"] != rows["base"]["choice_loss"]
    profile = FreezingProfile.load(folder)
    assert profile.trained == results["profile"]["trained"]
    adapter = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert sorted(adapter["matrices"]) == sorted(profile.trained)
    html = (folder / "report.html").read_text()
    for row in rows.values():
        assert f"{row['accuracy']:.3f}" in html or f"{100 * row['accuracy']:.1f}" in html
        assert row["label"] in text

    # A second call shows what is there, and does not train.
    said.clear()
    assert run_demo(folder, fast=True, echo=said.append) == results
    assert "holds a finished run" in said[0]
    # A run that was cut off goes on with the stages that are missing.
    (folder / "results.json").unlink()
    (folder / "stages" / "lora.json").unlink()
    said.clear()
    resumed = run_demo(folder, fast=True, echo=said.append)
    text = "\n".join(said)
    assert text.count("done before, reused") == 6
    losses = [{row["key"]: row["choice_loss"] for row in run["methods"]} for run in (results, resumed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
