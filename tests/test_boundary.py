"""No gradient and no recomputation below the lowest layer that trains."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import transformers
from datasets import Dataset
from peft import get_peft_model
from tiny import INPUT_IDS, build, logits, train_a_little
from trl import SFTConfig, SFTTrainer

from topotuner_peft import TopoConfig
from topotuner_peft.projections import find_projections

FAMILIES = ("llama", "gpt2", "phi3", "gemma3")
STEPS = 2

# What users set: nothing at all, or one of the arguments that change how gradients reach the layers.
CHECKPOINTING = {
    "stock": {},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "not reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "off": {"gradient_checkpointing": False},
}


def matrices(family, layer):
    return [p.id for p in find_projections(build(family)) if p.layer == layer]


def layers_of(model):
    base = model.get_base_model()
    return list(base.transformer.h if hasattr(base, "transformer") else base.model.layers)


def deltas(model):
    return {name: p for name, p in model.named_parameters() if ".topotuner_delta." in name}


class Watch:
    """Counts, per layer, forward passes (recomputed ones too) and gradients that come through.

    Everything is watched on a module *inside* the layer, because checkpointing goes round the layer's own hooks.
    """

    def __init__(self, layers):
        self.forwards, self.backwards, self.grad_outputs = Counter(), Counter(), Counter()
        for index, layer in enumerate(layers):
            inner = layer.mlp
            # Before the forward pass: recomputation ends early, once it has what the backward pass needs.
            inner.register_forward_pre_hook(self._forward(index))
            inner.register_full_backward_hook(self._backward(index))
            layer.register_forward_hook(self._output(index))

    def _forward(self, index):
        def hook(module, args):
            self.forwards[index] += 1

        return hook

    def _backward(self, index):
        def hook(module, grad_input, grad_output):
            self.backwards[index] += 1

        return hook

    def _output(self, index):
        def hook(module, args, output):
            hidden = output[0] if isinstance(output, tuple) else output
            self.grad_outputs[index] += hidden.requires_grad

        return hook


def train(model, folder, tokenizer, *, config=None, **arguments):
    """Train for two steps in an SFTTrainer with its defaults but for the arguments given."""
    rows = [{"input_ids": [5, 9, 33, 12, 7, 40, 21, 1]}, {"input_ids": [8, 61, 14, 3, 50, 6, 19, 1]}] * STEPS
    settings = SFTConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **arguments,
    )
    trainer = SFTTrainer(
        model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=config
    )
    watch = Watch(layers_of(trainer.model))
    gradients = {}
    for name, parameter in deltas(trainer.model).items():
        parameter.register_hook(lambda grad, name=name: gradients.setdefault(name, grad.clone()))
    trainer.train()
    return trainer.model, watch, gradients


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_gradient_crosses_the_layers_below_the_lowest_trained_one(family, checkpointing, tmp_path, tiny_tokenizer):
    config = TopoConfig(matrices=matrices(family, 3))
    model, watch, gradients = train(
        build(family), tmp_path, tiny_tokenizer, config=config, **CHECKPOINTING[checkpointing]
    )
    once_more = 1 if checkpointing == "off" else 2
    assert watch.forwards == {0: STEPS, 1: STEPS, 2: STEPS, 3: STEPS * once_more}
    assert watch.backwards == {3: STEPS}
    assert {index: count for index, count in watch.grad_outputs.items() if count} == {3: STEPS}
    assert gradients.keys() == deltas(model).keys()
    for name, parameter in deltas(model).items():
        assert torch.isfinite(gradients[name]).all(), name
        assert parameter.abs().amax() > 1e-3, name


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_lowest_layer_gets_its_gradient_through_all_others(family, checkpointing, tmp_path, tiny_tokenizer):
    config = TopoConfig(matrices=matrices(family, 0))
    model, watch, gradients = train(
        build(family), tmp_path, tiny_tokenizer, config=config, **CHECKPOINTING[checkpointing]
    )
    once_more = 1 if checkpointing == "off" else 2
    assert watch.forwards == dict.fromkeys(range(4), STEPS * once_more)
    assert watch.backwards == dict.fromkeys(range(4), STEPS)
    assert gradients.keys() == deltas(model).keys()
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), name
        assert (gradient != 0).any(), name


def test_a_model_wrapped_before_the_trainer_has_the_boundary_too(tmp_path, tiny_tokenizer):
    model = get_peft_model(build("llama"), TopoConfig(matrices=matrices("llama", 2)))
    _, watch, _ = train(model, tmp_path, tiny_tokenizer)
    assert watch.backwards == {2: STEPS, 3: STEPS}
    assert watch.forwards[0] == watch.forwards[1] == STEPS


def gradients_of(model):
    model.train()
    model.zero_grad()
    model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lowest", [0, 2, 3])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("order", ["before", "after", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_embeddings_and_checkpointing_give_the_gradients_of_plain_training(family, order, reentrant, lowest):
    # Attention dropout aside, which the tiny GPT-2 would otherwise draw anew.
    def fresh():
        model = build(family)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model

    ids = [name for layer in range(lowest, 4) for name in matrices(family, layer)]
    expected = gradients_of(get_peft_model(fresh(), TopoConfig(matrices=ids)))
    base, kwargs = fresh(), {"use_reentrant": reentrant}
    if order in ("before", "both"):
        base.gradient_checkpointing_enable(kwargs)
    model = get_peft_model(base, TopoConfig(matrices=ids))
    if order in ("after", "both"):
        model.gradient_checkpointing_enable(kwargs)
        model.enable_input_require_grads()
    found = gradients_of(model)
    assert found.keys() == expected.keys() == deltas(model).keys()
    for name, gradient in found.items():
        assert (gradient != 0).any(), name
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_switching_adapters_moves_the_boundary():
    model = get_peft_model(build("llama"), TopoConfig(matrices=matrices("llama", 3)))
    model.add_adapter("low", TopoConfig(matrices=matrices("llama", 0)))
    model.enable_input_require_grads()
    for adapter, layers in (("default", {3}), ("low", {0, 1, 2, 3}), ("default", {3})):
        model.set_adapter(adapter)
        watch = Watch(layers_of(model))
        found = gradients_of(model)
        assert set(watch.backwards) == layers
        assert {name.split(".")[-2] for name in found} == {adapter}


def test_what_is_unfrozen_by_hand_below_gets_its_gradient():
    model = get_peft_model(build("llama"), TopoConfig(matrices=matrices("llama", 3)))
    gradients_of(model)
    layers_of(model)[1].mlp.up_proj.weight.requires_grad_(True)
    found = gradients_of(model)
    assert [name for name in found if "layers.1.mlp.up_proj" in name]
    layers_of(model)[1].mlp.up_proj.weight.requires_grad_(False)
    model.get_base_model().model.embed_tokens.weight.requires_grad_(True)
    assert [name for name in gradients_of(model) if "embed_tokens" in name]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_trained_embeddings_and_heads_get_their_gradient(family):
    # The tiny Gemma's head is its embeddings; the tiny Llama's is not, and lies above the boundary.
    for name in ("lm_head", "embed_tokens"):
        config = TopoConfig(matrices=matrices(family, 3), modules_to_save=[name])
        model = get_peft_model(build(family), config)
        found = gradients_of(model)
        assert [key for key in found if name in key and (found[key] != 0).any()], name


def test_single_token_rows_get_their_gradient():
    config = TopoConfig(matrices=matrices("llama", 3), trainable_token_indices=[5])
    found = gradients_of(get_peft_model(build("llama"), config))
    assert [name for name in found if "trainable_tokens" in name and (found[name] != 0).any()]


def test_embeddings_given_as_input_get_their_gradient():
    # Soft prompts and attributions ask for the gradient of the input itself.
    model = get_peft_model(build("llama"), TopoConfig(matrices=matrices("llama", 3))).train()
    embeds = model.get_input_embeddings()(INPUT_IDS).detach().requires_grad_()
    model(inputs_embeds=embeds, labels=INPUT_IDS).loss.backward()
    assert (embeds.grad != 0).any()


def test_the_inner_model_called_by_itself_has_no_stale_boundary():
    # After a training step the layers must not go on cutting for callers that go round the model.
    model = get_peft_model(build("llama"), TopoConfig(matrices=matrices("llama", 3)))
    gradients_of(model)
    model.add_adapter("low", TopoConfig(matrices=matrices("llama", 0)))
    model.set_adapter("low")
    model.get_base_model().model(input_ids=INPUT_IDS).last_hidden_state.sum().backward()
    assert all((p.grad != 0).any() for name, p in deltas(model).items() if ".low." in name)


def test_a_forward_pass_that_fails_leaves_no_boundary():
    model = get_peft_model(build("llama"), TopoConfig(matrices=matrices("llama", 3))).train()
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[999]]))
    model.get_base_model().model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    model.get_base_model().model(input_ids=INPUT_IDS).last_hidden_state.sum().backward()
    assert (model.get_base_model().model.layers[0].mlp.up_proj.weight.grad != 0).any()


def test_the_attention_mask_stays_without_gradient():
    # GPT-2 hands it on by position; a mask that requires grad takes attention off its fast path.
    model = get_peft_model(build("gpt2"), TopoConfig(matrices=matrices("gpt2", 2)))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    seen = []

    def look(module, args, kwargs):
        values = [*args[1:], *kwargs.values()]
        seen.extend(v.requires_grad for v in values if isinstance(v, torch.Tensor))

    for layer in layers_of(model):
        layer.attn.register_forward_pre_hook(look, with_kwargs=True)
    model.train()
    mask = torch.ones_like(INPUT_IDS)
    mask[0, :3] = 0
    model(input_ids=INPUT_IDS, attention_mask=mask, labels=INPUT_IDS).loss.backward()
    assert seen
    assert not any(seen)


def test_a_copy_has_a_boundary_of_its_own():
    model = get_peft_model(build("llama"), TopoConfig(matrices=matrices("llama", 3)))
    twin = copy.deepcopy(model)
    for each in (twin, model):
        each.enable_input_require_grads()
        watch = Watch(layers_of(each))
        gradients_of(each)
        assert set(watch.backwards) == {3}


def test_hidden_states_and_attentions_are_those_of_the_base():
    model = get_peft_model(build("llama"), TopoConfig(matrices=matrices("llama", 3))).train()
    ours = model(input_ids=INPUT_IDS, output_hidden_states=True).hidden_states
    plain = build("llama")(input_ids=INPUT_IDS, output_hidden_states=True).hidden_states
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_layers_keep_their_class_for_those_who_look():
    model = get_peft_model(build("llama"), TopoConfig(matrices=matrices("llama", 3)))
    for layer in layers_of(model):
        assert isinstance(layer, type(build("llama").model.layers[0]))
        assert type(layer).__name__ == "LlamaDecoderLayer"
        assert type(layer).__module__ == "transformers.models.llama.modeling_llama"
    train_a_little(model)
    plain = model.unload()
    assert [type(layer) for layer in plain.model.layers] == [type(layer) for layer in build("llama").model.layers]
    assert torch.equal(logits(plain), logits(build("llama")))


def test_an_encoder_decoder_model_trains_without_a_boundary():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = get_peft_model(
        transformers.T5ForConditionalGeneration(config),
        TopoConfig(matrices=["encoder.block.1.layer.0.SelfAttention.v", "decoder.block.1.layer.0.SelfAttention.v"]),
    )
    found = gradients_of(model)
    assert len(found) == 2
    assert all((gradient != 0).any() for gradient in found.values())
