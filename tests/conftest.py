import os

# Before anything imports a tokenizer or the Hub's client: both read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

from topotuner_peft.demo.assets import default_cache_dir, load_smollm2


@pytest.fixture(scope="session")
def cache_dir():
    """The default cache, so that a machine downloads and converts once."""
    return default_cache_dir()


@pytest.fixture(scope="session")
def smollm2_dir(cache_dir):
    """SmolLM2-135M-Instruct as safetensors. For tests marked slow: the first use downloads 93 MB."""
    return load_smollm2(cache_dir)


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A byte-level BPE of up to 400 tokens: its own words are one or two, all others several."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "the film was good and the story was bad, yes yes no no no Review: Sentiment: Question: Answer: "
    tokenizer.train_from_iterator([words * 20], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="session")
def real_matrix(smollm2_dir):
    """The v_proj of layer 12 of SmolLM2-135M, (192, 576) float32."""
    from safetensors import safe_open

    with safe_open(smollm2_dir / "model.safetensors", framework="numpy") as file:
        return file.get_tensor("model.layers.12.self_attn.v_proj.weight")
