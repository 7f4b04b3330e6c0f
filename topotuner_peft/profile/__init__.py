"""Freezing profiles: which matrices train and which stay frozen, and the rules that choose them."""

from .profile import FreezingProfile
from .selection import SelectionRule, select

__all__ = ["FreezingProfile", "SelectionRule", "select"]
