"""The methods the demo compares, and the learning rate of each with its reason."""

from __future__ import annotations

from .training import Method

PRIOR = Method(
    "prior",
    "prior run",
    1e-4,
    "a careful rate for all attention matrices: drift is to show what the task moves, not what a high rate breaks",
)
TOPOTUNER = Method("topotuner", "TopoTuner", 1e-3, "")
METHODS = {
    "topotuner": TOPOTUNER,
    "random": Method("random", "Random matrices", 1e-3, "the same as TopoTuner's: only the choice differs"),
    "lora": Method("lora", "LoRA r16", 1e-3, ""),
    "full": Method("full", "Full fine-tuning", 5e-5, ""),
}
STOPPING_THRESHOLD = 0.5
