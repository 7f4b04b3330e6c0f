"""The demo's results as one page that works from disk: no script, no font, no request."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .comparison import LEGEND, forgetting_sentence, headline, methods_table, stopping_sentence
from .plots import drift_curves, drift_heatmap, methods_chart

if TYPE_CHECKING:
    from ..drift import DriftTable
    from ..profile import FreezingProfile

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #59636e; --paper: #fff; --line: #d1d9e0; --card: #f6f8fa;
  --mark: #b34700; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --faint: #9198a1; --paper: #0d1117; --line: #3d444d; --card: #151b23; --mark: #ffb454; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p, ul { margin: .5rem 0; max-width: 46rem; }
.lead { font-size: 1.1rem; }
.faint, caption, figcaption { color: var(--faint); font-size: .88rem; }
.warn { border: 2px solid var(--mark); border-radius: 6px; padding: .6rem .8rem; font-weight: 600; }
figure { margin: .8rem 0; max-width: 46rem; }
.wide figure { max-width: none; }
caption { text-align: left; }
figure img { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; }
.wide img { min-width: 40rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; white-space: nowrap; }
th, td { text-align: right; padding: .35rem .7rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
tr.ours td { font-weight: 600; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .8rem; overflow-x: auto;
  font-size: .85rem; line-height: 1.45; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .92rem; }
dt { color: var(--faint); } dd { margin: 0; min-width: 0; }
"""

_SNIPPET = """\
from peft import get_peft_model
from topotuner_peft import TopoConfig
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({model!r})
model = get_peft_model(base, TopoConfig(profile="profile.json", task_type="CAUSAL_LM"))  # train on a task of yours
"""

_LOAD_SNIPPET = """\
import topotuner_peft  # tells PEFT the adapter's type
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({model!r})
model = PeftModel.from_pretrained(base, "adapter")  # the adapter that this run trained
"""


def write_report(
    results: Mapping[str, Any], path: str | os.PathLike[str], *, table: DriftTable, profile: FreezingProfile
) -> None:
    """Write the page.

    Parameters
    ----------
    results : mapping
        The content of the demo's ``results.json``.
    path : path-like
        HTML file.
    table : DriftTable
        Drift of the prior run.
    profile : FreezingProfile
        The choice made from it.
    """
    heat = _picture(
        lambda file, theme: drift_heatmap(table, file, profile=profile, theme=theme),
        f"Heat map of topological drift by layer and projection; the {len(profile.trained)} trained matrices are framed",
    )
    stopping = results["stopping"]
    curves = _picture(
        lambda file, theme: drift_curves(stopping["history"], file, threshold=stopping["threshold"], theme=theme),
        "Drift and stopping score per epoch",
    )
    chart = _picture(
        lambda file, theme: methods_chart(results["methods"], file, theme=theme),
        "Held-out choice loss of each method against its training time",
    )
    model = results["model"]
    title = f"topotuner demo: {model['name']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(results["created"])}, seed {results["seed"]}</p>',
        f'<p class="{"warn" if results["fast"] else "lead"}">{escape(headline(results))}</p>',
        *_section("What was compared", _methods(results), chart, _rates(results)),
        *_section(
            "What moved: drift on the prior task",
            _paragraph(
                f"The model was fine-tuned on {results['prior']['task']}, all its attention matrices training. Drift is "
                "the Wasserstein distance between a matrix's persistence diagram before and after. The rule: "
                f"{results['profile']['rule']}; reached {results['profile']['share']:.2%} of all parameters."
            ),
            f'<div class="wide">{heat}</div>',
        ),
        *_section("When it stopped", _paragraph(stopping_sentence(results)), curves),
        *_section("What it forgot", _paragraph(forgetting_sentence(results))),
        *_section("The adapter", _adapter(results)),
        *_section(
            "Use it",
            f"<pre>{escape(_SNIPPET.format(model=_loadable(model)))}</pre>",
            f"<pre>{escape(_LOAD_SNIPPET.format(model=_loadable(model)))}</pre>",
        ),
        *_section(
            "What to bear in mind", "<ul>", *(f"<li>{escape(text)}</li>" for text in results["caveats"]), "</ul>"
        ),
        *_section("How it was run", _circumstances(results)),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )
    Path(path).write_text(page, encoding="utf-8")


def _picture(draw: Callable[[Path, str], None], text: str) -> str:
    """Return a picture in both themes as HTML with the files inside."""
    addresses = {}
    with tempfile.TemporaryDirectory() as folder:
        for theme in ("light", "dark"):
            file = Path(folder) / f"{theme}.png"
            draw(file, theme)
            addresses[theme] = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{addresses["dark"]}">'
        f'<img src="{addresses["light"]}" alt="{escape(text)}"></picture></figure>'
    )


def _section(heading: str, *content: str) -> list[str]:
    return [f"<h2>{escape(heading)}</h2>", *content]


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _methods(results: Mapping[str, Any]) -> str:
    columns, rows = methods_table(results)
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in columns)
    lines = [
        f"<tr{' class=ours' if row['key'] == 'topotuner' else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for row, cells in zip(results["methods"], rows, strict=True)
    ]
    examples = results["target"]["test_examples"]
    return (
        f'<div class="wide"><table><caption>{escape(results["target"]["task"])}, {examples} held-out examples'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f'<p class="faint">{escape(LEGEND)}</p>'
    )


def _rates(results: Mapping[str, Any]) -> str:
    items = "".join(
        f"<li>{escape(row['label'])}, learning rate {row['learning_rate']:g}: {escape(row['learning_rate_reason'])}."
        + (f" Matrices: {escape(row['layers'])}." if row["layers"] else "")
        + "</li>"
        for row in results["methods"]
        if row["learning_rate"] is not None
    )
    return f"<ul>{items}</ul>"


def _adapter(results: Mapping[str, Any]) -> str:
    reload, adapter = results["reload"], results["adapter"]
    same = (
        "gave the same logits, bit for bit"
        if reload["bit_equal"]
        else f"gave logits that differ by at most {reload['max_abs_difference']:.2g}"
    )
    return _paragraph(
        f"Saved in the folder {adapter['path']}: {adapter['bytes'] / 1e6:.1f} MB. Loaded in a new process it {same}; "
        "the scores above are of that reloaded adapter."
    )


def _loadable(model: Mapping[str, Any]) -> str:
    return "HuggingFaceTB/SmolLM2-135M-Instruct" if model["name"] == "SmolLM2-135M-Instruct" else model["name"]


def _circumstances(results: Mapping[str, Any]) -> str:
    model, machine = results["model"], results["machine"]
    entries = {
        "model": f"{model['name']}, {model['parameters']:,} parameters, from {model['source']}, licence: {model['licence']}. "
        f"{model['note']}",
        "prior task": f"{results['prior']['task']} ({results['prior']['licence']}); learning rate "
        f"{results['prior']['learning_rate']:g}: {results['prior']['learning_rate_reason']}; "
        f"{results['prior']['seconds']:.0f} s, {results['prior']['drift_seconds']:.1f} s of them to measure drift",
        "target task": f"{results['target']['task']} ({results['target']['licence']})",
        "plan": " ".join(results["plan"]["sentences"]),
        "machine": f"{machine['cpu']}, {machine['threads']} threads, {machine['platform']}",
        "time": f"{results['total_seconds'] / 60:.1f} minutes in all",
        "versions": ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    }
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries.items()) + "</dl>"
