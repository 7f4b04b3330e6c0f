"""Grade-school science questions with four choices: ARC-Easy.

The rows are those of the data set's test part, split anew by question, so a score here is not comparable with a
published one. Each choice is scored as a text, not as a letter, which a small model can't use. The few questions
with three or five choices are left out. Licence: CC BY-SA 4.0.

References
----------
P. Clark et al., "Think you have Solved Question Answering? Try ARC, the AI2 Reasoning Challenge", arXiv:1803.05457.
"""

from pathlib import Path

from topotuner_peft.tasks import SPLITS, Task, check_request
from topotuner_peft.tasks.files import choose, in_split, read_rows

_HUB = ("allenai/ai2_arc", "ARC-Easy", "test")


def load(
    split: str,
    size: int | None = None,
    seed: int = 0,
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
) -> list[dict]:
    """Load questions.

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
        Folder with ``arc_easy.jsonl``; by default the Hub's ``allenai/ai2_arc``.

    Returns
    -------
    list of dict
        Rows ``{"prompt": str, "completion": str, "choices": list[str], "label": int}`` of four choices.
    """
    check_request(TASK.name, split, SPLITS, size, seed)
    rows = read_rows("arc_easy", data_dir, _HUB, _from_hub)
    rows = in_split([row for row in rows if len(row["choices"]) == 4], split, lambda row: row["query"])
    return [_row(row) for row in choose(rows, TASK.name, split, size, seed)]


def _from_hub(row: dict) -> dict:
    return {
        "query": f"Question: {row['question']}",
        "choices": row["choices"]["text"],
        "gold": row["choices"]["label"].index(row["answerKey"]),
    }


def _row(row: dict) -> dict:
    choices = [f" {choice}" for choice in row["choices"]]
    label = row["gold"]
    return {"prompt": f"{row['query']}\nAnswer:", "completion": choices[label], "choices": choices, "label": label}


TASK = Task(name="arc_easy", title="grade-school science questions", kind="choice", splits=SPLITS, load=load)
