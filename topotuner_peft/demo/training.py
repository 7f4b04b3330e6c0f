"""Training one method the way a user would: TRL's SFTTrainer with a PEFT configuration."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ..stopping import TopoDriftCallback

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from .plan import Sizes

# At most; fewer where an epoch is short, since the first epoch's drift is the yardstick of the stopping score.
WARMUP_STEPS = 4
MAX_LENGTH = 384


@dataclass(frozen=True)
class Method:
    """A way to fine-tune, and the learning rate it gets.

    Attributes
    ----------
    key, label : str
    learning_rate : float
    reason : str
        Why this rate.
    """

    key: str
    label: str
    learning_rate: float
    reason: str


@dataclass
class Run:
    """What a training run left.

    Attributes
    ----------
    model : torch.nn.Module
        The trained model, a PEFT model unless everything trained.
    seconds : float
        Wall time of training, drift measurements included.
    step_seconds : float
        Median of the steps after the first.
    steps : int
    epochs : float
    trainable : int
        Number of parameters that trained.
    losses : list of float
        Mean training loss per epoch.
    """

    model: nn.Module
    seconds: float
    step_seconds: float
    steps: int
    epochs: float
    trainable: int
    losses: list[float]


class _Progress(TrainerCallback):
    """One progress bar per run, and the time of each step."""

    def __init__(self, description: str):
        self.description = description
        self.seconds: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs):
        from tqdm.auto import tqdm

        self._bar = tqdm(total=state.max_steps, desc=self.description, unit="step", leave=False, mininterval=1.0)

    def on_step_begin(self, args, state, control, **kwargs):
        self._started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self._started)
        self._bar.update()

    def on_train_end(self, args, state, control, **kwargs):
        self._bar.close()


def train(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    *,
    config: PeftConfig | None,
    learning_rate: float,
    sizes: Sizes,
    epochs: int,
    seed: int,
    description: str,
    callbacks: Sequence[TrainerCallback] = (),
    schedule: str = "constant_with_warmup",
    sampling: str = "random",
) -> Run:
    """Fine-tune a model on prompts and completions; the loss is on the completions.

    The learning rate is constant after a short warm-up unless another schedule is asked for, so that a score of
    stability can't be a shadow of its decay. No weight decay, no gradient checkpointing, float32.

    Parameters
    ----------
    model : torch.nn.Module
        The base model; changed in place.
    tokenizer : transformers.PreTrainedTokenizerBase
    rows : sequence of dict
        With ``prompt`` and ``completion``.
    config : peft.PeftConfig or None
        None trains all weights.
    learning_rate : float
    sizes : Sizes
        Batch size; ``examples`` must be the number of rows.
    epochs : int
    seed : int
        Order of the examples and initial values.
    description : str
        What the progress bar says.
    callbacks : sequence of transformers.TrainerCallback
        A `TopoDriftCallback` is attached, so that it logs through the trainer.
    schedule : str
        A name that ``lr_scheduler_type`` takes.
    sampling : str
        A name that ``train_sampling_strategy`` takes: ``"random"``, or ``"sequential"`` for the rows as they come.

    Returns
    -------
    Run
    """
    import torch
    from datasets import Dataset
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    set_seed(seed)
    dataset = Dataset.from_list([{name: row[name] for name in ("prompt", "completion")} for row in rows])
    progress = _Progress(description)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = SFTConfig(
            output_dir=scratch,
            num_train_epochs=epochs,
            per_device_train_batch_size=sizes.batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type=schedule,
            warmup_steps=min(WARMUP_STEPS, max(1, sizes.steps_per_epoch // 5)),
            weight_decay=0.0,
            max_length=MAX_LENGTH,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            train_sampling_strategy=sampling,
            seed=seed,
            data_seed=seed,
            logging_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model, args=arguments, train_dataset=dataset, processing_class=tokenizer, peft_config=config
        )
        # The demo reports once, at the end; the Trainer's printer would print a dictionary per epoch.
        from transformers import PrinterCallback

        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(progress)
        for callback in callbacks:
            if isinstance(callback, TopoDriftCallback):
                callback.attach(trainer)
            else:
                trainer.add_callback(callback)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trained = trainer.model
    return Run(
        model=trained,
        seconds=seconds,
        step_seconds=statistics.median(progress.seconds[1:] or progress.seconds),
        steps=trainer.state.global_step,
        epochs=float(trainer.state.epoch),
        trainable=sum(p.numel() for p in trained.parameters() if p.requires_grad),
        losses=losses,
    )
