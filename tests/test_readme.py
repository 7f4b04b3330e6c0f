"""The README's code runs as it stands, in an empty folder, on a small model of the same family."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from topotuner_peft import DriftTable, FreezingProfile, measure_drift

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)

# What a machine without the Hub needs: uploads go into folders of the same name.
UPLOADS = """
import huggingface_hub, pathlib, peft

def push(self, repo_id, **kwargs):
    self.save_pretrained(repo_id)

class Api:
    def __init__(self, token=None): pass
    def create_repo(self, repo_id, private=None, exist_ok=False):
        pathlib.Path(repo_id).mkdir(parents=True, exist_ok=exist_ok)
    def upload_file(self, *, path_or_fileobj, path_in_repo, repo_id, commit_message):
        pathlib.Path(repo_id, path_in_repo).write_bytes(path_or_fileobj)
        return type("Commit", (), {"commit_url": repo_id})

peft.PeftModel.push_to_hub = push
huggingface_hub.HfApi = Api
"""


def save_model(folder, tokenizer, noise=0.0):
    import torch

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_every_block_is_of_a_kind_that_is_checked():
    assert {kind for kind, _ in BLOCKS} == {"bash", "python"}
    assert sum(kind == "python" for kind, _ in BLOCKS) >= 5


@pytest.mark.slow
def test_the_python_blocks_run(tmp_path, tiny_tokenizer):
    # Folders of these names stand for the models on the Hub.
    base = save_model(tmp_path / "HuggingFaceTB/SmolLM2-135M", tiny_tokenizer)
    tuned = save_model(tmp_path / "HuggingFaceTB/SmolLM2-135M-Instruct", tiny_tokenizer, noise=0.01)
    table = measure_drift(tuned, base, progress=False)
    FreezingProfile.from_drift(table).save(tmp_path / "topotuner-demo" / "profile.json")
    rows = [{"prompt": f"Question: {i}", "completion": " yes yes no"} for i in range(8)]
    for name in ("prior.jsonl", "target.jsonl"):
        (tmp_path / name).write_text("\n".join(json.dumps(row) for row in rows))
    code = UPLOADS + "\n".join(text for kind, text in BLOCKS if kind == "python")
    assert "`use_cpu=True`" in README
    code = code.replace('SFTConfig("', 'SFTConfig(use_cpu=True, output_dir="')
    script = tmp_path / "readme.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-W", "error:::topotuner_peft", str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trainable params" in done.stdout
    assert "layers that train" in done.stdout
    assert (tmp_path / "drift.png").stat().st_size > 5000
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "me" / "my-profile" / "profile.json").is_file()
    commands = [
        line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if line[:9] == "topotuner"
    ]
    assert commands
    for command in commands:
        arguments = shlex.split(command, comments=True)[1:]
        done = subprocess.run(
            [sys.executable, "-m", "topotuner_cli", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert "drift" in done.stdout
    assert len(DriftTable.load(tmp_path / "drift.json")) == 24


def test_the_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for kind, text in BLOCKS:
        if kind != "bash":
            continue
        for target in re.findall(r"^make ([\w-]+)", text, flags=re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_links_and_pictures_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).is_file(), link
