"""Tables, sentences, pictures and the demo's page."""

import copy
import html.parser
import sys

import numpy as np
import pytest

from topotuner_peft import DriftSettings, DriftTable, FreezingProfile
from topotuner_peft.drift import MatrixDrift
from topotuner_peft.report.comparison import headline, methods_table, stopping_sentence
from topotuner_peft.report.html import write_report
from topotuner_peft.report.plots import drift_curves, drift_heatmap, methods_chart
from topotuner_peft.report.terminal import render_table, summary_text

ROWS = [
    MatrixDrift(f"model.layers.{layer}.self_attn.{name}_proj", layer, name, (8, 8), {0: drift}, 4.0)
    for layer in range(12)
    for name, drift in zip("qkvo", (0.1, 0.2, 0.3 + layer, 0.4), strict=True)
]
TABLE = DriftTable(ROWS, DriftSettings(), {"name": "SmolLM2-135M-Instruct", "parameters": 10_000})
PROFILE = FreezingProfile.from_drift(TABLE, budget=0.02)


def method(key, label, difference, error, **values):
    base = key == "base"
    return {
        "key": key, "label": label, "learning_rate": None if base else 1e-3, "learning_rate_reason": "tried",
        "epochs": 0 if base else 3, "steps": 36, "seconds": None if base else 123.4, "step_seconds": 3.3,
        "trainable": 1, "trainable_share": 0.0 if base else 0.0148, "adapter_bytes": None if base else 7_960_000,
        "accuracy": 0.8125, "accuracy_se": 0.0244, "choice_loss": 0.4321, "choice_loss_se": 0.0456,
        "paired_difference": difference, "paired_difference_se": error, "prior_loss": 1.4137,
        "prior_loss_change": 0.0 if base else -0.0289, "text_loss": 3.8239, "text_loss_change": 0.0 if base else 0.0741,
        "peak_memory_bytes": None, "layers": "", **values,
    }  # fmt: skip


def results_of(base=(0.1, 0.02), random=(0.0, 0.02), lora=(0.0, 0.02), full=(0.0, 0.02), fast=False, **changes):
    return {
        "schema": 1,
        "created": "2026-01-02T03:04:05+00:00",
        "seed": 0,
        "fast": fast,
        "model": {"name": "SmolLM2-135M-Instruct", "parameters": 134515008, "source": "a package", "licence": "L",
                  "note": "Dequantised."},
        "machine": {"cpu": "a CPU", "threads": 2, "platform": "Linux"},
        "versions": {"torch": "2.13.0"},
        "total_seconds": 812.0,
        "plan": {"sentences": ["It was planned so.", "And so."]},
        "prior": {"task": "sums", "licence": "A", "seconds": 120.0, "drift_seconds": 2.5, "learning_rate": 1e-4,
                  "learning_rate_reason": "careful", "history": []},
        "profile": {"rule": PROFILE.rule.describe(), "budget": 0.015, "share": 0.0148, "trained": PROFILE.trained,
                    "by_projection": {"v": 3}},
        "target": {"task": "reviews", "licence": "B", "test_examples": 256},
        "stopping": {
            "threshold": 0.5, "score_name": "step", "epochs_run": 3, "epochs_budget": 4, "stopped_early": True,
            "reason": "", "saved_share": 0.25, "seconds": 1.0,
            "history": [
                {"epoch": 1, "score": None, "drift_mean": 1e-4},
                {"epoch": 2, "score": 0.81, "drift_mean": 2e-4},
                {"epoch": 3, "score": 0.47, "drift_mean": 2.5e-4},
            ],
        },
        "methods": [
            method("base", "Base model", *base),
            method("topotuner", "TopoTuner", None, None),
            method("random", "Random matrices", *random),
            method("lora", "LoRA r16", *lora),
            method("full", "Full fine-tuning", *full, trainable_share=1.0, adapter_bytes=538_000_000),
        ],
        "reload": {"bit_equal": True, "max_abs_difference": 0.0, "seconds": 3.0},
        "adapter": {"path": "adapter", "bytes": 7_960_000},
        "caveats": ["One seed only."],
        **changes,
    }  # fmt: skip


class Page(html.parser.HTMLParser):
    """The text, links and structure of a page."""

    VOID = frozenset({"meta", "img", "source", "br", "link"})

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.addresses, self.pictures = [], [], [], []
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.addresses += [attrs[name] for name in ("src", "href", "srcset") if name in attrs]
        if tag == "img":
            self.pictures.append(attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


# Tables


def test_a_table_is_aligned_and_as_wide_as_it_must_be():
    text = render_table(["name", "value"], [["a", "1.5"], ["longer", "12.25"]], width=80)
    assert text.splitlines() == ["name    value", "──────  ─────", "a         1.5", "longer  12.25"]
    text = render_table(["a", "b"], [["x", "left"]], align=["r", "l"], width=80)
    assert text.splitlines()[-1] == "x  left"


def test_a_table_too_wide_loses_the_middle_of_its_widest_cells():
    name = "model.layers.3.self_attn.v_proj"
    text = render_table(["matrix", "drift"], [[name, "0.5"]], width=30)
    assert max(len(line) for line in text.splitlines()) == 30
    assert text.splitlines()[-1].startswith("model.laye")
    assert "v_proj" in text
    assert "…" in text
    with pytest.raises(ValueError, match="2 cells, the table 1 columns"):
        render_table(["a"], [["1", "2"]])


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_summary_fits_the_terminal_and_says_it_all(width):
    results = results_of()
    text = summary_text(results, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    for cells in (methods_table(results)[0], *methods_table(results)[1]):
        for cell in cells:
            assert cell in text
    squeezed = " ".join(text.split())
    assert stopping_sentence(results) in squeezed
    assert "bit for bit" in squeezed
    assert "One seed only." in squeezed


# Sentences


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, "better than base model and level with random matrices, LoRA r16 and full fine-tuning"),
        ({"lora": (-0.1, 0.02)}, "level with random matrices and full fine-tuning and worse than LoRA r16"),
        ({"lora": (0.1, 0.02), "full": (0.1, 0.02)}, "better than base model, LoRA r16 and full fine-tuning"),
        ({"random": (-0.05, 0.02)}, "worse than random matrices"),
        ({"base": (0.03, 0.02), "lora": (-0.03, 0.02)}, "level with base model, random matrices, LoRA r16"),
        ({"base": (-0.3, 0.02)}, "worse than base model"),
    ],
)
def test_the_headline_says_who_won(numbers, expected):
    assert expected in headline(results_of(**numbers))


def test_a_fast_run_claims_nothing():
    text = headline(results_of(fast=True, lora=(0.5, 0.01)))
    assert "far too few steps" in text
    assert "better" not in text


def test_the_stop_is_told_as_it_was():
    results = results_of()
    assert "stopped by itself after 3 of 4 epochs, at a drift score of 0.47 (threshold 0.5): 25%" in stopping_sentence(
        results
    )
    results["stopping"]["stopped_early"] = False
    assert "used all 4 epochs: the drift score ended at 0.47" in stopping_sentence(results)


# Pictures


def pixels(path):
    from matplotlib import image

    return image.imread(path)[..., :3]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "draw",
    [
        lambda path, theme: drift_heatmap(TABLE, path, theme=theme),
        lambda path, theme: drift_heatmap(TABLE, path, profile=PROFILE, theme=theme),
        lambda path, theme: drift_curves(results_of()["stopping"]["history"], path, threshold=0.5, theme=theme),
        lambda path, theme: drift_curves(results_of()["stopping"]["history"], path, threshold=None, theme=theme),
        lambda path, theme: methods_chart(results_of()["methods"], path, theme=theme),
    ],
)
def test_pictures_have_the_theme_s_paper_and_something_on_it(tmp_path, draw, theme):
    path = tmp_path / "new" / "picture.png"
    draw(path, theme)
    image = pixels(path)
    assert image.shape[0] > 200
    assert image.shape[1] > 500
    np.testing.assert_allclose(image[2, 2], 1.0 if theme == "light" else np.array([13, 17, 23]) / 255, atol=0.01)
    assert len(np.unique((image * 255).astype(int).reshape(-1, 3), axis=0)) > 20


def test_titles_were_black_on_black_in_the_dark(tmp_path):
    drift_heatmap(TABLE, tmp_path / "dark.png", theme="dark")
    top = pixels(tmp_path / "dark.png")[:50]
    assert top.max() > 0.8


def test_the_trained_matrices_are_framed(tmp_path):
    drift_heatmap(TABLE, tmp_path / "plain.png")
    drift_heatmap(TABLE, tmp_path / "framed.png", profile=PROFILE)
    orange = np.array([0xD5, 0x5E, 0x00]) / 255

    def count(name):
        return (np.abs(pixels(tmp_path / name) - orange).max(axis=-1) < 0.02).sum()

    assert count("plain.png") == 0
    assert count("framed.png") > 500


def test_a_model_that_did_not_move_can_be_drawn(tmp_path):
    still = DriftTable(
        [MatrixDrift(row.id, row.layer, row.projection, row.shape, {0: 0.0}, 1.0) for row in ROWS],
        DriftSettings(),
        {"name": None, "parameters": 10},
    )
    drift_heatmap(still, tmp_path / "still.png")
    assert (tmp_path / "still.png").stat().st_size > 5000


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    import topotuner_peft.extras as extras

    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"matplotlib is not installed.*topotuner-peft\[plot\]"):
        PROFILE.plot(tmp_path / "x.png")
    with pytest.raises(ModuleNotFoundError, match="plot"):
        drift_curves([], tmp_path / "x.png", threshold=None)


def test_drawing_leaves_pyplot_alone(tmp_path):
    before = "matplotlib.pyplot" in sys.modules
    drift_heatmap(TABLE, tmp_path / "x.png")
    assert ("matplotlib.pyplot" in sys.modules) == before
    with pytest.raises(ValueError, match="theme='pink'"):
        drift_heatmap(TABLE, tmp_path / "x.png", theme="pink")


# The page


@pytest.fixture
def page(tmp_path):
    def write(results):
        path = tmp_path / "report.html"
        write_report(results, path, table=TABLE, profile=PROFILE)
        return path.read_text(encoding="utf-8")

    return write


def test_the_page_needs_nothing_else_and_shows_the_terminal_s_numbers(page):
    results = results_of()
    text = page(results)
    parsed = Page(text)
    assert parsed.addresses
    assert all(address.startswith("data:image/png;base64,") for address in parsed.addresses)
    assert "@import" not in text
    assert "url(" not in text
    assert "<script" not in text
    said = " ".join(" ".join(parsed.text).split())
    for row in methods_table(results)[1]:
        for cell in row:
            assert cell in said
    assert headline(results) in said
    assert stopping_sentence(results) in said
    assert len(parsed.pictures) == 3
    assert all(len(picture["alt"]) > 20 for picture in parsed.pictures)
    assert 'lang="en"' in text
    assert "width=device-width" in text
    assert "prefers-color-scheme: dark" in text


def test_names_are_escaped(page):
    results = copy.deepcopy(results_of())
    results["model"]["name"] = "<script>alert(1)</script>"
    results["machine"]["cpu"] = "A & B"
    text = page(results)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "A &amp; B" in text


def test_a_fast_run_is_marked_on_the_page(page):
    assert '<p class="warn">All parts ran.' in page(results_of(fast=True))
    assert 'class="warn"' not in page(results_of())
