"""The demo: its plan, and the whole of it."""

import json
import math

import numpy as np
import pytest
import tiny
import torch

from topotuner_peft.demo.evaluation import paired_difference
from topotuner_peft.demo.plan import FAST, FULL, Limits, Plan, make_plan, time_steps

SECONDS = {"full": 5.5, "lora": 3.9, "topotuner": 3.6, "prior": 7.0, "scoring": 20.0}
LONG = Limits(10_000, 4, 3, 16, 8, 256, 16, 16, 10_000)


@pytest.mark.parametrize("limits", [FULL, LONG, Limits(2000, 4, 3, 16, 8, 256, 16, 16, 1000)])
@pytest.mark.parametrize("speed", [0.3, 1.0])
def test_the_plan_fits_its_time_and_uses_most_of_it(limits, speed):
    seconds = {name: speed * value for name, value in SECONDS.items()}
    plan = make_plan(seconds, limits)
    expected = sum(plan.estimate.values())
    assert expected <= limits.seconds
    if plan.target.steps_per_epoch < limits.most_steps and limits is not FULL:
        assert expected > 0.9 * limits.seconds


def test_every_method_gets_the_same_steps():
    plan = make_plan(SECONDS, LONG)
    steps = {name: plan.estimate[name] / plan.step_seconds[name] for name in ("topotuner", "lora", "full")}
    assert set(np.round(list(steps.values()), 9)) == {plan.target.steps}
    assert plan.estimate["random"] == plan.estimate["topotuner"]
    assert plan.target.examples == plan.target.steps_per_epoch * 16


def test_a_fast_machine_gets_no_more_than_the_most_steps():
    plan = make_plan({name: value / 100 for name, value in SECONDS.items()}, FULL)
    assert plan.target.steps_per_epoch == plan.prior.steps_per_epoch == FULL.most_steps


def test_a_machine_too_slow_for_the_time_is_told_so():
    plan = make_plan({name: 100 * value for name, value in SECONDS.items()}, FAST)
    assert plan.target.steps_per_epoch == plan.prior.steps_per_epoch == 2
    assert sum(plan.estimate.values()) > FAST.seconds
    minutes = sum(plan.estimate.values()) / 60
    assert f"{minutes:.0f} minutes in all" in " ".join(plan.sentences())


def test_a_plan_survives_its_file():
    plan = make_plan(SECONDS, FULL)
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
