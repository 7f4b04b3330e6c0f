"""Tiny random models of the families we name, built from their configurations."""

from __future__ import annotations

import torch
import transformers

_COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_BUILDERS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_COMMON)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**_COMMON)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_COMMON)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_COMMON, head_dim=16)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**_COMMON, head_dim=8)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**_COMMON)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
}

FAMILIES = tuple(_BUILDERS)
INPUT_IDS = torch.tensor([[5, 9, 33, 12, 7, 40, 21], [8, 61, 14, 3, 50, 6, 19]])


def build(family: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A tiny random causal language model in evaluation mode; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return _BUILDERS[family]().eval()


def perturbed(family: str, scale: float = 0.02) -> transformers.PreTrainedModel:
    """The same model with noise on its matrices, more in the later layers."""
    model = build(family)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                layer = next((int(part) for part in name.split(".") if part.isdigit()), 0)
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(scale * (1 + layer) * noise)
    return model


def train_a_little(model: torch.nn.Module, steps: int = 3, lr: float = 1e-2) -> None:
    """A few AdamW steps on the fixed batch."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    model.train()
    for _ in range(steps):
        model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    """The model's logits on the fixed batch, (2, 7, 64)."""
    with torch.no_grad():
        return model(input_ids=INPUT_IDS).logits.clone()
