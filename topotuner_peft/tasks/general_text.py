"""General English text that no task here trains on, to measure what fine-tuning makes a model forget.

The text is the story "In the Year 2889" (1889), published under the name of Jules Verne and now ascribed to his
son Michel, in chunks of up to 512 characters. It is in the public domain in the United States, and comes as a
Project Gutenberg file inside the package ``reasoning-gym`` (Apache-2.0). Gutenberg's header and footer and the
redactor's note are cut off.

A model may well have met the story in its pretraining. That is no harm here: what is measured is how much
worse a model predicts it after fine-tuning than before, not how well it does.
"""

import importlib.util
import random
import re
from pathlib import Path

from topotuner_peft.tasks import Task, check_request

CHUNK = 512
_FILE = "data/in_the_year_2889.txt"
# The title with a full stop stands between the redactor's note and the first sentence.
_START = "\nIN THE YEAR 2889.\n"
_END = "\nEnd of Project Gutenberg's In the Year 2889"


def load(split: str = "test", size: int | None = None, seed: int = 0, cache_dir: Path | None = None) -> list[dict]:
    """Load chunks of the story.

    Parameters
    ----------
    split : {"test"}
        The story is only ever held out.
    size : int, optional
        How many chunks; by default all.
    seed : int, default 0
        Which chunks, where fewer than all are asked for. They come in the story's order.
    cache_dir : path-like, optional
        Not used, as nothing is downloaded; every loader takes it.

    Returns
    -------
    list of dict
        Rows ``{"text": str}`` of at most 512 characters, cut between words.

    Raises
    ------
    ValueError
        If the split is not "test", the seed is negative, or more chunks are asked for than there are.
    ModuleNotFoundError
        If ``reasoning-gym`` is not installed.
    RuntimeError
        If its file is not the one that is known here.
    """
    check_request(TASK.name, split, TASK.splits, size, seed)
    chunks = _chunks(_story())
    if size is not None and size > len(chunks):
        raise ValueError(f"general_text has {len(chunks)} chunks: ask for no more, not {size}.")
    if size is not None:
        chosen = random.Random(seed).sample(range(len(chunks)), size)
        chunks = [chunks[index] for index in sorted(chosen)]
    return [{"text": chunk} for chunk in chunks]


def _chunks(text: str) -> list[str]:
    """Cut a text between words into chunks of at most `CHUNK` characters."""
    return re.findall(rf"\S(?:.{{0,{CHUNK - 2}}}\S)?(?=\s|$)", text, flags=re.DOTALL)


def _story() -> str:
    """Read the story, one line per paragraph, with an empty line between two."""
    # Found without importing the package, which takes a second and is not needed.
    found = importlib.util.find_spec("reasoning_gym")
    if found is None:
        raise ModuleNotFoundError(
            'The general text comes with reasoning-gym: run `pip install "topotuner-peft[demo]"`.'
        )
    path = Path(found.submodule_search_locations[0]) / _FILE
    _, start, rest = path.read_text(encoding="utf-8").partition(_START)
    story, end, _ = rest.partition(_END)
    if not start or not end:
        raise RuntimeError(
            f"{path} does not have the headings it is known by: install reasoning-gym 0.1.25, whose file has."
        )
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", story.strip()))


TASK = Task(
    name="general_text",
    title="a story, held out to measure forgetting",
    kind="text",
    splits=("test",),
    load=load,
)
