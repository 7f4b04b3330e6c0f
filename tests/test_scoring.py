import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from topotuner_peft.tasks import scoring
from topotuner_peft.tasks.scoring import score_choices, score_tokens

FILLER = "the film was good and the story was bad, yes no "


def tiny_llama():
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config)


def tiny_gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=512))


def tiny_bloom():
    # ALiBi: has no position_ids to pass.
    return BloomForCausalLM(BloomConfig(vocab_size=400, hidden_size=32, n_layer=2, n_head=4))


def tiny_llama_with_lora():
    model = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.train()


MODELS = [tiny_llama, tiny_gpt2, tiny_bloom, tiny_llama_with_lora]


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def model(request):
    torch.manual_seed(0)
    model = request.param()
    with torch.no_grad():
        for parameter in model.parameters():
            # The default initialisation gives nearly the same probability to everything.
            parameter.mul_(5 if parameter.ndim == 2 else 1)
    return model


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return tiny_llama()


def choice_rows(choices, n=11):
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 120, n)
    return [
        {
            "prompt": f"Review: {FILLER[: length % 40]}{FILLER * (length // 40)}\nSentiment:",
            "choices": choices,
            "label": i % 2,
        }
        for i, length in enumerate(lengths)
    ]


def brute_force(model, ids, start):
    """Log-probability of every token from `start` on, one unpadded sequence, the whole vocabulary, no options."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    logp = logits.log_softmax(-1)
    return np.array([logp[position - 1, ids[position]].item() for position in range(start, len(ids))])


def expected_likelihoods(model, tokenizer, rows):
    return np.array(
        [
            [
                brute_force(
                    model, tokenizer(row["prompt"] + c)["input_ids"], len(tokenizer(row["prompt"])["input_ids"])
                ).sum()
                for c in row["choices"]
            ]
            for row in rows
        ]
    )


@pytest.mark.parametrize("choices", [[" bad", " good"], [" yes", " very good indeed", " no"]])
def test_choices_agree_with_brute_force(model, tiny_tokenizer, choices):
    one_token = all(len(tiny_tokenizer(choice)["input_ids"]) == 1 for choice in choices)
    assert one_token == (len(choices) == 2)
    rows = choice_rows(choices)
    scores = score_choices(model, tiny_tokenizer, rows, batch_size=4)
    likelihoods = expected_likelihoods(model, tiny_tokenizer, rows)
    np.testing.assert_allclose(scores.log_likelihoods, likelihoods, atol=1e-4)

    labels = [row["label"] for row in rows]
    probability = np.exp(likelihoods) / np.exp(likelihoods).sum(axis=1, keepdims=True)
    losses = -np.log(probability[range(len(rows)), labels])
    correct = likelihoods.argmax(axis=1) == labels
    np.testing.assert_allclose(scores.losses, losses, atol=1e-4)
    np.testing.assert_array_equal(scores.correct, correct)
    np.testing.assert_array_equal(scores.labels, labels)
    assert scores.accuracy == pytest.approx(correct.mean())
    assert scores.choice_loss == pytest.approx(losses.mean(), abs=1e-4)
    assert scores.choice_loss_se == pytest.approx(losses.std(ddof=1) / len(rows) ** 0.5, abs=1e-4)
    assert scores.accuracy_se == pytest.approx(correct.std(ddof=1) / len(rows) ** 0.5)
    assert set(scores.summary()) == {"rows", "accuracy", "accuracy_se", "choice_loss", "choice_loss_se"}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("choices", [[" bad", " good"], [" yes", " very good indeed", " no"]])
def test_choices_do_not_depend_on_batch_size_or_padding_side(model, tiny_tokenizer, monkeypatch, choices, side):
    monkeypatch.setattr(tiny_tokenizer, "padding_side", side)
    rows = choice_rows(choices)
    alone = score_choices(model, tiny_tokenizer, rows, batch_size=1)
    for batch_size in (3, 100):
        together = score_choices(model, tiny_tokenizer, rows, batch_size=batch_size)
        np.testing.assert_allclose(together.log_likelihoods, alone.log_likelihoods, atol=1e-4)


def test_one_forward_pass_per_batch_of_prompts_and_few_logits(llama, tiny_tokenizer, monkeypatch):
    shapes = []
    forward = llama.forward

    def spy(*args, logits_to_keep=0, **kwargs):
        output = forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        shapes.append(tuple(output.logits.shape))
        return output

    monkeypatch.setattr(llama, "forward", spy)
    monkeypatch.setattr(scoring, "_forward_parameters", lambda model: {"position_ids", "logits_to_keep"})
    score_choices(llama, tiny_tokenizer, choice_rows([" bad", " good"], n=8), batch_size=4)
    assert shapes == [(4, 1, 400)] * 2


@pytest.mark.parametrize("make", MODELS)
def test_what_a_wrapped_model_accepts(make):
    accepted = scoring._forward_parameters(make())
    assert ("position_ids" in accepted) == (make is not tiny_bloom)
    assert "logits_to_keep" in accepted
    assert scoring._forward_parameters(torch.compile(make())) == accepted


def test_a_tie_counts_in_part(llama, tiny_tokenizer):
    torch.nn.init.zeros_(llama.lm_head.weight)
    scores = score_choices(llama, tiny_tokenizer, choice_rows([" bad", " good"]))
    assert scores.accuracy == 0.5
    assert scores.choice_loss == pytest.approx(np.log(2))


def test_choices_that_are_hardly_likely(llama, tiny_tokenizer):
    # Probabilities around exp(-1000) must not become 0 / 0.
    torch.nn.init.zeros_(llama.lm_head.weight)
    tokens = [tiny_tokenizer(word)["input_ids"][0] for word in (" bad", " good")]

    def shift(module, inputs, output):
        output[..., tokens[0]] -= 1000.0
        output[..., tokens[1]] -= 1001.0
        return output

    llama.lm_head.register_forward_hook(shift)
    scores = score_choices(llama, tiny_tokenizer, choice_rows([" bad", " good"], n=1))
    assert scores.choice_loss == pytest.approx(np.log1p(np.exp(-1)), abs=1e-3)
    assert np.isnan(scores.choice_loss_se)


def token_rows():
    words = FILLER.split()
    return [
        {"prompt": f"Question: {' '.join(words[: 1 + 3 * i % 10])}\nAnswer:", "completion": " " + FILLER * (1 + i % 4)}
        for i in range(9)
    ]


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_completions_agree_with_brute_force(model, tiny_tokenizer, batch_size):
    rows = token_rows()
    scores = score_tokens(model, tiny_tokenizer, rows, batch_size=batch_size)
    expected = [
        brute_force(
            model,
            tiny_tokenizer(row["prompt"] + row["completion"] + "<eos>")["input_ids"],
            len(tiny_tokenizer(row["prompt"])["input_ids"]),
        )
        for row in rows
    ]
    np.testing.assert_allclose(scores.sums, [-values.sum() for values in expected], atol=1e-3)
    np.testing.assert_array_equal(scores.counts, [len(values) for values in expected])
    assert scores.n_tokens == sum(map(len, expected))
    assert scores.loss == pytest.approx(-np.concatenate(expected).mean(), abs=1e-4)
    assert scores.n_truncated == 0


@pytest.mark.parametrize("as_row", [lambda text: text, lambda text: {"text": text}], ids=["str", "dict"])
def test_texts_agree_with_brute_force(model, tiny_tokenizer, as_row):
    texts = [FILLER * n for n in (3, 1, 4, 2)]
    scores = score_tokens(model, tiny_tokenizer, [as_row(text) for text in texts], batch_size=3)
    expected = [brute_force(model, tiny_tokenizer(text)["input_ids"], 1) for text in texts]
    np.testing.assert_allclose(scores.sums, [-values.sum() for values in expected], atol=1e-3)
    np.testing.assert_array_equal(scores.counts, [len(values) for values in expected])


def test_truncation_is_counted(llama, tiny_tokenizer):
    texts = [FILLER * 3, FILLER[:20]]
    scores = score_tokens(llama, tiny_tokenizer, texts, max_length=16)
    assert scores.n_truncated == 1
    assert scores.counts[0] == 15
    expected = brute_force(llama, tiny_tokenizer(texts[0])["input_ids"][:16], 1)
    assert scores.sums[0] == pytest.approx(-expected.sum(), abs=1e-4)
    with pytest.raises(ValueError, match=r"Row 1 \('Question: .*no token to score in its first 4"):
        score_tokens(llama, tiny_tokenizer, [FILLER, token_rows()[0]], max_length=4)


def test_the_standard_error_of_a_ratio(llama, tiny_tokenizer):
    scores = score_tokens(llama, tiny_tokenizer, token_rows())
    generator = np.random.default_rng(0)
    draws = generator.integers(0, len(scores.sums), (4000, len(scores.sums)))
    resampled = scores.sums[draws].sum(axis=1) / scores.counts[draws].sum(axis=1)
    assert scores.loss_se == pytest.approx(resampled.std(), rel=0.25)


def test_tokens_and_loss_are_those_of_the_sft_trainer(llama, tiny_tokenizer, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = token_rows()
    # Two words that the tokenizer joins across the boundary: the completion starts before the prompt ends.
    rows.append({"prompt": "the film was g", "completion": "ood"})
    arguments = SFTConfig(
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_length=40,
        per_device_eval_batch_size=len(rows),
    )
    data = Dataset.from_list(rows)
    trainer = SFTTrainer(llama, arguments, train_dataset=data, eval_dataset=data, processing_class=tiny_tokenizer)
    sequences = [scoring._row_sequence(tiny_tokenizer, row, index) for index, row in enumerate(rows)]
    assert sequences[-1].start < len(tiny_tokenizer(rows[-1]["prompt"])["input_ids"])
    for example, sequence in zip(trainer.train_dataset, sequences, strict=True):
        ids = sequence.ids[:40]
        assert example["input_ids"] == ids
        labels = trainer.data_collator([example])["labels"][0].tolist()
        assert labels == [-100] * sequence.start + ids[sequence.start :]
    scores = score_tokens(llama, tiny_tokenizer, rows, max_length=40)
    assert scores.n_truncated > 0
    assert scores.loss == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-4)


def test_training_modes_and_gradients_are_left_alone(llama, tiny_tokenizer):
    llama.train()
    llama.model.layers[0].eval()
    before = [module.training for module in llama.modules()]
    score_tokens(llama, tiny_tokenizer, [FILLER])
    assert [module.training for module in llama.modules()] == before
    assert all(parameter.grad is None for parameter in llama.parameters())
    assert torch.is_grad_enabled()

    torch.nn.init.constant_(llama.lm_head.weight, float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        score_tokens(llama, tiny_tokenizer, [FILLER])
    assert [module.training for module in llama.modules()] == before


def test_nan_names_the_row(llama, tiny_tokenizer):
    marker = tiny_tokenizer("Q")["input_ids"][0]
    with torch.no_grad():
        llama.model.embed_tokens.weight[marker] = float("nan")
    rows = [
        {"prompt": f"{text} the film was", "choices": [" bad", " good"], "label": 0} for text in ("A", "B", "Q", "C")
    ]
    with pytest.raises(ValueError, match=r"NaN for Row 2 \('Q the film was'\)"):
        score_choices(llama, tiny_tokenizer, rows)
    with pytest.raises(ValueError, match=r"NaN for Row 1 \('Q the"):
        score_tokens(llama, tiny_tokenizer, [FILLER, "Q the film"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": [" bad"]}, "Row 1 .* has 1 choices, the first row has 2"),
        ({"label": 2}, "Row 1 .* has label 2"),
        ({"choices": [" bad", ""]}, "Row 1 .* adds no token"),
        ({"prompt": ""}, "Row 1 .* no token before its completion"),
    ],
)
def test_rows_that_do_not_fit(llama, tiny_tokenizer, change, message):
    rows = choice_rows([" bad", " good"], n=2)
    rows[1] = rows[1] | change
    with pytest.raises(ValueError, match=message):
        score_choices(llama, tiny_tokenizer, rows)


def test_nothing_to_score(llama, tiny_tokenizer):
    with pytest.raises(ValueError, match="no rows"):
        score_choices(llama, tiny_tokenizer, [])
    with pytest.raises(ValueError, match="no rows"):
        score_tokens(llama, tiny_tokenizer, [])
    with pytest.raises(ValueError, match="no token to score"):
        score_tokens(llama, tiny_tokenizer, [""])
    with pytest.raises(ValueError, match="batch_size"):
        score_tokens(llama, tiny_tokenizer, [FILLER], batch_size=0)


def test_progress(llama, tiny_tokenizer):
    calls = []
    score_tokens(llama, tiny_tokenizer, [FILLER] * 5, batch_size=2, progress=lambda *call: calls.append(call))
    assert calls == [(2, 5), (4, 5), (5, 5)]


@pytest.mark.slow
def test_the_real_model_knows_more_than_chance(smollm2_dir, cache_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from topotuner_peft.tasks import general_text, sentiment

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    for choice in sentiment.CHOICES:
        assert len(tokenizer(choice)["input_ids"]) == 1
    scores = score_choices(model, tokenizer, sentiment.load("validation", 64, cache_dir=cache_dir))
    assert scores.accuracy > 0.6
    assert scores.choice_loss < np.log(2)
    texts = score_tokens(model, tokenizer, general_text.load("test", 4), batch_size=4)
    assert 2.0 < texts.loss < 4.5
