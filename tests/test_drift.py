"""Drift tables: of two models, of a model and its snapshot, of a PEFT model and its base."""

import copy
import json
import math

import gudhi.hera
import numpy as np
import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from scipy.sparse.csgraph import minimum_spanning_tree
from scipy.spatial.distance import pdist, squareform

from topotuner_peft import DriftSettings, DriftTable, TopoConfig, measure_drift, take_snapshot
from topotuner_peft.drift import MatrixDrift


def measured(*models, **options):
    return measure_drift(*models, progress=False, **options)


def drift_by_hand(before, after, metric):
    """The same number by SciPy's spanning tree and Hera."""
    diagrams = []
    for weight in (before, after):
        tree = minimum_spanning_tree(squareform(pdist(weight.detach().double().numpy(), metric)))
        diagrams.append(np.column_stack([np.zeros(tree.nnz), tree.data]))
    return gudhi.hera.wasserstein_distance(*diagrams, order=1, internal_p=math.inf, delta=1e-9)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_the_drift_of_two_models_is_what_a_computation_by_hand_gives(metric):
    base, tuned = tiny.build("llama"), tiny.perturbed("llama")
    table = measured(base, tuned, metric=metric)
    assert len(table) == 16
    for row in table.rows:
        weights = [model.get_submodule(row.id).weight for model in (base, tuned)]
        assert row.drift[0] == pytest.approx(drift_by_hand(*weights, metric), rel=1e-5)
        assert row.shape == tuple(weights[0].shape)
        change = (weights[1] - weights[0]).norm() / weights[0].norm()
        assert row.relative_norm == pytest.approx(change.item(), rel=1e-5)
        assert row.per_point == row.drift[0] / row.shape[0]
        assert row.relative == row.drift[0] / row.total_persistence


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_has_four_matrices_a_layer_and_moves_most_where_it_was_pushed_most(family):
    table = measured(tiny.build(family), tiny.perturbed(family))
    assert {(row.layer, row.projection) for row in table.rows} == {(i, p) for i in range(4) for p in "qkvo"}
    assert len(table) == 16
    for projection in "qkvo":
        norms = [row.relative_norm for row in table.rows if row.projection == projection]
        assert norms == sorted(norms)
        assert table.rows[0].drift[0] > 0


def test_a_model_against_itself_has_no_drift_exactly():
    model = tiny.build("qwen3")
    for metric in ("cosine", "angular", "euclidean"):
        table = measured(model, copy.deepcopy(model), metric=metric, dimensions=(0, 1))
        assert {value for row in table.rows for value in row.drift.values()} == {0.0}


def test_a_snapshot_stands_for_the_model_it_was_taken_of():
    model = tiny.build("mistral")
    before = copy.deepcopy(model)
    snapshot = take_snapshot(model)
    tiny.train_a_little(model)
    expected = measured(before, model)
    found = measured(snapshot, model)
    assert [row.drift for row in found.rows] == [row.drift for row in expected.rows]
    assert {row.relative_norm for row in found.rows} == {None}
    assert min(row.drift[0] for row in found.rows) > 0


@pytest.mark.parametrize("kind", ["topotuner", "lora"])
def test_one_peft_model_is_compared_with_its_own_base(kind):
    base = tiny.build("llama")
    targets = ["v_proj", "o_proj"]
    if kind == "lora":
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    else:
        config = TopoConfig(target_modules=targets)
    model = get_peft_model(copy.deepcopy(base), config)
    tiny.train_a_little(model)
    table = measured(model)
    merged = copy.deepcopy(model).merge_and_unload()
    expected = measured(base, merged)
    for found, other in zip(table.rows, expected.rows, strict=True):
        assert found.id == other.id
        assert found.drift[0] == pytest.approx(other.drift[0], rel=1e-4, abs=1e-7)
        assert (found.drift[0] > 0) == (found.projection in "vo")


def test_dimension_one_is_measured_where_asked_for():
    table = measured(
        tiny.build("llama"), tiny.perturbed("llama"), dimensions=(0, 1), matrices=["layers.2.self_attn.q_proj"]
    )
    (row,) = table.rows
    assert row.id == "model.layers.2.self_attn.q_proj"
    assert row.drift[1] > 0
    assert "drift H1" in table.to_text()
    assert table.to_pandas().loc[0, "drift_h1"] == row.drift[1]


def test_matrices_and_projections_narrow_the_table():
    base, tuned = tiny.build("llama"), tiny.perturbed("llama")
    assert {row.projection for row in measured(base, tuned, projections=("v",)).rows} == {"v"}
    with pytest.raises(ValueError, match=r"no matrices \['model.layers.9.self_attn.q_proj'\]; it has"):
        measured(base, tuned, matrices=["model.layers.9.self_attn.q_proj"])
    with pytest.raises(ValueError, match="empty list"):
        measured(base, tuned, matrices=[])


def test_nan_never_ranks():
    base, tuned = tiny.build("llama"), tiny.perturbed("llama")
    with torch.no_grad():
        tuned.model.layers[2].self_attn.k_proj.weight[1, 1] = math.nan
    with pytest.raises(ValueError, match=r"'model.layers.2.self_attn.k_proj' holds NaN"):
        measured(base, tuned)
    row = MatrixDrift("a", 0, "q", (2, 2), {0: math.nan}, 1.0)
    with pytest.raises(ValueError, match="drift of 'a' is nan"):
        DriftTable([row], DriftSettings(), {"parameters": 4})


def test_models_that_do_not_fit_are_named():
    base = tiny.build("llama")
    with pytest.raises(ValueError, match=r"lacks .* 'model.layers.0.self_attn.q_proj' among them; it has transformer"):
        measured(base, tiny.build("gpt2"))
    with pytest.raises(ValueError, match=r"q_proj' is \(32, 32\) in the base model, \(64, 32\) in the tuned"):
        measured(base, tiny.build("qwen3"))
    with pytest.raises(TypeError, match="must be a PEFT model"):
        measured(base)
    with pytest.raises(TypeError, match="read weights from a int"):
        measured(base, 3)
    with pytest.raises(ValueError, match="snapshot was taken with"):
        measured(take_snapshot(base), base, metric="euclidean")
    with pytest.raises(ValueError, match="lacks 0"):
        measured(base, base, dimensions=(1,))


def test_weights_on_the_meta_device_are_refused_by_name():
    with torch.device("meta"):
        empty = tiny.build("llama")
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj' is not in memory"):
        measured(empty, tiny.build("llama"))


def test_a_table_survives_its_file(tmp_path):
    table = measured(tiny.build("llama"), tiny.perturbed("llama"), dimensions=(0, 1), internal_p=2, order=2)
    table.save(tmp_path / "a" / "drift.json")
    loaded = DriftTable.load(tmp_path / "a" / "drift.json")
    assert loaded == table
    assert loaded.settings.internal_p == 2
    values = json.loads((tmp_path / "a" / "drift.json").read_text())
    assert values["base"]["parameters"] == sum(p.numel() for p in tiny.build("llama").parameters())
    values["schema"] = 99
    with pytest.raises(ValueError, match=r"schema 99; .* reads up to 1.*install that or a newer version"):
        DriftTable.from_dict(values)
    with pytest.raises(ValueError, match="no drift table"):
        DriftTable.from_dict({"kind": "cake"})


def test_the_infinite_ground_metric_survives_json(tmp_path):
    table = measured(tiny.build("llama"), tiny.perturbed("llama"), projections=("v",))
    table.save(tmp_path / "drift.json")
    assert "Infinity" not in (tmp_path / "drift.json").read_text()
    assert DriftTable.load(tmp_path / "drift.json").settings.internal_p == math.inf


def test_what_a_person_sees():
    table = measured(tiny.build("llama"), tiny.perturbed("llama"))
    assert "16 matrices" in repr(table)
    assert "cosine" in repr(table)
    text = table.to_text(limit=3)
    assert text.endswith("… and 13 more")
    highest = max(table.rows, key=lambda row: row.per_point)
    assert highest.id in text.splitlines()[2]
    with pytest.raises(KeyError, match="'nowhere' is not in this drift table"):
        table["nowhere"]
    frame = table.to_pandas()
    assert list(frame["id"]) == [row.id for row in table.rows]


def test_permuting_the_rows_of_a_matrix_is_no_drift():
    base = tiny.build("llama")
    permuted = copy.deepcopy(base)
    with torch.no_grad():
        weight = permuted.model.layers[1].self_attn.q_proj.weight
        weight.copy_(weight[torch.randperm(32, generator=torch.Generator().manual_seed(0))])
    row = measured(base, permuted)["model.layers.1.self_attn.q_proj"]
    assert row.drift[0] == pytest.approx(0, abs=1e-12)
    assert row.relative_norm > 1
