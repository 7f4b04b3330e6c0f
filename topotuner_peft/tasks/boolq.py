"""Yes-or-no questions about a passage: BoolQ, the shorter ones.

The rows are those of the data set's validation part with passage and question of at most 600 characters, split
anew by passage, so a score here is not comparable with a published one. Licence: CC BY-SA 3.0.

References
----------
C. Clark et al., "BoolQ: Exploring the Surprising Difficulty of Natural Yes/No Questions", NAACL 2019.
"""

from pathlib import Path

from topotuner_peft.tasks import SPLITS, Task, check_request
from topotuner_peft.tasks.files import choose, in_split, read_rows

MAX_CHARACTERS = 600
CHOICES = (" no", " yes")
_HUB = ("google/boolq", None, "validation")


def load(
    split: str,
    size: int | None = None,
    seed: int = 0,
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
) -> list[dict]:
    """Load questions with their passages. About six in ten answers are yes.

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
        Folder with ``boolq.jsonl``; by default the Hub's ``google/boolq``.

    Returns
    -------
    list of dict
        Rows ``{"prompt": str, "completion": str, "choices": list[str], "label": int}``; label 1 is yes.
    """
    check_request(TASK.name, split, SPLITS, size, seed)
    rows = [row for row in read_rows("boolq", data_dir, _HUB, _from_hub) if len(row["query"]) <= MAX_CHARACTERS]
    rows = in_split(rows, split, lambda row: row["query"].partition("\nQuestion: ")[0])
    return [_row(row) for row in choose(rows, TASK.name, split, size, seed)]


def _from_hub(row: dict) -> dict:
    return {"query": f"Passage: {row['passage']}\nQuestion: {row['question']}?", "gold": int(row["answer"])}


def _row(row: dict) -> dict:
    label = row["gold"]
    return {
        "prompt": f"{row['query']}\nAnswer:",
        "completion": CHOICES[label],
        "choices": list(CHOICES),
        "label": label,
    }


TASK = Task(name="boolq", title="yes-or-no questions about a passage", kind="choice", splits=SPLITS, load=load)
