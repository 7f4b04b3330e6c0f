r"""Math word problems with worked solutions, made on the spot by the package ``reasoning-gym`` 0.1.25.

The texts are GSM8K-style questions from the generator ``gsm_symbolic``; a completion is the worked solution
and ends in ``#### N``. Any number of them can be had.

*Splits.* A question goes to the split that the hash of its text names (`topotuner_peft.tasks.split_of`), so no
question is in two splits, whatever the seeds and sizes; the splits also draw from disjoint ranges of the
generator's seeds. All splits share the generator's hundred-odd templates: a test row is a known kind of story
with new names and numbers, which measures fitting to these templates, not mathematics at large.

*What is changed.* The sentence that the generator appends to each question ("Give the result as your final
answer. …") is taken off; the last line gives the answer as the generator normalises it (``72``, where some
solutions say ``72.0``); rows whose solution shows floating-point noise (``0.30000000000000004``, 2 % of them)
are left out.

*Provenance and licence.* ``reasoning-gym`` is Apache-2.0 and ships the templates as Python code, without a
statement of their own origin. They follow the form of the GSM-Symbolic paper [1]_, whose data have their own
licence; the package's maintainers say in public that they wrote theirs anew for that reason [2]_. Neither that,
nor how close the wording is to GSM8K's, has been verified here.

References
----------
.. [1] I. Mirzadeh et al., "GSM-Symbolic: Understanding the Limitations of Mathematical Reasoning in Large
   Language Models", arXiv:2410.05229.
.. [2] https://github.com/open-thought/reasoning-gym, the discussion "Add GSM8K-symbolic".
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from topotuner_peft.demo.assets import REASONING_GYM, fetch
from topotuner_peft.tasks import SPLITS, Task, check_request, split_of

_SUFFIX = " Give the result as your final answer. Do not include units."
_NOISE = re.compile(r"\d\.\d{5,}")
# The generator seeds row i with `seed + i`: two seeds closer than a data set's length share rows. A million
# rows per seed, and a million seeds per split, keep all ranges apart.
_ROWS_PER_SEED = 10**6
_SEEDS_PER_SPLIT = 10**6


def load(
    split: str,
    size: int | None = 1000,
    seed: int = 0,
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
) -> list[dict]:
    """Make math word problems.

    Parameters
    ----------
    split : {"train", "validation", "test"}
        Which split.
    size : int, default 1000
        How many rows, at most 100,000. There is no "all": None is an error.
    seed : int, default 0
        Which rows, below a million. With the same seed, a smaller request is the beginning of a larger one.
    cache_dir : path-like, optional
        Where the package's wheel is kept, see `topotuner_peft.demo.assets`.
    data_dir : path-like, optional
        Not used.

    Returns
    -------
    list of dict
        Rows ``{"prompt": str, "completion": str, "answer": str}``, all prompts different; `answer` is the
        number at the end of the completion.

    Raises
    ------
    ValueError
        If the split is unknown, or size or seed is out of range.
    topotuner_peft.demo.assets.AssetError
        If the wheel cannot be fetched.
    """
    check_request(TASK.name, split, SPLITS, size, seed)
    if size is None or size > 100_000:
        raise ValueError(f"math_word_problems makes rows without end: ask for a size up to 100000, not {size}.")
    if seed >= _SEEDS_PER_SPLIT:
        raise ValueError(f"seed must be below {_SEEDS_PER_SPLIT}, got {seed}.")
    rows = {}
    for question, solution, answer in _problems(split, seed, cache_dir):
        if split_of(question) != split or _NOISE.search(solution):
            continue
        row = {
            "prompt": f"Question: {question}\nAnswer:",
            "completion": f" {solution}\n#### {answer}",
            "answer": answer,
        }
        rows.setdefault(question, row)
        if len(rows) == size:
            return list(rows.values())
    raise ValueError(
        f"The generator gave only {len(rows)} different {split} questions for seed {seed}: ask for fewer than {size}."
    )


def _problems(split: str, seed: int, cache_dir: Path | None) -> Iterator[tuple[str, str, str]]:
    """Yield question, worked solution without its last line, and answer, from this split's and seed's range."""
    module, templates = _generator(fetch(REASONING_GYM, cache_dir))
    start = (SPLITS.index(split) * _SEEDS_PER_SPLIT + seed) * _ROWS_PER_SEED
    rows = module.GSMSymbolicDataset(module.GSMSymbolicDatasetConfig(seed=start, size=_ROWS_PER_SEED))
    rows._generators = templates
    for row in rows:
        solution, _, _ = row["metadata"]["answer_cot"].rpartition("\n#### ")
        yield row["question"].removesuffix(_SUFFIX), solution, row["answer"]


@cache
def _generator(wheel: Path) -> tuple[ModuleType, dict]:
    """Import the one generator from the wheel, and none of the other hundred with what they depend on.

    Returns
    -------
    tuple
        Its module, and its templates: a data set of the generator imports them when it is first used, by when its
        packages are gone from ``sys.modules``.
    """
    name = "reasoning_gym"
    # An installed reasoning-gym is put aside for the moment, not replaced.
    aside = {key: sys.modules.pop(key) for key in list(sys.modules) if key.partition(".")[0] == name}
    try:
        # Packages without their `__init__`, which would import everything.
        for package in (name, f"{name}.coaching", f"{name}.arithmetic"):
            module = ModuleType(package)
            module.__path__ = [f"{wheel}/{package.replace('.', '/')}"]
            sys.modules[package] = module
        module = import_module(f"{name}.arithmetic.gsm_symbolic.gsm_symbolic")
        return module, module.GSMSymbolicDataset(module.GSMSymbolicDatasetConfig(size=1)).generators
    finally:
        for key in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[key]
        sys.modules.update(aside)


TASK = Task(
    name="math_word_problems",
    title="math word problems with worked solutions",
    kind="completion",
    splits=SPLITS,
    load=load,
)
