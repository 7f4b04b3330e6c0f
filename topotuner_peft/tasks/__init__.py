"""The task families: where their texts come from, how they are split, how they are scored.

A task is a `Task`, found by name with `get_task`. Its `load` gives rows as plain dictionaries:

- prompt-completion tasks give ``{"prompt": str, "completion": str}``, the plain-text format that TRL's
  ``SFTTrainer`` trains on (no chat template; the completion starts with its own space);
- choice tasks add ``{"choices": list[str], "label": int}``, with ``completion == choices[label]``;
- texts give ``{"text": str}``.

Some come out of small packages and need no account or Hub; the others (``gsm8k``, ``arc_easy``, ``boolq``,
``svamp``) from the Hugging Face Hub, or from a folder of JSON Lines files given as ``data_dir``.

`topotuner_peft.tasks.scoring` scores a model on such rows.
"""

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

SPLITS = ("train", "validation", "test")

# Modules rather than tasks, so that listing the names imports none of them.
_MODULES = {
    "math_word_problems": "topotuner_peft.tasks.math_word_problems",
    "sentiment": "topotuner_peft.tasks.sentiment",
    "general_text": "topotuner_peft.tasks.general_text",
    "gsm8k": "topotuner_peft.tasks.gsm8k",
    "arc_easy": "topotuner_peft.tasks.arc_easy",
    "boolq": "topotuner_peft.tasks.boolq",
    "svamp": "topotuner_peft.tasks.svamp",
}


class Loader(Protocol):
    """What loads the rows of a task."""

    def __call__(
        self,
        split: str,
        size: int | None = None,
        seed: int = 0,
        cache_dir: Path | None = None,
        data_dir: Path | None = None,
    ) -> list[dict]:
        """Return `size` rows (None: all there are) of a split; the same arguments give the same rows."""
        ...


@dataclass(frozen=True)
class Task:
    """A task family.

    Parameters
    ----------
    name : str
        What `get_task` calls it.
    title : str
        A few words for people.
    kind : {"completion", "choice", "text"}
        Which keys the rows have; see the module's docstring.
    splits : tuple of str
        The splits that `load` knows.
    load : Loader
        Loads the rows.
    """

    name: str
    title: str
    kind: Literal["completion", "choice", "text"]
    splits: tuple[str, ...]
    load: Loader


def task_names() -> tuple[str, ...]:
    """Return the names that `get_task` knows."""
    return tuple(_MODULES)


def get_task(name: str) -> Task:
    """Return the task of that name.

    Raises
    ------
    ValueError
        If there is none; the message lists those there are.
    """
    if name not in _MODULES:
        raise ValueError(f"There is no task {name!r}: choose one of {', '.join(_MODULES)}.")
    return importlib.import_module(_MODULES[name]).TASK


def split_of(key: str) -> str:
    """Assign a key to a split, by its text alone: 70 % train, 15 % validation, 15 % test.

    Whatever must not lie in two splits (a question, a film) is used as the key. The assignment depends on
    nothing else: not on a seed, on other keys or on the order of the data.

    Parameters
    ----------
    key : str
        Any text.

    Returns
    -------
    str
        ``"train"``, ``"validation"`` or ``"test"``.

    Examples
    --------
    >>> split_of("about_a_boy")
    'train'
    """
    percent = int(hashlib.sha256(key.encode()).hexdigest(), 16) % 100
    if percent < 70:
        return "train"
    return "validation" if percent < 85 else "test"


def check_request(task: str, split: str, splits: tuple[str, ...], size: int | None, seed: int) -> None:
    """Check the arguments of a loader.

    Raises
    ------
    ValueError
        If the task has no such split, or the size or the seed is negative (a size of zero included).
    """
    if split not in splits:
        raise ValueError(f"{task} has no split {split!r}: choose one of {', '.join(splits)}.")
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, got {size}.")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}.")
