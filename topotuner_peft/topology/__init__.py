"""Persistence diagrams of row clouds and distances between them: arrays in, numbers out, no models."""

from .persistence import persistence_diagrams
from .wasserstein import wasserstein_distance

__all__ = ["persistence_diagrams", "wasserstein_distance"]
