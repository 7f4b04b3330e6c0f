"""Which attention projection matrices a model has, what they are called, and what their weights are.

A *matrix id* is the key used everywhere (drift tables, profiles, the tuner, files): the path of the module in
the base model, such as ``model.layers.3.self_attn.v_proj``. Where a model fuses several projections into one
module, the id carries the projection as a suffix: ``transformer.h.3.attn.c_attn[q]``. A single head's rows of a q,
k or v matrix, or its columns of an o matrix, are a matrix of their own: ``model.layers.3.self_attn.v_proj[head=1]``,
``transformer.h.3.attn.c_attn[q,head=1]``.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

PROJECTIONS = ("q", "k", "v", "o")

# Last one or two path segments of the module -> the projections its output rows hold. Sources: the attention
# classes of transformers 5 (modeling_*.py) of the families named on the right.
_MODULE_NAMES: dict[str, tuple[str, ...]] = {
    "q_proj": ("q",),  # Llama, Mistral, Qwen 2/3, Gemma 2/3, OPT, StarCoder2, Mixtral, Qwen-MoE
    "k_proj": ("k",),
    "v_proj": ("v",),
    "o_proj": ("o",),
    "self_attn.out_proj": ("o",),  # OPT
    "self_attn.dense": ("o",),  # Phi-2
    "qkv_proj": ("q", "k", "v"),  # Phi-3, Phi-4
    "attn.c_attn": ("q", "k", "v"),  # GPT-2
    "attn.c_proj": ("o",),
    "query_key_value": ("q", "k", "v"),  # GPT-NeoX, Pythia, Falcon, BLOOM: rows interleaved per head
    "attention.dense": ("o",),  # GPT-NeoX, Pythia
    "self_attention.dense": ("o",),  # Falcon, BLOOM
    "self.query": ("q",),  # BERT, RoBERTa
    "self.key": ("k",),
    "self.value": ("v",),
    "attention.output.dense": ("o",),
    "SelfAttention.q": ("q",),  # T5
    "SelfAttention.k": ("k",),
    "SelfAttention.v": ("v",),
    "SelfAttention.o": ("o",),
}

# Towers beside the language model in multimodal models: they have projections of the same names.
_OTHER_TOWERS = re.compile(r"(^|\.)(vision\w*|visual|audio\w*|image_\w+|speech\w*|\w*_tower)(\.|$)")

# What wrappers put into a path: torch.compile, FSDP, activation checkpointing, DDP, PEFT.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
_PEFT_PREFIX = "base_model.model."

_LAYER = re.compile(r"(?:^|\.)(?P<stack>[^.\d][^.]*)\.(?P<index>\d+)\.")
_HEAD = re.compile(r"(?:^|,)head=(?P<head>\d+)$")
_ID = re.compile(r"(?P<module>[^\[\]]+)(\[(?P<block>[^\[\]]+)\])?$")


@dataclass(frozen=True)
class Projection:
    """One attention projection matrix of a model.

    Attributes
    ----------
    id : str
        The matrix id.
    module : str
        Path of the module that holds it, free of wrappers.
    layer : int
        Index of the transformer layer.
    projection : str
        ``"q"``, ``"k"``, ``"v"`` or ``"o"``; whatever the caller's pattern names for unknown models.
    shape : tuple of int
        (output features, input features) of this matrix alone; its rows are the points of its cloud.
    rows : tuple of (int, int) or None
        Half-open ranges of the module's output features that belong to the matrix; None for all of them.
    transposed : bool
        Whether the module stores its weight as (input, output), as GPT-2's ``Conv1D`` does.
    columns : tuple of (int, int) or None
        Half-open range of the module's input features, for a head of an o matrix; None for all of them.
    """

    id: str
    module: str
    layer: int
    projection: str
    shape: tuple[int, int]
    rows: tuple[tuple[int, int], ...] | None = None
    transposed: bool = False
    columns: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Number of parameters of the matrix."""
        return self.shape[0] * self.shape[1]


def split_id(matrix_id: str) -> tuple[str, str | None]:
    """Split a matrix id into the module's path and the block inside it (None for the whole module)."""
    found = _ID.match(matrix_id)
    if not found:
        raise ValueError(f"{matrix_id!r} is not a matrix id; expected 'path.of.module' or 'path.of.module[q]'.")
    return found["module"], found["block"]


def strip_wrappers(path: str) -> str:
    """Return a module path as the base model has it, without what compilers, shards and PEFT insert."""
    path = _WRAPPERS.sub("", path).lstrip(".")
    while path.startswith(("module.", _PEFT_PREFIX)):
        path = path.removeprefix("module.").removeprefix(_PEFT_PREFIX)
    return path


def layer_index(path: str) -> int | None:
    """Return the index of the transformer layer a path lies in: its first number, not an expert's."""
    found = _LAYER.search(path)
    return int(found["index"]) if found else None


def layer_stack(path: str) -> str | None:
    """Return the path of the list of layers that a module lies in (``model.layers``), or None."""
    found = _LAYER.search(path)
    return path[: found.end("stack")] if found else None


def _tail(matrix_id: str) -> str:
    """Return the part of an id from its layer stack on, which wrappers and heads do not change."""
    found = _LAYER.search(strip_wrappers(matrix_id))
    return found.string[found.start("stack") :] if found else strip_wrappers(matrix_id)


def match_ids(wanted: Iterable[str], available: Iterable[str]) -> dict[str, str | None]:
    """Find the same matrices under the names another wrapping of the model gives them.

    ``layers.0.…`` of a bare model, ``model.layers.0.…`` of the causal language model and
    ``model.language_model.layers.0.…`` inside a vision-language model are one matrix.

    Parameters
    ----------
    wanted, available : iterable of str
        Matrix ids.

    Returns
    -------
    dict of str to (str or None)
        For each wanted id the available one, or None where there is none.

    Raises
    ------
    ValueError
        If a wanted id fits several available ones, as in a model with an encoder and a decoder.
    """
    available = list(available)
    exact = set(available)
    by_tail: dict[str, list[str]] = {}
    for candidate in available:
        by_tail.setdefault(_tail(candidate), []).append(candidate)
    result: dict[str, str | None] = {}
    for name in wanted:
        if name in exact:
            result[name] = name
            continue
        candidates = by_tail.get(_tail(name), [])
        if len(candidates) > 1:
            raise ValueError(
                f"The matrix {name!r} fits several matrices of this model: {candidates}. "
                "Use ids with the model's full paths."
            )
        result[name] = candidates[0] if candidates else None
    return result


def summarise_names(names: Iterable[str], limit: int = 20) -> str:
    """Return module paths for an error message, layer numbers folded into ``*``, at most ``limit`` of them."""
    counts: dict[str, int] = {}
    for name in names:
        folded = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        counts[folded] = counts.get(folded, 0) + 1
    lines = [f"{name} (x{count})" if count > 1 else name for name, count in counts.items()]
    more = f", and {len(lines) - limit} more" if len(lines) > limit else ""
    return ", ".join(lines[:limit]) + more if lines else "none"


def _kind(path: str) -> tuple[str, ...] | None:
    """Return the projections that the module of this path holds, or None if it is no attention projection."""
    segments = path.split(".")
    for length in (3, 2, 1):
        kinds = _MODULE_NAMES.get(".".join(segments[-length:]))
        if kinds is not None:
            return kinds
    return None


def config_field(config: Any, *names: str) -> Any:
    """Return the first of some fields that a model configuration (object or dict) has and that is not None."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    return None


def text_config(config: Any) -> Any:
    """Return the language model's part of a configuration."""
    return config_field(config, "text_config") or config


def _head_counts(config: Any) -> tuple[int | None, int | None]:
    """Return how many query heads and key-value heads a configuration speaks of; None where it does not."""
    config = text_config(config) if config is not None else None
    heads = config_field(config, "num_attention_heads", "n_head") if config is not None else None
    if not heads:
        return None, None
    kv_heads = config_field(config, "num_key_value_heads", "num_kv_heads") or heads
    if config_field(config, "model_type") == "falcon":
        # Falcon's num_kv_heads only counts where the new decoder architecture or multi-query attention is on
        # (modeling_falcon.py, _split_heads).
        if config_field(config, "new_decoder_architecture"):
            kv_heads = config_field(config, "num_kv_heads") or heads
        else:
            kv_heads = 1 if config_field(config, "multi_query") else heads
    return heads, kv_heads


def split_heads(projection: Projection, config: Any) -> list[Projection]:
    """Take a projection apart into its attention heads.

    A head of q, k or v is a range of rows; a head of o is a range of columns, those that read that head's output.

    Parameters
    ----------
    projection : Projection
    config : object or dict
        The model's configuration, which says how many heads there are.

    Returns
    -------
    list of Projection
        One per head; of k and v one per key-value head.

    Raises
    ------
    ValueError
        If the number of heads is not known or does not divide the matrix.
    """
    heads, kv_heads = _head_counts(config)
    count = {"q": heads, "o": heads, "k": kv_heads, "v": kv_heads}.get(projection.projection)
    height, width = projection.shape
    side = width if projection.projection == "o" else height
    if count is None or side % count:
        raise ValueError(
            f"{projection.id!r}, {height} × {width}, can't be taken apart into heads: "
            + ("the number of its heads is not known." if count is None else f"{count} heads do not divide it.")
        )
    size = side // count
    module, block = split_id(projection.id)
    parts = []
    for head in range(count):
        start, stop = head * size, (head + 1) * size
        name = f"{module}[{block + ',' if block else ''}head={head}]"
        if projection.projection == "o":
            parts.append(replace(projection, id=name, shape=(height, size), columns=(start, stop)))
        else:
            rows = _slice(projection.rows or ((0, height),), start, stop)
            parts.append(replace(projection, id=name, shape=(size, width), rows=rows))
    return parts


def _slice(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Return positions start to stop of ranges laid end to end, as ranges."""
    found, offset = [], 0
    for low, high in ranges:
        first, last = max(start - offset, 0), min(stop - offset, high - low)
        if first < last:
            found.append((low + first, low + last))
        offset += high - low
    return tuple(found)


def head_index(matrix_id: str) -> int | None:
    """Return the head that a matrix id names, or None if it names none."""
    found = _HEAD.search(split_id(matrix_id)[1] or "")
    return int(found["head"]) if found else None


def are_heads(matrix_ids: Iterable[str]) -> bool:
    """Whether matrix ids name single heads.

    Raises
    ------
    ValueError
        If some do and some do not.
    """
    kinds = {head_index(name) is not None for name in matrix_ids}
    if len(kinds) > 1:
        raise ValueError("Some of the matrices are single heads and some are not; choose one unit for all.")
    return kinds == {True}


def _ranges(kind: str, path: str, out_features: int, config: Any) -> tuple[tuple[int, int], ...]:
    """Return which output features of a fused module are its q, k or v rows."""
    heads, kv_heads = _head_counts(config)
    if heads is None:
        raise ValueError(
            f"{path!r} holds q, k and v in one matrix, and the model has no configuration that says how many "
            "heads it has. Pass a transformers model, or select whole modules with `target_modules`."
        )
    config = text_config(config)
    head_dim = config_field(config, "head_dim") or out_features // (heads + 2 * kv_heads)
    if (heads + 2 * kv_heads) * head_dim != out_features:
        raise ValueError(
            f"{path!r} has {out_features} output features, which {heads} query heads and {kv_heads} key-value "
            f"heads of {head_dim} do not fill: its layout is not known."
        )
    if path.endswith("query_key_value"):
        # Interleaved: per key-value group its query heads, then one key head, then one value head. With as many
        # groups as heads that is (head, 3, head_dim), the layout of BLOOM and GPT-NeoX.
        per_group = heads // kv_heads
        start, length = {"q": (0, per_group), "k": (per_group, 1), "v": (per_group + 1, 1)}[kind]
        step = (per_group + 2) * head_dim
        return tuple(
            (group * step + start * head_dim, group * step + (start + length) * head_dim) for group in range(kv_heads)
        )
    q, kv = heads * head_dim, kv_heads * head_dim
    return {"q": ((0, q),), "k": ((q, q + kv),), "v": ((q + kv, q + 2 * kv),)}[kind]


def describe_projections(
    shapes: Mapping[str, tuple[int, int]],
    *,
    config: Any = None,
    transposed: frozenset[str] | set[str] = frozenset(),
    projections: Sequence[str] = PROJECTIONS,
    pattern: str | None = None,
    heads: bool = False,
) -> list[Projection]:
    """Find the attention projections among the modules of a model, given their names and shapes.

    Parameters
    ----------
    shapes : mapping of str to (int, int)
        Module path → (output features, input features), for live models and checkpoints alike.
    config : object or dict, optional
        The model's configuration; needed where q, k and v are fused.
    transposed : set of str
        Modules that store their weight as (input, output).
    projections : sequence of str
        Which of ``"q"``, ``"k"``, ``"v"``, ``"o"`` to return.
    pattern : str, optional
        For models of other names: a regular expression that a module's whole path must match, with a group
        ``projection`` that says what it is called; one without that group calls each by its last path segment.
    heads : bool
        Return single heads instead of whole matrices, see `split_heads`.

    Returns
    -------
    list of Projection
        In the order of the model's modules, so by layer.

    Raises
    ------
    ValueError
        If nothing is found, naming the modules that are there; if a projection is not one of the four; if a
        fused matrix can't be taken apart.
    """
    unknown = [name for name in projections if name not in PROJECTIONS]
    if pattern is None and unknown:
        raise ValueError(f"Unknown projections {unknown}; expected some of {list(PROJECTIONS)}.")
    if not projections:
        raise ValueError(f"No projections asked for; expected some of {list(PROJECTIONS)}.")
    compiled = re.compile(pattern) if pattern is not None else None
    found: list[Projection] = []
    for path, shape in shapes.items():
        layer = layer_index(path)
        if compiled is not None:
            match = compiled.fullmatch(path)
            if match:
                kind = match.groupdict().get("projection") or path.rpartition(".")[2]
                found.append(Projection(path, path, layer or 0, kind, shape, transposed=path in transposed))
            continue
        kinds = _kind(path)
        if kinds is None or layer is None or _OTHER_TOWERS.search(path):
            continue
        for kind in kinds:
            if kind not in projections:
                continue
            if len(kinds) == 1:
                found.append(Projection(path, path, layer, kind, shape, transposed=path in transposed))
                continue
            rows = _ranges(kind, path, shape[0], config)
            count = sum(stop - start for start, stop in rows)
            found.append(Projection(f"{path}[{kind}]", path, layer, kind, (count, shape[1]), rows, path in transposed))
    if not found:
        asked = f"the pattern {pattern!r}" if pattern is not None else f"the projections {list(projections)}"
        raise ValueError(
            f"Found no attention matrices for {asked}. The model's matrices are: {summarise_names(shapes)}. "
            "For a model of other names pass `pattern`, a regular expression over module paths."
        )
    return [head for projection in found for head in split_heads(projection, config)] if heads else found


def _is_adapter_internal(path: str, tuner_layers: set[str]) -> bool:
    parent = path.rpartition(".")[0]
    while parent:
        if parent in tuner_layers:
            return True
        parent = parent.rpartition(".")[0]
    return False


def matrix_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module of a live model that holds one matrix, by its path in the base model.

    Adapted layers appear once, as themselves; what is inside them (base layer, adapter weights) does not.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    named = dict(model.named_modules())
    tuner_layers = {path for path, module in named.items() if isinstance(module, BaseTunerLayer)}
    modules = {}
    for path, module in named.items():
        if _is_adapter_internal(path, tuner_layers):
            continue
        base = module.get_base_layer() if path in tuner_layers else module
        if getattr(getattr(base, "weight", None), "ndim", 0) == 2:
            modules[strip_wrappers(path)] = module
    return modules


def in_out_features(module: nn.Module) -> tuple[int, int, bool]:
    """Return (output features, input features, stored transposed) of a linear module, adapted or not."""
    from transformers.pytorch_utils import Conv1D

    base = base_layer(module)
    if isinstance(base, Conv1D):
        # The weight may be packed or empty (ZeRO-3); the feature counts are not.
        return base.nf, base.nx, True
    if hasattr(base, "out_features") and hasattr(base, "in_features"):
        return base.out_features, base.in_features, False
    rows, columns = base.weight.shape
    return rows, columns, False


def base_layer(module: nn.Module) -> nn.Module:
    """Return the layer under an adapter, or the module itself."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def find_projections(
    model: nn.Module,
    *,
    projections: Sequence[str] = PROJECTIONS,
    pattern: str | None = None,
    heads: bool = False,
) -> list[Projection]:
    """Find the q, k, v and o matrices of a live model, with or without adapters, compiled or sharded.

    Parameters
    ----------
    model : torch.nn.Module
        A transformers model, or one wrapped by PEFT.
    projections : sequence of str
        Which of ``"q"``, ``"k"``, ``"v"``, ``"o"`` to return.
    pattern : str, optional
        For models of other names, see `describe_projections`.
    heads : bool
        Return single heads instead of whole matrices, see `split_heads`.

    Returns
    -------
    list of Projection

    Raises
    ------
    ValueError
        If nothing is found, naming the matrices that are there.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                                num_attention_heads=2, num_key_value_heads=1))
    >>> [(p.id, p.shape) for p in find_projections(model, projections=("q", "v"))]
    [('layers.0.self_attn.q_proj', (8, 8)), ('layers.0.self_attn.v_proj', (4, 8))]
    """
    shapes, transposed = {}, set()
    for path, module in matrix_modules(model).items():
        out_features, in_features, stored_transposed = in_out_features(module)
        shapes[path] = (out_features, in_features)
        if stored_transposed:
            transposed.add(path)
    return describe_projections(
        shapes,
        config=getattr(model, "config", None),
        transposed=transposed,
        projections=projections,
        pattern=pattern,
        heads=heads,
    )


def module_weight(path: str, module: nn.Module, effective: bool) -> torch.Tensor:
    """Return the weight a module computes with (or its base weight), as the module stores it.

    Raises
    ------
    ValueError
        If the weight is off-loaded or sharded, or the base weight has been merged away.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.quantization_utils import resolve_quantization_backend

    base = base_layer(module)
    if base.weight.is_meta or base.weight.numel() == 0:
        raise ValueError(
            f"The weight of {path!r} is not in memory (device {base.weight.device}, shape {tuple(base.weight.shape)}): "
            "it is off-loaded or sharded. Load the model without off-loading, or measure saved checkpoints."
        )
    adapted = isinstance(module, BaseTunerLayer)
    backend = resolve_quantization_backend(base)
    if adapted:
        weight = module.get_base_weight()
    else:
        weight = base.weight.detach() if backend is None else backend.get_base_weight(base)
    if not adapted:
        return weight
    if not effective:
        if not module.merged:
            return weight
        original = getattr(module, "unmerged_weight", None)
        if original is None:
            raise ValueError(
                f"{path!r} has a merged adapter and the base weight is no longer there; call `unmerge_adapter()` first."
            )
        return original
    if module.disable_adapters:
        return weight
    available = module._get_available_adapters()
    names = [name for name in module.active_adapters if name in available and name not in module.merged_adapters]
    if not all(_adds_its_delta(module, name) for name in names):
        if backend is not None:
            raise ValueError(
                f"The adapter of {path!r} does not only add to the weight, and the weight is quantised; "
                "merge the adapter and measure the merged model."
            )
        return _merged(module, names)
    for name in names:
        # In float32 at least: added in bfloat16, small deltas would round away.
        delta = module.get_delta_weight(name)
        weight = weight.float() + delta.detach().to(weight.device).float()
    return weight


def _adds_its_delta(module: nn.Module, adapter: str) -> bool:
    """Tell whether an adapted weight is the base's plus `get_delta_weight`: ours and plain LoRA, but not DoRA."""
    from peft.tuners.lora import LoraLayer

    from .tuner.layer import TopoLayer

    return isinstance(module, TopoLayer) or (isinstance(module, LoraLayer) and adapter not in module.lora_variant)


def _merged(module: nn.Module, adapters: list[str]) -> torch.Tensor:
    """Return the weight that PEFT's own merge of a copy gives, in float32."""
    copied = copy.deepcopy(module).float()
    copied.merge(safe_merge=True, adapter_names=adapters)
    return base_layer(copied).weight.detach()


def read_weight(module: nn.Module, projection: Projection, *, effective: bool = True) -> torch.Tensor:
    """Return one matrix of a live model.

    Parameters
    ----------
    module : torch.nn.Module
        The module at ``projection.module``, adapted or not (see `matrix_modules`).
    projection : Projection
        Which rows of it.
    effective : bool
        True for the weight the model computes with: base plus active deltas, merged ones counted once. False for
        the base model's own weight.

    Returns
    -------
    torch.Tensor
        (output features, input features), any float dtype; it may share memory with the model.

    Raises
    ------
    ValueError
        If the weight is off-loaded or sharded, or the base weight has been merged away.
    """
    return take_matrix(module_weight(projection.module, module, effective), projection)


def take_matrix(weight: torch.Tensor, projection: Projection) -> torch.Tensor:
    """Return one matrix, (output features, input features), out of its module's weight or gradient as stored."""
    if projection.transposed:
        weight = weight.T
    if projection.columns is not None:
        weight = weight[:, slice(*projection.columns)]
    if projection.rows is None:
        return weight
    import torch

    return torch.cat([weight[start:stop] for start, stop in projection.rows])


def count_parameters(model: nn.Module) -> int:
    """Return how many parameters the base model has: tied ones once, 4-bit ones unpacked, adapters left out."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    ours: set[int] = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            keep = {id(parameter) for parameter in module.get_base_layer().parameters()}
            ours.update(id(parameter) for parameter in module.parameters() if id(parameter) not in keep)
        elif isinstance(module, AuxiliaryTrainingWrapper):
            keep = {id(parameter) for parameter in module.original_module.parameters()}
            ours.update(id(parameter) for parameter in module.parameters() if id(parameter) not in keep)
    total = 0
    for parameter in model.parameters():
        if id(parameter) in ours:
            continue
        # ZeRO-3 leaves an empty shell that knows its full size; bitsandbytes packs two values into a byte.
        count = getattr(parameter, "ds_numel", parameter.numel())
        if type(parameter).__name__ == "Params4bit":
            count *= 2 * parameter.element_size()
        total += count
    return total


def fingerprint(model: nn.Module, matrix_ids: Sequence[str]) -> dict[str, Any]:
    """Return a few numbers that tell one base model from another of the same shape.

    Parameters
    ----------
    model : torch.nn.Module
        The base model.
    matrix_ids : sequence of str
        Matrices to sample; at most eight of them, evenly spaced, are.

    Returns
    -------
    dict
        ``model_type``, ``layers`` and ``sample``: a list of [module path, [four weights]] with four digits,
        which survive a cast to half precision. ``sample`` is None where weights are quantised or not in memory.
    """
    from peft.utils.quantization_utils import resolve_quantization_backend

    modules = matrix_modules(model)

    def read(path: str) -> torch.Tensor | None:
        base = base_layer(modules[path])
        in_memory = not base.weight.is_meta and base.weight.numel() > 0 and base.weight.is_floating_point()
        if not in_memory or resolve_quantization_backend(base) is not None:
            return None
        weight = getattr(modules[path], "unmerged_weight", None)
        return base.weight if weight is None else weight

    known = [matrix_id for matrix_id in matrix_ids if split_id(matrix_id)[0] in modules]
    return fingerprint_of(getattr(model, "config", None), known, read)


def fingerprint_of(
    config: Any, matrix_ids: Sequence[str], read: Callable[[str], torch.Tensor | None] | None
) -> dict[str, Any]:
    """Return the `fingerprint` of weights that a function reads.

    Parameters
    ----------
    config : object, dict or None
        The model's configuration.
    matrix_ids : sequence of str
    read : callable, optional
        Module path → its weight as stored, or None where there are no exact values to read.
    """
    config = text_config(config) if config is not None else None
    paths = sorted({split_id(matrix_id)[0] for matrix_id in matrix_ids})
    step = max(1, math.ceil(len(paths) / 8))
    sample: list[Any] | None = [] if read is not None else None
    for path in paths[::step] if read is not None else ():
        weight = read(path)
        if weight is None:
            sample = None
            break
        flat = weight.detach().reshape(-1)
        positions = [int(flat.numel() * share) for share in (0.11, 0.37, 0.61, 0.83)]
        sample.append([path, [float(f"{flat[position].item():.4g}") for position in positions]])
    return {
        "model_type": config_field(config, "model_type") if config is not None else None,
        "layers": config_field(config, "num_hidden_layers", "n_layer", "num_layers") if config is not None else None,
        "sample": sample,
    }


def fingerprint_differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return in words how two fingerprints differ; an empty list where they do not, as far as can be told.

    Sampled weights may differ by 1 %: twice what rounding to bfloat16 does (2⁻⁸ = 0.4 %).
    """
    differences = [
        f"{key} is {found.get(key)!r}, was {expected.get(key)!r}"
        for key in ("model_type", "layers")
        if expected.get(key) is not None and found.get(key) is not None and expected[key] != found[key]
    ]
    ours, theirs = expected.get("sample"), found.get("sample")
    if not ours or not theirs:
        return differences
    by_path = dict(theirs)
    matched = match_ids([path for path, _ in ours], by_path)
    for path, values in ours:
        other = by_path.get(matched[path])
        if other is None:
            continue
        scale = max(abs(value) for value in values)
        if any(abs(a - b) > 0.01 * max(abs(a), 0.05 * scale) for a, b in zip(values, other, strict=True)):
            differences.append(f"the weights of {path!r} are others")
            break
    return differences
