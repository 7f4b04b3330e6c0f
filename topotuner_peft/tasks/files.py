"""Rows of the public data sets that no package carries: from a folder of JSON Lines files, or from the Hub."""

import json
import random
from collections.abc import Callable
from pathlib import Path

from topotuner_peft.tasks import split_of


def read_rows(
    name: str,
    data_dir: Path | None,
    hub: tuple[str, str | None, str],
    convert: Callable[[dict], dict],
) -> list[dict]:
    """Read a data set's rows.

    Parameters
    ----------
    name : str
        The file is ``data_dir/<name>.jsonl``.
    data_dir : path-like or None
        None reads from the Hugging Face Hub.
    hub : tuple
        Repository, configuration and split there.
    convert : callable
        Makes a row of the file's form from one of the Hub's.

    Raises
    ------
    FileNotFoundError
        If the folder lacks the file.
    """
    if data_dir is None:
        from datasets import load_dataset

        repository, configuration, split = hub
        return [convert(row) for row in load_dataset(repository, configuration, split=split)]
    file = Path(data_dir) / f"{name}.jsonl"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there. Without a data_dir, the rows come from {hub[0]!r} on the Hub.")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def choose(rows: list[dict], task: str, split: str, size: int | None, seed: int) -> list[dict]:
    """Return `size` of a split's rows in an order that the seed gives; a smaller request begins a larger one."""
    if size is not None and size > len(rows):
        raise ValueError(f"{task} has {len(rows)} {split} rows: ask for no more, not {size}.")
    return random.Random(seed).sample(rows, len(rows))[:size]


def in_split(rows: list[dict], split: str, key: Callable[[dict], str]) -> list[dict]:
    """Return the rows whose key the hash puts into the split, see `topotuner_peft.tasks.split_of`."""
    return [row for row in rows if split_of(key(row)) == split]
