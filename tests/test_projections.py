"""Which matrices are found, under which names."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES, build

from topotuner_peft.projections import (
    count_parameters,
    describe_projections,
    find_projections,
    fingerprint,
    fingerprint_differences,
    layer_index,
    match_ids,
    matrix_modules,
    read_weight,
    split_id,
    strip_wrappers,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_q_k_v_and_o_in_each_layer(family):
    found = find_projections(build(family))
    assert sorted((p.layer, p.projection) for p in found) == [(i, name) for i in range(4) for name in "koqv"]


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_the_projection_alone(family):
    model = build(family)
    modules = matrix_modules(model)
    for p in find_projections(model):
        assert tuple(read_weight(modules[p.module], p).shape) == p.shape
        assert p.size == p.shape[0] * p.shape[1]


def test_fused_rows_are_the_ones_attention_uses():
    # Phi-3 splits its fused output at q = heads * head_dim, then k and v; zero v and attention's output is zero.
    model = build("phi3")
    v = next(p for p in find_projections(model) if p.id == "model.layers.0.self_attn.qkv_proj[v]")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        (start, stop) = v.rows[0]
        attention.qkv_proj.weight[start:stop] = 0
    seen = {}
    attention.o_proj.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    model(input_ids=torch.tensor([[4, 5, 6]]))
    assert torch.equal(seen["x"], torch.zeros_like(seen["x"]))


def test_gpt2_fused_v_is_read_transposed():
    model = build("gpt2")
    v = next(p for p in find_projections(model) if p.id == "transformer.h.1.attn.c_attn[v]")
    weight = model.transformer.h[1].attn.c_attn.weight
    read = read_weight(matrix_modules(model)[v.module], v)
    assert torch.equal(read, weight.T[64:96])


@pytest.mark.parametrize(
    ("kind", "build_config"),
    [
        (
            "neox",
            lambda: transformers.GPTNeoXForCausalLM(
                transformers.GPTNeoXConfig(
                    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
                )
            ),
        ),
        (
            "bloom",
            lambda: transformers.BloomForCausalLM(
                transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
            ),
        ),
        (
            "falcon",
            lambda: transformers.FalconForCausalLM(
                transformers.FalconConfig(
                    vocab_size=64,
                    hidden_size=32,
                    num_hidden_layers=1,
                    num_attention_heads=4,
                    num_kv_heads=2,
                    new_decoder_architecture=True,
                )
            ),
        ),
    ],
)
def test_interleaved_values_are_found_head_by_head(kind, build_config):
    # If the v rows (and biases) are zero, whatever enters the output projection is zero; q rows do not do that.
    torch.manual_seed(0)
    model = build_config().eval()
    for name, expect_zero in (("v", True), ("q", False)):
        torch.manual_seed(0)
        model = build_config().eval()
        (p,) = find_projections(model, projections=[name])
        fused = model.get_submodule(p.module)
        with torch.no_grad():
            for start, stop in p.rows:
                fused.weight[start:stop] = 0
                if fused.bias is not None:
                    fused.bias[start:stop] = 0
        seen = {}
        out = next(m for n, m in model.named_modules() if n.endswith("attention.dense"))
        out.register_forward_pre_hook(lambda module, args, seen=seen: seen.update(x=args[0]))
        model(input_ids=torch.tensor([[4, 5, 6]]))
        assert bool((seen["x"] == 0).all()) is expect_zero, (kind, name)


def test_an_experts_index_is_not_taken_for_the_layers():
    assert layer_index("model.layers.1.mlp.experts.0.down_proj") == 1


def test_names_saved_under_torch_compile_match():
    assert strip_wrappers("_orig_mod.model.layers.0.self_attn._orig_mod.q_proj") == "model.layers.0.self_attn.q_proj"
    assert strip_wrappers("module.base_model.model.model.layers.0.x") == "model.layers.0.x"
    assert strip_wrappers("_fsdp_wrapped_module.model.layers.2._fsdp_wrapped_module.mlp") == "model.layers.2.mlp"


def test_bare_causal_and_multimodal_paths_are_one_matrix():
    wanted = ["layers.0.self_attn.v_proj"]
    for path in ("model.layers.0.self_attn.v_proj", "model.language_model.layers.0.self_attn.v_proj"):
        assert match_ids(wanted, [path]) == {wanted[0]: path}
    assert match_ids(wanted, ["model.layers.1.self_attn.v_proj"]) == {wanted[0]: None}


def test_an_ambiguous_match_is_refused():
    with pytest.raises(ValueError, match=r"fits several"):
        match_ids(
            ["layers.0.self_attn.q_proj"], ["encoder.layers.0.self_attn.q_proj", "decoder.layers.0.self_attn.q_proj"]
        )


def test_a_vision_tower_is_left_out():
    shapes = {"vision_tower.layers.0.self_attn.q_proj": (8, 8), "model.layers.0.self_attn.q_proj": (8, 8)}
    assert [p.id for p in describe_projections(shapes)] == ["model.layers.0.self_attn.q_proj"]


def test_unknown_names_list_what_was_found():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"matrices are: 0, 1.*pattern"):
        find_projections(model)


def test_a_pattern_finds_other_names():
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.ModuleDict({"Wq": torch.nn.Linear(4, 4)})])})
    (p,) = find_projections(model, pattern=r"blocks\.\d+\.W(?P<projection>q)")
    assert (p.id, p.layer, p.projection) == ("blocks.0.Wq", 0, "q")


def test_an_unknown_projection_is_refused():
    with pytest.raises(ValueError, match="Unknown projections"):
        find_projections(build("llama"), projections=["x"])


def test_a_fused_matrix_without_a_configuration_is_refused():
    with pytest.raises(ValueError, match="no configuration"):
        describe_projections({"model.layers.0.self_attn.qkv_proj": (24, 8)})


def test_an_adapted_model_has_the_same_matrices():
    plain = find_projections(build("llama"))
    adapted = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    assert find_projections(adapted) == plain
    assert count_parameters(adapted) == count_parameters(build("llama"))


def test_tied_parameters_count_once():
    model = build("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert count_parameters(model) == sum(p.numel() for p in model.parameters())


def test_merged_deltas_count_once():
    model = get_peft_model(build("llama"), LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False))
    p = next(p for p in find_projections(model) if p.projection == "v")
    module = matrix_modules(model)[p.module]
    before = read_weight(module, p)
    model.merge_adapter()
    assert torch.allclose(read_weight(module, p), before, atol=1e-6)
    with pytest.raises(ValueError, match="unmerge_adapter"):
        read_weight(module, p, effective=False)


def test_weights_off_loaded_to_meta_are_refused_by_name():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(build("llama").config)
    p = find_projections(model)[0]
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj.*not in memory"):
        read_weight(matrix_modules(model)[p.module], p)


def test_a_fingerprint_survives_half_precision_and_tells_other_weights():
    ids = [p.id for p in find_projections(build("llama"))]
    expected = fingerprint(build("llama"), ids)
    for dtype in (torch.bfloat16, torch.float16):
        assert fingerprint_differences(expected, fingerprint(build("llama").to(dtype), ids)) == []
    assert fingerprint_differences(expected, fingerprint(build("llama", seed=1), ids))


def test_malformed_ids_are_refused():
    assert split_id("a.b[q]") == ("a.b", "q")
    with pytest.raises(ValueError, match="not a matrix id"):
        split_id("a.b[q")
