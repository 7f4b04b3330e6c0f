"""Single attention heads as the unit that is measured, chosen and trained."""

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from tiny import FAMILIES, INPUT_IDS, build, logits, perturbed, train_a_little

from topotuner_peft import FreezingProfile, TopoConfig, TopoDriftCallback, measure_drift, persistence_diagrams
from topotuner_peft.projections import (
    are_heads,
    find_projections,
    head_index,
    matrix_modules,
    read_weight,
    split_heads,
)


def neox():
    torch.manual_seed(0)
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
    ).eval()


def some_heads(model, names="qvo"):
    """Two heads of each projection in two layers, not side by side where there are more than two."""
    heads = find_projections(model, heads=True, projections=list(names))
    last = max(p.layer for p in heads)
    wanted = {p.projection: max(head_index(q.id) for q in heads if q.projection == p.projection) for p in heads}
    return [p for p in heads if p.layer in (1, last) and head_index(p.id) in (0, wanted[p.projection])]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_heads_of_a_matrix_are_all_of_it_once(family):
    model = build(family)
    modules = matrix_modules(model)
    for p in find_projections(model):
        parts = split_heads(p, model.config)
        assert [head_index(part.id) for part in parts] == list(range(len(parts)))
        weights = [read_weight(modules[part.module], part) for part in parts]
        assert [tuple(weight.shape) for weight in weights] == [part.shape for part in parts]
        joined = torch.cat(weights, dim=1 if p.projection == "o" else 0)
        assert torch.equal(joined, read_weight(modules[p.module], p))
    assert are_heads(part.id for part in find_projections(model, heads=True))


@pytest.mark.parametrize("make", [*FAMILIES, "neox"])
def test_a_head_is_the_one_that_attention_knows(make):
    # Zero one value head: what enters the output projection is zero in the columns of the query heads that read it.
    model = neox() if make == "neox" else build(make)
    heads = [p for p in find_projections(model, heads=True) if p.layer == 1]
    value = next(p for p in heads if p.projection == "v" and head_index(p.id) == 1)
    outs = [p for p in heads if p.projection == "o"]
    readers = len(outs) // sum(p.projection == "v" for p in heads)
    module = model.get_submodule(value.module)
    with torch.no_grad():
        for start, stop in value.rows:
            (module.weight.T if value.transposed else module.weight)[start:stop] = 0
            if getattr(module, "bias", None) is not None:
                module.bias[start:stop] = 0
    seen = {}
    model.get_submodule(outs[0].module).register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    model(input_ids=INPUT_IDS)
    silent = [head_index(p.id) for p in outs if not seen["x"][..., slice(*p.columns)].any()]
    assert silent == list(range(readers, 2 * readers))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_delta_of_heads_is_the_gradient_of_their_part_of_the_weight(family):
    heads = some_heads(build(family))
    model = get_peft_model(build(family), TopoConfig(matrices=[p.id for p in heads]))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == sum(p.size for p in heads)
    model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
    plain = build(family)
    plain(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
    for name in {p.module for p in heads}:
        layer = matrix_modules(model)[name]
        full = plain.get_submodule(name).weight.grad
        delta = layer.topotuner_delta["default"].weight
        with torch.no_grad():
            delta.copy_(delta.grad)
        covered = torch.zeros_like(full, dtype=torch.bool)
        for p in (p for p in heads if p.module == name):
            part = covered.T if p.transposed else covered
            for start, stop in p.rows or ((0, part.shape[0]),):
                part[start:stop, slice(*(p.columns or (0, part.shape[1])))] = True
        torch.testing.assert_close(layer.get_delta_weight("default"), full * covered, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_train_save_load_and_merge(family, tmp_path):
    heads = some_heads(build(family), "qkvo")
    model = get_peft_model(build(family), TopoConfig(matrices=[p.id for p in heads]))
    train_a_little(model)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build(family), tmp_path)
    assert torch.equal(logits(loaded), expected)
    assert loaded.peft_config["default"].matrices == sorted(p.id for p in heads)
    plain = loaded.merge_and_unload()
    torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-5)
    modules, before = matrix_modules(plain), matrix_modules(build(family))
    chosen = {p.id for p in heads}
    for p in find_projections(plain, heads=True):
        moved = not torch.equal(read_weight(modules[p.module], p), read_weight(before[p.module], p))
        assert moved == (p.id in chosen), p.id


def test_the_drift_of_a_head_is_that_of_its_own_cloud():
    base, tuned = build("llama"), perturbed("llama")
    table = measure_drift(base, tuned, heads=True, projections=("v", "o"), progress=False)
    assert len(table) == 4 * (2 + 4)
    rows = table["model.layers.2.self_attn.v_proj[head=1]"]
    assert (rows.shape, rows.head, rows.layer, rows.projection) == ((8, 32), 1, 2, "v")
    weights = [model.model.layers[2].self_attn.v_proj.weight[8:16] for model in (base, tuned)]
    deaths = [np.sort(persistence_diagrams(weight)[0][:-1, 1]) for weight in weights]
    # Nearly equal diagrams: sorted matching is the optimal one.
    assert rows.drift[0] == pytest.approx(np.abs(deaths[0] - deaths[1]).sum(), rel=1e-6)
    columns = table["model.layers.2.self_attn.o_proj[head=3]"]
    assert columns.shape == (32, 8)
    weight = base.model.layers[2].self_attn.o_proj.weight[:, 24:]
    assert columns.total_persistence == pytest.approx(persistence_diagrams(weight)[0][:-1, 1].sum())


def test_a_profile_of_heads_is_chosen_saved_drawn_and_trained(tmp_path):
    table = measure_drift(build("llama"), perturbed("llama"), heads=True, progress=False)
    profile = FreezingProfile.from_drift(table, budget=0.05)
    profile.save(tmp_path)
    profile = FreezingProfile.load(tmp_path)
    assert are_heads(profile.trained)
    assert profile.share <= 0.05
    assert "layer.head that train" in profile.to_text()
    profile.plot(tmp_path / "heads.png")
    assert (tmp_path / "heads.png").stat().st_size > 5000
    assert [p.id for p in profile.check_model(build("llama"))] == profile.trained
    model = get_peft_model(build("llama"), TopoConfig(profile=tmp_path))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == profile.parameters


def test_single_heads_can_be_watched():
    names = ["model.layers.2.self_attn.v_proj[head=1]", "model.layers.3.self_attn.o_proj[head=0]"]
    callback = TopoDriftCallback(watch=names)
    model = get_peft_model(build("llama"), TopoConfig(matrices=names))
    assert [p.id for p in callback._find(model)] == names
    # By default the whole matrices that heads are trained of.
    assert [p.id for p in TopoDriftCallback()._find(model)] == [name.partition("[")[0] for name in names]


def test_heads_that_are_not_known_are_an_error():
    model = build("llama")
    with pytest.raises(ValueError, match="number of its heads is not known"):
        split_heads(find_projections(model)[0], None)
    with pytest.raises(ValueError, match=r"no 'model.layers.1.self_attn.v_proj\[head=7\]'"):
        get_peft_model(model, TopoConfig(matrices=["model.layers.1.self_attn.v_proj[head=7]"]))
    with pytest.raises(ValueError, match="single heads and some are not"):
        are_heads(["layers.0.q_proj", "layers.0.v_proj[head=1]"])
    whole = measure_drift(build("llama"), perturbed("llama"), progress=False)
    heads = measure_drift(build("llama"), perturbed("llama"), heads=True, progress=False)
    with pytest.raises(KeyError, match="not in this drift table"):
        whole[heads.rows[0].id]
