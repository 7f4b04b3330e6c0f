"""The demo's results in sentences and one table, the same for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Paired differences below this many standard errors are called level (about 95 % of chance alone).
LEVEL = 2.0


def methods_table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and cells of the table of methods.

    Parameters
    ----------
    results : mapping
        The content of the demo's ``results.json``.
    """
    columns = [
        "method",
        "trained",
        "rate",
        "epochs",
        "seconds",
        "adapter",
        "accuracy",
        "choice loss",
        "vs TopoTuner",
        "math loss",
        "text loss",
    ]
    return columns, [_cells(row) for row in results["methods"]]


def _cells(row: Mapping[str, Any]) -> list[str]:
    base = row["key"] == "base"

    def unless_base(text: str) -> str:
        return "–" if base else text

    size = row["adapter_bytes"]
    difference = row["paired_difference"]
    return [
        row["label"],
        unless_base(_share(row["trainable_share"])),
        "–" if row["learning_rate"] is None else f"{row['learning_rate']:g}",
        unless_base(f"{row['epochs']:g}"),
        "–" if row["seconds"] is None else f"{row['seconds']:.0f}",
        "–" if size is None else f"{size / 1e6:.1f} MB",
        f"{row['accuracy']:.3f} ±{row['accuracy_se']:.3f}",
        f"{row['choice_loss']:.3f} ±{row['choice_loss_se']:.3f}",
        "–" if difference is None else f"{difference:+.3f} ±{row['paired_difference_se']:.3f}",
        f"{row['prior_loss']:.3f}" if base else f"{row['prior_loss_change']:+.3f}",
        f"{row['text_loss']:.3f}" if base else f"{row['text_loss_change']:+.3f}",
    ]


def _share(share: float) -> str:
    return f"{share:.0%}" if share > 0.995 else f"{share:.2%}"


LEGEND = (
    "Choice loss: mean negative log-probability of the right one of the two answers, in nats; lower is better. "
    "“vs TopoTuner” is the difference of that loss over the same examples: above zero means that TopoTuner is better. "
    "± is one standard error over the test examples; it knows nothing of other seeds. Math and text loss are in nats "
    "per token: the base model's own, then each method's change; above zero means forgetting."
)


def headline(results: Mapping[str, Any]) -> str:
    """Say in one or two sentences how TopoTuner did against its rivals, whichever way it went."""
    if results["fast"]:
        return (
            "All parts ran. This was a --fast run, with far too few steps and examples for its scores to mean anything."
        )
    verdicts: dict[str, list[str]] = {"better than": [], "level with": [], "worse than": []}
    for row in results["methods"]:
        if row["key"] != "topotuner":
            verdicts[_verdict(row)].append(_in_sentence(row["label"]))
    parts = [f"{verdict} {_listed(names)}" for verdict, names in verdicts.items() if names]
    ours = next(row for row in results["methods"] if row["key"] == "topotuner")
    return (
        f"Training {_share(ours['trainable_share'])} of the weights, TopoTuner reached a choice loss of "
        f"{ours['choice_loss']:.3f} on held-out reviews: {_listed(parts)} (differences within {LEVEL:g} paired "
        "standard errors are called level)."
    )


def _verdict(row: Mapping[str, Any]) -> str:
    difference, error = row["paired_difference"], row["paired_difference_se"]
    if abs(difference) <= LEVEL * error:
        return "level with"
    return "better than" if difference > 0 else "worse than"


def _in_sentence(label: str) -> str:
    """Return a label as it stands inside a sentence: names keep their capitals."""
    return label if label[:2].isupper() or label.startswith("LoRA") else label[0].lower() + label[1:]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def stopping_sentence(results: Mapping[str, Any]) -> str:
    """Say whether and where training stopped by itself."""
    stopping = results["stopping"]
    last = stopping["history"][-1]["score"]
    if stopping["stopped_early"]:
        return (
            f"Training stopped by itself after {stopping['epochs_run']} of {stopping['epochs_budget']} epochs, at a "
            f"drift score of {last:.2f} (threshold {stopping['threshold']:g}): {stopping['saved_share']:.0%} of the "
            "epochs were saved. The other methods trained for as many epochs."
        )
    return (
        f"Training used all {stopping['epochs_budget']} epochs: the drift score ended at {last:.2f}, and the threshold "
        f"is {stopping['threshold']:g}."
    )


def forgetting_sentence(results: Mapping[str, Any]) -> str:
    """Say what fine-tuning did to the loss on the story nobody trained on."""
    changes = [(row["text_loss_change"], row["label"]) for row in results["methods"] if row["key"] != "base"]
    told = ", ".join(f"{label} {change:+.3f}" for change, label in sorted(changes))
    return f"Forgetting, as the change of the loss on a story that no method trained on: {told} nats per token."
