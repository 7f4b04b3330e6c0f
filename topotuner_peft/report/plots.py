"""Pictures: drift as a heat map, the stopping score, the methods compared. They need the ``plot`` extra."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..drift import DriftTable, MatrixDrift
    from ..profile import FreezingProfile


@dataclass(frozen=True)
class _Theme:
    ink: str
    faint: str
    paper: str
    mark: str
    accent: str


# Okabe and Ito's orange and blue, told apart by all kinds of colour vision.
_THEMES = {
    "light": _Theme("#1f2328", "#8b949e", "#ffffff", "#d55e00", "#0072b2"),
    "dark": _Theme("#e6edf3", "#7d8590", "#0d1117", "#ffb454", "#56b4e9"),
}
_DPI = 144


def _figure(width: float, height: float, theme: str) -> tuple[Figure, _Theme]:
    require("plot", "matplotlib")
    if theme not in _THEMES:
        raise ValueError(f"theme={theme!r} is unknown; expected {' or '.join(_THEMES)}.")
    # Without pyplot: no backend is chosen and no window kept for the caller's process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = _THEMES[theme]
    figure = Figure((width, height), dpi=_DPI, facecolor=colours.paper, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, colours


def _dress(axes: Axes, colours: _Theme) -> None:
    axes.set_facecolor(colours.paper)
    for name, spine in axes.spines.items():
        spine.set_color(colours.faint)
        spine.set_visible(name in ("left", "bottom"))
    axes.tick_params(colors=colours.ink, which="both")
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(colours.ink)


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _exponent(highest: float) -> int:
    """Return the power of ten that one factor takes out of all numbers of a picture."""
    return int(np.floor(np.log10(highest))) if highest > 0 else 0


def _power(exponent: int) -> str:
    return f" (10$^{{{exponent}}}$)" if exponent else ""


def drift_heatmap(
    table: DriftTable,
    path: str | os.PathLike[str],
    *,
    profile: FreezingProfile | None = None,
    theme: str = "light",
) -> None:
    """Draw the drift of all matrices: layers from left to right, one row per projection, or per head of one.

    Parameters
    ----------
    table : DriftTable
    path : path-like
        PNG file.
    profile : FreezingProfile, optional
        Its trained matrices get a frame.
    theme : {"light", "dark"}

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is not installed.
    """
    lines = sorted({_line(row) for row in table.rows})
    names = [name if head is None else f"{name} {head}" for _, name, head in lines]
    layers = sorted({row.layer for row in table.rows})
    exponent = _exponent(max(row.per_point for row in table.rows))
    values = np.full((len(lines), len(layers)), np.nan)
    for row in table.rows:
        values[lines.index(_line(row)), layers.index(row.layer)] = row.per_point / 10.0**exponent

    figure, colours = _figure(max(6.0, 1.9 + 0.27 * len(layers)), 1.5 + 0.42 * len(names), theme)
    axes = figure.add_subplot()
    image = axes.imshow(values, cmap="cividis", aspect="auto", vmin=0)
    axes.set_yticks(range(len(names)), names)
    step = 1 if len(layers) <= 40 else 5
    axes.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]], fontsize=8)
    axes.set_xlabel("layer")
    axes.set_ylabel("projection")
    title = f"Topological drift, {table.base.get('name') or 'an unnamed model'}"
    axes.set_title(f"{title} ({table.metric} distance)", loc="left", fontsize=11, color=colours.ink)
    _dress(axes, colours)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    if profile is not None:
        _frame(axes, table, profile, lines, layers, colours)
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.05)
    bar.set_label(f"drift per row{_power(exponent)}", color=colours.ink)
    bar.ax.tick_params(colors=colours.ink)
    bar.outline.set_visible(False)
    _save(figure, path)


def _line(row: MatrixDrift) -> tuple[int, str, int | None]:
    return ("qkvo".find(row.projection) % 9, row.projection, row.head)


def _frame(axes, table, profile, lines, layers, colours) -> None:
    from matplotlib.patches import Patch, Rectangle

    chosen = set(profile.trained)
    for row in table.rows:
        if row.id in chosen:
            corner = (layers.index(row.layer) - 0.43, lines.index(_line(row)) - 0.43)
            axes.add_patch(Rectangle(corner, 0.86, 0.86, fill=False, edgecolor=colours.mark, linewidth=2.2))
    axes.legend(
        handles=[Patch(facecolor="none", edgecolor=colours.mark, linewidth=2.2)],
        labels=[f"trained: {len(chosen)} matrices, {profile.share:.2%} of all parameters"],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=9,
        labelcolor=colours.ink,
    )


def drift_curves(
    history: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    threshold: float | None,
    theme: str = "light",
) -> None:
    """Draw the stopping score per epoch, with its threshold.

    Parameters
    ----------
    history : sequence of mapping
        ``epoch``, ``score`` (None for the first) and ``drift_mean`` of each epoch, as the callback keeps them.
    path : path-like
        PNG file.
    threshold : float or None
        At or below it training stops.
    theme : {"light", "dark"}
    """
    figure, colours = _figure(6.4, 3.2, theme)
    left, right = figure.subplots(1, 2)
    epochs = [entry["epoch"] for entry in history]
    drifts = np.array([entry["drift_mean"] for entry in history])
    exponent = _exponent(drifts.max())
    left.plot(epochs, drifts / 10.0**exponent, "o-", color=colours.accent)
    left.set_title("Drift from the pretrained weights", loc="left", fontsize=10, color=colours.ink)
    left.set_ylabel(f"mean drift per row{_power(exponent)}")
    # The first epoch is the yardstick: its own score is 1 by definition.
    scores = [1.0 if entry["score"] is None else entry["score"] for entry in history]
    right.plot(epochs, scores, "o-", color=colours.accent)
    right.plot(epochs[:1], scores[:1], "o", color=colours.paper, markeredgecolor=colours.accent)
    for epoch, score in zip(epochs, scores, strict=True):
        right.annotate(
            f"{score:.2f}", (epoch, score), xytext=(0, 7), textcoords="offset points", ha="center", color=colours.ink,
            fontsize=9,
        )  # fmt: skip
    if threshold is not None:
        right.axhline(threshold, color=colours.mark, linestyle="--", linewidth=1.5)
        right.annotate(
            f"stops at {threshold:g}", (epochs[0], threshold), xytext=(-6, -12), textcoords="offset points",
            color=colours.mark, fontsize=9,
        )  # fmt: skip
    right.set_title("Score: movement of an epoch, first = 1", loc="left", fontsize=10, color=colours.ink)
    right.set_ylim(0, max([*scores, threshold or 0.0]) * 1.2)
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.set_xticks(epochs)
        axes.margins(x=0.12)
        _dress(axes, colours)
    left.set_ylim(bottom=0)
    _save(figure, path)


def methods_chart(methods: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, theme: str = "light") -> None:
    """Draw each method's choice loss with one standard error, and its training time beside it.

    Parameters
    ----------
    methods : sequence of mapping
        The rows of the demo's ``results.json``.
    path : path-like
        PNG file.
    theme : {"light", "dark"}
    """
    figure, colours = _figure(7.2, 0.9 + 0.42 * len(methods), theme)
    axes = figure.add_subplot()
    for place, row in enumerate(methods):
        ours = row["key"] == "topotuner"
        colour = colours.faint if row["key"] == "base" else colours.mark if ours else colours.accent
        axes.errorbar(
            row["choice_loss"], place, xerr=row["choice_loss_se"], fmt="o", color=colour, capsize=3,
            markersize=8 if ours else 6,
        )  # fmt: skip
        time = "no training" if row["seconds"] is None else f"{row['seconds']:.0f} s of training"
        axes.annotate(
            time, (1.02, place), xycoords=("axes fraction", "data"), va="center", color=colours.ink, fontsize=9,
            fontweight="bold" if ours else "normal", annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(range(len(methods)), [row["label"] for row in methods])
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.set_xlabel("held-out choice loss, ± one standard error (lower is better)")
    axes.grid(axis="x", color=colours.faint, alpha=0.3)
    axes.set_axisbelow(True)
    _dress(axes, colours)
    _save(figure, path)
