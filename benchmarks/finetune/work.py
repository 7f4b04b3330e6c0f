"""What a cell and a prior run do, each in a process of its own."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from topotuner_peft import DriftTable, FreezingProfile, TopoConfig, measure_drift
from topotuner_peft.demo.plan import Sizes
from topotuner_peft.demo.training import train
from topotuner_peft.drift import take_snapshot, write_json
from topotuner_peft.projections import find_projections
from topotuner_peft.tasks import get_task
from topotuner_peft.tasks.scoring import score_choices, score_tokens
from topotuner_peft.versions import package_versions

SMOLLM2 = "smollm2-135m-instruct"


def load_model(name: str, *, weights: bool = True):
    """Return a model in float32 and its tokenizer, or None and the tokenizer.

    Parameters
    ----------
    name : str
        ``"smollm2-135m-instruct"`` takes the packaged one; else a folder or Hub id.
    weights : bool
        Whether to load the model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = name
    if name == SMOLLM2:
        from topotuner_peft.demo.assets import load_smollm2

        path = str(load_smollm2())
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) if weights else None, tokenizer


def attention_modules(model) -> list[str]:
    """Return the modules that hold attention matrices."""
    return sorted({projection.module for projection in find_projections(model)})


# The prior run


def run_prior(prior: dict[str, Any], model_name: str, data_dir: Path | None, output: Path, weights: Path) -> None:
    """Fine-tune all attention matrices on the prior task and write how they drifted.

    The result has the drift table by cosine distance, with the Euclidean drift and the cosine drift after the
    first steps as scores of their own; the tuned matrices themselves go into a cache, for what is asked later.
    """
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    from topotuner_peft.projections import matrix_modules, read_weight

    model, tokenizer = load_model(model_name)
    base = take_snapshot(model)
    euclidean = take_snapshot(model, settings=_euclidean())
    sizes = Sizes(prior["steps"], prior["batch"], 1)
    rows = get_task(prior["task"]).load("train", sizes.examples, prior["seed"], data_dir=data_dir)
    early: dict[int, dict[str, float]] = {}

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step in prior["early"]:
                table = measure_drift(base, model, progress=False)
                early[state.global_step] = {row.id: row.drift[0] / row.shape[0] for row in table.rows}

    run = train(
        model,
        tokenizer,
        rows,
        config=TopoConfig(target_modules=attention_modules(model), task_type="CAUSAL_LM"),
        learning_rate=prior["learning_rate"],
        sizes=sizes,
        epochs=1,
        seed=prior["seed"],
        description="prior",
        callbacks=[Watch()],
        schedule=prior["schedule"],
    )
    started = time.perf_counter()
    table = measure_drift(run.model, progress=False)
    seconds = time.perf_counter() - started
    table.base["name"] = model_name
    other = measure_drift(euclidean, run.model, metric="euclidean", progress=False)
    table = table.with_scores("euclidean", {row.id: row.per_point for row in other.rows})
    for step, values in early.items():
        table = table.with_scores(f"early{step}", values)
    modules = matrix_modules(run.model)
    tensors = {
        p.id: read_weight(modules[p.module], p).detach().contiguous().clone() for p in find_projections(run.model)
    }
    weights.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, weights)
    write_json(
        output,
        {
            "prior": prior,
            "seconds": {"train": run.seconds, "drift": seconds},
            "losses": run.losses,
            "drift": table.to_dict(),
            "machine": machine(),
        },
    )


def _euclidean():
    from topotuner_peft import DriftSettings

    return DriftSettings(metric="euclidean")


# The cell


def choose(method: dict[str, Any], model, tokenizer, rows, prior: Path | None, batch: int) -> FreezingProfile:
    """Return the choice of matrices that a method makes."""
    from topotuner_peft.profile.scores import gradient_energy, signal_to_noise

    rule = {name: value for name, value in method.items() if name not in ("kind", "batches")}
    order = rule.get("order", "drift")
    if prior is not None:
        table = DriftTable.from_dict(_read(prior)["drift"])
    else:
        # The rule looks at no drift; the table only lists the matrices.
        table = measure_drift(model, model, progress=False)
    if order == "gradient":
        batches = [
            collate(tokenizer, rows[start : start + batch]) for start in range(0, method["batches"] * batch, batch)
        ]
        table = table.with_scores("gradient", gradient_energy(model, batches))
    elif order == "spectral":
        table = table.with_scores("spectral", signal_to_noise(model))
    elif order == "kappa":
        from peft.helpers import KappaTuneSelector

        ranked = KappaTuneSelector(model, show_progress=False).get_best_targets()
        table = table.with_scores("kappa", {row.id: -float(ranked.index(row.id)) for row in table.rows})
    return FreezingProfile.from_drift(table, **rule)


def collate(tokenizer, rows) -> dict[str, Any]:
    """Return one batch whose loss is that of the completions, as TRL trains on them."""
    import torch

    ids, labels = [], []
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        whole = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        ids.append(whole)
        labels.append([-100] * len(prompt) + whole[len(prompt) :])
    width = max(map(len, ids))

    def pad(values, filler):
        return torch.tensor([value + [filler] * (width - len(value)) for value in values])

    mask = [[1] * len(value) for value in ids]
    return {
        "input_ids": pad(ids, tokenizer.pad_token_id),
        "attention_mask": pad(mask, 0),
        "labels": pad(labels, -100),
    }


def order_by_length(rows: list[dict[str, Any]], batch: int, seed: int) -> list[dict[str, Any]]:
    """Return the rows with those of like length in one batch, and the batches in random order.

    Far less is padded. The Trainer's own way draws from the state that the method's initial values left, so that
    two methods of one seed would not see the same batches.
    """
    ordered = sorted(rows, key=lambda row: len(row["prompt"]) + len(row["completion"]))
    batches = [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
    order = np.random.default_rng(seed).permutation(len(batches))
    return [row for index in order for row in batches[index]]


def make_config(method: dict[str, Any], model, profile: FreezingProfile | None, seed: int):
    """Return the PEFT configuration of a method, None for full fine-tuning."""
    from peft import LoraConfig, ShiraConfig

    if method["kind"] == "topo":
        return TopoConfig(profile=profile, task_type="CAUSAL_LM")
    if method["kind"] == "lora":
        return LoraConfig(
            r=method["rank"],
            lora_alpha=2 * method["rank"],
            target_modules=attention_modules(model),
            task_type="CAUSAL_LM",
        )
    if method["kind"] == "shira":
        return ShiraConfig(
            r=method["rank"], random_seed=seed, target_modules=attention_modules(model), task_type="CAUSAL_LM"
        )
    return None


def run_cell(label: str, values: dict[str, Any], data_dir: Path | None, prior: Path | None, output: Path) -> None:
    """Train and score one cell, and write its result."""
    from transformers import TrainerCallback

    started = time.perf_counter()
    method, training, evaluation = values["method"], values["training"], values["evaluation"]
    task = get_task(values["task"])
    model, tokenizer = load_model(values["model"])
    sizes = Sizes(training["steps"] // training.get("epochs", 1), training["batch"], training.get("epochs", 1))
    rows = task.load("train", sizes.examples, values["seed"], data_dir=data_dir)
    by_length = training.get("batches") == "by_length"
    # The same held-out rows for every seed and method.
    validation = task.load("validation", evaluation["validation"], 0, data_dir=data_dir)
    test = task.load("test", evaluation["test"], 0, data_dir=data_dir)

    selecting = time.perf_counter()
    profile = None
    if method["kind"] == "topo":
        profile = choose(method, model, tokenizer, rows, prior, training["batch"])
    selecting = time.perf_counter() - selecting
    base = take_snapshot(model)
    names = [p.id for p in find_projections(model)]
    config = make_config(method, model, profile, values["seed"])

    curve: list[dict[str, Any]] = []
    step_losses: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step in evaluation["at"]:
                began = time.perf_counter()
                scores = score_choices(model, tokenizer, validation)
                curve.append(
                    {
                        "step": state.global_step,
                        "validation": _choices(scores),
                        "seconds": time.perf_counter() - began,
                    }
                )

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                step_losses.append(float(logs["loss"]))

    run = train(
        model,
        tokenizer,
        order_by_length(rows, sizes.batch_size, values["seed"]) if by_length else rows,
        config=config,
        learning_rate=values["learning_rate"],
        sizes=sizes,
        epochs=sizes.epochs,
        seed=values["seed"],
        description=label,
        callbacks=[Watch()],
        schedule=training["schedule"],
        sampling="sequential" if by_length else "random",
    )
    memory = peak_memory()
    scoring = time.perf_counter()
    test_scores = score_choices(run.model, tokenizer, test)
    train_scores = score_choices(run.model, tokenizer, rows[: evaluation["validation"]])
    forgetting = score_forgetting(run.model, tokenizer, evaluation["forgetting"], data_dir)
    scoring = time.perf_counter() - scoring
    drift = measure_drift(base, run.model, matrices=names, progress=False)
    result = {
        "id": output.stem.rpartition("-")[2],
        "label": label,
        "cell": values,
        "trainable": run.trainable,
        "trainable_share": run.trainable / drift.base["parameters"],
        "adapter_bytes": adapter_bytes(run.model, config),
        "matrices": profile.trained if profile is not None else None,
        "lowest_layer": _lowest_layer(profile),
        "train_losses": step_losses,
        "curve": curve,
        "validation": curve[-1]["validation"] if curve else None,
        "test": _choices(test_scores),
        "test_losses": [float(f"{loss:.4g}") for loss in test_scores.losses],
        "train": _choices(train_scores),
        "forgetting": forgetting,
        "drift": {row.id: float(f"{row.drift[0]:.5g}") for row in drift.rows if row.drift[0] > 0},
        "seconds": {
            "select": selecting,
            "step": run.step_seconds,
            "train": run.seconds - sum(entry["seconds"] for entry in curve),
            "score": scoring,
            "whole": time.perf_counter() - started,
        },
        "peak_memory_bytes": memory,
        "machine": machine(),
        "versions": package_versions(),
    }
    write_json(output, result)


def run_base(values: dict[str, Any], data_dir: Path | None, output: Path) -> None:
    """Score the untrained model on a task, with the rows that the cells are scored on."""
    task = get_task(values["task"])
    model, tokenizer = load_model(values["model"])
    scores = {
        name: score_choices(model, tokenizer, task.load(name, values["evaluation"][name], 0, data_dir=data_dir))
        for name in ("validation", "test")
    }
    forgetting = score_forgetting(model, tokenizer, values["evaluation"]["forgetting"], data_dir)
    write_json(
        output,
        {
            "label": "base",
            "cell": values,
            **{name: _choices(result) for name, result in scores.items()},
            "test_losses": [float(f"{loss:.4g}") for loss in scores["test"].losses],
            "forgetting": forgetting,
            "versions": package_versions(),
        },
    )


def score_forgetting(model, tokenizer, counts: dict[str, int], data_dir: Path | None) -> dict[str, float]:
    """Return the loss per token, in nats, on test rows of tasks that the model was not trained on."""
    losses = {}
    for name, count in counts.items():
        rows = get_task(name).load("test", count, 0, data_dir=data_dir)
        losses[name] = float(score_tokens(model, tokenizer, rows).loss)
    return losses


def _choices(scores) -> dict[str, float]:
    return {
        "loss": scores.choice_loss,
        "loss_se": scores.choice_loss_se,
        "accuracy": scores.accuracy,
        "accuracy_se": scores.accuracy_se,
    }


def _lowest_layer(profile: FreezingProfile | None) -> int | None:
    if profile is None:
        return None
    chosen = set(profile.trained)
    return min(row.layer for row in profile.table.rows if row.id in chosen)


def adapter_bytes(model, config) -> int:
    """Return the size of what would be shared: the adapter's file, or the whole model in float32."""
    if config is None:
        return sum(p.numel() * p.element_size() for p in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else 1024 * peak


def machine() -> dict[str, Any]:
    """Return where and when this runs, and how busy the machine is."""
    import torch

    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return {
        "cpu": name,
        "threads": torch.get_num_threads(),
        "load": round(float(np.mean(os.getloadavg()[:2])), 2),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _read(path: Path) -> dict[str, Any]:
    return json.loads(Path(path).read_text(encoding="utf-8"))
