"""How much the demo trains and scores, so that it fits into its time on the machine it runs on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# Share of the time that scoring five models may take, before it is done on fewer reviews.
_SCORING_SHARE = 0.22
# Share of the time that is left for training after scoring. The prior run happens once and the four methods share
# the rest.
_PRIOR_SHARE = 0.2
# What the probe can't see: making models, building data sets, the diagrams, the report.
_OVERHEAD_SECONDS = 60.0
# A Trainer's step against the probe's bare one: data loading, callbacks, a machine that warms up.
_TRAINER_FACTOR = 1.15


@dataclass(frozen=True)
class Sizes:
    """Examples, batch size and epochs of one training run.

    Attributes
    ----------
    steps_per_epoch, batch_size, epochs : int
    """

    steps_per_epoch: int
    batch_size: int
    epochs: int

    @property
    def examples(self) -> int:
        """Number of training examples."""
        return self.steps_per_epoch * self.batch_size

    @property
    def steps(self) -> int:
        """Number of optimiser steps."""
        return self.steps_per_epoch * self.epochs

    def to_dict(self) -> dict[str, int]:
        """Return the sizes as JSON-able values."""
        return {**asdict(self), "examples": self.examples}


@dataclass(frozen=True)
class Limits:
    """What a kind of run asks for.

    Attributes
    ----------
    seconds : float
        The time the whole run is fitted to.
    target_epochs, prior_epochs : int
    target_batch, prior_batch : int
        Halved where the machine is too slow for ``least_steps`` an epoch. Even numbers.
    test_rows, least_test_rows : int
        How many reviews score a model; fewer, down to the least, where that would take too long.
    prior_test_rows, text_rows : int
        How many math problems and pieces of text do.
    least_steps, most_steps : int
        Steps per epoch: below the least the batch is halved (the first epoch's few steps would be a poor yardstick
        for the stopping score), and a fast machine gets the most.
    """

    seconds: float
    target_epochs: int
    prior_epochs: int
    target_batch: int
    prior_batch: int
    test_rows: int
    least_test_rows: int
    prior_test_rows: int
    text_rows: int
    least_steps: int
    most_steps: int


FULL = Limits(
    seconds=860,
    target_epochs=4,
    prior_epochs=2,
    target_batch=8,
    prior_batch=4,
    test_rows=256,
    least_test_rows=128,
    prior_test_rows=8,
    text_rows=8,
    least_steps=8,
    most_steps=60,
)
FAST = Limits(
    seconds=150,
    target_epochs=3,
    prior_epochs=2,
    target_batch=4,
    prior_batch=2,
    test_rows=32,
    least_test_rows=16,
    prior_test_rows=2,
    text_rows=2,
    least_steps=2,
    most_steps=4,
)


@dataclass(frozen=True)
class Plan:
    """The demo's sizes and what they are expected to cost.

    Attributes
    ----------
    prior, target : Sizes
    limits : Limits
        Those of the kind of run, with the number of test rows that was settled on.
    step_seconds : dict of str to float
        ``prior``, ``topotuner``, ``lora``, ``full``: a Trainer's step of the batch that was settled on;
        ``scoring`` (one model).
    estimate : dict of str to float
        Expected seconds per stage.
    """

    prior: Sizes
    target: Sizes
    limits: Limits
    step_seconds: dict[str, float]
    estimate: dict[str, float]

    def sentences(self) -> list[str]:
        """Say what was chosen and why."""
        minutes = sum(self.estimate.values()) / 60
        steps = ", ".join(
            f"{label} {self.step_seconds[key]:.1f} s"
            for key, label in (("topotuner", "deltas"), ("lora", "LoRA"), ("full", "full fine-tuning"))
        )
        return [
            f"One training step of {self.target.batch_size} reviews takes here: {steps}; one of "
            f"{self.prior.batch_size} math problems {self.step_seconds['prior']:.1f} s; scoring one model about "
            f"{self.step_seconds['scoring']:.0f} s.",
            f"To fit {self.limits.seconds / 60:.0f} minutes, every method trains on the same {self.target.examples} "
            f"reviews ({self.target.steps_per_epoch} steps an epoch, at most {self.target.epochs} epochs); the prior "
            f"run on {self.prior.examples} math problems, {self.prior.epochs} epochs.",
            f"Every model is scored on {self.limits.test_rows} held-out reviews, {self.limits.prior_test_rows} math "
            f"problems and {self.limits.text_rows} pieces of text. Expected to take {minutes:.0f} minutes in all.",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-able values."""
        return {
            "prior": self.prior.to_dict(),
            "target": self.target.to_dict(),
            "limits": asdict(self.limits),
            "step_seconds": self.step_seconds,
            "estimate": self.estimate,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_dict` wrote."""
        prior, target = (
            Sizes(**{k: v for k, v in values[name].items() if k != "examples"}) for name in ("prior", "target")
        )
        return cls(prior, target, Limits(**values["limits"]), dict(values["step_seconds"]), dict(values["estimate"]))


def make_plan(
    half_steps: Mapping[str, float], scoring: tuple[float, float], limits: Limits, spent: float = 0.0
) -> Plan:
    """Fit the sizes into the time.

    Parameters
    ----------
    half_steps : mapping of str to float
        Seconds of one training step at half the limits' batch: ``prior``, ``topotuner``, ``lora``, ``full``.
    scoring : tuple of float
        Seconds of scoring one model: per review, and for all else together.
    limits : Limits
    spent : float
        Seconds of the time that are gone already.

    Returns
    -------
    Plan
        With at least two steps an epoch, also where that takes longer than asked; ``estimate`` says so.
    """
    models = 5  # base, topotuner, random, lora, full
    per_row, rest = scoring
    affordable = (_SCORING_SHARE * limits.seconds / models - rest) / per_row
    limits = replace(limits, test_rows=int(min(max(affordable, limits.least_test_rows), limits.test_rows)))
    per_model = per_row * limits.test_rows + rest
    left = max(limits.seconds - spent - _OVERHEAD_SECONDS - models * per_model, 0.0)
    target_step = 2 * half_steps["topotuner"] + half_steps["lora"] + half_steps["full"]
    prior = _fit(left * _PRIOR_SHARE, half_steps["prior"], limits, limits.prior_batch, limits.prior_epochs)
    target = _fit(left * (1 - _PRIOR_SHARE), target_step, limits, limits.target_batch, limits.target_epochs)
    # A whole batch takes no longer than two halves.
    halves = {"prior": 2 * prior.batch_size / limits.prior_batch}
    seconds = {
        name: halves.get(name, 2 * target.batch_size / limits.target_batch) * value
        for name, value in half_steps.items()
    }
    estimate = {
        "prior": prior.steps * seconds["prior"],
        "topotuner": target.steps * seconds["topotuner"],
        "random": target.steps * seconds["topotuner"],
        "lora": target.steps * seconds["lora"],
        "full": target.steps * seconds["full"],
        "scoring": models * per_model,
        "other": _OVERHEAD_SECONDS + spent,
    }
    return Plan(prior, target, limits, {**seconds, "scoring": per_model}, estimate)


def _fit(seconds: float, half_step: float, limits: Limits, batch: int, epochs: int) -> Sizes:
    """Return the sizes of a run of so many seconds."""
    steps = int(seconds / epochs / (2 * half_step))
    if steps < limits.least_steps:
        batch //= 2
        steps = int(seconds / epochs / half_step)
    return Sizes(min(max(2, steps), limits.most_steps), batch, epochs)


def time_steps(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean seconds of one training step over the batches, after a first step that is not counted.

    Parameters
    ----------
    model : torch.nn.Module
        What requires grad trains, with gradients clipped as the Trainer does.
    batches : sequence of mapping
        ``input_ids``, ``attention_mask`` and ``labels``, each (batch, tokens). Several, since their lengths differ.
    """
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=0.0)
    model.train()
    seconds = []
    for batch in (batches[0], *batches):
        started = time.perf_counter()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        seconds.append(time.perf_counter() - started)
    return statistics.mean(seconds[1:])


def time_forward(model: nn.Module, batch: Mapping[str, Any]) -> float:
    """Return the seconds of one forward pass without gradients, after a first one that is not counted."""
    import torch

    model.eval()
    with torch.no_grad():
        model(**batch)
        started = time.perf_counter()
        model(**batch)
    return time.perf_counter() - started


def probe(
    load: Callable[[], nn.Module],
    target_batches: Sequence[Mapping[str, Any]],
    prior_batches: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, float], float]:
    """Time a training step of each kind of method and the forward pass.

    Parameters
    ----------
    load : callable
        Returns a fresh base model.
    target_batches, prior_batches : sequence of mapping
        Batches of either task.

    Returns
    -------
    tuple of dict and float
        Seconds of one step of a Trainer: ``full``, ``lora``, ``topotuner``, ``prior``; and of the forward pass per
        token.
    """
    from peft import LoraConfig, get_peft_model

    from ..projections import find_projections
    from ..tuner import TopoConfig

    model = load()
    per_token = time_forward(model, target_batches[0]) / target_batches[0]["input_ids"].numel()
    seconds = {}
    found = find_projections(model)
    attention = sorted({p.module for p in found})
    # Before the drift is known: v and o of every sixth layer from the first, a delta at every depth.
    few = sorted({p.module for p in found if p.projection in "vo" and p.layer % 6 == 0})
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=attention, task_type="CAUSAL_LM")
    for name, config, batches in (
        ("lora", lora, target_batches),
        ("topotuner", TopoConfig(target_modules=few, task_type="CAUSAL_LM"), target_batches),
        ("prior", TopoConfig(target_modules=attention, task_type="CAUSAL_LM"), prior_batches),
    ):
        adapted = get_peft_model(model, config)
        seconds[name] = _TRAINER_FACTOR * time_steps(adapted, batches)
        model = adapted.unload()
    model.requires_grad_(True)
    seconds["full"] = _TRAINER_FACTOR * time_steps(model, target_batches)
    return seconds, per_token
