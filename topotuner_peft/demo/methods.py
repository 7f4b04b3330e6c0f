"""The methods the demo compares, and the learning rate of each with its reason.

The rates come from the grid ``benchmarks/finetune/configs/demo_rates.yaml``: the demo's regime of about a hundred
reviews seen four times, one seed, the same four rates of TopoTuner and LoRA. What decides is the choice loss on 160
*validation* reviews, the mean of those after the third and fourth epoch. TopoTuner: 0.405 at 5e-5, 0.366 at 1e-4, 0.320
at 2e-4, 0.340 at 5e-4. LoRA: 0.432, 0.430, 0.330, 0.458 at the same. Full fine-tuning: 0.448 at 2e-6, 0.384 at 5e-6,
0.446 at 1e-5. With a hundred examples seen again and again, higher rates overfit; with more data they do not.
"""

from __future__ import annotations

from .training import Method

_TRIED = "the best of {} on validation reviews"

PRIOR = Method(
    "prior",
    "Prior run",
    1e-4,
    "a careful rate for all attention matrices: drift is to show what the task moves, not what a high rate breaks",
)
TOPOTUNER = Method("topotuner", "TopoTuner", 2e-4, _TRIED.format("5e-5, 1e-4, 2e-4 and 5e-4"))
METHODS = {
    "topotuner": TOPOTUNER,
    "random": Method("random", "Random matrices", 2e-4, "TopoTuner's: only the choice of matrices differs"),
    "lora": Method("lora", "LoRA r16", 2e-4, _TRIED.format("5e-5, 1e-4, 2e-4 and 5e-4")),
    "full": Method("full", "Full fine-tuning", 5e-6, _TRIED.format("2e-6, 5e-6 and 1e-5")),
}

# In runs of this size the score was 1.2, 0.9 and 0.6 after epochs 2, 3 and 4: the threshold stops at the first epoch
# that moves the matrices less than the first one did.
STOPPING_THRESHOLD = 1.0
