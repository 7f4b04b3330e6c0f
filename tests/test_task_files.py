"""Tasks whose rows come from the Hub or from a folder of JSON Lines files."""

import json

import datasets
import pytest

from topotuner_peft.tasks import SPLITS, get_task, split_of

# As the Hub has them, and as the files do.
HUB = {
    "arc_easy": [
        {
            "question": f"Which is number {n}?",
            "choices": {"text": ["one", "two", "three", "four"], "label": labels},
            "answerKey": labels[n % 4],
        }
        for n, labels in ((n, list("ABCD") if n % 2 else list("1234")) for n in range(60))
    ],
    "boolq": [{"passage": f"Text {n}.", "question": f"is it {n}", "answer": n % 3 == 0} for n in range(60)],
    "gsm8k": [
        {"question": f"What is {n} + 1?", "answer": f"It is {n}+1=<<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}"}
        for n in range(60)
    ],
    "svamp": [{"question_concat": f"Add 1 to {n}.", "Answer": f"{n + 1}.0"} for n in range(60)],
}
FILES = {
    "arc_easy": [
        {"query": f"Question: {row['question']}", "choices": row["choices"]["text"], "gold": n % 4}
        for n, row in enumerate(HUB["arc_easy"])
    ],
    "boolq": [
        {"query": f"Passage: {row['passage']}\nQuestion: {row['question']}?", "gold": int(row["answer"])}
        for row in HUB["boolq"]
    ],
    "gsm8k_train": HUB["gsm8k"],
    "gsm8k_test": HUB["gsm8k"],
    "svamp": [{"context": f"Add 1 to {n}.", "answer": f"{n + 1}"} for n in range(60)],
}


@pytest.fixture
def data_dir(tmp_path):
    for name, rows in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def splits_of(task):
    return [(task, split) for split in get_task(task).splits]


ALL = [pair for task in HUB for pair in splits_of(task)]


@pytest.mark.parametrize(("task", "split"), ALL)
def test_the_hub_and_the_files_give_the_same_rows(task, split, data_dir, monkeypatch):
    asked = []

    def load_dataset(repository, configuration, split):
        asked.append((repository, configuration, split))
        return HUB[task]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    from_hub = get_task(task).load(split)
    assert asked
    assert from_hub == get_task(task).load(split, data_dir=data_dir)
    assert asked[1:] == []


@pytest.mark.parametrize("task", ["arc_easy", "boolq", "gsm8k"])
def test_no_question_is_in_two_splits(task, data_dir):
    rows = {split: get_task(task).load(split, data_dir=data_dir) for split in SPLITS}
    prompts = {split: {row["prompt"] for row in rows[split]} for split in SPLITS}
    if task == "gsm8k":  # its test part is a file of its own, here a copy
        assert prompts["train"].isdisjoint(prompts["validation"])
        assert len(prompts["train"] | prompts["validation"]) == 60
        return
    assert sum(map(len, prompts.values())) == len(set.union(*prompts.values())) == 60


@pytest.mark.parametrize(("task", "split"), ALL)
def test_rows_are_of_their_kind_and_the_seed_orders_them(task, split, data_dir):
    load = get_task(task).load
    rows = load(split, data_dir=data_dir)
    for row in rows:
        assert row["prompt"].endswith("\nAnswer:")
        assert row["completion"].startswith(" ")
        if get_task(task).kind == "choice":
            assert row["completion"] == row["choices"][row["label"]]
    assert load(split, 5, data_dir=data_dir) == rows[:5]
    other = load(split, seed=1, data_dir=data_dir)
    assert other != rows
    assert sorted(row["prompt"] for row in other) == sorted(row["prompt"] for row in rows)
    with pytest.raises(ValueError, match=rf"{task} has {len(rows)} {split} rows: ask for no more, not 61"):
        load(split, 61, data_dir=data_dir)


def test_the_annotations_of_gsm8k_are_gone(data_dir):
    row = get_task("gsm8k").load("test", 1, data_dir=data_dir)[0]
    assert "<<" not in row["completion"]
    assert row["completion"].endswith(f"#### {row['answer']}")


def test_long_passages_are_left_out(data_dir):
    long = {"query": f"Passage: {'word ' * 200}\nQuestion: is it long?", "gold": 1}
    file = data_dir / "boolq.jsonl"
    file.write_text(file.read_text() + json.dumps(long) + "\n")
    assert sum(len(get_task("boolq").load(split, data_dir=data_dir)) for split in SPLITS) == 60


def test_a_question_about_the_same_passage_stays_in_its_split(data_dir):
    rows = [{"query": f"Passage: The same.\nQuestion: is it {n}?", "gold": 0} for n in range(9)]
    (data_dir / "boolq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(get_task("boolq").load(split_of("Passage: The same."), data_dir=data_dir)) == 9


def test_a_folder_without_the_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"svamp.jsonl is not there.*'ChilleD/SVAMP' on the Hub"):
        get_task("svamp").load("test", data_dir=tmp_path)
