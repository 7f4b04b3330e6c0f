"""Grade-school math problems with worked solutions: GSM8K.

The calculator annotations (``<<48/2=24>>``) of the solutions are taken out. Validation rows are those of the data
set's train part whose question the hash assigns there; the test part is its own. Licence: MIT.

References
----------
K. Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168.
"""

import re
from pathlib import Path

from topotuner_peft.tasks import SPLITS, Task, check_request, split_of
from topotuner_peft.tasks.files import choose, read_rows

_CALCULATION = re.compile(r"<<[^<>]*>>")


def load(
    split: str,
    size: int | None = None,
    seed: int = 0,
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
) -> list[dict]:
    """Load problems.

    Parameters
    ----------
    split : {"train", "validation", "test"}
    size : int, optional
        How many rows; by default all.
    seed : int, default 0
        Which rows, and their order.
    cache_dir : path-like, optional
        Not used.
    data_dir : path-like, optional
        Folder with ``gsm8k_train.jsonl`` and ``gsm8k_test.jsonl``; by default the Hub's ``openai/gsm8k``.

    Returns
    -------
    list of dict
        Rows ``{"prompt": str, "completion": str, "answer": str}``; a completion ends in ``#### N``.
    """
    check_request(TASK.name, split, SPLITS, size, seed)
    part = "test" if split == "test" else "train"
    rows = read_rows(f"gsm8k_{part}", data_dir, ("openai/gsm8k", "main", part), dict)
    if part == "train":
        wanted = split == "validation"
        rows = [row for row in rows if (split_of(row["question"]) == "validation") == wanted]
    return [_row(row) for row in choose(rows, TASK.name, split, size, seed)]


def _row(row: dict) -> dict:
    solution = _CALCULATION.sub("", row["answer"])
    return {
        "prompt": f"Question: {row['question']}\nAnswer:",
        "completion": f" {solution}",
        "answer": solution.rpartition("#### ")[2],
    }


TASK = Task(
    name="gsm8k", title="grade-school math problems with worked solutions", kind="completion", splits=SPLITS, load=load
)
