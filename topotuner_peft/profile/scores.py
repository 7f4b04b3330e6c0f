"""Numbers to choose matrices by that are no drift: the rivals that drift has to beat.

Each function returns one number per matrix, for `DriftTable.with_scores`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..projections import PROJECTIONS, find_projections, matrix_modules, read_weight, take_matrix

if TYPE_CHECKING:
    from torch import nn


def gradient_energy(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    projections: Sequence[str] = PROJECTIONS,
    pattern: str | None = None,
) -> dict[str, float]:
    """Return how much the loss of some batches pulls at each matrix.

    The mean over batches of ‖∂L/∂W‖² divided by the number of the matrix's parameters.

    Parameters
    ----------
    model : torch.nn.Module
        A base model without adapters. Its weights, gradients, training mode and ``requires_grad`` are left as
        they were.
    batches : iterable of mapping
        Arguments of ``model(**batch)``, ``labels`` among them.
    projections, pattern
        Which matrices, see `topotuner_peft.projections.find_projections`.

    Returns
    -------
    dict of str to float
        Matrix id → energy.

    Raises
    ------
    ValueError
        If there are no batches.
    """
    import torch

    found = find_projections(model, projections=projections, pattern=pattern)
    modules = matrix_modules(model)
    weights = {name: modules[name].weight for name in dict.fromkeys(p.module for p in found)}
    flags = {id(p): p.requires_grad for p in model.parameters()}
    training = model.training
    energy = dict.fromkeys((p.id for p in found), 0.0)
    count = 0
    try:
        model.eval()
        model.requires_grad_(False)
        for weight in weights.values():
            weight.requires_grad_(True)
        for batch in batches:
            loss = model(**batch).loss
            gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
            for projection in found:
                part = take_matrix(gradients[projection.module], projection)
                energy[projection.id] += float(part.double().square().sum()) / projection.size
            count += 1
    finally:
        model.train(training)
        for parameter in model.parameters():
            parameter.requires_grad_(flags[id(parameter)])
    if not count:
        raise ValueError("There are no batches to take gradients of.")
    return {name: value / count for name, value in energy.items()}


def signal_to_noise(
    model: nn.Module, *, projections: Sequence[str] = PROJECTIONS, pattern: str | None = None
) -> dict[str, float]:
    """Return the spectral signal-to-noise ratio by which Spectrum chooses layers.

    Singular values above the Marchenko–Pastur edge of a noise matrix are signal. The noise's scale is estimated
    from the interquartile range of the singular values (÷ 1.349), the edge is σ (1 + √β) with β the ratio of the
    shorter to the longer side. The score is (sum of signal / sum of noise) / largest singular value. Spectrum
    trains the highest of each projection type: use it with ``balanced=True``.

    References
    ----------
    E. Hartford et al., "Spectrum: Targeted Training on Signal to Noise Ratio", arXiv:2406.06623.

    Parameters
    ----------
    model : torch.nn.Module
    projections, pattern
        Which matrices, see `topotuner_peft.projections.find_projections`.

    Returns
    -------
    dict of str to float
        Matrix id → ratio. Where no singular value is noise, the ratio has no bound; it is then that of a noise of
        the smallest singular value.
    """
    import torch

    modules = matrix_modules(model)
    ratios = {}
    for projection in find_projections(model, projections=projections, pattern=pattern):
        weight = read_weight(modules[projection.module], projection, effective=False)
        values = torch.linalg.svdvals(weight.detach().float())
        low, high = torch.quantile(values, torch.tensor([0.25, 0.75], device=values.device))
        sigma = (high - low) / 1.349
        edge = sigma * (1 + math.sqrt(min(weight.shape) / max(weight.shape)))
        signal, noise = values[values > edge].sum(), values[values <= edge].sum()
        ratios[projection.id] = float(signal / torch.maximum(noise, values.min()) / values.max())
    return ratios
