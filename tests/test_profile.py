"""Freezing profiles: the rule, the file, and what fits which model."""

import json

import pytest
import tiny

from topotuner_peft import DriftSettings, DriftTable, FreezingProfile, measure_drift
from topotuner_peft.drift import MatrixDrift
from topotuner_peft.profile.selection import SelectionRule
from topotuner_peft.projections import find_projections

PARAMETERS = 10_000


def table_of(drifts, shape=(10, 10), parameters=PARAMETERS):
    """A table with one matrix per entry: projection → drifts by layer."""
    rows = [
        MatrixDrift(f"model.layers.{layer}.self_attn.{name}_proj", layer, name, shape, {0: drift}, 1.0)
        for name, values in drifts.items()
        for layer, drift in enumerate(values)
    ]
    return DriftTable(rows, DriftSettings(), {"name": "made up", "parameters": parameters, "model_type": "llama"})


TABLE = table_of({"q": [5, 1, 3], "v": [2, 6, 4]})


def layers(profile):
    rows = {row.id: row for row in profile.table.rows}
    return [f"{rows[name].projection}{rows[name].layer}" for name in profile.trained]


@pytest.fixture(scope="module")
def measured():
    return measure_drift(tiny.build("llama"), tiny.perturbed("llama"), progress=False)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"budget": 0.02}, ["q0", "v1"]),
        ({"budget": 0.02, "train": "low"}, ["q1", "v0"]),
        ({"budget": 0.0399}, ["q0", "v1", "v2"]),
        ({"budget": 1}, ["q0", "q1", "q2", "v0", "v1", "v2"]),
        ({"k": 1}, ["q0", "v1"]),
        ({"k": 2, "train": "low"}, ["q1", "q2", "v0", "v2"]),
        ({"k": 1, "projections": ("v",)}, ["v1"]),
        ({"k": 1, "projections": "v"}, ["v1"]),
        ({"k": 1, "freeze": "high"}, ["q1", "q2", "v0", "v2"]),
        ({"k": 2, "freeze": "low"}, ["q0", "v1"]),
        ({}, ["v1"]),
    ],
)
def test_the_rule_chooses(rule, expected):
    profile = FreezingProfile.from_drift(TABLE, **rule)
    assert layers(profile) == expected
    assert sorted([*profile.trained, *profile.frozen]) == sorted(row.id for row in TABLE.rows)
    if profile.budget is not None:
        assert profile.share <= profile.budget


def test_the_budget_skips_what_no_longer_fits_and_goes_on():
    table = table_of({"v": [1, 2]})
    big = MatrixDrift("model.layers.0.self_attn.q_proj", 0, "q", (100, 10), {0: 1000.0}, 1.0)
    table = DriftTable([big, *table.rows], table.settings, table.base)
    assert layers(FreezingProfile.from_drift(table, budget=0.02)) == ["v0", "v1"]
    assert layers(FreezingProfile.from_drift(table, budget=0.11)) == ["q0", "v1"]


def test_a_k_proj_of_few_rows_beside_a_q_proj_of_many():
    # Raw drift grows with the number of rows: per row, the small matrix moved more.
    rows = [
        MatrixDrift("model.layers.0.self_attn.q_proj", 0, "q", (100, 10), {0: 10.0}, 50.0),
        MatrixDrift("model.layers.0.self_attn.k_proj", 0, "k", (10, 10), {0: 2.0}, 20.0),
    ]
    table = DriftTable(rows, DriftSettings(), {"parameters": 10_000})
    assert layers(FreezingProfile.from_drift(table, budget=0.1)) == ["k0"]
    assert layers(FreezingProfile.from_drift(table, budget=0.1, normalise="none")) == ["q0"]
    assert layers(FreezingProfile.from_drift(table, budget=0.1, normalise="total")) == ["q0"]


def test_equal_drift_goes_to_the_earlier_layer():
    assert layers(FreezingProfile.from_drift(table_of({"v": [1, 1, 1, 1]}), budget=0.02)) == ["v0", "v1"]


def test_a_random_draw_is_the_same_size_and_can_be_drawn_again():
    profile = FreezingProfile.from_drift(table_of({"q": range(50), "v": range(50)}), budget=0.2)
    draws = [profile.reselect(order="random", seed=seed) for seed in (1, 1, 2)]
    assert draws[0].trained == draws[1].trained
    assert draws[0].trained != draws[2].trained
    assert {draw.parameters for draw in draws} == {profile.parameters}
    with pytest.raises(ValueError, match="needs a `seed`"):
        FreezingProfile.from_drift(TABLE, order="random")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"budget": 0}, "budget=0 is no share"),
        ({"budget": -0.1}, "budget=-0.1 is no share"),
        ({"budget": 1.5}, "budget=1.5 is no share"),
        ({"budget": float("nan")}, "budget=nan is no share"),
        ({"budget": 0.001}, r"budget of 0.1000% of 10,000 parameters holds none.*Raise the budget"),
        ({"k": 0}, "k=0"),
        ({"k": 1.5}, "k=1.5"),
        ({"k": 4}, "k=4 asks for more than there are: the table has 3 q matrices"),
        ({"k": 3, "freeze": "low"}, "k=3 leaves none to train"),
        ({"k": 1, "budget": 0.1}, "either `budget` or `k`"),
        ({"freeze": "high", "budget": 0.1}, "`freeze` takes a number `k`"),
        ({"freeze": "high"}, "`freeze` needs `k`"),
        ({"freeze": "high", "train": "low", "k": 1}, "either `train` or `freeze`"),
        ({"train": "most"}, "train='most'"),
        ({"projections": ("x",)}, r"no projections \['x'\]; it has \['q', 'v'\]"),
        ({"projections": ()}, "`projections` is empty"),
        ({"normalise": "rows"}, "normalise='rows'"),
        (
            {"order": "alphabet"},
            r"order='alphabet' is unknown; this table can be ranked by \['drift', 'norm', 'random'",
        ),
        ({"order": "norm"}, "no norm of the change of 'model.layers.0.self_attn.q_proj'"),
        ({"order": "first", "train": "low"}, "ranks by no measurement"),
        ({"order": "random", "seed": 1, "freeze": "high", "k": 1}, "ranks by no measurement"),
        ({"dimensions": (0, 1)}, r"not measured in dimensions \[1\], only in \[0\]"),
        ({"dimensions": ()}, "`dimensions` is empty"),
        ({"per_layer": 0}, "per_layer=0"),
        ({"every": 1.5}, "every=1.5"),
        ({"k": 1, "every": 2}, "spread a budget"),
        ({"budget": 0.011, "balanced": True}, "holds none"),
    ],
)
def test_a_rule_that_makes_no_sense_is_named(rule, message):
    with pytest.raises(ValueError, match=message):
        FreezingProfile.from_drift(TABLE, **rule)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"order": "first", "budget": 0.03}, ["q0", "q1", "v0"]),
        ({"order": "last", "budget": 0.03}, ["q1", "q2", "v2"]),
        ({"order": "last", "budget": 0.02, "projections": ("v",)}, ["v1", "v2"]),
        ({"budget": 0.03}, ["q0", "v1", "v2"]),
        ({"budget": 0.04, "per_layer": 1}, ["q0", "v1", "v2"]),
        ({"budget": 0.03, "every": 1}, ["q0", "v1", "v2"]),
        ({"budget": 0.04, "balanced": True}, ["q0", "q2", "v1", "v2"]),
        ({"budget": 0.03, "balanced": True}, ["q0", "v1"]),
    ],
)
def test_controls_and_spreads(rule, expected):
    assert layers(FreezingProfile.from_drift(TABLE, **rule)) == expected


def test_every_window_of_layers_gets_its_best_before_the_ranking_goes_on():
    table = table_of({"v": [9, 8, 7, 6, 5, 1, 2, 3]})
    assert layers(FreezingProfile.from_drift(table, budget=0.04)) == ["v0", "v1", "v2", "v3"]
    assert layers(FreezingProfile.from_drift(table, budget=0.04, every=4)) == ["v0", "v1", "v2", "v4"]
    assert layers(FreezingProfile.from_drift(table, budget=0.04, every=2)) == ["v0", "v2", "v4", "v7"]


def test_drift_in_two_dimensions_is_added():
    rows = [
        MatrixDrift(f"model.layers.{layer}.self_attn.v_proj", layer, "v", (10, 10), {0: h0, 1: h1}, 1.0)
        for layer, (h0, h1) in enumerate([(3.0, 0.0), (2.0, 2.0), (1.0, 2.5)])
    ]
    table = DriftTable(rows, DriftSettings(dimensions=(0, 1)), {"parameters": PARAMETERS})
    chosen = {
        dimensions: layers(FreezingProfile.from_drift(table, budget=0.01, dimensions=dimensions))
        for dimensions in ((0,), (1,), (0, 1))
    }
    assert chosen == {(0,): ["v0"], (1,): ["v2"], (0, 1): ["v1"]}


def test_a_score_of_ones_own_ranks_and_survives_the_file(tmp_path):
    table = TABLE.with_scores("importance", {row.id: -row.drift[0] for row in TABLE.rows})
    profile = FreezingProfile.from_drift(table, order="importance", budget=0.02)
    assert layers(profile) == ["q1", "v0"]
    assert "importance" in profile.to_text().splitlines()[0]
    assert FreezingProfile.load(profile.save(tmp_path)) == profile
    assert list(table.to_pandas()["importance"]) == [-row.drift[0] for row in TABLE.rows]
    assert "importance" not in TABLE.to_pandas()


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_score_that_lacks_a_matrix_or_is_nan_never_ranks(value):
    scores = {row.id: 1.0 for row in TABLE.rows}
    scores.pop(TABLE.rows[3].id)
    if value is not None:
        scores[TABLE.rows[3].id] = value
    with pytest.raises(ValueError, match=r"importance of 'model.layers.0.self_attn.v_proj' is .*can't be ranked"):
        TABLE.with_scores("importance", scores)


def test_ranking_by_norm_follows_the_table(measured):
    profile = FreezingProfile.from_drift(measured, order="norm", k=1)
    for name in "qkvo":
        rows = [row for row in measured.rows if row.projection == name]
        assert max(rows, key=lambda row: row.relative_norm).id in profile.trained


def test_reselect_replaces_the_opposite_option():
    profile = FreezingProfile.from_drift(TABLE, budget=0.02)
    assert profile.reselect(k=1).rule == SelectionRule(train="high", k=1)
    assert layers(profile.reselect(train="low")) == ["q1", "v0"]
    assert layers(profile.reselect(freeze="high", k=1).reselect(budget=0.02, train="high")) == ["q0", "v1"]


def test_a_profile_survives_its_file(tmp_path):
    profile = FreezingProfile.from_drift(TABLE, budget=0.02, prior_task="sums", projections=("q", "v"))
    profile.transferred_to.append("reviews")
    profile.stopping_threshold = 0.2
    profile.extra["note_of_a_later_version"] = {"kept": True}
    assert profile.save(tmp_path) == tmp_path / "profile.json"
    assert profile.save(tmp_path / "mine.json") == tmp_path / "mine.json"
    for source in (tmp_path, tmp_path / "profile.json", str(tmp_path / "mine.json")):
        assert FreezingProfile.load(source) == profile
    values = json.loads((tmp_path / "profile.json").read_text())
    assert values["trained"] == profile.trained
    assert values["note_of_a_later_version"] == {"kept": True}
    assert len(values["drift"]["rows"]) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "no freezing profile"),
        ('{"kind": "topotuner freezing profile", "schema": 1}', "it lacks 'drift'"),
        (
            '{"kind": "topotuner freezing profile", "schema": 7, "versions": {"topotuner-peft": "9.1"}}',
            r"schema 7.*9\.1",
        ),
    ],
)
def test_a_file_that_is_no_profile_is_named(tmp_path, text, message):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        FreezingProfile.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["nobody/nothing", "no/such/file.json", "missing.json"])
def test_an_unknown_profile_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"There is no freezing profile at '{name}'"):
        FreezingProfile.load(name)


def test_what_a_person_sees(measured):
    profile = FreezingProfile.from_drift(measured, budget=0.05, prior_task="noise")
    assert "prior task: noise" in repr(profile)
    text = profile.to_text()
    assert f"reached {profile.share:.2%}" in text
    for name in "qkvo":
        count = sum(row.projection == name and row.id in profile.trained for row in measured.rows)
        line = next(line for line in text.splitlines() if line.split()[:1] == [name])
        assert line.split()[1:4] == [str(count), "of", "4"]


# Which models it fits


def test_a_profile_fits_the_model_it_was_made_on_and_its_bare_form(measured):
    profile = FreezingProfile.from_drift(measured, budget=0.05)
    model = tiny.build("llama")
    assert [p.id for p in profile.check_model(model)] == profile.trained
    bare = profile.check_model(model.model)
    assert [f"model.{p.id}" for p in bare] == profile.trained


def test_a_profile_for_another_model_is_refused(measured):
    profile = FreezingProfile.from_drift(measured, budget=0.05)
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj' is \(32, 32\); .* it is \(64, 32\)"):
        profile.check_model(tiny.build("qwen3"))
    with pytest.raises(ValueError, match=r"16 of its 16 matrices are not in this model.*The profile has .*model has"):
        profile.check_model(tiny.build("gpt2"))


def test_a_subset_of_the_targets_matched_and_nobody_said_so(measured):
    # peft issues 1959 and 3658.
    profile = FreezingProfile.from_drift(measured, k=4, projections=("v",))
    fewer = [p for p in find_projections(tiny.build("llama")) if p.layer < 3]
    with pytest.raises(ValueError, match=r"4 of its 16 matrices are not in this model.*strict=False"):
        profile.resolve(fewer)
    with pytest.warns(UserWarning, match="1 of its 4 trained matrices are not in this model"):
        assert len(profile.resolve(fewer, strict=False)) == 3


def test_zero_matches_is_always_an_error(measured):
    profile = FreezingProfile.from_drift(measured, k=4, projections=("v",))
    others = [p for p in find_projections(tiny.build("llama")) if p.projection != "v"]
    with pytest.raises(ValueError, match="none of its 4 trained matrices is in this model"):
        profile.resolve(others, strict=False)


def test_a_model_of_more_layers_is_not_taken_for_the_same(measured):
    profile = FreezingProfile.from_drift(measured, budget=0.05)
    more = find_projections(tiny.build("llama"))
    import dataclasses

    extra = dataclasses.replace(more[0], id="model.layers.4.self_attn.q_proj", layer=4)
    with pytest.raises(ValueError, match=r"layers it does not cover: \[4\]"):
        profile.resolve([*more, extra])


def test_another_type_of_model_draws_a_warning(measured):
    profile = FreezingProfile.from_drift(measured, budget=0.05)
    with pytest.warns(UserWarning, match="of type 'llama'; this model is of type 'mistral'"):
        profile.resolve(find_projections(tiny.build("mistral")), model_type="mistral")


def test_a_profile_that_names_what_its_table_lacks_is_refused():
    with pytest.raises(ValueError, match="names 'elsewhere', which its drift table does not have"):
        FreezingProfile(TABLE, SelectionRule(), ["elsewhere"], [])
    with pytest.raises(ValueError, match="trains nothing"):
        FreezingProfile(TABLE, SelectionRule(), [], [])


def test_the_profile_goes_to_the_hub_and_comes_back(tmp_path, monkeypatch):
    """The client is real, its two calls are answered by a folder."""
    import huggingface_hub

    class Api:
        def __init__(self, token=None):
            self.token = token

        def create_repo(self, repo_id, *, private, exist_ok):
            (tmp_path / repo_id).mkdir(parents=True, exist_ok=exist_ok)

        def upload_file(self, *, path_or_fileobj, path_in_repo, repo_id, commit_message):
            (tmp_path / repo_id / path_in_repo).write_bytes(path_or_fileobj)
            return type("Commit", (), {"commit_url": f"https://hub/{repo_id}/commit/1"})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo_id, name, revision: tmp_path / repo_id / name)
    profile = FreezingProfile.from_drift(TABLE, budget=0.02)
    assert profile.push_to_hub("me/profile") == "https://hub/me/profile/commit/1"
    monkeypatch.chdir(tmp_path / "me")
    assert FreezingProfile.load("me/profile") == profile
