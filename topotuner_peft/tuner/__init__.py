"""TopoTuner as a PEFT method: a zero-initialised, full-rank delta on each chosen matrix."""

from .config import TopoConfig
from .layer import DeltaLinear, TopoLayer, TopoLinear
from .model import TopoModel
from .registration import register

__all__ = ["DeltaLinear", "TopoConfig", "TopoLayer", "TopoLinear", "TopoModel", "register"]

register(TopoConfig, TopoModel)
