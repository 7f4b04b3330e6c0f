"""The command line: exit statuses, one-line errors, and what it does not import."""

import subprocess
import sys
from pathlib import Path

import pytest

import topotuner_cli
from topotuner_peft import extras
from topotuner_peft.demo import run as demo_run

ROOT = Path(topotuner_cli.__file__).parent


def test_help_names_the_commands_and_imports_nothing_heavy():
    code = (
        "import sys, topotuner_cli\n"
        "try: topotuner_cli.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'peft', 'transformers', 'numpy', 'topotuner_peft'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


def test_without_a_command_it_shows_the_help_and_fails(capsys):
    assert topotuner_cli.main([]) == 2
    assert "usage: topotuner" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["dance"], ["demo", "--seed", "x"], ["demo", "--fats"]])
def test_wrong_use_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        topotuner_cli.main(arguments)
    assert end.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_version(capsys):
    assert topotuner_cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("topotuner 0.")


def test_options_reach_the_demo(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(demo_run, "run_demo", lambda folder, **options: given.update(options, folder=folder))
    arguments = ["demo", "--fast", "--model", "m", "--output-dir", str(tmp_path), "--seed", "7", "--restart"]
    assert topotuner_cli.main(arguments) == 0
    assert callable(given.pop("echo"))
    assert given == {"folder": str(tmp_path), "fast": True, "model": "m", "seed": 7, "restart": True}


def test_an_error_is_one_line_and_status_1(monkeypatch, capsys, tmp_path):
    def fail(*_, **__):
        raise demo_run.DemoError("the thing\n  is broken")

    monkeypatch.setattr(demo_run, "run_demo", fail)
    assert topotuner_cli.main(["demo", "--output-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "topotuner demo: the thing is broken\n"
    with pytest.raises(demo_run.DemoError):
        topotuner_cli.main(["demo", "--debug", "--output-dir", str(tmp_path)])


def test_ctrl_c_is_not_a_traceback(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_run, "run_demo", interrupt)
    assert topotuner_cli.main(["demo"]) == 1
    assert capsys.readouterr().err == "\ntopotuner demo: stopped\n"


def test_a_missing_extra_is_named_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "gguf" else object())
    assert topotuner_cli.main(["demo"]) == 1
    said = capsys.readouterr().err
    assert "gguf" in said
    assert 'pip install "topotuner-peft[demo]"' in said


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    for options in ([], ["--restart"]):
        assert topotuner_cli.main(["demo", "--output-dir", str(tmp_path), *options]) == 1
        assert "is not empty and holds no run of this demo" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_of_other_settings_is_not_mixed_with_this_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo_run._Demo, "run", lambda self: {})
    assert topotuner_cli.main(["demo", "--output-dir", str(tmp_path / "d")]) == 0
    assert topotuner_cli.main(["demo", "--output-dir", str(tmp_path / "d"), "--seed", "3"]) == 1
    said = capsys.readouterr().err
    assert "another seed" in said
    assert "--restart" in said
    (tmp_path / "d" / "adapter").mkdir()
    (tmp_path / "d" / "mine.txt").write_text("keep me")
    assert topotuner_cli.main(["demo", "--output-dir", str(tmp_path / "d"), "--seed", "3", "--restart"]) == 0
    assert not (tmp_path / "d" / "adapter").exists()
    assert (tmp_path / "d" / "mine.txt").read_text() == "keep me"
