"""Numbers beside drift to choose matrices by."""

import numpy as np
import pytest
import tiny
import torch

from topotuner_peft.profile.scores import gradient_energy, signal_to_noise
from topotuner_peft.projections import find_projections

BATCH = {"input_ids": tiny.INPUT_IDS, "labels": tiny.INPUT_IDS}


def test_gradient_energy_is_that_of_a_backward_pass():
    model = tiny.build("llama")
    energy = gradient_energy(model, [BATCH])
    model(**BATCH).loss.backward()
    assert set(energy) == {p.id for p in find_projections(model)}
    for name, value in energy.items():
        assert value == pytest.approx(float(model.get_submodule(name).weight.grad.square().mean()), rel=1e-5)


def test_gradient_energy_of_fused_rows_is_that_of_their_part():
    model = tiny.build("gpt2")
    energy = gradient_energy(model, [BATCH, BATCH])
    model(**BATCH).loss.backward()
    gradient = model.transformer.h[2].attn.c_attn.weight.grad.T  # (out, in)
    for index, name in enumerate("qkv"):
        part = gradient[32 * index : 32 * (index + 1)]
        assert energy[f"transformer.h.2.attn.c_attn[{name}]"] == pytest.approx(float(part.square().mean()), rel=1e-5)


def test_gradient_energy_leaves_the_model_as_it_was():
    model = tiny.build("llama").train()
    model.model.embed_tokens.weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    gradient_energy(model, [BATCH])
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    with pytest.raises(ValueError, match="no batches"):
        gradient_energy(model, [])
    assert [p.requires_grad for p in model.parameters()] == flags


def test_signal_to_noise_is_its_formula():
    model = tiny.build("llama")
    ratios = signal_to_noise(model, projections=("k",))
    assert len(ratios) == 4
    for name, ratio in ratios.items():
        values = np.linalg.svd(model.get_submodule(name).weight.detach().numpy(), compute_uv=False)
        low, high = np.quantile(values, [0.25, 0.75])
        edge = (high - low) / 1.349 * (1 + np.sqrt(16 / 32))
        signal = values > edge
        assert 0 < signal.sum() < 16
        assert ratio == pytest.approx(values[signal].sum() / values[~signal].sum() / values[0], rel=1e-4)


def test_a_matrix_with_signal_stands_out():
    model = tiny.build("llama")
    weight = model.model.layers[2].self_attn.v_proj.weight
    before = signal_to_noise(model)
    with torch.no_grad():
        weight.add_(torch.outer(torch.ones(16), torch.ones(32)) * 0.1)
        weight.mul_(1.0)
    after = signal_to_noise(model)
    changed = [name for name in after if after[name] != before[name]]
    assert changed == ["model.layers.2.self_attn.v_proj"]
