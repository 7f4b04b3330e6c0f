"""Short arithmetic problems, held out to measure forgetting: SVAMP's test part, whose licence is MIT.

References
----------
A. Patel et al., "Are NLP Models really able to Solve Simple Math Word Problems?", NAACL 2021.
"""

from pathlib import Path

from topotuner_peft.tasks import Task, check_request
from topotuner_peft.tasks.files import choose, read_rows

_HUB = ("ChilleD/SVAMP", None, "test")


def load(
    split: str = "test",
    size: int | None = None,
    seed: int = 0,
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
) -> list[dict]:
    """Load problems.

    Parameters
    ----------
    split : {"test"}
        SVAMP is only ever held out here.
    size : int, optional
        How many rows; by default all 300.
    seed : int, default 0
        Which rows, and their order.
    cache_dir : path-like, optional
        Not used.
    data_dir : path-like, optional
        Folder with ``svamp.jsonl``; by default the Hub's ``ChilleD/SVAMP``.

    Returns
    -------
    list of dict
        Rows ``{"prompt": str, "completion": str, "answer": str}``; the completion is the number alone.
    """
    check_request(TASK.name, split, TASK.splits, size, seed)
    rows = read_rows("svamp", data_dir, _HUB, _from_hub)
    return [_row(row) for row in choose(rows, TASK.name, split, size, seed)]


def _from_hub(row: dict) -> dict:
    return {"context": row["question_concat"], "answer": row["Answer"].removesuffix(".0")}


def _row(row: dict) -> dict:
    return {
        "prompt": f"Question: {row['context']}\nAnswer:",
        "completion": f" {row['answer']}",
        "answer": str(row["answer"]),
    }


TASK = Task(name="svamp", title="short arithmetic problems", kind="completion", splits=("test",), load=load)
