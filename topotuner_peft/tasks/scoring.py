"""Scores of a causal language model on the rows of a task: choices, and loss per token.

*Tokens.* A prompt and its completion are cut up as TRL's ``SFTTrainer`` does it for plain-text
prompt-completion data (read in TRL 1.16): the prompt and the prompt + completion are tokenised, each with the
tokenizer's own special tokens, and the completion is what follows their longest common prefix. TRL also appends
the end-of-sequence token to every completion that does not end in it; `score_tokens` does the same, so that its
mean is the loss that training lowers. `score_choices` and plain texts have no such token.

*Batches.* Rows are sorted by length and padded on the left, whatever side the tokenizer pads on, with an
attention mask and positions that count from each row's first token. The wanted logits are then the last ones of
every row, and a model that has ``logits_to_keep`` computes no others. In float32 the results do not depend on
the batch size beyond rounding. A model that has neither an attention mask nor positions to tell padding from
text (a recurrent one) is to be scored with ``batch_size=1``.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ChoiceScores:
    """How a model chooses among given answers.

    All arrays are float64 in the order of the rows, so that two models scored on the same rows can be compared
    in pairs: the standard error of ``a.losses - b.losses`` is far smaller than that of either mean.

    Attributes
    ----------
    accuracy, accuracy_se : float
        Share of rows whose right choice is the likeliest, and its standard error. NaN for one row's error.
    choice_loss, choice_loss_se : float
        Mean negative natural logarithm of the right choice's probability among the choices (nats; chance is
        log 2 for two), and its standard error.
    log_likelihoods : np.ndarray, shape (n, c)
        Log-likelihood of each choice given the prompt, summed over the choice's tokens, in nats.
    labels : np.ndarray of int64, shape (n,)
        Index of the right choice.
    correct : np.ndarray, shape (n,)
        1 if the right choice is the likeliest, else 0; 1/m if it is one of m that tie.
    losses : np.ndarray, shape (n,)
        Negative log-probability of the right choice among the choices, in nats.
    """

    accuracy: float
    accuracy_se: float
    choice_loss: float
    choice_loss_se: float
    log_likelihoods: np.ndarray
    labels: np.ndarray
    correct: np.ndarray
    losses: np.ndarray

    def summary(self) -> dict[str, float | int]:
        """Return the means, their standard errors and the number of rows, ready for JSON."""
        return {
            "rows": len(self.labels),
            "accuracy": self.accuracy,
            "accuracy_se": self.accuracy_se,
            "choice_loss": self.choice_loss,
            "choice_loss_se": self.choice_loss_se,
        }


@dataclass(frozen=True)
class TokenScores:
    """How well a model predicts given tokens.

    Attributes
    ----------
    loss : float
        Mean negative log-likelihood per token, over all tokens of all rows, in nats.
    loss_se : float
        Its standard error with rows, not tokens, taken as independent (the ratio estimator's). NaN for one row.
    n_tokens : int
        How many tokens were scored.
    n_truncated : int
        How many rows were longer than `max_length` and lost their end.
    sums : np.ndarray of float64, shape (n,)
        Negative log-likelihood of each row's scored tokens, in nats, in the order of the rows.
    counts : np.ndarray of int64, shape (n,)
        How many tokens were scored in each row.
    """

    loss: float
    loss_se: float
    n_tokens: int
    n_truncated: int
    sums: np.ndarray
    counts: np.ndarray

    def summary(self) -> dict[str, float | int]:
        """Return the mean, its standard error and the counts, ready for JSON."""
        return {
            "rows": len(self.counts),
            "tokens": self.n_tokens,
            "truncated_rows": self.n_truncated,
            "loss": self.loss,
            "loss_se": self.loss_se,
        }


class _Sequence(NamedTuple):
    """Token ids, of which those from `start` on are scored, and the name of the row they come from."""

    ids: list[int]
    start: int
    row: str


def score_choices(
    model: "torch.nn.Module",
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[dict],
    *,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> ChoiceScores:
    """Score a model on rows with choices.

    Where every choice is one token, one forward pass per prompt gives all of them, from the logits of its last
    position. Otherwise each choice is scored after its prompt, the log-probabilities of its tokens summed.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model from transformers, bare or wrapped by PEFT or ``torch.compile``. Its training
        mode is restored afterwards, module by module.
    tokenizer : transformers.PreTrainedTokenizerBase
        The model's tokenizer.
    rows : sequence of dict
        Rows with ``prompt``, ``choices`` (the same number in every row) and ``label``.
    batch_size : int, default 16
        Sequences per forward pass.
    progress : callable, optional
        Called as ``progress(done, total)`` after each batch, in sequences.

    Returns
    -------
    ChoiceScores
        Means, standard errors and the arrays behind them.

    Raises
    ------
    ValueError
        If there are no rows, a row does not fit the above, or the model gives NaN; the message names the row.
    """
    if not rows:
        raise ValueError("There are no rows to score.")
    n_choices = len(rows[0]["choices"])
    sequences = []
    for index, row in enumerate(rows):
        name = _row_name(index, row["prompt"])
        if len(row["choices"]) != n_choices:
            raise ValueError(f"{name} has {len(row['choices'])} choices, the first row has {n_choices}.")
        if not 0 <= row["label"] < n_choices:
            raise ValueError(f"{name} has label {row['label']}, but {n_choices} choices.")
        prompt_ids = _token_ids(tokenizer, row["prompt"])
        sequences.append([_completion(tokenizer, prompt_ids, row["prompt"], c, name) for c in row["choices"]])

    one_token = all(_differ_in_last_token_only(choices) for choices in sequences)
    if one_token:
        first = [choices[0] for choices in sequences]
        wanted = [[choice.ids[-1] for choice in choices] for choices in sequences]
        log_likelihoods = np.array(_score(model, first, batch_size, progress, last_tokens=wanted))
    else:
        flat = [choice for choices in sequences for choice in choices]
        sums = [values.sum() for values in _score(model, flat, batch_size, progress)]
        log_likelihoods = np.array(sums).reshape(len(rows), n_choices)

    labels = np.array([row["label"] for row in rows], dtype=np.int64)
    right = log_likelihoods[np.arange(len(rows)), labels]
    best = log_likelihoods.max(axis=1)
    for index in np.flatnonzero(np.isneginf(best)):
        name = _row_name(index, rows[index]["prompt"])
        raise ValueError(f"{name}: the model gives every choice the probability 0, so none can be preferred.")
    ties = (log_likelihoods == best[:, None]).sum(axis=1)
    correct = (right == best) / ties
    losses = best + np.log(np.exp(log_likelihoods - best[:, None]).sum(axis=1)) - right
    return ChoiceScores(
        accuracy=float(correct.mean()),
        accuracy_se=_standard_error(correct),
        choice_loss=float(losses.mean()),
        choice_loss_se=_standard_error(losses),
        log_likelihoods=log_likelihoods,
        labels=labels,
        correct=correct,
        losses=losses,
    )


def score_tokens(
    model: "torch.nn.Module",
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[dict | str],
    *,
    batch_size: int = 8,
    max_length: int | None = 1024,
    progress: Progress | None = None,
) -> TokenScores:
    """Score a model's predictions of completions, or of whole texts.

    Parameters
    ----------
    model : torch.nn.Module
        As in `score_choices`.
    tokenizer : transformers.PreTrainedTokenizerBase
        The model's tokenizer.
    rows : sequence of dict or str
        Rows with ``prompt`` and ``completion``, of which the completion and the end-of-sequence token that TRL
        trains on are scored; or texts, plain or as ``{"text": str}``, of which every token but the first is.
    batch_size : int, default 8
        Rows per forward pass. A batch's logits take batch_size × scored tokens × vocabulary × 4 bytes.
    max_length : int, optional
        Longer rows lose their end, as in ``SFTConfig``, whose default this is; ``n_truncated`` counts them.
    progress : callable, optional
        Called as ``progress(done, total)`` after each batch, in rows.

    Returns
    -------
    TokenScores
        The mean, its standard error and the arrays behind it.

    Raises
    ------
    ValueError
        If there are no rows, a row has no token to score (after truncation), or the model gives NaN; the
        message names the row.
    """
    if not rows:
        raise ValueError("There are no rows to score.")
    sequences, n_truncated = [], 0
    for index, row in enumerate(rows):
        sequence = _row_sequence(tokenizer, row, index)
        if max_length is not None and len(sequence.ids) > max_length:
            n_truncated += 1
            sequence = sequence._replace(ids=sequence.ids[:max_length])
        if sequence.start >= len(sequence.ids):
            raise ValueError(
                f"{sequence.row} has no token to score in its first {len(sequence.ids)}: raise max_length "
                f"({max_length}) or leave the row out."
            )
        sequences.append(sequence)

    log_probabilities = _score(model, sequences, batch_size, progress)
    sums = np.array([-values.sum() for values in log_probabilities])
    counts = np.array([len(values) for values in log_probabilities], dtype=np.int64)
    loss = sums.sum() / counts.sum()
    # Rows have different lengths: this is the standard error of a ratio of two means.
    residuals = (sums - loss * counts) / counts.mean()
    return TokenScores(
        loss=float(loss),
        loss_se=_standard_error(residuals),
        n_tokens=int(counts.sum()),
        n_truncated=n_truncated,
        sums=sums,
        counts=counts,
    )


def _row_sequence(tokenizer: "PreTrainedTokenizerBase", row: dict | str, index: int) -> _Sequence:
    """Tokenise one row for `score_tokens`."""
    if not isinstance(row, str) and "prompt" in row:
        completion = row["completion"]
        if not completion.endswith(tokenizer.eos_token):
            completion += tokenizer.eos_token
        prompt_ids = _token_ids(tokenizer, row["prompt"])
        return _completion(tokenizer, prompt_ids, row["prompt"], completion, _row_name(index, row["prompt"]))
    text = row if isinstance(row, str) else row["text"]
    # The first token has nothing before it to be predicted from.
    return _Sequence(_token_ids(tokenizer, text), 1, _row_name(index, text))


def _completion(
    tokenizer: "PreTrainedTokenizerBase", prompt_ids: list[int], prompt: str, completion: str, name: str
) -> _Sequence:
    """Tokenise prompt + completion; the completion starts where it leaves the tokenised prompt."""
    ids = _token_ids(tokenizer, prompt + completion)
    pairs = zip(prompt_ids, ids, strict=False)
    start = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt_ids), len(ids)))
    if start == 0:
        raise ValueError(f"{name} has no token before its completion {completion!r} to predict it from.")
    if start == len(ids):
        raise ValueError(f"{name}: the completion {completion!r} adds no token to the prompt.")
    return _Sequence(ids, start, name)


def _token_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Tokenise a text, with the special tokens that the tokenizer adds of itself."""
    return tokenizer(text)["input_ids"]


def _differ_in_last_token_only(choices: list[_Sequence]) -> bool:
    """Whether the choices of a row are one token each, after the same tokens."""
    context = choices[0].ids[:-1]
    return all(choice.start == len(choice.ids) - 1 and choice.ids[:-1] == context for choice in choices)


def _score(
    model: "torch.nn.Module",
    sequences: list[_Sequence],
    batch_size: int,
    progress: Progress | None,
    last_tokens: list[list[int]] | None = None,
) -> list[np.ndarray]:
    """Return the log-probabilities (nats, float64) of every sequence's scored tokens, in the order given.

    With `last_tokens`, those of several alternatives to each sequence's last token instead.
    """
    import torch

    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    device = model.get_input_embeddings().weight.device
    accepted = _forward_parameters(model)
    results: list[np.ndarray] = [np.empty(0)] * len(sequences)
    # Longest first, so that too large a batch fails at once and not at the end.
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index].ids))
    with _evaluating(model), torch.no_grad():
        for begin in range(0, len(order), batch_size):
            batch = order[begin : begin + batch_size]
            # The last token is only ever predicted: it need not be an input.
            inputs = [sequences[index].ids[:-1] for index in batch]
            keep = max(len(sequences[index].ids) - sequences[index].start for index in batch)
            logits = _last_logits(model, inputs, keep, accepted, device)  # (batch, keep, vocabulary)
            for row_logits, index in zip(logits, batch, strict=True):
                sequence = sequences[index]
                count = len(sequence.ids) - sequence.start
                scores = row_logits[-count:].float()  # (count, vocabulary)
                if last_tokens is None:
                    targets = torch.tensor(sequence.ids[sequence.start :], device=scores.device)
                    picked = scores.gather(1, targets[:, None])[:, 0]
                else:
                    picked = scores[0, last_tokens[index]]
                values = (picked - scores.logsumexp(dim=1)).double().cpu().numpy()
                if np.isnan(values).any():
                    raise ValueError(
                        f"The model gives NaN for {sequence.row}: its weights or its precision are broken."
                    )
                results[index] = values
            if progress is not None:
                progress(begin + len(batch), len(order))
    return results


def _last_logits(
    model: "torch.nn.Module",
    inputs: list[list[int]],
    keep: int,
    accepted: set[str],
    device: "torch.device",
) -> "torch.Tensor":
    """Run one left-padded batch and return the logits of its last `keep` positions, (batch, keep, vocabulary)."""
    import torch

    width = max(len(ids) for ids in inputs)
    # What the padding holds does not matter, as it is masked: 0 is a token of every vocabulary.
    input_ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in inputs], device=device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in inputs], device=device)
    options = {}
    if "position_ids" in accepted:
        options["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    if "use_cache" in accepted:
        options["use_cache"] = False
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = keep
    return model(input_ids=input_ids, attention_mask=mask, **options).logits[:, -keep:]


def _forward_parameters(model: "torch.nn.Module") -> set[str]:
    """Return what the innermost model's ``forward`` accepts; wrappers accept anything and pass it on."""
    import torch
    from peft import PeftMixedModel, PeftModel

    if isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    if isinstance(model, PeftModel):
        model = model.get_base_model()
    elif isinstance(model, PeftMixedModel):
        model = model.base_model.model
    return set(inspect.signature(model.forward).parameters)


@contextmanager
def _evaluating(model: "torch.nn.Module") -> Iterator[None]:
    """Switch to evaluation mode, and afterwards every module back to the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean of independent values, NaN for fewer than two."""
    if len(values) < 2:
        return float("nan")
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def _row_name(index: int, text: str) -> str:
    """Name a row in an error message."""
    return f"Row {index} ({text[:40]!r}{'…' if len(text) > 40 else ''})"
