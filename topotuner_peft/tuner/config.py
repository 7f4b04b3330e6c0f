"""Configuration of the TopoTuner method."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from peft.config import PeftConfig

from ..profile import FreezingProfile
from .registration import peft_type


@dataclass
class TopoConfig(PeftConfig):
    """Which matrices train, as a PEFT configuration.

    Give either ``profile`` (measured) or ``target_modules`` (by name).

    Parameters
    ----------
    profile : FreezingProfile or str, optional
        A profile, the path of one, or the Hub id of one.
    budget : float, optional
        Share of the base model's parameters to train at most, above 0 and up to 1; chooses anew from the
        profile's drift. Without any rule the profile's own choice is taken.
    k : int, optional
        Instead of a budget: the number of matrices per projection.
    train, freeze : {"high", "low"}, optional
        Direction of the choice, see `topotuner_peft.profile.SelectionRule`.
    projections : list of str, optional
        Choose among these of ``"q"``, ``"k"``, ``"v"``, ``"o"`` only.
    strict : bool
        Whether a matrix of the profile that the model lacks is an error (default) or only counted in a warning.
    target_modules : list of str or str, optional
        Instead of a profile: names or a regular expression of the modules to train, as in ``LoraConfig``.
    exclude_modules : list of str or str, optional
        Modules to leave out.
    layers_to_transform : list of int or int, optional
        With ``target_modules``: only these layers.
    layers_pattern : list of str or str, optional
        Name of the list of layers, where it is not the usual one.
    modules_to_save : list of str, optional
        Further modules to train and save whole, such as a classifier.
    trainable_token_indices : list of int or dict, optional
        Rows of the embedding to train, as in ``LoraConfig``.
    init_weights : bool
        True starts at the pretrained weights. False fills the deltas with low-rank noise and is for tests.
    matrices : list of str, optional
        Resolved matrix ids. Set when the method is applied and saved with the adapter, so that loading needs no
        profile.
    base_fingerprint : dict, optional
        A few numbers that tell the base model from another of the same shape. Set and saved likewise.
    profile_summary : dict, optional
        Where the choice came from: model, prior task, rule and share reached. Set and saved likewise.
    """

    profile: Any = field(
        default=None,
        metadata={"help": "A FreezingProfile, or the path or Hub id of one, that says what trains."},
    )
    budget: float | None = field(
        default=None,
        metadata={"help": "Share of the base model's parameters to train at most (0.015 for 1.5 %)."},
    )
    k: int | None = field(default=None, metadata={"help": "Instead of a budget: matrices per projection."})
    train: str | None = field(default=None, metadata={"help": "Train the matrices of 'high' or of 'low' drift."})
    freeze: str | None = field(
        default=None,
        metadata={"help": "Freeze the k matrices per projection of 'high' or 'low' drift; the rest trains."},
    )
    projections: list[str] | None = field(
        default=None, metadata={"help": "Choose among these projections only: some of 'q', 'k', 'v', 'o'."}
    )
    strict: bool = field(
        default=True, metadata={"help": "Whether a matrix of the profile that the model lacks is an error."}
    )
    target_modules: list[str] | str | None = field(
        default=None,
        metadata={"help": "Instead of a profile: names or a regular expression of the modules to train whole."},
    )
    exclude_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Names or a regular expression of modules to leave out."}
    )
    layers_to_transform: list[int] | int | None = field(
        default=None, metadata={"help": "With target_modules: indices of the layers to train."}
    )
    layers_pattern: list[str] | str | None = field(
        default=None,
        metadata={"help": "Name of the list of layers, if layers_to_transform is given and it is unusual."},
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Further modules to train and save whole, such as a classifier."}
    )
    trainable_token_indices: list[int] | dict[str, list[int]] | None = field(
        default=None, metadata={"help": "Indices of tokens whose embeddings train, as in LoraConfig."}
    )
    init_weights: bool = field(
        default=True,
        metadata={"help": "Start at the pretrained weights. False fills the deltas with noise, for tests."},
    )
    matrices: list[str] | None = field(
        default=None, metadata={"help": "Resolved matrix ids; set when the method is applied."}
    )
    base_fingerprint: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Numbers that identify the base model; set when the method is applied."},
    )
    profile_summary: dict[str, Any] | None = field(
        default=None, metadata={"help": "Where the choice came from; set when the method is applied."}
    )

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = peft_type()
        self.target_modules = set(self.target_modules) if isinstance(self.target_modules, list) else self.target_modules
        self.exclude_modules = (
            set(self.exclude_modules) if isinstance(self.exclude_modules, list) else self.exclude_modules
        )
        # Index 0 alone is a valid choice of layers, so the test is for None.
        if isinstance(self.target_modules, str) and self.layers_to_transform is not None:
            raise ValueError(
                "`layers_to_transform` needs `target_modules` as a list of names, not a regular expression."
            )
        if isinstance(self.target_modules, str) and self.layers_pattern is not None:
            raise ValueError("`layers_pattern` needs `target_modules` as a list of names, not a regular expression.")
        if self.layers_pattern is not None and self.layers_to_transform is None:
            raise ValueError("`layers_pattern` is given without `layers_to_transform`, so it would do nothing.")
        rule = [name for name in ("budget", "k", "train", "freeze", "projections") if getattr(self, name) is not None]
        if self.profile is None and rule and self.matrices is None:
            raise ValueError(f"{rule} choose from a profile's drift, but no `profile` is given.")
        if self.profile is not None and self.target_modules is not None:
            raise ValueError("Give either `profile` or `target_modules`: both say which matrices train.")
        if self.budget is not None and not 0 < self.budget <= 1:
            raise ValueError(f"budget={self.budget} is no share of the parameters; expected more than 0, at most 1.")

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON-able values; lists are sorted, the profile is named, not copied."""
        # A profile holds the drift of every matrix; asdict would copy it all only to be dropped.
        plain = copy.copy(self)
        plain.profile = None
        values = PeftConfig.to_dict(plain)
        for name in ("target_modules", "exclude_modules"):
            if isinstance(values[name], set):
                values[name] = sorted(values[name])
        # Where the choice came from is in `profile_summary`; a path or an object would not load elsewhere.
        return values

    def load_profile(self) -> FreezingProfile | None:
        """Return the profile under this configuration's rule, or None if there is none.

        Raises
        ------
        ValueError
            If the profile does not exist or the rule contradicts itself.
        TypeError
            If ``profile`` is neither a profile nor a name.
        """
        if self.profile is None:
            return None
        if isinstance(self.profile, FreezingProfile):
            profile = self.profile
        elif isinstance(self.profile, str) or hasattr(self.profile, "__fspath__"):
            profile = FreezingProfile.load(self.profile)
        else:
            raise TypeError(
                f"profile is a {type(self.profile).__name__}; expected a FreezingProfile, a path or a Hub id."
            )
        rule = {
            "budget": self.budget,
            "k": self.k,
            "train": self.train,
            "freeze": self.freeze,
            "projections": tuple(self.projections) if self.projections is not None else None,
        }
        return profile.reselect(**rule) if any(value is not None for value in rule.values()) else profile
