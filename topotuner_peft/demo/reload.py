"""Load a saved adapter in a process of its own and score it: ``python -m topotuner_peft.demo.reload JOB.json``.

The job names the base model, the adapter, what to score on and where the results go.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np


def main(job_file: str) -> None:
    """Do the job: load, compute the reference logits, score, write results."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import topotuner_peft  # noqa: F401 - registers the method
    from topotuner_peft.demo.evaluation import HeldOut, evaluate, reference_logits
    from topotuner_peft.demo.plan import Limits
    from topotuner_peft.drift import write_json

    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    started = time.perf_counter()
    base = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, job["adapter"])
    seconds = time.perf_counter() - started
    cache_dir = Path(job["cache_dir"]) if job["cache_dir"] else None
    held_out = HeldOut.load(Limits(**job["limits"]), job["seed"], cache_dir)
    np.save(job["logits"], reference_logits(model, tokenizer, held_out), allow_pickle=False)
    write_json(job["result"], {**evaluate(model, tokenizer, held_out), "load_seconds": seconds})


if __name__ == "__main__":
    main(sys.argv[1])
