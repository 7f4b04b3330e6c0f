"""Drift from anything that holds weights: checkpoints, adapters, GGUF files, state dicts, and the commands for it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import topotuner_cli
from topotuner_peft import DriftTable, FreezingProfile, TopoConfig, measure_drift, take_snapshot
from topotuner_peft.sources import Selection, open_source


def measured(*sources, **options):
    return measure_drift(*sources, progress=False, **options)


def numbers(table):
    return {row.id: (row.drift, row.relative_norm, row.spectral_norm, row.total_persistence) for row in table.rows}


@pytest.fixture
def pair(tmp_path):
    """A base and a tuned tiny model, and the folders they are saved in."""
    models = tiny.build("llama"), tiny.perturbed("llama")
    folders = []
    for name, model in zip(("base", "tuned"), models, strict=True):
        model.save_pretrained(tmp_path / name)
        folders.append(tmp_path / name)
    return *models, *folders


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_files_and_the_live_model_give_the_same_scan(family, tmp_path):
    """Names and shapes on disk differ from those in memory: fused, transposed, renamed."""
    base, tuned = tiny.build(family), tiny.perturbed(family)
    for name, model in (("base", base), ("tuned", tuned)):
        model.save_pretrained(tmp_path / name, max_shard_size="20KB" if name == "tuned" else "5GB")
    assert len(list((tmp_path / "tuned").glob("model-*.safetensors"))) > 1
    live, files = measured(base, tuned), measured(tmp_path / "base", str(tmp_path / "tuned"))
    assert numbers(files) == numbers(live)
    assert files.base["fingerprint"] == live.base["fingerprint"]
    assert files.base["parameters"] == live.base["parameters"]
    # A profile made of the files fits the live model.
    profile = FreezingProfile.from_drift(files, k=1)
    assert TopoConfig(profile=profile, task_type="CAUSAL_LM") is not None
    assert get_peft_model(tiny.build(family), TopoConfig(profile=profile)).get_nb_trainable_parameters()[0] > 0


def test_sources_can_be_mixed_freely(pair):
    base, tuned, base_folder, tuned_folder = pair
    expected = numbers(measured(base, tuned))
    states = base.state_dict(), tuned.state_dict()
    for before in (base, base_folder, states[0], base_folder / "model.safetensors"):
        for after in (tuned, tuned_folder, states[1]):
            assert numbers(measured(before, after)) == expected
    snapshot = measured(take_snapshot(base), tuned_folder)
    assert {row.id: row.drift for row in snapshot.rows} == {name: values[0] for name, values in expected.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_in_half_precision_is_the_model_in_half_precision(pair, dtype, tmp_path):
    base, tuned = (model.to(dtype) for model in pair[:2])
    for name, model in (("a", base), ("b", tuned)):
        model.save_pretrained(tmp_path / name)
    assert numbers(measured(tmp_path / "a", tmp_path / "b")) == numbers(measured(base, tuned))


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
        LoraConfig(r=4, use_rslora=True, target_modules=["v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
        LoraConfig(r=4, use_dora=True, target_modules=["v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
        TopoConfig(target_modules=["k_proj", "v_proj"], layers_to_transform=[1, 2], task_type="CAUSAL_LM"),
    ],
    ids=["lora", "rslora", "dora", "topotuner"],
)
def test_an_adapter_is_read_as_what_its_merge_computes(config, pair, tmp_path):
    base, _, base_folder, _ = pair
    adapted = get_peft_model(tiny.build("llama"), config)
    tiny.train_a_little(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    named = measured(base_folder, tmp_path / "adapter")
    live = PeftModel.from_pretrained(tiny.build("llama"), tmp_path / "adapter")
    assert numbers(named) == numbers(measured(live))
    merged = measured(base, live.merge_and_unload())
    for row in named.rows:
        assert row.drift[0] == pytest.approx(merged[row.id].drift[0], rel=1e-3, abs=1e-6)
        assert (row.relative_norm > 0) == (merged[row.id].relative_norm > 0)


def test_an_adapter_alone_finds_the_base_that_it_names(pair, tmp_path):
    base_folder = pair[2]
    model = type(pair[0]).from_pretrained(base_folder)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    table = measured(tmp_path / "adapter")
    assert numbers(table) == numbers(measured(base_folder, tmp_path / "adapter"))
    assert {row.projection for row in table.rows if row.drift[0] > 0} == {"v"}


def test_an_adapter_that_touches_no_attention_matrix_is_an_error(pair, tmp_path):
    adapted = get_peft_model(tiny.build("llama"), LoraConfig(r=2, target_modules=["up_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"changes none of the matrices that are measured.*up_proj"):
        measured(pair[2], tmp_path / "adapter")


def test_a_gguf_file_is_the_checkpoint_it_was_made_from(pair, tmp_path):
    """llama.cpp keeps the rows of q and k of Llama in another order; the diagrams must not depend on who saved."""
    gguf = pytest.importorskip("gguf")
    base, tuned, base_folder, tuned_folder = pair

    def write(model, path):
        config = model.config
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        for layer, block in enumerate(model.model.layers):
            for name, letter in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")):
                weight = block.self_attn.get_submodule(f"{letter}_proj").weight.detach().numpy()
                if letter in "qk":
                    heads = config.num_attention_heads if letter == "q" else config.num_key_value_heads
                    rows, columns = weight.shape
                    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
                    weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
                writer.add_tensor(f"blk.{layer}.attn_{name}.weight", weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    for name, model in (("base", base), ("tuned", tuned)):
        write(model, tmp_path / f"{name}.gguf")
    files = measured(tmp_path / "base.gguf", tmp_path / "tuned.gguf")
    assert numbers(files) == numbers(measured(base, tuned))
    # Row by row, too: mixed with the checkpoint, nothing moved.
    mixed = measured(base_folder, tmp_path / "base.gguf")
    assert all(row.relative_norm == 0 for row in mixed.rows)
    assert numbers(measured(tmp_path / "base.gguf", tuned_folder)) == numbers(files)


# What can't be read


def test_a_folder_of_pickles_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(FileNotFoundError, match=r"'pytorch_model.bin'.*pickle.*save the model again as safetensors"):
        open_source(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks 1 of its .* shards, '{lost.name}'"):
        open_source(tmp_path)


def test_a_quantised_checkpoint_is_refused_rather_than_its_codes_measured(pair):
    folder = pair[2]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantised \(gptq\).*Load it with transformers"):
        open_source(folder)


def test_weights_in_eight_bits_are_refused_by_name(pair):
    folder = pair[2]
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.self_attn.v_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(name)):
        measured(folder, pair[3])


def test_a_nan_in_a_file_is_named(pair):
    folder = pair[3]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.k_proj"):
        measured(pair[2], folder)


def test_meta_tensors_are_refused_by_name():
    with torch.device("meta"):
        model = type(tiny.build("llama"))(tiny.build("llama").config)
    with pytest.raises(ValueError, match="off-loaded or sharded"):
        measured(model, model)
    with pytest.raises(ValueError, match=r"'model\.embed_tokens\.weight' of the state dict is on the meta device"):
        measured(model.state_dict(), model.state_dict())


def test_what_is_not_there_is_said_and_not_looked_for_on_the_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("./no/such/folder", "no/such/folder/deep", "weights.safetensors"):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            open_source(name)
    with pytest.raises(TypeError, match="Can't read weights from a int"):
        open_source(3)


def test_two_models_of_unlike_shape_are_refused(pair, tmp_path):
    tiny.build("qwen3").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"k_proj' is \(16, 32\) in the base model, \(32, 32\) in the tuned"):
        measured(pair[2], tmp_path / "other")


def test_a_checkpoint_is_never_in_memory_as_a_whole(pair, monkeypatch):
    """Tensors are read one by one, and none that is not an attention matrix."""
    import safetensors

    read, original = [], safetensors.safe_open

    class Spy:
        def __init__(self, file, **options):
            self.opened = original(file, **options)

        def __enter__(self):
            self.opened.__enter__()
            return self

        def __exit__(self, *details):
            return self.opened.__exit__(*details)

        def get_tensor(self, key):
            read.append(key)
            return self.opened.get_tensor(key)

        def __getattr__(self, name):
            return getattr(self.opened, name)

    monkeypatch.setattr(safetensors, "safe_open", Spy)
    measured(pair[2], pair[3])
    assert read
    assert all("self_attn" in key for key in read)


# Many matrices at once, again, and over ranks


@pytest.mark.parametrize("n_jobs", [2, -1])
def test_the_number_of_threads_changes_nothing(pair, n_jobs):
    assert numbers(measured(pair[2], pair[3], n_jobs=n_jobs)) == numbers(measured(pair[0], pair[1]))


def test_no_threads_at_all_is_an_error(pair):
    with pytest.raises(ValueError, match="n_jobs=0 must be a positive number"):
        measured(pair[0], pair[1], n_jobs=0)


def test_an_error_in_one_thread_is_the_error_of_the_scan(pair):
    with torch.no_grad():
        pair[1].model.layers[3].self_attn.o_proj.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.o_proj"):
        measured(pair[0], pair[1], n_jobs=2)


def test_an_interrupted_scan_goes_on_and_a_second_one_on_the_same_base_does_half(pair, tmp_path, monkeypatch):
    from topotuner_peft import DriftSettings

    cache, computed = tmp_path / "cache", []
    original = DriftSettings.diagrams

    def counted(self, weight, name):
        if len(computed) == 10 and not cache.with_name("again").exists():
            cache.with_name("again").touch()
            raise KeyboardInterrupt
        computed.append(name)
        return original(self, weight, name)

    monkeypatch.setattr(DriftSettings, "diagrams", counted)
    expected = 32  # 16 matrices, two models
    with pytest.raises(KeyboardInterrupt):
        measured(pair[2], pair[3], cache_dir=cache)
    table = measured(pair[2], pair[3], cache_dir=cache)
    assert len(computed) == expected
    assert len(list(cache.glob("*.safetensors"))) == expected
    computed.clear()
    other = tiny.perturbed("llama", scale=0.05)
    measured(pair[2], other, cache_dir=cache)
    assert len(computed) == 16
    computed.clear()
    assert numbers(measured(pair[2], pair[3], cache_dir=cache)) == numbers(table)
    assert computed == []
    # Other settings and other dtypes have other diagrams.
    measured(pair[2], pair[3], cache_dir=cache, metric="euclidean")
    assert len(computed) == 32


def test_the_spectral_norm_is_the_largest_singular_value(pair, tmp_path):
    table = measured(pair[0], pair[1])
    for row in table.rows:
        weights = [model.get_submodule(row.id).weight.detach().double() for model in pair[:2]]
        assert row.spectral_norm == pytest.approx(torch.linalg.matrix_norm(weights[1] - weights[0], 2).item(), rel=1e-5)
    frame = table.to_pandas()
    assert list(frame["spectral_norm"]) == [row.spectral_norm for row in table.rows]
    table.save(tmp_path / "drift.json")
    assert numbers(DriftTable.load(tmp_path / "drift.json")) == numbers(table)


# The commands


def test_the_drift_command_shows_and_saves_the_table(pair, tmp_path, capsys):
    output = tmp_path / "drift.json"
    command = ["drift", str(pair[2]), str(pair[3]), "-o", str(output), "--limit", "3", "--projections", "v,o"]
    assert topotuner_cli.main(command) == 0
    said = capsys.readouterr().out
    table = DriftTable.load(output)
    assert {row.projection for row in table.rows} == {"v", "o"}
    assert numbers(table) == numbers(measured(pair[0], pair[1], projections=("v", "o")))
    best = max(table.rows, key=lambda row: row.per_point)
    assert best.id in said
    assert "… and 5 more" in said
    assert f"Saved: {output}" in said


def test_the_drift_command_prints_json_that_can_be_read_again(pair, capsys):
    assert topotuner_cli.main(["drift", str(pair[2]), str(pair[3]), "--json", "--dims", "0,1"]) == 0
    table = DriftTable.from_dict(json.loads(capsys.readouterr().out))
    assert numbers(table) == numbers(measured(pair[0], pair[1], dimensions=(0, 1)))


def test_the_scan_command_says_what_there_is_and_what_it_costs(pair, capsys):
    assert topotuner_cli.main(["scan", str(pair[2])]) == 0
    said = capsys.readouterr().out
    parameters = sum(p.numel() for p in pair[0].parameters())
    assert f"{parameters:,} parameters" in said
    assert "16 attention matrices" in said
    assert "32 × 32" in said
    assert "16 × 32" in said
    assert topotuner_cli.main(["scan", str(pair[2]), "--json", "--heads"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {entry["projection"]: entry["count"] for entry in found["matrices"]} == {"q": 16, "k": 8, "v": 8, "o": 16}
    assert found["pair_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drift", "no/such/folder/deep", "x"], "no such file or folder"),
        (["drift", "BASE"], "it must be a PEFT model or an adapter"),
        (["scan", "BASE", "--pattern", "(?P<layer>x)(?P<projection>y)"], "y"),
    ],
)
def test_a_command_that_fails_says_why_in_one_line(pair, arguments, message, capsys):
    assert topotuner_cli.main([str(pair[2]) if a == "BASE" else a for a in arguments]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said


@pytest.mark.parametrize("option", [["--projections", "v,x"], ["--dims", "one"], ["--metric", "manhattan"]])
def test_a_command_used_wrongly_is_status_2(pair, option):
    with pytest.raises(SystemExit) as end:
        topotuner_cli.main(["drift", str(pair[2]), str(pair[3]), *option])
    assert end.value.code == 2


def test_a_selection_says_which_matrices(pair):
    source = open_source(pair[2], Selection(projections=("v",)))
    assert [p.id for p in source.projections] == [f"model.layers.{i}.self_attn.v_proj" for i in range(4)]
    assert source.info["name"] == str(pair[2])
    assert Path(source.info["name"]).is_dir()
