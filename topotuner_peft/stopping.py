"""Watch topological drift while a Trainer runs, and stop when the matrices have settled."""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import Trainer, TrainerCallback

from . import projections as _projections
from .drift import DriftSettings, DriftTable, matrix_drift, model_info, relative_norm, select_matrices
from .profile import FreezingProfile
from .projections import Projection

if TYPE_CHECKING:
    import os

    from torch import nn

DEFAULT_THRESHOLD = 0.1
STATE_FILE = "topotuner_drift.safetensors"


def step_score(moved: Sequence[float], first: Sequence[float]) -> float:
    """Return the mean over matrices of W(D_t, D_{t−1}) / W(D_1, D_0), D_0 being the pretrained diagram.

    1 means that the last epoch moved the diagrams as far as the first did, 0 that it did not move them. Unlike
    the authors' rule it is never negative, so that matrices can't cancel each other, and a drift that goes out
    and comes back is movement, not rest.

    Parameters
    ----------
    moved : sequence of float
        W(D_t, D_{t−1}) per matrix.
    first : sequence of float
        W(D_1, D_0) per matrix; those at 0 never moved and leave the mean.

    Raises
    ------
    ValueError
        If no matrix moved in the first epoch.
    """
    return _mean_ratio(moved, first)


def increment_score(now: Sequence[float], before: Sequence[float], first: Sequence[float]) -> float:
    """Return the authors' score: the mean over matrices of (D(t) − D(t−1)) / D(1), signed.

    D(t) is the drift from the pretrained matrix after epoch t (Erol et al. 2026, and their code). It is there to
    reproduce their results: opposite signs cancel.
    """
    return _mean_ratio(np.subtract(now, before), first)


def _mean_ratio(numerators: Sequence[float], first: Sequence[float]) -> float:
    first = np.asarray(first, dtype=np.float64)
    moved = first > 0
    if not moved.any():
        raise ValueError(
            "No watched matrix moved in the first epoch, so there is nothing to compare later epochs with. Are the "
            "watched matrices trained, and is the learning rate above zero?"
        )
    return float(np.mean(np.asarray(numerators, dtype=np.float64)[moved] / first[moved]))


class TopoDriftCallback(TrainerCallback):
    """Stop training when the persistence diagrams of the watched matrices no longer move.

    At the end of each epoch the diagrams of the weights the model computes with (base plus active adapters) are
    compared with those of the epoch before. No evaluation set is needed. Diagrams are kept, not weights.

    Parameters
    ----------
    threshold : float or None
        Stop when the score is at or below it. None only records.
    score : {"step", "increment"}
        See `step_score` and `increment_score`.
    patience : int
        Number of epochs in a row that must be at or below the threshold.
    min_epochs : int
        Never stop before this many epochs; at least 2, since the first epoch is the yardstick.
    watch : {"trained", "attention"} or list of str
        The attention matrices that train, all attention matrices, or these matrix ids.
    metric, order, internal_p, precision
        How drift is measured, see `topotuner_peft.DriftSettings`. Dimension 0 only.
    pattern : str, optional
        For models of other module names, see `topotuner_peft.projections.describe_projections`.
    verbose : bool
        Print one line per epoch, and at the end why training stopped.

    Attributes
    ----------
    history : list of dict
        One entry per epoch: ``epoch``, ``step``, ``score`` (None after the first), ``drift_mean`` (mean drift per
        row from the pretrained matrices), ``drift`` and ``moved`` (per matrix: from the pretrained one, from the
        epoch before) and ``seconds`` spent.
    stopped_epoch : int or None
        The epoch after which this callback stopped training.
    reason : str
        Why training ended or goes on, in a sentence.

    Notes
    -----
    A decaying learning rate shrinks every such score whatever the topology does; use a constant one (with
    warm-up) where the score is to decide.

    As an entry of ``callbacks`` it stops and records, also in ``trainer.state.log_history``. `attach` adds it to a
    trainer and also shows its scalars in every tracker (a callback is handed no trainer to log through).

    Examples
    --------
    >>> callback = TopoDriftCallback(threshold=0.1)
    >>> # trainer = SFTTrainer(model, train_dataset=dataset, peft_config=TopoConfig(profile=profile))
    >>> # callback.attach(trainer); trainer.train()
    """

    def __init__(
        self,
        threshold: float | None = DEFAULT_THRESHOLD,
        *,
        score: str = "step",
        patience: int = 1,
        min_epochs: int = 2,
        watch: str | Iterable[str] = "trained",
        metric: str = "cosine",
        order: float = 1.0,
        internal_p: float = math.inf,
        precision: str = "float32",
        pattern: str | None = None,
        verbose: bool = True,
    ):
        if score not in ("step", "increment"):
            raise ValueError(f"score={score!r} is unknown; expected 'step' or 'increment'.")
        if threshold is not None and not math.isfinite(threshold):
            raise ValueError(f"threshold={threshold} is not a finite number; pass None to record without stopping.")
        if score == "step" and threshold is not None and threshold < 0:
            raise ValueError(f"threshold={threshold} can't be reached: the score 'step' is never negative.")
        if patience < 1:
            raise ValueError(f"patience={patience}; expected 1 or more epochs.")
        if min_epochs < 2:
            raise ValueError(f"min_epochs={min_epochs}; expected 2 or more, since the first epoch is the yardstick.")
        if isinstance(watch, str) and watch not in ("trained", "attention"):
            raise ValueError(f"watch={watch!r} is unknown; expected 'trained', 'attention' or a list of matrix ids.")
        self.threshold = threshold
        self.score = score
        self.patience = patience
        self.min_epochs = min_epochs
        self.watch = watch if isinstance(watch, str) else list(watch)
        self.settings = DriftSettings(metric, (0,), order, internal_p, precision)
        self.pattern = pattern
        self.verbose = verbose
        self._trainer: weakref.ref[Trainer] | None = None
        self._reset()

    def _reset(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.stopped_epoch: int | None = None
        self.reason = "Training has not ended."
        self._watched: list[Projection] = []
        self._origin: dict[str, np.ndarray] = {}
        self._previous: dict[str, np.ndarray] = {}
        self._relative_norm: dict[str, float] = {}
        self._info: dict[str, Any] = {}

    def attach(self, trainer: Trainer) -> TopoDriftCallback:
        """Add this callback to a trainer and log through it.

        Returns
        -------
        TopoDriftCallback
            Itself.
        """
        self._trainer = weakref.ref(trainer)
        trainer.add_callback(self)
        return self

    # Events

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Take the pretrained diagrams, or on resuming those that were saved with the checkpoint."""
        self._reset()
        self._watched = self._find(model)
        self._info = model_info(model, self._watched)
        if state.global_step > 0:
            self._restore(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        else:
            # The base weights under an adapter are the origin, also if the adapter was trained before.
            self._origin = self._diagrams(model, effective=False)
            self._previous = self._diagrams(model, effective=True) if _is_adapted(model) else dict(self._origin)

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        """Score the epoch that ends, and ask the trainer to stop if the matrices have settled."""
        if state.epoch is None or abs(state.epoch - round(state.epoch)) > 1e-6:
            # Cut short by max_steps or by another callback: a part must not be scored as a whole epoch.
            return
        started = time.perf_counter()
        now = self._diagrams(model, effective=True)
        self._measure_norms(model)
        moved = {p.id: self._distance(p, self._previous, now) for p in self._watched}
        drift = {p.id: self._distance(p, self._origin, now) for p in self._watched}
        self._previous = now
        score = self._score(moved, drift)
        entry = {
            "epoch": round(state.epoch),
            "step": state.global_step,
            "score": score,
            "drift_mean": float(np.mean([drift[p.id] / p.shape[0] for p in self._watched])),
            "drift": drift,
            "moved": moved,
            "seconds": 0.0,
        }
        self.history.append(entry)
        entry["seconds"] = time.perf_counter() - started
        self._log(state, entry)
        if self._has_settled():
            control.should_training_stop = True
            self.stopped_epoch = entry["epoch"]

    def on_save(self, args, state, control, **kwargs):
        """Write the diagrams and the history beside the checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            self._save(folder / STATE_FILE)

    def on_train_end(self, args, state, control, **kwargs):
        """Say why training ended."""
        if self.stopped_epoch is not None:
            last = self.history[-1]
            saved = 1 - last["epoch"] / state.num_train_epochs if state.num_train_epochs else 0.0
            score = f"the score {last['score']:.3f} is at or below the threshold {self.threshold:g}"
            self.reason = (
                f"Stopped after epoch {self.stopped_epoch} of {state.num_train_epochs:g}: {score}; {saved:.0%} of the "
                "epochs were not needed."
                if saved > 0
                else f"Ran for all {self.stopped_epoch} epochs: {score} only after the last one."
            )
        elif not self.history:
            self.reason = "Training ended before a whole epoch, so nothing was scored."
        elif self.history[-1]["score"] is None:
            self.reason = "Ran for one epoch, the yardstick of the score; a second one is needed to compare."
        elif self.threshold is None:
            self.reason = f"Ran for {self.history[-1]['epoch']} epochs; drift was recorded only."
        else:
            self.reason = (
                f"Ran for {self.history[-1]['epoch']} epochs: the score {self.history[-1]['score']:.3f} stayed above "
                f"the threshold {self.threshold:g}, the matrices were still moving."
            )
        self._say(state, self.reason)

    # What it hands out

    def table(self, *, average: str = "mean") -> DriftTable:
        """Return the drift of the watched matrices over the run.

        Parameters
        ----------
        average : {"mean", "last"}
            The mean of the drift after each epoch, by which the authors rank, or the drift after the last one.

        Raises
        ------
        RuntimeError
            If no epoch has ended yet.
        """
        if average not in ("mean", "last"):
            raise ValueError(f"average={average!r} is unknown; expected 'mean' or 'last'.")
        if not self.history:
            raise RuntimeError("No drift was recorded: train for at least one whole epoch first.")
        entries = self.history if average == "mean" else self.history[-1:]
        rows = []
        for projection in self._watched:
            origin = _as_diagram(self._origin[projection.id])
            row = matrix_drift(projection, self.settings, [origin], [origin], self._relative_norm.get(projection.id))
            drift = float(np.mean([entry["drift"][projection.id] for entry in entries]))
            rows.append(type(row)(**{**row.__dict__, "drift": {0: drift}}))
        epochs = [entry["epoch"] for entry in entries]
        note = f"mean over the ends of epochs {epochs}" if average == "mean" else f"after epoch {epochs[-1]}"
        return DriftTable(rows, self.settings, self._info, {"name": "the model in training"}, note)

    def profile(self, *, prior_task: str | None = None, average: str = "mean", **rule: Any) -> FreezingProfile:
        """Return the freezing profile of the run: Scenario A's prior step, with no checkpoint kept.

        Parameters
        ----------
        prior_task : str, optional
            What the run trained on.
        average : {"mean", "last"}
            See `table`.
        **rule
            See `FreezingProfile.from_drift`.
        """
        profile = FreezingProfile.from_drift(self.table(average=average), prior_task=prior_task, **rule)
        profile.stopping_threshold = self.threshold
        return profile

    @property
    def seconds(self) -> float:
        """Seconds spent measuring at the ends of epochs."""
        return sum(entry["seconds"] for entry in self.history)

    # How it works

    def _find(self, model: nn.Module) -> list[Projection]:
        heads = isinstance(self.watch, list) and _projections.are_heads(self.watch)
        found = _projections.find_projections(model, pattern=self.pattern, heads=heads)
        if isinstance(self.watch, list):
            return select_matrices(found, self.watch)
        if self.watch == "attention":
            return found
        modules = _projections.matrix_modules(model)
        trained = [p for p in found if _trains(modules[p.module], p)]
        if not trained:
            raise ValueError(
                "None of the model's attention matrices trains, so there is nothing to watch. Train some, or name "
                "what to watch: watch='attention' or a list of matrix ids."
            )
        return trained

    def _diagrams(self, model: nn.Module, *, effective: bool) -> dict[str, np.ndarray]:
        """Return matrix id → (n − 1,) float64, the finite deaths; births in dimension 0 are all 0."""
        modules = _projections.matrix_modules(model)
        result = {}
        for p in self._watched:
            weight = _projections.read_weight(modules[p.module], p, effective=effective)
            (diagram,) = self.settings.diagrams(weight, p.id)
            result[p.id] = diagram[np.isfinite(diagram[:, 1]), 1]
        return result

    def _measure_norms(self, model: nn.Module) -> None:
        modules = _projections.matrix_modules(model)
        for p in self._watched:
            module = modules[p.module]
            if hasattr(module, "get_base_layer"):
                base = _projections.read_weight(module, p, effective=False)
                self._relative_norm[p.id] = relative_norm(base, _projections.read_weight(module, p))

    def _distance(self, projection: Projection, before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> float:
        pair = [[_as_diagram(side[projection.id])] for side in (before, after)]
        return self.settings.distances(*pair)[0]

    def _score(self, moved: dict[str, float], drift: dict[str, float]) -> float | None:
        ids = [p.id for p in self._watched]
        if not self.history:
            first = [moved[name] for name in ids]
            _mean_ratio(first, first)  # raises if nothing moved, an epoch earlier than the score would
            return None
        first = [self.history[0]["moved"][name] for name in ids]
        if self.score == "step":
            return step_score([moved[name] for name in ids], first)
        before = [self.history[-1]["drift"][name] for name in ids]
        return increment_score([drift[name] for name in ids], before, [self.history[0]["drift"][name] for name in ids])

    def _has_settled(self) -> bool:
        if self.threshold is None or self.history[-1]["epoch"] < self.min_epochs:
            return False
        last = [entry["score"] for entry in self.history[-self.patience :]]
        return len(last) == self.patience and all(s is not None and s <= self.threshold for s in last)

    def _log(self, state: Any, entry: dict[str, Any]) -> None:
        logs = {"topo/drift/mean": entry["drift_mean"]}
        if entry["score"] is not None:
            logs["topo/score"] = entry["score"]
        by_projection: dict[str, list[float]] = {}
        for p in self._watched:
            by_projection.setdefault(p.projection, []).append(entry["drift"][p.id] / p.shape[0])
        logs.update({f"topo/drift/{name}": float(np.mean(values)) for name, values in by_projection.items()})
        score = "the yardstick" if entry["score"] is None else f"score {entry['score']:.3f}"
        against = "" if self.threshold is None or entry["score"] is None else f" (stops at {self.threshold:g})"
        self._say(state, f"Epoch {entry['epoch']}: drift per row {entry['drift_mean']:.3g}, {score}{against}")
        trainer = self._trainer() if self._trainer is not None else None
        if trainer is not None:
            # The base class's method: TRL's own would flush the averages of its running metrics into this entry.
            due = trainer.control.should_log
            Trainer.log(trainer, logs)
            # Logging clears the flag by which the Trainer's own entry for this epoch is still due.
            trainer.control.should_log = due
        else:
            state.log_history.append({**logs, "epoch": state.epoch, "step": state.global_step})

    def _say(self, state: Any, text: str) -> None:
        if self.verbose and state.is_world_process_zero:
            from tqdm.auto import tqdm

            tqdm.write(f"[topotuner] {text}")

    def _save(self, path: str | os.PathLike[str]) -> None:
        from safetensors.numpy import save_file

        tensors = {f"origin/{name}": deaths for name, deaths in self._origin.items()}
        tensors.update({f"previous/{name}": deaths for name, deaths in self._previous.items()})
        state = {
            "history": self.history,
            "settings": self.settings.to_dict(),
            "relative_norm": self._relative_norm,
            "info": self._info,
        }
        save_file(tensors, path, metadata={"topotuner": json.dumps(state, allow_nan=False)})

    def _restore(self, folder: Path) -> None:
        from safetensors import safe_open

        path = folder / STATE_FILE
        if not path.is_file():
            raise ValueError(
                f"Training resumes at a checkpoint, but {path} is not there, so the diagrams to compare with are "
                "lost. Resume from a checkpoint in `output_dir` that was saved with this callback, or leave it out."
            )
        with safe_open(path, framework="numpy") as file:
            state = json.loads(file.metadata()["topotuner"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iteration without
        if DriftSettings.from_dict(state["settings"]) != self.settings:
            raise ValueError(f"{path} was written with {state['settings']}, this callback measures {self.settings}.")
        self._origin = {n.removeprefix("origin/"): t for n, t in tensors.items() if n.startswith("origin/")}
        self._previous = {n.removeprefix("previous/"): t for n, t in tensors.items() if n.startswith("previous/")}
        watched = {p.id for p in self._watched}
        if set(self._origin) != watched:
            odd = sorted(set(self._origin) ^ watched)
            raise ValueError(f"{path} watches other matrices than this run, {odd[0]!r} among them.")
        self.history = state["history"]
        self._relative_norm = state["relative_norm"]
        self._info = state["info"]


def _as_diagram(deaths: np.ndarray) -> np.ndarray:
    """Return the (n, 2) diagram of dimension 0 with these finite deaths and its essential class."""
    diagram = np.zeros((len(deaths) + 1, 2))
    diagram[:-1, 1] = deaths
    diagram[-1, 1] = np.inf
    return diagram


def _is_adapted(model: nn.Module) -> bool:
    return any(hasattr(module, "get_base_layer") for module in model.modules())


def _trains(module: nn.Module, projection: Projection) -> bool:
    """Return whether any entry of the matrix trains, through its own weight or an adapter's."""
    blocks = getattr(module, "topotuner_blocks", None)
    if blocks is None:
        return any(parameter.requires_grad for parameter in module.parameters())
    for name, delta in module.topotuner_delta.items():
        if not delta.weight.requires_grad:
            continue
        covered, wanted = blocks[name].rows, projection.rows
        if covered is None or wanted is None:
            return True
        if any(start < stop_b and start_b < stop for start, stop in covered for start_b, stop_b in wanted):
            return True
    return False
