"""Measure which attention matrices reorganise when a language model learns, and train only those.

Importing this package registers the method with PEFT, so that ``peft.get_peft_model``,
``peft.PeftModel.from_pretrained`` and TRL's trainers take a `TopoConfig` and its adapters.
"""

from .drift import DriftSettings, DriftTable, measure_drift, take_snapshot
from .profile import FreezingProfile
from .topology import persistence_diagrams, wasserstein_distance
from .tuner import TopoConfig, TopoModel

__version__ = "0.1.0"

__all__ = [
    "DriftSettings",
    "DriftTable",
    "FreezingProfile",
    "TopoConfig",
    "TopoModel",
    "measure_drift",
    "persistence_diagrams",
    "take_snapshot",
    "wasserstein_distance",
]
