"""Anything that holds weights, read one matrix at a time: live models, checkpoints, adapters, GGUF files.

A source knows which attention matrices it has (`projections`), the weight of each (`weight`) and what a file should
say about it (`info`). Nothing is unpickled. A checkpoint's shard is opened for one tensor and closed again, so that
memory stays at a few matrices however large the model is.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import projections as _projections
from .projections import PROJECTIONS, Projection

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

# Model types whose attention modules are transformers' Conv1D, which stores (input, output).
_CONV1D_TYPES = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}

# owner/name or a name alone, perhaps at a revision (huggingface_hub.utils.validate_repo_id).
_HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*(/[\w.-]+)?)(@(?P<revision>[\w][\w./-]*))?$", re.ASCII)

# What llama.cpp calls the attention matrices, and what they are called here, per architecture (gguf.constants).
_GGUF_TENSOR = re.compile(r"blk\.(?P<layer>\d+)\.attn_(?P<kind>q|k|v|output|qkv)\.weight$")
_GGUF_NAMES = {
    "gpt2": ("transformer.h.{}.attn.", {"qkv": "c_attn", "output": "c_proj"}),
}
_GGUF_DEFAULT = (
    "model.layers.{}.self_attn.",
    {"q": "q_proj", "k": "k_proj", "v": "v_proj", "output": "o_proj", "qkv": "qkv_proj"},
)


class Source:
    """A set of weights.

    Attributes
    ----------
    name : str or None
        What to call it: a path or Hub id.
    projections : list of Projection
        The attention matrices it has, in the order of layers.
    info : dict
        ``name``, ``revision``, ``model_type``, ``parameters`` and ``fingerprint``, as in `DriftTable.base`.
    """

    name: str | None
    projections: list[Projection]
    info: dict[str, Any]

    def module_weight(self, path: str) -> torch.Tensor:
        """Return the weight of one module as it is stored."""
        raise NotImplementedError

    def weight(self, projection: Projection) -> torch.Tensor:
        """Return one matrix, (output features, input features), any floating dtype."""
        return _projections.take_matrix(self.module_weight(projection.module), projection)


@dataclass(frozen=True)
class Selection:
    """Which matrices of a source are meant, see `topotuner_peft.projections.describe_projections`."""

    projections: Sequence[str] = PROJECTIONS
    pattern: str | None = None
    heads: bool = False


def model_info(model: nn.Module, found: Sequence[Projection]) -> dict[str, Any]:
    """Return what a file says about the base model of a live one."""
    config = getattr(model, "config", None)
    inner = getattr(model, "base_model", model)
    name = getattr(config, "_name_or_path", None) or getattr(inner, "name_or_path", None) or None
    ids = [projection.id for projection in found]
    return {
        "name": name,
        "revision": getattr(config, "_commit_hash", None),
        "model_type": getattr(_projections.text_config(config), "model_type", None) if config is not None else None,
        "parameters": _projections.count_parameters(model),
        "fingerprint": _projections.fingerprint(model, ids),
    }


def open_source(
    source: nn.Module | Mapping[str, torch.Tensor] | str | os.PathLike[str],
    selection: Selection | None = None,
    *,
    base: Source | None = None,
    config: Any = None,
    effective: bool = True,
) -> Source:
    """Return a source of weights.

    Parameters
    ----------
    source : torch.nn.Module, mapping of str to torch.Tensor, str or path
        A live model; a state dict; a folder of safetensors, one such file, or a Hub id, perhaps ``id@revision``; a
        PEFT adapter (folder or Hub id); a GGUF file.
    selection : Selection, optional
    base : Source, optional
        What an adapter sits on; by default the base model its configuration names.
    config : object or dict, optional
        The configuration of a state dict; needed where q, k and v are fused, and for single heads.
    effective : bool
        For a live PEFT model, whether active adapters count.

    Raises
    ------
    FileNotFoundError
        If nothing is there, or no safetensors are.
    ValueError
        If it is damaged or quantised, or has none of the matrices; the message names them.
    TypeError
        If it is none of these.
    """
    from torch import nn

    selection = selection or Selection()
    if isinstance(source, nn.Module):
        return _Model(source, selection, effective)
    if isinstance(source, Mapping):
        return _StateDict(source, selection, config)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"Can't read weights from a {type(source).__name__}; expected a model, a Snapshot, a state dict, or the "
            "path or Hub id of a checkpoint, an adapter or a GGUF file."
        )
    path, revision = resolve_path(source)
    if path.suffix == ".gguf":
        return _Gguf(path, selection)
    if (path / "adapter_config.json").exists():
        return _Adapter(path, str(source), revision, selection, base)
    return _Checkpoint(path, str(source), revision, selection)


def is_adapter(source: Any) -> bool:
    """Tell whether a source is the folder or Hub id of a PEFT adapter."""
    return isinstance(source, str | os.PathLike) and (resolve_path(source)[0] / "adapter_config.json").exists()


def resolve_path(source: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """Return a local path for a path or Hub id, and the commit of a Hub id (None for a path).

    Raises
    ------
    FileNotFoundError
        If it is neither there nor the name of a repository.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path, None
    match = _HUB_ID.fullmatch(str(source))
    if match is None or path.suffix in (".gguf", ".safetensors", ".json"):
        raise FileNotFoundError(f"There is no {str(source)!r}: no such file or folder, and not the id of a Hub model.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                match["repo"],
                revision=match["revision"],
                # Not the second copy that some repositories keep as consolidated*.safetensors.
                allow_patterns=["config.json", "*.index.json", "adapter_*", "model*.safetensors"],
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"There is no folder {str(source)!r}, and the Hub did not give a model of that name: {reason}"
        ) from error
    return folder, folder.name


class _Model(Source):
    """A live model, its adapters counted or not."""

    def __init__(self, model: nn.Module, selection: Selection, effective: bool):
        self.config = getattr(model, "config", None)
        self.effective = effective
        self.projections = _projections.find_projections(
            model, projections=selection.projections, pattern=selection.pattern, heads=selection.heads
        )
        self.modules = _projections.matrix_modules(model)
        self.info = model_info(model, self.projections)
        self.name = self.info["name"]

    def module_weight(self, path: str) -> torch.Tensor:
        return _projections.module_weight(path, self.modules[path], self.effective)


class _Stored(Source):
    """Named tensors somewhere: what checkpoints and state dicts have in common."""

    config: Any

    def _describe(
        self, shapes: Mapping[str, tuple[int, ...]], selection: Selection, revision: str | None, *, exact: bool
    ) -> None:
        """Find the matrices among tensors of these names and shapes, and fill in what is known of the model."""
        model_type = _projections.config_field(_projections.text_config(self.config or {}) or {}, "model_type")
        self.tensors = {
            _projections.strip_wrappers(name.removesuffix(".weight")): name
            for name, shape in shapes.items()
            if name.endswith(".weight") and len(shape) == 2
        }
        transposed, by_path = set(), {}
        for path, name in self.tensors.items():
            rows, columns = shapes[name]
            if exact and model_type in _CONV1D_TYPES and re.search(r"\.(attn|mlp)\.c_\w+$", path):
                transposed.add(path)
                rows, columns = columns, rows
            by_path[path] = (rows, columns)
        self.projections = _projections.describe_projections(
            # Files list tensors by name, where layer 10 comes before layer 2.
            dict(sorted(by_path.items(), key=lambda item: _natural(item[0]))),
            config=self.config,
            transposed=transposed,
            projections=selection.projections,
            pattern=selection.pattern,
            heads=selection.heads,
        )
        parameters = 0
        for shape in shapes.values():
            count = 1
            for side in shape:
                count *= side
            parameters += count
        self.info = {
            "name": self.name,
            "revision": revision,
            "model_type": model_type,
            "parameters": parameters,
            "fingerprint": _projections.fingerprint_of(
                self.config,
                [projection.id for projection in self.projections],
                self.module_weight if exact else None,
            ),
        }


class _StateDict(_Stored):
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], selection: Selection, config: Any):
        self.name, self.config, self._values = None, config, tensors
        meta = [name for name, tensor in tensors.items() if tensor.is_meta]
        if meta:
            raise ValueError(f"The tensor {meta[0]!r} of the state dict is on the meta device and has no values.")
        # Tied tensors are there under two names.
        seen, shapes = set(), {}
        for name, tensor in tensors.items():
            place = (tensor.data_ptr(), tuple(tensor.shape))
            if place not in seen:
                shapes[name] = tuple(tensor.shape)
            seen.add(place)
        self._describe(shapes, selection, None, exact=True)

    def module_weight(self, path: str) -> torch.Tensor:
        return self._values[self.tensors[path]].detach()


class _Checkpoint(_Stored):
    """A folder of safetensors, sharded or not, or one such file."""

    def __init__(self, path: Path, name: str, revision: str | None, selection: Selection):
        from safetensors import safe_open

        self.name = name
        self.folder = path if path.is_dir() else path.parent
        config_file = self.folder / "config.json"
        self.config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else None
        quantised = _projections.config_field(self.config or {}, "quantization_config")
        if quantised:
            raise ValueError(
                f"The checkpoint {name!r} is quantised ({quantised.get('quant_method', 'unknown method')}): its files hold "
                "codes, not weights. Load it with transformers and pass the model, or use the unquantised checkpoint."
            )
        self.files = {}
        shapes = {}
        for file in _weight_files(path):
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    self.files[key] = file
                    shapes[key] = tuple(opened.get_slice(key).get_shape())
        self._describe(shapes, selection, revision, exact=True)

    def module_weight(self, path: str) -> torch.Tensor:
        from safetensors import safe_open

        key = self.tensors[path]
        with safe_open(self.files[key], framework="pt") as opened:
            tensor = opened.get_tensor(key)
        if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
            raise ValueError(
                f"The tensor {key!r} of {self.files[key].name} is {tensor.dtype}: quantised, so its numbers are not "
                "the weights. Load the model with transformers and pass it instead."
            )
        return tensor


class _Gguf(_Stored):
    """A GGUF file of llama.cpp; quantised tensors are dequantised one at a time."""

    def __init__(self, path: Path, selection: Selection):
        from .extras import require

        require("gguf", "gguf")
        from gguf import GGUFReader

        self.name = str(path)
        reader = GGUFReader(path)
        self.architecture = str(reader.fields["general.architecture"].contents())

        def count(key: str) -> int | None:
            field = reader.fields.get(f"{self.architecture}.{key}")
            return None if field is None else field.contents()

        heads = count("attention.head_count")
        kv_heads = count("attention.head_count_kv") or heads
        self.config = {
            "model_type": self.architecture,
            "num_hidden_layers": count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": count("attention.key_length"),
        }
        prefix, names = _GGUF_NAMES.get(self.architecture, _GGUF_DEFAULT)
        self._entries = {}
        shapes = {}
        for tensor in reader.tensors:
            shape = tuple(int(side) for side in reversed(tensor.shape))
            match = _GGUF_TENSOR.fullmatch(tensor.name)
            name = tensor.name
            if match and match["kind"] in names:
                name = prefix.format(match["layer"]) + names[match["kind"]] + ".weight"
            shapes[name] = shape
            self._entries[name] = (tensor, match["kind"] if match else None)
        self._describe(shapes, selection, None, exact=False)

    def module_weight(self, path: str) -> torch.Tensor:
        import torch
        from gguf.quants import dequantize

        tensor, kind = self._entries[self.tensors[path]]
        values = dequantize(tensor.data, tensor.tensor_type)
        if self.architecture == "llama" and kind in ("q", "k"):
            values = _interleaved_to_halves(
                values, self.config["num_attention_heads" if kind == "q" else "num_key_value_heads"]
            )
        return torch.from_numpy(values.copy())


class _Adapter(Source):
    """A PEFT adapter on a base. PEFT computes what each adapted layer's weight becomes, one layer at a time."""

    def __init__(self, path: Path, name: str, revision: str | None, selection: Selection, base: Source | None):
        import torch
        from peft import PeftConfig, PeftModel

        self.name = name
        config = PeftConfig.from_pretrained(path)
        if base is None:
            if not config.base_model_name_or_path:
                raise ValueError(f"The adapter {name!r} does not name its base model; pass the base beside it.")
            base = open_source(config.base_model_name_or_path, selection)
        self.base = base
        self.projections = base.projections
        recorded = getattr(config, "base_fingerprint", None)
        if recorded is not None:
            _warn_of_another_base(name, recorded, base)
            # Checked; below, the tuner would see a base without its weights.
            config.base_fingerprint = None
        kept = {p.module for p in base.projections if p.module.rpartition(".")[2] in (config.modules_to_save or ())}
        if kept:
            raise ValueError(
                f"The adapter {name!r} keeps whole copies of {_projections.summarise_names(kept)} (modules_to_save); "
                "load it with PEFT and pass the model."
            )
        skeleton = _skeleton(base, name)
        # PEFT moves an adapter to its base layer's device, which must not be meta: one zero, seen as a whole matrix.
        zero = torch.zeros(())
        for module in _projections.matrix_modules(skeleton).values():
            module.weight = torch.nn.Parameter(zero.expand(module.weight.shape), requires_grad=False)
        # Only the adapter's own tensors come into memory.
        model = PeftModel.from_pretrained(skeleton, path, config=config, low_cpu_mem_usage=True)
        model.requires_grad_(False)
        self.modules = _projections.matrix_modules(model)
        paths = {projection.module for projection in self.projections}
        self._partners = _projections.match_ids(paths, self.modules)
        self.info = {**base.info, "name": name, "revision": revision}
        adapted = [path for path in self._partners.values() if path and self._is_adapted(path)]
        if not adapted:
            raise ValueError(
                f"The adapter {name!r} changes none of the matrices that are measured; its target_modules are "
                f"{getattr(config, 'target_modules', None)}."
            )
        self._torch = torch

    def _is_adapted(self, path: str) -> bool:
        from peft.tuners.tuners_utils import BaseTunerLayer

        return isinstance(self.modules[path], BaseTunerLayer)

    def module_weight(self, path: str) -> torch.Tensor:
        weight = self.base.module_weight(path)
        partner = self._partners[path]
        if partner is None or not self._is_adapted(partner):
            return weight
        module = self.modules[partner]
        layer = _projections.base_layer(module)
        empty = layer.weight
        if tuple(empty.shape) != tuple(weight.shape):
            raise ValueError(
                f"{path!r} is {tuple(weight.shape)} in the base and {tuple(empty.shape)} in the model that the adapter "
                f"{self.name!r} was made for."
            )
        layer.weight = self._torch.nn.Parameter(weight.float(), requires_grad=False)
        try:
            return _projections.module_weight(partner, module, True)
        finally:
            layer.weight = empty


def _warn_of_another_base(adapter: str, recorded: dict[str, Any], base: Source) -> None:
    differences = _projections.fingerprint_differences(recorded, base.info["fingerprint"])
    if differences:
        warnings.warn(
            f"The adapter {adapter!r} was trained on another base model than {base.name!r}: {'; '.join(differences)}.",
            stacklevel=2,
        )


def _skeleton(base: Source, adapter: str) -> nn.Module:
    """Return the base model without its weights, for PEFT to put an adapter on."""
    import torch
    import transformers

    config = getattr(base, "config", None)
    if config is None or isinstance(base, _Gguf):
        raise ValueError(
            f"The adapter {adapter!r} needs the configuration of its base model, and {base.name!r} has none that "
            "transformers reads. Pass the folder or Hub id of the base model."
        )
    if isinstance(config, Mapping):
        values = dict(config)
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if kind is None:
            return transformers.AutoModelForCausalLM.from_config(config)
        return kind._from_config(config)


def _weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint.

    Raises
    ------
    FileNotFoundError
        If there are none, or a shard that the index lists is missing.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"{str(path)!r} is not a safetensors or GGUF file; convert it first.")
        return [path]
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (path / name).exists()]
        if missing:
            raise FileNotFoundError(
                f"{str(path)!r} lacks {len(missing)} of its {len(names)} shards, {missing[0]!r} among them; "
                "download it again."
            )
        return [path / name for name in names]
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
        remedy = (
            f"it has {pickled[0]!r}, which is a pickle and is not read: save the model again as safetensors"
            if pickled
            else "expected model.safetensors, shards with their index, or an adapter"
        )
        raise FileNotFoundError(f"There are no safetensors in {str(path)!r}; {remedy}.")
    return files


def _natural(name: str) -> list[Any]:
    """Return a sort key by which layer 2 comes before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _interleaved_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo the order that llama.cpp keeps the rows of q and k in.

    Its rotary embedding pairs neighbouring rows of a head, transformers' pairs a row of the first half with one
    of the second: row 2i of a head there is row i here, row 2i + 1 is row i + d/2.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


__all__ = ["Selection", "Source", "is_adapter", "open_source", "resolve_path"]
