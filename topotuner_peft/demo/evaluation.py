"""Scoring one model on the target task, the prior task and held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from .plan import Limits


@dataclass(frozen=True)
class HeldOut:
    """The held-out rows that every model is scored on.

    Attributes
    ----------
    target, prior, text : list of dict
    """

    target: list[dict[str, Any]]
    prior: list[dict[str, Any]]
    text: list[dict[str, Any]]

    @classmethod
    def load(cls, limits: Limits, seed: int, cache_dir: Path | None) -> HeldOut:
        """Load the test rows; the same arguments give the same rows in every process."""
        from ..tasks import get_task

        return cls(
            get_task("sentiment").load("test", limits.test_rows, seed, cache_dir),
            get_task("math_word_problems").load("test", limits.prior_test_rows, seed, cache_dir),
            get_task("general_text").load("test", limits.text_rows, seed, cache_dir),
        )


def evaluate(model: nn.Module, tokenizer: PreTrainedTokenizerBase, held_out: HeldOut) -> dict[str, Any]:
    """Score a model.

    Returns
    -------
    dict
        ``accuracy``, ``choice_loss`` and their standard errors, ``losses`` per example (for paired comparison),
        ``prior_loss`` and ``text_loss`` in nats per token.
    """
    from ..tasks.scoring import score_choices, score_tokens

    choices = score_choices(model, tokenizer, held_out.target)
    prior = score_tokens(model, tokenizer, held_out.prior)
    text = score_tokens(model, tokenizer, [row["text"] for row in held_out.text])
    return {
        "accuracy": float(choices.accuracy),
        "accuracy_se": float(choices.accuracy_se),
        "choice_loss": float(choices.choice_loss),
        "choice_loss_se": float(choices.choice_loss_se),
        "losses": [float(value) for value in choices.losses],
        "prior_loss": float(prior.loss),
        "text_loss": float(text.loss),
    }


def paired_difference(losses: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Return the mean of losses − reference over the same examples, and its standard error."""
    difference = np.subtract(losses, reference)
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference)))


def reference_logits(model: nn.Module, tokenizer: PreTrainedTokenizerBase, held_out: HeldOut) -> np.ndarray:
    """Return the logits after the first held-out prompt, (tokens, vocabulary) float32, to compare two processes."""
    import torch

    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(**tokenizer(held_out.target[0]["prompt"], return_tensors="pt")).logits[0]
    model.train(training)
    return logits.float().numpy()
