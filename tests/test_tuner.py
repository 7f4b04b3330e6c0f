"""The PEFT method: what trains, what is saved, what loads again, and what merging leaves behind."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from peft import (
    PeftModel,
    convert_to_lora,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, INPUT_IDS, build, logits, perturbed, train_a_little

from topotuner_peft import FreezingProfile, TopoConfig, measure_drift
from topotuner_peft.projections import count_parameters, find_projections, matrix_modules, read_weight
from topotuner_peft.tuner import TopoLayer

WAYS = ("matrices", "target_modules", "profile")
_TARGETS = {"phi3": ["qkv_proj", "o_proj"], "gpt2": ["attn.c_attn", "attn.c_proj"]}
_REPOSITORY = Path(__file__).parents[1]


@cache
def drift_table(family):
    return measure_drift(build(family), perturbed(family), projections=("v", "o"))


def profile_of(family, **rule):
    return FreezingProfile.from_drift(drift_table(family), **(rule or {"k": 2}))


def some_matrices(family, layers=(1, 3), projections=("v", "o")):
    return [p for p in find_projections(build(family), projections=projections) if p.layer in layers]


def config_for(family, way="matrices", **more):
    """A configuration in one of three ways, and how many parameters it should train."""
    matrices = some_matrices(family)
    if way == "matrices":
        return TopoConfig(matrices=[p.id for p in matrices], **more), sum(p.size for p in matrices)
    if way == "profile":
        profile = profile_of(family)
        return TopoConfig(profile=profile, **more), profile.parameters
    whole = {p.module: module for p in matrices for module in [build(family).get_submodule(p.module)]}
    names = _TARGETS.get(family, ["v_proj", "o_proj"])
    config = TopoConfig(target_modules=names, layers_to_transform=[1, 3], **more)
    return config, sum(module.weight.numel() for module in whole.values())


def adapted(family, way="matrices", *, train=False, **more):
    """A tiny model with an adapter, trained for three steps if asked to."""
    model = get_peft_model(build(family), config_for(family, way, **more)[0])
    if train:
        train_a_little(model)
    return model


def trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def base_weights(model):
    """The base model's parameters under the names they have without an adapter."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "topotuner_" not in name
    }


def assert_same_weights(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def run_python(code, *arguments):
    """Run a script in a fresh process that has the package and the tiny models, and return what it printed."""
    path = os.pathsep.join([str(_REPOSITORY), str(_REPOSITORY / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# What trains


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_chosen_matrices_train(family, way):
    config, expected = config_for(family, way)
    model = get_peft_model(build(family), config)
    assert sum(p.numel() for p in trainable(model).values()) == expected
    assert all(".topotuner_delta.default.weight" in name for name in trainable(model))
    assert model.get_nb_trainable_parameters()[0] == expected
    modules = {name.partition("[")[0] for name in model.peft_config["default"].matrices}
    assert {name.removeprefix("base_model.model.").partition(".topotuner_")[0] for name in trainable(model)} == modules


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_untrained_adapter_changes_no_bit_of_the_output(family, way):
    assert torch.equal(logits(adapted(family, way)), logits(build(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_training_moves_every_delta_and_leaves_the_base_alone(family):
    model = adapted(family, train=True)
    for name, parameter in trainable(model).items():
        assert (parameter != 0).all(dim=1).any(), name
        assert parameter.abs().amax() > 1e-3, name
    assert_same_weights(base_weights(model), base_weights(build(family)))
    assert not torch.allclose(logits(model), logits(build(family)), atol=1e-3)


@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_training_v_of_a_fused_matrix_leaves_its_q_and_k_rows(family):
    matrices = some_matrices(family, projections=("v",))
    model = get_peft_model(build(family), TopoConfig(matrices=[p.id for p in matrices]))
    train_a_little(model)
    modules, before = matrix_modules(model), matrix_modules(build(family))
    for p in find_projections(model, projections=("q", "k", "v")):
        moved = not torch.equal(read_weight(modules[p.module], p), read_weight(before[p.module], p))
        assert moved == (p.id in {chosen.id for chosen in matrices}), p.id


@pytest.mark.parametrize("family", FAMILIES)
def test_a_delta_is_the_gradient_of_the_weight_itself(family):
    # Against autograd on the base weight: the same rows, the same orientation, for Conv1D and fused modules too.
    matrices = some_matrices(family, projections=("q", "v", "o"))
    model = get_peft_model(build(family), TopoConfig(matrices=[p.id for p in matrices]))
    model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
    plain = build(family)
    plain(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
    for module in {p.module for p in matrices}:
        layer = matrix_modules(model)[module]
        full = plain.get_submodule(module).weight.grad
        delta = layer.topotuner_delta["default"].weight
        with torch.no_grad():
            delta.copy_(delta.grad)
        ours = layer.get_delta_weight("default")
        covered = torch.zeros_like(full, dtype=torch.bool)
        for p in (p for p in matrices if p.module == module):
            rows = covered.T if p.transposed else covered
            for start, stop in p.rows or ((0, p.shape[0]),):
                rows[start:stop] = True
        torch.testing.assert_close(ours, full * covered, rtol=1e-4, atol=1e-6)


def test_a_profile_made_on_the_bare_model_fits_the_causal_language_model():
    bare = transformers.LlamaModel(build("llama").config)
    changed = copy.deepcopy(bare)
    with torch.no_grad():
        for layer in changed.layers[2:]:
            layer.self_attn.v_proj.weight.add_(torch.randn(16, 32) * 0.02)
    profile = FreezingProfile.from_drift(measure_drift(bare, changed, projections=("v",)), k=2)
    assert profile.trained == ["layers.2.self_attn.v_proj", "layers.3.self_attn.v_proj"]
    with pytest.warns(UserWarning, match="other weights"):
        model = get_peft_model(build("llama"), TopoConfig(profile=profile))
    assert model.peft_config["default"].matrices == [f"model.{name}" for name in profile.trained]


def test_the_callers_configuration_is_not_changed():
    config = TopoConfig(profile=profile_of("llama"), k=1, exclude_modules=["layers.0.self_attn.o_proj"])
    before = copy.deepcopy(vars(config))
    model = get_peft_model(build("llama"), config)
    after = dict(vars(config))
    # PEFT's own get_peft_model notes the base model's name, for every method.
    for values in (before, after):
        values.pop("base_model_name_or_path")
    profile_before, profile_after = before.pop("profile"), after.pop("profile")
    assert after == before
    assert profile_after.to_dict() == profile_before.to_dict()
    assert model.peft_config["default"].matrices is not None
    # So it can be used again, on another model too.
    again = get_peft_model(build("llama"), config)
    assert again.peft_config["default"].matrices == model.peft_config["default"].matrices


def test_layer_zero_alone_can_be_chosen():
    model = get_peft_model(build("llama"), TopoConfig(target_modules=["v_proj"], layers_to_transform=0))
    assert model.peft_config["default"].matrices == ["model.layers.0.self_attn.v_proj"]


def test_a_regular_expression_and_a_budget_choose():
    model = get_peft_model(build("llama"), TopoConfig(target_modules=r".*\.[01]\.self_attn\.(q|k)_proj"))
    assert len(model.peft_config["default"].matrices) == 4
    config = TopoConfig(profile=profile_of("llama"), budget=0.05)
    model = get_peft_model(build("llama"), config)
    count, total = sum(p.numel() for p in trainable(model).values()), count_parameters(model)
    assert 0.035 < count / total <= 0.05
    assert model.peft_config["default"].profile_summary["share"] == count / total


@pytest.mark.parametrize("where", ["whole", "layer"])
def test_a_compiled_model_trains_and_saves_under_the_names_of_the_base(where, tmp_path):
    plain = build("llama")
    if where == "whole":
        base = torch.compile(plain, backend="eager")
    else:
        base = plain
        base.model.layers[3] = torch.compile(base.model.layers[3], backend="eager")
    ids = [p.id for p in some_matrices("llama")]
    model = get_peft_model(base, TopoConfig(matrices=ids))
    assert len(trainable(model)) == 4
    for parameter in trainable(model).values():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(tmp_path)
    assert not [key for key in load_file(tmp_path / "adapter_model.safetensors") if "_orig_mod" in key]
    loaded = PeftModel.from_pretrained(build("llama"), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(model))
    assert not torch.allclose(logits(loaded), logits(build("llama")), atol=1e-3)
    # And back: an adapter of the plain model on a compiled one.
    PeftModel.from_pretrained(base if where == "whole" else build("llama"), tmp_path)


# Saving and loading


@pytest.fixture(scope="module")
def round_trips(tmp_path_factory):
    """Per family and way: the logits when saved, those in a process of its own, and the folder."""
    root = tmp_path_factory.mktemp("adapters")
    expected, folders = {}, {}
    for family in FAMILIES:
        build(family).save_pretrained(root / f"base-{family}")
        for way in WAYS:
            model = adapted(family, way, train=True)
            folder = root / f"{family}-{way}"
            model.peft_config["default"].base_model_name_or_path = str(root / f"base-{family}")
            model.save_pretrained(folder)
            expected[family, way], folders[family, way] = logits(model), folder
    code = """
import sys, topotuner_peft, torch, transformers
from pathlib import Path
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import save_file
from tiny import FAMILIES, build, logits
root, found = Path(sys.argv[1]), {}
for family in FAMILIES:
    for way in ("matrices", "target_modules", "profile"):
        folder = root / f"{family}-{way}"
        found[f"{family}-{way}"] = logits(PeftModel.from_pretrained(build(family), folder))
found["auto"] = logits(AutoPeftModelForCausalLM.from_pretrained(folder))
save_file(found, root / "found.safetensors")
"""
    run_python(code, root)
    return expected, load_file(root / "found.safetensors"), folders


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_process_reloads_bit_equal(round_trips, family, way):
    expected, found, _ = round_trips
    assert torch.equal(found[f"{family}-{way}"], expected[family, way])
    assert not torch.allclose(expected[family, way], logits(build(family)), atol=1e-3)


def test_the_base_named_in_the_adapter_loads_without_a_network(round_trips):
    expected, found, _ = round_trips
    assert torch.equal(found["auto"], expected[FAMILIES[-1], WAYS[-1]])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_has_our_tensors_only_and_none_is_empty(round_trips, family, way):
    folder = round_trips[2][family, way]
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert tensors
    for key, tensor in tensors.items():
        assert key.endswith(".topotuner_delta.weight"), key
        assert tensor.dtype == torch.float32
        assert tensor.abs().amax() > 0, key
    assert sum(t.numel() for t in tensors.values()) == config_for(family, way)[1]
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert config["peft_type"] == "TOPOTUNER"
    assert config["profile"] is None
    assert config["matrices"] == sorted(config["matrices"])
    assert config["target_modules"] == sorted(config["target_modules"])


def test_the_profile_is_not_needed_for_loading(tmp_path):
    file = profile_of("llama").save(tmp_path / "profile.json")
    model = get_peft_model(build("llama"), TopoConfig(profile=str(file)))
    train_a_little(model)
    model.save_pretrained(tmp_path / "adapter")
    file.unlink()
    assert torch.equal(logits(PeftModel.from_pretrained(build("llama"), tmp_path / "adapter")), logits(model))
    summary = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["profile_summary"]
    assert summary["rule"]["k"] == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loading_for_more_training_leaves_exactly_the_profiles_matrices_trainable(round_trips, family, way):
    folder = round_trips[2][family, way]
    frozen = PeftModel.from_pretrained(build(family), folder)
    assert not trainable(frozen)
    model = PeftModel.from_pretrained(build(family), folder, is_trainable=True)
    assert sum(p.numel() for p in trainable(model).values()) == config_for(family, way)[1]
    assert all(".topotuner_delta.default.weight" in name for name in trainable(model))
    assert torch.equal(logits(model.eval()), logits(frozen))
    train_a_little(model)
    assert not torch.equal(logits(model), logits(frozen))


def test_load_adapter_reports_no_missing_keys(round_trips):
    expected, _, folders = round_trips
    model = adapted("llama")
    result = model.load_adapter(folders["llama", "matrices"], "other")
    assert result.missing_keys == []
    assert result.unexpected_keys == []
    model.set_adapter("other")
    assert torch.equal(logits(model), expected["llama", "matrices"])


def test_low_memory_loading_keeps_float32_deltas_on_a_bfloat16_base(round_trips):
    folder = round_trips[2]["llama", "matrices"]
    base = build("llama").to(torch.bfloat16)
    model = PeftModel.from_pretrained(base, folder, low_cpu_mem_usage=True)
    saved = load_file(folder / "adapter_model.safetensors")
    state = get_peft_model_state_dict(model)
    assert state.keys() == saved.keys()
    for key, tensor in saved.items():
        assert torch.equal(state[key], tensor), key


def test_resuming_with_other_matrices_is_refused(tmp_path):
    # PEFT's Trainer loads weights only: whatever has no place in the model would vanish without a word.
    adapted("llama", train=True).save_pretrained(tmp_path)
    for ids in (["model.layers.0.self_attn.q_proj"], ["model.layers.1.self_attn.v_proj"]):
        model = get_peft_model(build("llama"), TopoConfig(matrices=ids))
        with pytest.raises(ValueError, match=r"other matrices than .*layers\.\d\.self_attn\.\w_proj.*matrices"):
            model.load_adapter(tmp_path, "default", is_trainable=True)


def test_an_adapter_file_that_lacks_a_matrix_is_refused(tmp_path):
    adapted("llama", train=True).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"lacks .*layers\.1\.self_attn\.o_proj"):
        PeftModel.from_pretrained(build("llama"), tmp_path)


def test_an_empty_tensor_is_not_saved(tmp_path):
    # What ZeRO-3 leaves in the state dict of a parameter that was not gathered: a 40-byte adapter.
    model = adapted("llama", train=True)
    state = model.state_dict()
    key = next(key for key in state if "topotuner_delta" in key)
    for wrong in (torch.zeros(0), torch.zeros(3, 5)):
        state[key] = wrong
        with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_proj.*gather"):
            model.save_pretrained(tmp_path, state_dict=state)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_pad_token_and_resized_embeddings_do_not_swell_the_file(family, tmp_path):
    build(family).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(65)
    model = get_peft_model(base, config_for(family)[0])
    train_a_little(model)
    model.save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all("topotuner_delta" in key for key in tensors)
    loaded = PeftModel.from_pretrained(build(family), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model)[..., :64])


def test_resized_embeddings_that_train_are_saved(tmp_path):
    build("llama").save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(65)
    model = get_peft_model(base, config_for("llama", modules_to_save=["embed_tokens", "lm_head"])[0])
    train_a_little(model)
    model.save_pretrained(tmp_path / "adapter")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again.resize_token_embeddings(65)
    loaded = PeftModel.from_pretrained(again, tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
def test_modules_to_save_train_and_come_back(family, tmp_path):
    # The tiny Gemma's head is tied to its embeddings, the others' heads are not.
    config, count = config_for(family, modules_to_save=["lm_head"])
    model = get_peft_model(build(family), config)
    assert sum(p.numel() for p in trainable(model).values()) == count + 64 * 32
    train_a_little(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build(family), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    merged = PeftModel.from_pretrained(build(family), tmp_path).merge_and_unload()
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-5)


def test_single_token_rows_train(tmp_path):
    model = adapted("llama", train=True, trainable_token_indices=[5, 9])
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(build("llama"), tmp_path)), logits(model))
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 4 * (config_for("llama")[1] + 2 * 64 * 32)


# Switching off, merging


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_disable_adapter_gives_the_base_output_bit_exactly(family, merged):
    model = adapted(family, train=True)
    with_adapter = logits(model)
    if merged:
        model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(build(family)))
    torch.testing.assert_close(logits(model), with_adapter, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merge_and_unmerge_round_trip_loses_no_bit(family, dtype):
    model = adapted(family, "matrices", init_weights=False).to(dtype)
    before, output = base_weights(model), logits(model)
    for _ in range(3):
        model.merge_adapter()
        changed = base_weights(model)
        assert sum(not torch.equal(changed[name], before[name]) for name in before) == len(
            {p.module for p in some_matrices(family)}
        )
        model.unmerge_adapter()
        assert_same_weights(base_weights(model), before)
        assert torch.equal(logits(model), output)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_logits_are_those_of_the_adapter(family):
    model = adapted(family, train=True)
    output = logits(model)
    model.merge_adapter(safe_merge=True)
    torch.testing.assert_close(logits(model), output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["merge_and_unload", "unload"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_ours_is_left_after_unloading(family, way, tmp_path):
    model = adapted(family, train=True)
    expected = logits(model) if way == "merge_and_unload" else logits(build(family))
    plain = getattr(model, way)()
    assert not [m for m in plain.modules() if type(m).__module__.startswith("topotuner") or isinstance(m, TopoLayer)]
    assert not [m for m in plain.modules() if any("topotuner" in name for name in vars(m))]
    assert [type(m) for m in plain.modules()] == [type(m) for m in build(family).modules()]
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in plain.modules())
    assert plain.state_dict().keys() == build(family).state_dict().keys()
    torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-5)
    plain.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(plain))


def test_a_merge_that_would_not_be_finite_is_refused_and_nothing_changes():
    model = adapted("llama", train=True)
    before = base_weights(model)
    name, delta = next(iter(trainable(model).items()))
    with torch.no_grad():
        delta[0, 0] = float("nan")
    module = name.removeprefix("base_model.model.").partition(".topotuner_")[0]
    with pytest.raises(ValueError, match=r"'default'.*not finite"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(base_weights(model)[f"{module}.weight"], before[f"{module}.weight"])


def test_a_copy_of_a_model_is_a_model_of_its_own():
    model = adapted("llama", train=True)
    output = logits(model)
    twin = copy.deepcopy(model)
    train_a_little(twin)
    assert torch.equal(logits(model), output)
    plain = twin.merge_and_unload()
    assert [type(m) for m in plain.modules()] == [type(m) for m in build("llama").modules()]
    assert torch.equal(logits(model), output)
    twin = copy.deepcopy(adapted("llama")).get_base_model()
    assert type(twin.model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_a_copy_of_a_merged_model_unmerges():
    model = adapted("llama", train=True)
    model.merge_adapter()
    twin = copy.deepcopy(model)
    twin.unmerge_adapter()
    assert_same_weights(base_weights(twin), base_weights(build("llama")))


def test_a_whole_model_can_be_pickled(tmp_path):
    model = adapted("llama", train=True)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(logits(again), logits(model))
    again.merge_and_unload()


# Several adapters


def test_two_adapters_are_added_switched_and_deleted(tmp_path):
    model = adapted("llama", train=True)
    first = logits(model)
    ids = [p.id for p in some_matrices("llama", layers=(0, 1), projections=("v", "q"))]
    model.add_adapter("second", TopoConfig(matrices=ids))
    assert torch.equal(logits(model), first)
    model.set_adapter("second")
    assert torch.equal(logits(model), logits(build("llama")))
    assert {name.split(".")[-2] for name in trainable(model)} == {"second"}
    train_a_little(model)
    second = logits(model)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    model.save_pretrained(tmp_path)
    for folder, expected in ((tmp_path, first), (tmp_path / "second", second)):
        assert torch.equal(logits(PeftModel.from_pretrained(build("llama"), folder)), expected)
    model.set_adapter("second")
    model.delete_adapter("default")
    assert torch.equal(logits(model), second)
    assert not [name for name, _ in model.named_parameters() if ".default." in name]


def test_two_active_adapters_add_up_and_merge():
    model = adapted("gpt2", train=True)
    model.add_adapter("second", TopoConfig(matrices=[p.id for p in some_matrices("gpt2", layers=(2, 3))]))
    model.set_adapter("second")
    train_a_little(model)
    model.base_model.set_adapter(["default", "second"])
    both = logits(model)
    module = matrix_modules(model)["transformer.h.3.attn.c_attn"]
    total = module.get_base_weight() + module.get_delta_weight("default") + module.get_delta_weight("second")
    (p,) = (p for p in find_projections(model, projections=["v"]) if p.layer == 3)
    torch.testing.assert_close(read_weight(module, p), total.T[64:96])
    before = base_weights(model)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), both, rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    assert_same_weights(base_weights(model), before)


def test_adding_or_loading_one_does_not_flip_requires_grad_of_another(tmp_path):
    adapted("llama", train=True).save_pretrained(tmp_path)
    same = [p.id for p in some_matrices("llama")]
    # A frozen one stays frozen.
    model = PeftModel.from_pretrained(build("llama"), tmp_path)
    model.add_adapter("new", TopoConfig(matrices=same))
    model.load_adapter(tmp_path, "loaded")
    assert not [name for name in trainable(model) if ".default." in name]
    # A trained one stays trained, and alone.
    model = adapted("llama")
    before = set(trainable(model))
    model.add_adapter("new", TopoConfig(matrices=same))
    model.load_adapter(tmp_path, "loaded")
    assert set(trainable(model)) == before


def test_a_merged_adapter_is_deleted_only_once_it_is_unmerged():
    model = adapted("llama", train=True)
    model.add_adapter("second", TopoConfig(matrices=[p.id for p in some_matrices("llama")], init_weights=False))
    model.set_adapter("second")
    second = logits(model)
    model.merge_adapter(["default", "second"])
    with pytest.raises(ValueError, match=r"'default'.*unmerge"):
        model.delete_adapter("default")
    model.unmerge_adapter()
    model.delete_adapter("default")
    assert torch.equal(logits(model), second)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), second, rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    assert_same_weights(base_weights(model), base_weights(build("llama")))


# Low precision


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_base_does_not_swallow_small_updates(family):
    model = get_peft_model(build(family).to(torch.bfloat16), config_for(family)[0])
    deltas = trainable(model)
    assert {p.dtype for p in deltas.values()} == {torch.float32}
    train_a_little(model, steps=20, lr=1e-5)
    changed = torch.cat([(p != 0).flatten() for p in deltas.values()])
    assert changed.float().mean() > 0.99
    # The merged weights cannot hold such steps; the effective ones can.
    modules = matrix_modules(model)
    p = some_matrices(family)[0]
    moved = read_weight(modules[p.module], p) != read_weight(modules[p.module], p, effective=False).float()
    assert moved.float().mean() > 0.99


def test_a_float16_base_trains_with_float32_deltas():
    model = get_peft_model(build("llama").to(torch.float16), config_for("llama")[0])
    model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
    for name, parameter in trainable(model).items():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        assert torch.isfinite(parameter.grad).all(), name


def test_autocast_keeps_the_deltas_float32():
    model = adapted("llama", train=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
    for parameter in trainable(model).values():
        assert parameter.grad.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all()


# Errors name the thing and the remedy


def test_an_unknown_profile_is_named():
    with pytest.raises(ValueError, match=r"no freezing profile at '/nowhere/profile\.json'.*Hub"):
        get_peft_model(build("llama"), TopoConfig(profile="/nowhere/profile.json"))
    with pytest.raises(ValueError, match=r"no freezing profile at 'someone/nothing'"):
        get_peft_model(build("llama"), TopoConfig(profile="someone/nothing"))


def test_a_file_that_is_no_profile_is_named(tmp_path):
    for text, message in (
        ("{", r"broken\.json is not JSON"),
        ("{}", r"broken\.json.*no freezing profile"),
        ("[]", "broken"),
    ):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            get_peft_model(build("llama"), TopoConfig(profile=tmp_path / "broken.json"))


def test_a_profile_of_another_type_is_refused():
    with pytest.raises(TypeError, match=r"profile is a dict; expected a FreezingProfile, a path or a Hub id"):
        get_peft_model(build("llama"), TopoConfig(profile={"trained": []}))


def test_a_selection_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match="nothing_proj"):
        get_peft_model(build("llama"), TopoConfig(target_modules=["nothing_proj"]))
    with pytest.raises(ValueError, match=r"model\.layers\.9\.self_attn\.v_proj.*layers\.\*\.self_attn\.v_proj \(x4\)"):
        get_peft_model(build("llama"), TopoConfig(matrices=["model.layers.9.self_attn.v_proj"]))
    with pytest.raises(ValueError, match=r"exclude_modules.*none of the profile's 4 matrices"):
        get_peft_model(build("llama"), TopoConfig(profile=profile_of("llama"), exclude_modules=["v_proj", "o_proj"]))


def test_a_fused_block_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"no block 'x'"):
        get_peft_model(build("phi3"), TopoConfig(matrices=["model.layers.1.self_attn.qkv_proj[x]"]))
    with pytest.raises(ValueError, match=r"no block 'q'"):
        get_peft_model(build("llama"), TopoConfig(matrices=["model.layers.1.self_attn.q_proj[q]"]))


def shorter_llama():
    config = build("llama").config
    config.num_hidden_layers = 3
    return transformers.LlamaForCausalLM(config)


def test_a_matrix_that_the_model_lacks_is_named_or_counted():
    profile = profile_of("llama", train="low", k=2)
    assert "model.layers.3.self_attn.v_proj" in profile.trained
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.v_proj.*strict=False"):
        get_peft_model(shorter_llama(), TopoConfig(profile=profile))
    with pytest.warns(UserWarning, match=r"2 of its 4 trained matrices are not in this model"):
        model = get_peft_model(shorter_llama(), TopoConfig(profile=profile, strict=False))
    assert len(model.peft_config["default"].matrices) == 2


def test_a_profile_of_another_shape_is_refused():
    config = build("llama").config
    config.num_key_value_heads = 4
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.v_proj' is \(16, 32\); in this model it is \(32, 32\)"
    ):
        get_peft_model(transformers.LlamaForCausalLM(config), TopoConfig(profile=profile_of("llama")))


def test_a_profile_of_another_model_of_the_same_shape_is_noticed():
    with pytest.warns(UserWarning, match=r"other weights.*'model\.layers"):
        get_peft_model(build("llama", seed=1), TopoConfig(profile=profile_of("llama")))
    with pytest.warns(UserWarning, match=r"of type 'llama'; this model is of type 'mistral'"):
        get_peft_model(build("mistral"), TopoConfig(profile=profile_of("llama")))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        get_peft_model(build("llama"), TopoConfig(profile=profile_of("llama")))
        get_peft_model(build("llama").to(torch.bfloat16), TopoConfig(profile=profile_of("llama")))


@pytest.mark.parametrize("budget", [0, 0.0, -0.1, 1.5, float("nan")])
def test_a_budget_that_is_no_share_is_refused(budget):
    with pytest.raises(ValueError, match=r"budget=.*more than 0.*at most 1"):
        TopoConfig(profile=profile_of("llama"), budget=budget)


def test_a_budget_too_small_for_any_matrix_says_what_the_smallest_takes():
    with pytest.raises(ValueError, match=r"smallest, 'model\.layers.*Raise the budget"):
        get_peft_model(build("llama"), TopoConfig(profile=profile_of("llama"), budget=0.001))


def test_contradictory_configurations_are_refused():
    profile = profile_of("llama")
    with pytest.raises(ValueError, match="either `profile` or `target_modules`"):
        TopoConfig(profile=profile, target_modules=["v_proj"])
    with pytest.raises(ValueError, match="no `profile` is given"):
        TopoConfig(target_modules=["v_proj"], budget=0.01)
    with pytest.raises(ValueError, match="`layers_to_transform` needs"):
        TopoConfig(target_modules="v_proj", layers_to_transform=[1])
    with pytest.raises(ValueError, match="without `layers_to_transform`"):
        TopoConfig(target_modules=["v_proj"], layers_pattern="layers")
    with pytest.raises(ValueError, match="not a budget"):
        get_peft_model(build("llama"), TopoConfig(profile=profile, freeze="high", budget=0.01))


def test_weights_that_are_not_numbers_are_named():
    changed = perturbed("llama")
    with torch.no_grad():
        changed.model.layers[2].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.2\.self_attn\.v_proj"):
        measure_drift(build("llama"), changed, projections=("v",))


def test_an_embedding_is_no_matrix_of_ours():
    with pytest.raises(TypeError, match=r"'model\.embed_tokens' is a Embedding.*modules_to_save"):
        get_peft_model(build("llama"), TopoConfig(target_modules=["embed_tokens"]))


# Loading on another base


def test_loading_on_another_base_of_the_same_shape_warns(round_trips):
    folder = round_trips[2]["llama", "matrices"]
    with pytest.warns(UserWarning, match=r"trained on another base model.*weights of 'model\.layers.*base-llama"):
        PeftModel.from_pretrained(build("llama", seed=1), folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PeftModel.from_pretrained(build("llama"), folder)
        PeftModel.from_pretrained(build("llama").to(torch.bfloat16), folder)


def test_loading_on_a_model_without_the_matrices_is_refused(round_trips):
    folder = round_trips[2]["llama", "matrices"]
    with pytest.raises(ValueError, match=r"2 matrices that this model does not have, 'model\.layers\.3.*base-llama"):
        PeftModel.from_pretrained(shorter_llama(), folder)
    with pytest.raises(ValueError, match=r"does not have.*transformer\.h\.\*\.attn"):
        PeftModel.from_pretrained(build("gpt2"), folder)


def test_a_configuration_without_its_matrices_is_refused(tmp_path):
    adapted("llama", train=True).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "matrices": []}))
    with pytest.raises(ValueError, match="empty list of matrices"):
        PeftModel.from_pretrained(build("llama"), tmp_path)


# With transformers' own adapter support


def test_transformers_adds_saves_and_loads_adapters(tmp_path):
    try:
        transformers.utils.peft_utils.check_peft_version(min_version=transformers.integrations.peft.MIN_PEFT_VERSION)
    except ValueError as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    model = build("llama")
    model.add_adapter(config_for("llama")[0])
    train_a_little(model)
    output = logits(model)
    model.save_pretrained(tmp_path)
    again = build("llama")
    again.load_adapter(str(tmp_path))
    assert torch.equal(logits(again), output)
    model.disable_adapters()
    assert torch.equal(logits(model), logits(build("llama")))


def test_a_delta_converts_to_an_exact_lora():
    model = get_peft_model(
        build("llama"), TopoConfig(matrices=[p.id for p in some_matrices("llama", projections=("v",))])
    )
    train_a_little(model)
    config, state = convert_to_lora(model, rank=16)
    lora = get_peft_model(build("llama"), config)
    set_peft_model_state_dict(lora, state)
    torch.testing.assert_close(logits(lora), logits(model), rtol=1e-3, atol=1e-4)


def test_a_sequence_classifier_trains_its_head_too(tmp_path):
    config = build("llama").config
    config.num_labels = 3

    def classifier():
        torch.manual_seed(0)
        return transformers.LlamaForSequenceClassification(config).eval()

    topo = TopoConfig(profile=profile_of("llama"), task_type="SEQ_CLS")
    model = get_peft_model(classifier(), topo)
    assert any("score" in name for name in trainable(model))
    optimiser = torch.optim.AdamW(trainable(model).values(), lr=1e-2)
    model(input_ids=INPUT_IDS, labels=torch.tensor([0, 2])).loss.backward()
    optimiser.step()
    model.eval().save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(classifier(), tmp_path)
    assert torch.equal(logits(again), logits(model))
