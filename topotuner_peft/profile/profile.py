"""The freezing profile: a choice of matrices, how it was made, and the drift of every matrix it was made from."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..drift import DriftTable, MatrixDrift, write_json
from ..projections import PROJECTIONS, Projection, are_heads, find_projections, match_ids, summarise_names
from ..versions import package_versions
from .selection import SelectionRule, select

if TYPE_CHECKING:
    from torch import nn

SCHEMA = 1
FILE_NAME = "profile.json"
_KIND = "topotuner freezing profile"


@dataclass
class FreezingProfile:
    """Which matrices of a model train and which stay frozen, reusable on new tasks.

    Attributes
    ----------
    table : DriftTable
        The drift of every matrix scanned, with the model and the settings.
    rule : SelectionRule
        How the choice was made.
    trained, frozen : list of str
        Matrix ids; together all those of the table.
    prior_task : str or None
        What the model was fine-tuned on when the drift was measured.
    transferred_to : list of str
        Tasks the profile was used on.
    stopping_threshold : float or None
        The drift threshold that stopped, or is to stop, training.
    versions : dict of str to str
        Packages that made it.
    extra : dict
        Keys of the file that this version does not know; kept.
    """

    table: DriftTable
    rule: SelectionRule
    trained: list[str]
    frozen: list[str]
    prior_task: str | None = None
    transferred_to: list[str] = field(default_factory=list)
    stopping_threshold: float | None = None
    versions: dict[str, str] = field(default_factory=package_versions)
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        scanned = {row.id for row in self.table.rows}
        stray = [name for name in [*self.trained, *self.frozen] if name not in scanned]
        if stray:
            raise ValueError(f"The profile names {stray[0]!r}, which its drift table does not have.")
        if not self.trained:
            raise ValueError("The profile trains nothing.")

    @classmethod
    def from_drift(
        cls,
        table: DriftTable,
        *,
        budget: float | None = None,
        k: int | None = None,
        train: str | None = None,
        freeze: str | None = None,
        projections: Sequence[str] | None = None,
        normalise: str = "points",
        order: str = "drift",
        seed: int | None = None,
        dimensions: Sequence[int] = (0,),
        balanced: bool = False,
        per_layer: int | None = None,
        every: int | None = None,
        prior_task: str | None = None,
    ) -> FreezingProfile:
        """Choose matrices from a drift table.

        Parameters
        ----------
        table : DriftTable
        budget, k, train, freeze, projections, normalise, order, seed, dimensions, balanced, per_layer, every
            The rule, see `SelectionRule`. Without any: the highest drift per row, at most 1.5 % of the model.
        prior_task : str, optional
            What the tuned model learned.

        Returns
        -------
        FreezingProfile

        Raises
        ------
        ValueError
            If the rule contradicts itself or chooses nothing.
        """
        rule = SelectionRule(
            train=train,
            freeze=freeze,
            budget=budget,
            k=k,
            projections=tuple(projections) if projections is not None else None,
            normalise=normalise,
            order=order,
            seed=seed,
            dimensions=tuple(dimensions),
            balanced=balanced,
            per_layer=per_layer,
            every=every,
        )
        return cls._choose(table, rule, prior_task=prior_task)

    @classmethod
    def _choose(cls, table: DriftTable, rule: SelectionRule, **fields: Any) -> FreezingProfile:
        trained = select(table, rule)
        chosen = set(trained)
        return cls(table, rule, trained, [row.id for row in table.rows if row.id not in chosen], **fields)

    def reselect(self, **changes: Any) -> FreezingProfile:
        """Return a profile of the same drift under another rule, such as another budget or direction.

        Parameters
        ----------
        **changes
            Fields of `SelectionRule`. A new ``train`` replaces ``freeze`` and the reverse, a new ``budget``
            replaces ``k`` and the reverse.
        """
        values = self.rule.to_dict()
        for given, replaced in (("train", "freeze"), ("freeze", "train"), ("budget", "k"), ("k", "budget")):
            if changes.get(given) is not None:
                values[replaced] = None
        values.update({name: value for name, value in changes.items() if value is not None})
        return self._choose(
            self.table,
            SelectionRule.from_dict(values),
            prior_task=self.prior_task,
            transferred_to=list(self.transferred_to),
        )

    @property
    def budget(self) -> float | None:
        """The budget asked for, as a share of all parameters."""
        return self.rule.budget

    @property
    def parameters(self) -> int:
        """Number of parameters that train."""
        chosen = set(self.trained)
        return sum(row.size for row in self.table.rows if row.id in chosen)

    @property
    def share(self) -> float:
        """Share of the model's parameters that train."""
        return self.parameters / self.table.base["parameters"]

    def __repr__(self) -> str:
        return (
            f"FreezingProfile({len(self.trained)} of {len(self.table.rows)} matrices of "
            f"{self.table.base.get('name') or 'an unnamed model'} train, {self.share:.2%} of its parameters; "
            f"prior task: {self.prior_task or 'not stated'})"
        )

    def to_text(self, *, width: int | None = None) -> str:
        """Return a summary for the terminal: per projection, the layers that train and their share."""
        from ..report.terminal import render_table

        chosen = set(self.trained)
        total = self.table.base["parameters"]
        names = sorted({row.projection for row in self.table.rows}, key=lambda n: ("qkvo".find(n) % 9, n))
        lines = []
        for name in names:
            rows = [row for row in self.table.rows if row.projection == name]
            picked = [row for row in rows if row.id in chosen]
            lines.append(
                [
                    name,
                    f"{len(picked)} of {len(rows)}",
                    f"{sum(row.size for row in picked) / total:.2%}",
                    " ".join(_place(row) for row in picked) or "–",
                ]
            )
        head = f"{self.rule.describe()}; reached {self.share:.2%} ({self.parameters:,} parameters)"
        unit = "layers that train" if lines and rows[0].head is None else "layer.head that train"
        columns = ["projection", "train", "of all parameters", unit]
        return head + "\n" + render_table(columns, lines, align=["l", "r", "r", "l"], width=width)

    def plot(self, path: str | os.PathLike[str], *, theme: str = "light") -> None:
        """Draw the drift of all matrices as a heat map with the trained ones marked (needs the ``plot`` extra)."""
        from ..report.plots import drift_heatmap

        drift_heatmap(self.table, path, profile=self, theme=theme)

    def resolve(
        self, found: Sequence[Projection], *, model_type: str | None = None, strict: bool = True
    ) -> list[Projection]:
        """Return the trained matrices as a model names them.

        Parameters
        ----------
        found : sequence of Projection
            The model's matrices.
        model_type : str, optional
            The model's type; another one than the profile's draws a warning.
        strict : bool
            Whether a matrix of the profile that the model lacks is an error. If False, the ones that are there
            are returned and a warning counts the others.

        Raises
        ------
        ValueError
            If a matrix is missing or has another shape, or none is left.
        """
        by_id = {projection.id: projection for projection in found}
        matched = match_ids([row.id for row in self.table.rows], by_id)
        missing = [name for name, match in matched.items() if match is None]
        shapes = {row.id: row.shape for row in self.table.rows}
        other = [
            name for name, match in matched.items() if match is not None and by_id[match].shape != tuple(shapes[name])
        ]
        made_for = f"The profile was made for {self.table.base.get('name') or 'a model'}"
        if other:
            name = other[0]
            raise ValueError(
                f"{made_for}, where {name!r} is {tuple(shapes[name])}; in this model it is "
                f"{by_id[matched[name]].shape}. A profile fits models of the same shape only."
            )
        unscanned = {p.layer for p in found} - {row.layer for row in self.table.rows}
        if strict and (missing or unscanned):
            problem = (
                f"{len(missing)} of its {len(matched)} matrices are not in this model, {missing[0]!r} among them"
                if missing
                else f"this model has layers it does not cover: {sorted(unscanned)}"
            )
            raise ValueError(
                f"{made_for}; {problem}. The profile has {summarise_names(matched)}; the model has "
                f"{summarise_names(by_id)}. Pass `strict=False` to use what fits."
            )
        chosen = set(self.trained)
        resolved = [by_id[matched[name]] for name in self.trained if matched[name] is not None]
        if not resolved:
            raise ValueError(
                f"{made_for}; none of its {len(self.trained)} trained matrices is in this model, which has "
                f"{summarise_names(by_id)}."
            )
        if len(resolved) < len(chosen):
            warnings.warn(
                f"{made_for}; {len(chosen) - len(resolved)} of its {len(chosen)} trained matrices are not in this "
                "model and are left out.",
                stacklevel=2,
            )
        ours = self.table.base.get("model_type")
        if model_type and ours and model_type != ours:
            warnings.warn(f"{made_for}, of type {ours!r}; this model is of type {model_type!r}.", stacklevel=2)
        return resolved

    def check_model(self, model: nn.Module) -> list[Projection]:
        """Return the trained matrices of a live model, or raise if the profile does not fit it."""
        names = [row.projection for row in self.table.rows]
        heads = are_heads(row.id for row in self.table.rows)
        return self.resolve(find_projections(model, projections=[n for n in PROJECTIONS if n in names], heads=heads))

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON-able values."""
        return {
            **self.extra,
            "kind": _KIND,
            "schema": SCHEMA,
            "base_model": self.table.base,
            "prior_task": self.prior_task,
            "rule": self.rule.to_dict(),
            "rule_in_words": self.rule.describe(),
            "share": self.share,
            "trained": self.trained,
            "frozen": self.frozen,
            "transferred_to": self.transferred_to,
            "stopping_threshold": self.stopping_threshold,
            "drift": self.table.to_dict(),
            "versions": self.versions,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FreezingProfile:
        """Return the profile that `to_dict` wrote.

        Raises
        ------
        ValueError
            If it is no profile, or one of a newer schema.
        """
        kind = values.get("kind") if isinstance(values, Mapping) else None
        if kind != _KIND:
            raise ValueError(f"This is no freezing profile: its kind is {kind!r}, expected {_KIND!r}.")
        if values["schema"] > SCHEMA:
            raise ValueError(
                f"This freezing profile has schema {values['schema']}; this version of topotuner_peft reads up to "
                f"{SCHEMA}. It was written by topotuner-peft {values.get('versions', {}).get('topotuner-peft', '?')}: "
                "install that or a newer version."
            )
        known = {
            "kind", "schema", "base_model", "prior_task", "rule", "rule_in_words", "share", "trained", "frozen",
            "transferred_to", "stopping_threshold", "drift", "versions",
        }  # fmt: skip
        return cls(
            table=DriftTable.from_dict(values["drift"]),
            rule=SelectionRule.from_dict(values["rule"]),
            trained=list(values["trained"]),
            frozen=list(values["frozen"]),
            prior_task=values.get("prior_task"),
            transferred_to=list(values.get("transferred_to", [])),
            stopping_threshold=values.get("stopping_threshold"),
            versions=dict(values["versions"]),
            extra={key: value for key, value in values.items() if key not in known},
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the profile as JSON; a path without ``.json`` is a folder that gets a ``profile.json``.

        Returns
        -------
        pathlib.Path
            The file written.
        """
        path = Path(path)
        file = path if path.suffix == ".json" else path / FILE_NAME
        write_json(file, self.to_dict())
        return file

    @classmethod
    def load(cls, source: str | os.PathLike[str], *, revision: str | None = None) -> FreezingProfile:
        """Read a profile from a file, from a folder with a ``profile.json``, or from the Hugging Face Hub.

        Parameters
        ----------
        source : str or path-like
            A path, or a Hub repository id such as ``"me/llama-3.1-8b-gsm8k"``.
        revision : str, optional
            Branch, tag or commit on the Hub.

        Raises
        ------
        ValueError
            If there is no such profile, or the file is none.
        """
        path = Path(source)
        if path.is_dir():
            path = path / FILE_NAME
        if not path.is_file():
            path = _download(str(source), revision)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path} is not JSON ({error}); expected a profile that FreezingProfile.save wrote."
            ) from error
        try:
            return cls.from_dict(values)
        except KeyError as error:
            raise ValueError(f"{path} is no whole freezing profile: it lacks {error}.") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the profile as ``profile.json`` to a Hub model repository, made if need be.

        Returns
        -------
        str
            The commit's address.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        content = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False).encode()
        commit = api.upload_file(
            path_or_fileobj=content,
            path_in_repo=FILE_NAME,
            repo_id=repo_id,
            commit_message="Upload a topotuner freezing profile",
        )
        return commit.commit_url


def _place(row: MatrixDrift) -> str:
    return str(row.layer) if row.head is None else f"{row.layer}.{row.head}"


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    missing = f"There is no freezing profile at {name!r}: neither a file, nor a folder with a {FILE_NAME}"
    try:
        return Path(hf_hub_download(name, FILE_NAME, revision=revision))
    except HFValidationError as error:
        raise ValueError(f"{missing}, nor a valid Hub repository id.") from error
    except Exception as error:  # the Hub's client raises errors of many libraries; the cause is chained
        raise ValueError(
            f"{missing}, nor one that could be had from the Hub ({type(error).__name__}: {error})."
        ) from error
