"""The PEFT model of the TopoTuner method."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_target_module_exists
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.quantization_utils import get_quantization_kwargs, resolve_quantization_backend
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..projections import (
    PROJECTIONS,
    Projection,
    are_heads,
    count_parameters,
    find_projections,
    fingerprint,
    fingerprint_differences,
    match_ids,
    matrix_modules,
    split_id,
    strip_wrappers,
    summarise_names,
    text_config,
)
from .boundary import GradientBoundary
from .config import TopoConfig
from .layer import Block, DeltaLinear, Ranges, TopoLayer, TopoLinear


class TopoModel(BaseTuner):
    """A base model with full-rank deltas on the matrices that a profile or the configuration names.

    Made by ``peft.get_peft_model(model, TopoConfig(...))``. Saving writes what trains: embeddings that were resized
    but do not train stay out of the file, whatever PEFT's ``save_embedding_layers`` says. To keep them, name them in
    ``modules_to_save``, or single rows in ``trainable_token_indices``.

    Parameters
    ----------
    model : torch.nn.Module
        The base model; its weights are frozen.
    config : TopoConfig
    adapter_name : str
    low_cpu_mem_usage : bool
        Make the deltas on the meta device, for loading.
    """

    prefix: str = "topotuner_"
    tuner_layer_cls = TopoLayer
    target_module_mapping = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Resolve the configuration for this model and add the deltas."""
        # A copy: the caller may apply the same configuration, with its profile, to another model.
        config = copy.copy(self.peft_config[adapter_name])
        self.peft_config[adapter_name] = config
        self._resolve(config, model)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        if config.matrices is None:
            config.matrices = sorted(_adapted_modules(model, adapter_name))
        if config.base_fingerprint is None:
            config.base_fingerprint = fingerprint(model, config.matrices)
        GradientBoundary.install(model)

    def _resolve(self, config: TopoConfig, model: nn.Module) -> None:
        """Fill in ``matrices`` and ``target_modules`` from the profile, or check those that were saved."""
        profile = config.load_profile()
        if profile is not None:
            names = {row.projection for row in profile.table.rows}
            found = find_projections(
                model,
                projections=[name for name in PROJECTIONS if name in names],
                heads=are_heads(row.id for row in profile.table.rows),
            )
            model_type = getattr(text_config(getattr(model, "config", None)), "model_type", None)
            chosen = profile.resolve(found, model_type=model_type, strict=config.strict)
            _warn_of_other_weights(profile.table.base, model, found)
            chosen = [p for p in chosen if not _is_excluded(config, p.module)]
            if not chosen:
                raise ValueError(
                    f"exclude_modules={config.exclude_modules!r} leaves none of the profile's "
                    f"{len(profile.trained)} matrices to train."
                )
            config.matrices = sorted(projection.id for projection in chosen)
            config.base_fingerprint = None
            config.profile_summary = {
                "base_model": profile.table.base.get("name"),
                "prior_task": profile.prior_task,
                "rule": profile.rule.to_dict(),
                "share": sum(projection.size for projection in chosen) / count_parameters(model),
            }
        elif config.matrices is not None:
            self._check_saved(config, model)
        if config.matrices is not None:
            config.target_modules = {split_id(name)[0] for name in config.matrices}

    def _check_saved(self, config: TopoConfig, model: nn.Module) -> None:
        if not config.matrices:
            raise ValueError("The adapter's configuration has an empty list of matrices; it was not saved whole.")
        available = list(matrix_modules(model))
        modules = {name: split_id(name)[0] for name in config.matrices}
        matched = match_ids(modules.values(), available)
        missing = [name for name, module in modules.items() if matched[module] is None]
        if missing:
            raise ValueError(
                f"The adapter trains {len(missing)} matrices that this model does not have, {missing[0]!r} among "
                f"them; the model has {summarise_names(available)}. Load it on the base model it was made for"
                + (f", {config.base_model_name_or_path!r}." if config.base_model_name_or_path else ".")
            )
        blocks = {name: split_id(name)[1] for name in config.matrices}
        config.matrices = sorted(
            matched[module] + (f"[{blocks[name]}]" if blocks[name] else "") for name, module in modules.items()
        )
        if config.base_fingerprint is not None:
            differences = fingerprint_differences(config.base_fingerprint, fingerprint(model, config.matrices))
            if differences:
                warnings.warn(
                    "The adapter was trained on another base model than this one: "
                    f"{'; '.join(differences)}. Its deltas are added to weights they were not made for. Expected base: "
                    f"{config.base_model_name_or_path or 'not recorded'}.",
                    stacklevel=2,
                )

    @staticmethod
    def _check_target_module_exists(peft_config: TopoConfig, key: str) -> Any:
        key = strip_wrappers(key)
        if peft_config.matrices is None:
            return check_target_module_exists(peft_config, key)
        # The list is resolved: exact paths only, so that no suffix catches a module of another tower.
        if any(key == split_id(name)[0] for name in peft_config.matrices):
            return True
        excluded = check_target_module_exists(peft_config, key) if peft_config.exclude_modules else False
        # PEFT counts what was excluded, and warns if nothing was.
        return False if excluded else excluded

    def _create_and_replace(
        self,
        peft_config: TopoConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        block = self._block(peft_config, strip_wrappers(current_key))
        if isinstance(target, TopoLayer):
            target.update_layer(
                adapter_name,
                block,
                init_weights=peft_config.init_weights,
                inference_mode=peft_config.inference_mode,
            )
            return
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        backend = resolve_quantization_backend(base)
        linear = isinstance(base, nn.Linear | Conv1D) or (backend is not None and backend.layer_type == "linear")
        if not linear:
            raise TypeError(
                f"{current_key!r} is a {type(base).__name__}; only linear layers (and GPT-2's Conv1D) have a matrix "
                "that can be trained. Name others in `modules_to_save`, or leave them out."
            )
        if getattr(base, "tp_plan", None) or getattr(base, "_tp_info", None):
            raise NotImplementedError(
                f"{current_key!r} is split over devices by tensor parallelism, which deltas do not support."
            )
        new_module = TopoLinear(
            target,
            adapter_name,
            block,
            init_weights=peft_config.init_weights,
            **get_quantization_kwargs(self),
        )
        if adapter_name not in self.active_adapters:
            new_module.requires_grad_(False)
        self._replace_module(parent, target_name, new_module, target)

    def _block(self, config: TopoConfig, module: str) -> Block:
        """Return the part of a module that the configuration trains: all of it, rows of a fused one, or heads."""
        if config.matrices is None:
            return Block()
        ids = [name for name in config.matrices if split_id(name)[0] == module]
        if not ids or any(split_id(name)[1] is None for name in ids):
            return Block()
        by_id = self._found(are_heads(ids))
        unknown = [name for name in ids if name not in by_id]
        if unknown:
            block = split_id(unknown[0])[1]
            raise ValueError(f"This model has no {unknown[0]!r}: {module!r} has no block {block!r}.")
        rows = [span for name in ids if by_id[name].rows is not None for span in by_id[name].rows]
        columns = [by_id[name].columns for name in ids if by_id[name].columns is not None]
        return Block(_join(sorted(rows)) if rows else None, _join(sorted(columns)) if columns else None)

    def _found(self, heads: bool) -> dict[str, Projection]:
        return {projection.id: projection for projection in find_projections(self.model, heads=heads)}

    def unload(self) -> nn.Module:
        """Return the base model without the deltas."""
        plain = super().unload()
        GradientBoundary.remove(self.model)
        return plain

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Add the deltas into the base weights and return the base model."""
        plain = super().merge_and_unload(*args, **kwargs)
        GradientBoundary.remove(self.model)
        return plain

    @classmethod
    def _get_adapter_state_dict(
        cls, model: nn.Module, config: TopoConfig, adapter_name: str, state_dict: dict[str, torch.Tensor], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        ours = super()._get_adapter_state_dict(
            model=model, config=config, adapter_name=adapter_name, state_dict=state_dict, **kwargs
        )
        shapes = {path: (delta.out_features, delta.in_features) for path, delta in _deltas(model, adapter_name).items()}
        for key, tensor in ours.items():
            path = _delta_path(key)
            if tuple(tensor.shape) != shapes[path]:
                raise ValueError(
                    f"The delta of {path!r} to save has shape {tuple(tensor.shape)}, not {shapes[path]}: it is sharded. "
                    "Let the Trainer save, or gather the parameters first (ZeRO-3: "
                    "`deepspeed.zero.GatheredParameters`; FSDP: a full state dict)."
                )
        # PEFT adds the embeddings to the file once their number of rows differs from the base model's, trained or
        # not (peft/utils/save_and_load.py), and takes them from this dictionary.
        for key in _frozen_embedding_keys(model, state_dict):
            del state_dict[key]
        return ours

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        # PEFT maps names through here in both directions, so files are free of what torch.compile inserts.
        key = super()._remove_adapter_name_from_key(key, adapter_name)
        return key.replace("_orig_mod.", "") if f".{cls.prefix}" in key else key

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: TopoConfig, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        # PEFT ignores keys that have no place, and the Trainer, resuming, those that are missing as well.
        saved = {_delta_path(key) for key in state_dict if f".{cls.prefix}" in key}
        here = _deltas(model, adapter_name).keys()
        remedy = (
            "Load it with `PeftModel.from_pretrained`, or resume with the matrices it was trained with: those in the "
            "`adapter_config.json` beside it."
        )
        if saved - here:
            raise ValueError(
                f"The file holds other matrices than adapter {adapter_name!r}: {len(saved - here)} have no place here, "
                f"{min(saved - here)!r} among them. {remedy}"
            )
        if here - saved:
            raise ValueError(
                f"The file lacks {len(here - saved)} of the {len(here)} matrices of adapter {adapter_name!r}, "
                f"{min(here - saved)!r} among them. {remedy}"
            )
        cleaned = {
            key.replace("_orig_mod.", "") if f".{cls.prefix}" in key else key: v for key, v in state_dict.items()
        }
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, cleaned)


def _join(ranges: list[tuple[int, int]]) -> Ranges:
    """Join ranges that touch, so that q and k side by side are one block."""
    joined = [ranges[0]]
    for start, stop in ranges[1:]:
        if start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _warn_of_other_weights(measured_on: Mapping[str, Any], model: nn.Module, found: list[Projection]) -> None:
    expected = (measured_on.get("fingerprint") or {}).get("sample")
    differences = fingerprint_differences({"sample": expected}, fingerprint(model, [p.id for p in found]))
    if differences:
        warnings.warn(
            f"The profile was measured on {measured_on.get('name') or 'a model'} with other weights than this model's: "
            f"{differences[0]}. Its choice is used as it is; for one of this model's own, measure the drift here.",
            stacklevel=2,
        )


def _deltas(model: nn.Module, adapter_name: str) -> dict[str, DeltaLinear]:
    """Return an adapter's deltas by the path of the matrix's module in the base model."""
    return {
        strip_wrappers(path): module.topotuner_delta[adapter_name]
        for path, module in model.named_modules()
        if isinstance(module, TopoLayer) and adapter_name in module.topotuner_delta
    }


def _delta_path(key: str) -> str:
    """Return the path of the matrix's module from a key of a state dict or file."""
    return strip_wrappers(key.rpartition(f".{TopoModel.prefix}")[0])


def _frozen_embedding_keys(model: nn.Module, state_dict: Mapping[str, Any]) -> list[str]:
    """Return the keys of embeddings and output head, where nothing of them trains and no other adapter holds them."""
    if not hasattr(model, "get_input_embeddings"):
        return []
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    frozen = [
        module
        for module in embeddings
        if isinstance(module, nn.Embedding | nn.Linear) and not any(p.requires_grad for p in module.parameters())
    ]
    prefixes = tuple(f"{path}." for path, module in model.named_modules() if any(module is m for m in frozen))
    return [key for key in state_dict if prefixes and key.startswith(prefixes)]


def _is_excluded(config: TopoConfig, module: str) -> bool:
    probe = copy.copy(config)
    probe.target_modules = {module}
    probe.layers_to_transform = None
    probe.matrices = None
    return not check_target_module_exists(probe, module)


def _adapted_modules(model: nn.Module, adapter_name: str) -> list[str]:
    return [
        path
        for path, module in matrix_modules(model).items()
        if isinstance(module, TopoLayer) and adapter_name in module.topotuner_delta
    ]
