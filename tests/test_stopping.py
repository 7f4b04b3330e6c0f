"""The callback: what it scores, when it stops, what it logs, keeps and hands out."""

import copy
import json
import math

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from topotuner_peft import (
    FreezingProfile,
    TopoConfig,
    TopoDriftCallback,
    measure_drift,
    persistence_diagrams,
    wasserstein_distance,
)
from topotuner_peft.stopping import STATE_FILE, increment_score, step_score

ROWS = [{"input_ids": [5 + (3 * i + j) % 50 for j in range(6)]} for i in range(8)]
WATCHED = [f"model.layers.{layer}.self_attn.v_proj" for layer in (1, 2)]


class Keep(TrainerCallback):
    """The effective weights at the start and after each epoch, by plain arithmetic."""

    def __init__(self):
        self.weights = []

    def keep(self, model):
        values = {}
        for name in WATCHED:
            module = model.get_submodule(f"base_model.model.{name}")
            delta = module.topotuner_delta["default"].weight
            values[name] = (module.base_layer.weight + delta).detach().clone()
        self.weights.append(values)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.keep(model)

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        self.keep(model)


def arguments(folder, **options):
    defaults = {
        "output_dir": str(folder),
        "num_train_epochs": 5,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
    }
    return SFTConfig(**{**defaults, "max_length": 16, "packing": False, "bf16": False, **options})


def trainer_of(folder, tokenizer, callbacks=(), model=None, **options):
    model = model or tiny.build("llama")
    rows = [{**row, "labels": list(row["input_ids"])} for row in ROWS]
    return SFTTrainer(
        model,
        args=arguments(folder, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=TopoConfig(target_modules=WATCHED),
        callbacks=list(callbacks),
    )


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(64)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w3")),
        pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3",
    )  # fmt: skip


def scores_by_hand(weights):
    """Mean over matrices of W(D_t, D_{t−1}) / W(D_1, D_0), from kept weights."""
    diagrams = [{name: persistence_diagrams(w)[0] for name, w in moment.items()} for moment in weights]

    def moved(t, name):
        return wasserstein_distance(diagrams[t][name], diagrams[t - 1][name])

    return [float(np.mean([moved(t, name) / moved(1, name) for name in WATCHED])) for t in range(2, len(diagrams))]


def test_the_score_is_the_formula(tmp_path, tokenizer):
    keep, callback = Keep(), TopoDriftCallback(threshold=None, verbose=False)
    trainer_of(tmp_path, tokenizer, [keep, callback]).train()
    by_hand = scores_by_hand(keep.weights)
    assert callback.history[0]["score"] is None
    assert [entry["score"] for entry in callback.history[1:]] == pytest.approx(by_hand, rel=1e-9)
    assert [entry["epoch"] for entry in callback.history] == [1, 2, 3, 4, 5]
    assert set(callback.history[0]["drift"]) == set(WATCHED)
    base = tiny.build("llama")
    for name in WATCHED:
        origin = persistence_diagrams(base.get_submodule(name).weight)[0]
        end = persistence_diagrams(keep.weights[-1][name])[0]
        assert callback.history[-1]["drift"][name] == pytest.approx(wasserstein_distance(origin, end), rel=1e-9)


def test_it_stops_where_a_computation_by_hand_says(tmp_path, tokenizer):
    keep = Keep()
    trainer_of(tmp_path, tokenizer, [keep], num_train_epochs=6).train()
    by_hand = scores_by_hand(keep.weights)
    for threshold in (by_hand[0] * 1.01, (min(by_hand) + sorted(by_hand)[1]) / 2, min(by_hand) * 0.99):
        expected = next((epoch for epoch, score in enumerate(by_hand, start=2) if score <= threshold), 6)
        callback = TopoDriftCallback(threshold, verbose=False)
        trainer = trainer_of(tmp_path, tokenizer, [callback], num_train_epochs=6)
        trainer.train()
        assert trainer.state.epoch == expected
        assert callback.history[-1]["epoch"] == expected
        if min(by_hand) <= threshold:
            assert callback.stopped_epoch == expected
            wanted = f"Stopped after epoch {expected} of 6" if expected < 6 else "Ran for all 6 epochs"
            assert wanted in callback.reason
        else:
            assert callback.stopped_epoch is None
            assert "stayed above" in callback.reason


def test_patience_and_min_epochs(tmp_path, tokenizer):
    callback = TopoDriftCallback(1e6, patience=2, verbose=False)
    trainer = trainer_of(tmp_path, tokenizer, [callback])
    trainer.train()
    assert trainer.state.epoch == 3
    callback = TopoDriftCallback(1e6, min_epochs=4, verbose=False)
    trainer = trainer_of(tmp_path, tokenizer, [callback])
    trainer.train()
    assert trainer.state.epoch == 4


def test_step_and_increment_are_their_formulas():
    assert step_score([1, 1], [2, 4]) == pytest.approx((0.5 + 0.25) / 2)
    assert increment_score([3, 1], [2, 3], [2, 4]) == pytest.approx((0.5 - 0.5) / 2)
    # A matrix that never moved leaves the mean; with none left there is nothing to say.
    assert step_score([1, 0], [2, 0]) == 0.5
    with pytest.raises(ValueError, match="No watched matrix moved in the first epoch"):
        step_score([0, 0], [0, 0])


def test_the_authors_rule_is_there_by_name(tmp_path, tokenizer):
    callback = TopoDriftCallback(None, score="increment", verbose=False)
    trainer_of(tmp_path, tokenizer, [callback]).train()
    drifts = [[entry["drift"][name] for name in WATCHED] for entry in callback.history]
    expected = np.mean((np.array(drifts[3]) - drifts[2]) / drifts[0])
    assert callback.history[3]["score"] == pytest.approx(expected)


def test_attached_it_logs_through_the_trainer(tmp_path, tokenizer):
    seen = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    trainer = trainer_of(tmp_path, tokenizer, [Tracker()], num_train_epochs=2)
    callback = TopoDriftCallback(None, verbose=False).attach(trainer)
    trainer.train()
    ours = [logs for logs in seen if "topo/drift/mean" in logs]
    assert len(ours) == 2
    assert ours[1]["topo/score"] == callback.history[1]["score"]
    assert ours[1]["topo/drift/v"] == pytest.approx(ours[1]["topo/drift/mean"])
    in_state = [entry for entry in trainer.state.log_history if "topo/score" in entry]
    assert [entry["epoch"] for entry in in_state] == [2.0]
    json.dumps(trainer.state.log_history, allow_nan=False)


def test_the_loss_of_the_epoch_was_no_longer_logged(tmp_path, tokenizer):
    # Logging from on_epoch_end clears the flag that asks for the Trainer's own entry.
    trainer = trainer_of(tmp_path, tokenizer, num_train_epochs=2, logging_strategy="epoch")
    TopoDriftCallback(None, verbose=False).attach(trainer)
    trainer.train()
    assert [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry] == [1.0, 2.0]


def test_as_a_plain_callback_it_records_in_the_state(tmp_path, tokenizer):
    trainer = trainer_of(tmp_path, tokenizer, [TopoDriftCallback(None, verbose=False)], num_train_epochs=2)
    trainer.train()
    assert [e["step"] for e in trainer.state.log_history if "topo/drift/mean" in e] == [2, 4]


def test_it_prints_a_line_per_epoch_and_why_it_stopped(tmp_path, tokenizer, capsys):
    trainer_of(tmp_path, tokenizer, [TopoDriftCallback(1e6)]).train()
    said = [line for line in capsys.readouterr().out.splitlines() if "[topotuner]" in line]
    assert len(said) == 3
    assert "Epoch 1: drift per row" in said[0]
    assert "the yardstick" in said[0]
    assert "(stops at 1e+06)" in said[1]
    assert "60% of the epochs were not needed" in said[2]


def test_a_partial_epoch_is_not_scored_as_a_whole_one(tmp_path, tokenizer):
    callback = TopoDriftCallback(None, verbose=False)
    trainer_of(tmp_path, tokenizer, [callback], max_steps=3).train()
    assert [entry["epoch"] for entry in callback.history] == [1]
    callback = TopoDriftCallback(None, verbose=False)
    trainer_of(tmp_path, tokenizer, [callback], max_steps=1).train()
    assert callback.history == []
    assert "before a whole epoch" in callback.reason
    with pytest.raises(RuntimeError, match="train for at least one whole epoch"):
        callback.table()


def test_a_learning_rate_of_zero_is_an_error_not_a_stop(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="No watched matrix moved in the first epoch"):
        trainer_of(tmp_path, tokenizer, [TopoDriftCallback(verbose=False)], learning_rate=0.0).train()


def test_nan_is_never_taken_for_stable(tmp_path, tokenizer):
    class Break(TrainerCallback):
        def on_epoch_end(self, args, state, control, model=None, **kwargs):
            if state.epoch == 2:
                with torch.no_grad():
                    module = model.get_submodule(f"base_model.model.{WATCHED[1]}")
                    module.topotuner_delta["default"].weight[0, 0] = math.nan

    with pytest.raises(ValueError, match=f"'{WATCHED[1]}' holds NaN"):
        trainer_of(tmp_path, tokenizer, [Break(), TopoDriftCallback(verbose=False)]).train()


def test_full_fine_tuning_hands_out_the_profile_of_a_prior_run(tmp_path):
    base = tiny.build("llama")
    model = copy.deepcopy(base)
    rows = [{**row, "labels": list(row["input_ids"])} for row in ROWS]
    callback = TopoDriftCallback(None, watch="attention", verbose=False)
    trainer = Trainer(
        model,
        args=TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=2, learning_rate=1e-3, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    last = callback.table(average="last")
    expected = measure_drift(base, model, progress=False)
    for row, other in zip(last.rows, expected.rows, strict=True):
        assert row.id == other.id
        assert row.drift[0] == pytest.approx(other.drift[0], rel=1e-9)
        assert row.total_persistence == pytest.approx(other.total_persistence)
    mean = callback.table()
    assert mean.rows[3].drift[0] == pytest.approx(np.mean([e["drift"][mean.rows[3].id] for e in callback.history]))
    profile = callback.profile(prior_task="made up", budget=0.05)
    assert isinstance(profile, FreezingProfile)
    assert profile.prior_task == "made up"
    assert profile.trained == FreezingProfile.from_drift(mean, budget=0.05).trained
    assert profile.check_model(tiny.build("llama"))


def test_an_adapter_trained_before_is_measured_from_the_base(tmp_path, tokenizer):
    base = tiny.build("llama")
    model = get_peft_model(copy.deepcopy(base), TopoConfig(target_modules=WATCHED, task_type="CAUSAL_LM"))
    tiny.train_a_little(model)
    start = copy.deepcopy(model)
    callback = TopoDriftCallback(None, verbose=False)
    rows = [{**row, "labels": list(row["input_ids"])} for row in ROWS]
    trainer = SFTTrainer(
        model, args=arguments(tmp_path, num_train_epochs=1), train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    for name in WATCHED:
        module = start.get_submodule(f"base_model.model.{name}")
        origin, before = (
            persistence_diagrams(w)[0]
            for w in (
                module.base_layer.weight,
                module.base_layer.weight + module.topotuner_delta["default"].weight,
            )
        )
        module = trainer.model.get_submodule(f"base_model.model.{name}")
        now = persistence_diagrams(module.base_layer.weight + module.topotuner_delta["default"].weight)[0]
        assert callback.history[0]["drift"][name] == pytest.approx(wasserstein_distance(origin, now), rel=1e-9)
        assert callback.history[0]["moved"][name] == pytest.approx(wasserstein_distance(before, now), rel=1e-9)


def test_a_run_resumed_at_a_checkpoint_decides_what_the_whole_run_decides(tmp_path, tokenizer):
    # transformers issues 28544 and 10290: history lost on resume, or training goes on after a stop.
    whole = TopoDriftCallback(None, verbose=False)
    options = {"save_strategy": "epoch", "num_train_epochs": 4}
    trainer_of(tmp_path / "run", tokenizer, [whole], **options).train()
    assert (tmp_path / "run" / "checkpoint-4" / STATE_FILE).is_file()
    resumed = TopoDriftCallback(None, verbose=False)
    trainer = trainer_of(tmp_path / "run", tokenizer, [resumed], **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert [entry["epoch"] for entry in resumed.history] == [1, 2, 3, 4]
    assert [e["score"] for e in resumed.history] == [
        None,
        *(pytest.approx(e["score"], rel=1e-6) for e in whole.history[1:]),
    ]
    assert resumed.table().rows[0].drift[0] == pytest.approx(whole.table().rows[0].drift[0], rel=1e-6)


def test_resuming_without_the_diagrams_is_an_error(tmp_path, tokenizer):
    options = {"save_strategy": "epoch", "num_train_epochs": 3}
    trainer_of(tmp_path / "run", tokenizer, **options).train()
    trainer = trainer_of(tmp_path / "run", tokenizer, [TopoDriftCallback(verbose=False)], **options)
    with pytest.raises(ValueError, match=rf"checkpoint-2.{STATE_FILE} is not there"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "jump"}, "score='jump'"),
        ({"threshold": math.nan}, "threshold=nan"),
        ({"threshold": -0.1}, "threshold=-0.1 can't be reached"),
        ({"patience": 0}, "patience=0"),
        ({"min_epochs": 1}, "min_epochs=1"),
        ({"watch": "all"}, "watch='all'"),
        ({"metric": "taxi"}, "metric='taxi'"),
        ({"order": 0.5}, "order=0.5"),
        ({"internal_p": 3}, "internal_p=3"),
        ({"precision": "half"}, "precision='half'"),
    ],
)
def test_bad_options_are_named_before_training(options, message):
    with pytest.raises(ValueError, match=message):
        TopoDriftCallback(**options)


def test_nothing_to_watch_is_an_error(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"no matrices \['model.layers.9.self_attn.v_proj'\]"):
        trainer_of(
            tmp_path, tokenizer, [TopoDriftCallback(watch=["model.layers.9.self_attn.v_proj"], verbose=False)]
        ).train()
    model = tiny.build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    rows = [{**row, "labels": list(row["input_ids"])} for row in ROWS]
    trainer = Trainer(
        model,
        args=TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True),
        train_dataset=Dataset.from_list(rows),
        callbacks=[TopoDriftCallback(verbose=False)],
    )
    with pytest.raises(ValueError, match="None of the model's attention matrices trains"):
        trainer.train()
