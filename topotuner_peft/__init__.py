"""Measure which attention matrices reorganise when a language model learns, and train only those.

Importing this package registers the method with PEFT, so that ``peft.get_peft_model``,
``peft.PeftModel.from_pretrained`` and TRL's trainers take a `TopoConfig` and its adapters.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .tuner import TopoConfig, TopoModel

if TYPE_CHECKING:
    from .drift import DriftSettings, DriftTable, measure_drift, take_snapshot
    from .profile import FreezingProfile
    from .stopping import TopoDriftCallback
    from .topology import persistence_diagrams, wasserstein_distance

__version__ = "0.1.0"

__all__ = [
    "DriftSettings",
    "DriftTable",
    "FreezingProfile",
    "TopoConfig",
    "TopoDriftCallback",
    "TopoModel",
    "measure_drift",
    "persistence_diagrams",
    "take_snapshot",
    "wasserstein_distance",
]

# Loaded on first use: the callback alone imports transformers' Trainer, which takes longer than all the rest.
_LAZY = {
    "DriftSettings": "drift",
    "DriftTable": "drift",
    "FreezingProfile": "profile",
    "TopoDriftCallback": "stopping",
    "measure_drift": "drift",
    "persistence_diagrams": "topology",
    "take_snapshot": "drift",
    "wasserstein_distance": "topology",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
