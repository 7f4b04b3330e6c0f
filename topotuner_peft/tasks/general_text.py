"""General English text that no task here trains on, to measure what fine-tuning makes a model forget.

The text is the story "In the Year 2889" (1889), published under the name of Jules Verne and now ascribed to his
son Michel, in chunks of up to 512 characters. It is in the public domain in the United States, and comes as a
Project Gutenberg file inside the package ``reasoning-gym`` (Apache-2.0). Gutenberg's header and footer and the
redactor's note are cut off.

A model may well have met the story in its pretraining. That is no harm here: what is measured is how much
worse a model predicts it after fine-tuning than before, not how well it does.
"""

import random
import re
import zipfile
from pathlib import Path

from topotuner_peft.demo.assets import REASONING_GYM, fetch
from topotuner_peft.tasks import Task, check_request

CHUNK = 512
_FILE = "reasoning_gym/data/in_the_year_2889.txt"
# The title with a full stop stands between the redactor's note and the first sentence.
_START = "\nIN THE YEAR 2889.\n"
_END = "\nEnd of Project Gutenberg's In the Year 2889"


def load(
    split: str = "test",
    size: int | None = None,
    seed: int = 0,
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
) -> list[dict]:
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
        Where the package's wheel is kept, see `topotuner_peft.demo.assets`.
    data_dir : path-like, optional
        Not used.

    Returns
    -------
    list of dict
        Rows ``{"text": str}`` of at most 512 characters, cut between words.

    Raises
    ------
    ValueError
        If the split is not "test", the seed is negative, or more chunks are asked for than there are.
    topotuner_peft.demo.assets.AssetError
        If the wheel cannot be fetched.
    """
    check_request(TASK.name, split, TASK.splits, size, seed)
    chunks = _chunks(_story(cache_dir))
    if size is not None and size > len(chunks):
        raise ValueError(f"general_text has {len(chunks)} chunks: ask for no more, not {size}.")
    if size is not None:
        chosen = random.Random(seed).sample(range(len(chunks)), size)
        chunks = [chunks[index] for index in sorted(chosen)]
    return [{"text": chunk} for chunk in chunks]


def _chunks(text: str) -> list[str]:
    """Cut a text between words into chunks of at most `CHUNK` characters."""
    return re.findall(rf"\S(?:.{{0,{CHUNK - 2}}}\S)?(?=\s|$)", text, flags=re.DOTALL)


def _story(cache_dir: Path | None) -> str:
    """Read the story, one line per paragraph, with an empty line between two."""
    with zipfile.ZipFile(fetch(REASONING_GYM, cache_dir)) as wheel:
        text = wheel.read(_FILE).decode("utf-8").replace("\r\n", "\n")
    story = text.partition(_START)[2].partition(_END)[0]
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", story.strip()))


TASK = Task(
    name="general_text",
    title="a story, held out to measure forgetting",
    kind="text",
    splits=("test",),
    load=load,
)
