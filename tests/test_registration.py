"""What importing the package does, seen from processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parents[1]

_FAMILY = """
import sys, torch, transformers
from tiny import build, logits
"""


def python(code, *arguments, options=(), fails=False):
    """Run code in a fresh process; return what it printed, or what it complained about if it should fail."""
    path = os.pathsep.join([str(_REPOSITORY), str(_REPOSITORY / "tests")])
    done = subprocess.run(
        [sys.executable, *options, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode != 0) is fails, done.stderr
    return done.stderr if fails else done.stdout


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A saved adapter on a saved base model."""
    folder = tmp_path_factory.mktemp("saved")
    python(
        _FAMILY
        + """
import topotuner_peft
from peft import get_peft_model
root = sys.argv[1]
build("llama").save_pretrained(root + "/base")
base = transformers.AutoModelForCausalLM.from_pretrained(root + "/base")
config = topotuner_peft.TopoConfig(matrices=["model.layers.1.self_attn.v_proj"], init_weights=False)
model = get_peft_model(base, config)
model.eval().save_pretrained(root + "/adapter")
torch.save(logits(model), root + "/logits.pt")
""",
        folder,
    )
    return folder


def test_one_import_makes_every_way_of_loading_work(adapter):
    out = python(
        _FAMILY
        + """
import peft
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel, PeftType
import topotuner_peft
root = sys.argv[1]
expected = torch.load(root + "/logits.pt")
config = PeftConfig.from_pretrained(root + "/adapter")
assert type(config) is topotuner_peft.TopoConfig, type(config)
for load in (
    lambda: AutoPeftModelForCausalLM.from_pretrained(root + "/adapter"),
    lambda: PeftModel.from_pretrained(build("llama"), root + "/adapter"),
    lambda: peft.get_peft_model(build("llama"), config),
):
    model = load()
    assert type(model.base_model) is topotuner_peft.TopoModel
print(torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(root + "/adapter").eval()), expected))
assert peft.get_model_status(model).peft_types == {"default": "TOPOTUNER"}, peft.get_model_status(model)
""",
        adapter,
    )
    assert out.split() == ["True"]


def test_loading_without_our_import_is_a_key_error_that_names_the_method(adapter):
    # PEFT has no plugins; the model card and the README say which line is missing.
    out = python(
        _FAMILY
        + """
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
folder = sys.argv[1] + "/adapter"
for load in (
    lambda: PeftModel.from_pretrained(build("llama"), folder),
    lambda: PeftConfig.from_pretrained(folder),
    lambda: AutoPeftModelForCausalLM.from_pretrained(folder),
):
    try:
        load()
    except KeyError as error:
        print(repr(error))
import topotuner_peft
PeftModel.from_pretrained(build("llama"), folder)
""",
        adapter,
    )
    assert out.splitlines() == ["KeyError('TOPOTUNER')"] * 3


def test_importing_again_and_reloading_are_harmless(adapter):
    out = python(
        _FAMILY
        + """
import importlib
import topotuner_peft, topotuner_peft.tuner
import topotuner_peft.tuner as again
from peft import PeftModel, PeftType, get_peft_model
root = sys.argv[1]
count = len(PeftType)
def works():
    loaded = PeftModel.from_pretrained(build("llama"), root + "/adapter")
    assert torch.equal(logits(loaded), torch.load(root + "/logits.pt"))
    config = topotuner_peft.TopoConfig(target_modules=["v_proj"])
    get_peft_model(build("llama"), config)
    assert len(PeftType) == count
works()
for name in ("topotuner_peft", "topotuner_peft.tuner", "topotuner_peft.tuner.registration", "topotuner_peft"):
    importlib.reload(sys.modules[name])
    works()
for name in [n for n in sys.modules if n.startswith("topotuner_peft.tuner")]:
    importlib.reload(sys.modules[name])
importlib.reload(topotuner_peft)
# A notebook's clean slate: everything of ours forgotten, then imported anew.
for name in [n for n in sys.modules if n.split(".")[0] == "topotuner_peft"]:
    del sys.modules[name]
import topotuner_peft
works()
print("fine")
""",
        adapter,
    )
    assert out.split() == ["fine"]


def test_the_new_type_is_a_member_of_pefts_enum_in_every_way():
    out = python(
        """
import copy, json, pickle
import topotuner_peft
from peft import PeftType
from peft.utils.peft_types import PeftType as Same
kind = PeftType("TOPOTUNER")
assert kind is PeftType.TOPOTUNER is PeftType["TOPOTUNER"] is Same.TOPOTUNER
assert isinstance(kind, PeftType) and isinstance(kind, str)
assert kind in PeftType and kind in list(PeftType) and "TOPOTUNER" in PeftType.__members__
assert kind == "TOPOTUNER" and kind.value == kind.name == "TOPOTUNER" and hash(kind) == hash("TOPOTUNER")
assert {"TOPOTUNER": 1}[kind] == 1
assert json.dumps(kind) == '"TOPOTUNER"'
assert str(kind) == str(PeftType.LORA).replace("LORA", "TOPOTUNER")
assert repr(kind) == repr(PeftType.LORA).replace("LORA", "TOPOTUNER")
for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
    assert pickle.loads(pickle.dumps(kind, protocol)) is kind
assert copy.copy(kind) is copy.deepcopy(kind) is kind
try:
    PeftType.TOPOTUNER = "x"
except AttributeError:
    print("fine")
"""
    )
    assert out.split() == ["fine"]


def test_a_name_that_another_package_owns_is_refused():
    error = python(
        """
from peft import LoraConfig
from peft.tuners.lora import LoraModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
import importlib.util, sys
from topotuner_peft.tuner.registration import register
class Stranger(LoraConfig):
    pass
register(Stranger, LoraModel)
""",
        fails=True,
    )
    assert "PEFT already has a method 'topotuner', from topotuner_peft.tuner.config.TopoConfig" in error
    assert "import only one of them" in error


def test_our_import_brings_in_nothing_heavy():
    out = python(
        """
import sys
import peft
before = set(sys.modules)
import topotuner_peft
print(*sorted(set(sys.modules) - before))
"""
    )
    added = set(out.split())
    assert "topotuner_peft.tuner.model" in added
    heavy = {
        "accelerate", "datasets", "gguf", "gudhi", "hypothesis", "matplotlib", "ot", "pandas", "pyarrow",
        "ripser", "scipy", "sklearn", "transformers.trainer", "trl",
    }  # fmt: skip
    assert not {name for name in added if any(name == h or name.startswith(h + ".") for h in heavy)}


def test_no_warning_of_ours():
    # Those of torch, transformers and PEFT on their import are theirs, and come first.
    python(
        """
import warnings
import peft
warnings.simplefilter("error")
import topotuner_peft
from topotuner_peft import FreezingProfile, measure_drift
""",
        options=("-W", "error:::topotuner_peft"),
    )


def test_every_public_name_is_there():
    out = python(
        """
import topotuner_peft
assert set(topotuner_peft.__all__) <= set(dir(topotuner_peft))
for name in topotuner_peft.__all__:
    getattr(topotuner_peft, name)
try:
    topotuner_peft.nothing
except AttributeError as error:
    print(error)
"""
    )
    assert out.strip() == "module 'topotuner_peft' has no attribute 'nothing'"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], [], ["nonsense"]])
def test_the_commands_help_imports_neither_torch_nor_peft(arguments):
    out = python(
        f"""
import sys
import topotuner_cli
try:
    topotuner_cli.main({arguments!r})
except SystemExit:
    pass
print("loaded:", *(n for n in ("torch", "peft", "transformers", "numpy", "topotuner_peft") if n in sys.modules))
"""
    )
    assert out.strip().splitlines()[-1] == "loaded:"


def test_pefts_own_methods_are_as_before():
    out = python(
        _FAMILY
        + """
import peft
before = {k: (v, peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING.get(k)) for k, v in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
members = list(peft.PeftType)
import topotuner_peft
assert list(peft.PeftType)[: len(members)] == members and len(peft.PeftType) == len(members) + 1
for kind, pair in before.items():
    assert (peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind], peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING.get(kind)) == pair
peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["v_proj"]))
print("fine")
"""
    )
    assert out.split() == ["fine"]
