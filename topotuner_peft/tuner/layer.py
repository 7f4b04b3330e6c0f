"""The adapter layer: base(x) + delta(x)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils.quantization_utils import resolve_quantization_backend
from torch import nn

from ..projections import in_out_features

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Block:
    """The part of a module's weight that a delta covers.

    Attributes
    ----------
    rows, columns : tuple of (int, int) or None
        Half-open ranges of output and of input features; None for all of them.
    """

    rows: Ranges | None = None
    columns: Ranges | None = None

    def shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Return (rows, columns) of the block in a weight of this size."""
        return _length(self.rows, out_features), _length(self.columns, in_features)


def _length(ranges: Ranges | None, whole: int) -> int:
    return whole if ranges is None else sum(stop - start for start, stop in ranges)


def _index(ranges: Ranges, device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])


class DeltaLinear(nn.Module):
    """The change of a matrix, as a linear map without bias.

    A leaf module of its own, called like any other, so that what wraps leaf modules (FSDP, ZeRO-3, off-loading,
    ``torch.compile``) sees its parameter. It computes in the dtype of its weight, float32 as a rule, on a base
    of any dtype: small updates are not rounded away.

    Parameters
    ----------
    in_features, out_features : int
        Columns and rows of the delta: the trained ones only.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.weight.dtype)
        return F.linear(x, self.weight)

    def extra_repr(self) -> str:
        """Return the shape."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class TopoLayer(BaseTunerLayer):
    """What every adapted layer has: per adapter a delta and the block it covers."""

    adapter_layer_names: tuple[str, ...] = ("topotuner_delta",)
    other_param_names: tuple[str, ...] = ("topotuner_blocks",)

    def __init__(self, base_layer: nn.Module, **kwargs: Any):
        self.base_layer = base_layer
        self.topotuner_delta = nn.ModuleDict({})
        self.topotuner_blocks: dict[str, Block] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        # What merging puts aside: the tensor (or packed parameter) that was there, so that unmerging is bitwise.
        self._unmerged: Any = None
        self.quantization_backend = resolve_quantization_backend(
            self.get_base_layer(), get_apply_tensor_subclass=kwargs.get("get_apply_tensor_subclass")
        )
        self.out_features, self.in_features, self.transposed = in_out_features(base_layer)

    def update_layer(
        self, adapter_name: str, block: Block, *, init_weights: bool = True, inference_mode: bool = False
    ) -> None:
        """Add an adapter.

        Parameters
        ----------
        adapter_name : str
        block : Block
            Which part of the weight trains.
        init_weights : bool
            False fills the delta with rank-4 noise (full-rank noise would be no test for conversion to LoRA).
        inference_mode : bool
            Whether the adapter stays frozen.
        """
        height, width = block.shape(self.out_features, self.in_features)
        self.topotuner_blocks[adapter_name] = block
        delta = DeltaLinear(width, height)
        if not init_weights and not delta.weight.is_meta:
            with torch.no_grad():
                left = torch.randn(height, 4) / 4
                delta.weight.copy_(left @ torch.randn(4, width) / width**0.5)
        self.topotuner_delta[adapter_name] = delta
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        # PEFT's own also casts to the base's dtype, which would round a float32 delta on a bfloat16 base.
        delta = self.topotuner_delta[adapter_name]
        if delta.weight.is_meta:
            return
        if device is None:
            device, _ = self._get_base_layer_device_and_dtype(self.get_base_layer())
        if device is not None and device.type != "meta":
            delta.to(device)

    @property
    def unmerged_weight(self) -> torch.Tensor | None:
        """The base weight that merging put aside, or None if nothing is merged."""
        if self._unmerged is None or self.quantization_backend is not None:
            return None
        return self._unmerged

    def _apply(self, fn, recurse=True):
        # `.to()` and friends must move what merging put aside along with the weight that took its place.
        if isinstance(self._unmerged, torch.Tensor):
            with torch.no_grad():
                self._unmerged = fn(self._unmerged)
        return super()._apply(fn, recurse)

    def get_delta_weight(self, adapter_name: str) -> torch.Tensor:
        """Return an adapter's change of the whole weight, laid out as the base layer stores its weight."""
        delta = self.topotuner_delta[adapter_name].weight
        block = self.topotuner_blocks[adapter_name]
        if block.columns is not None:
            wide = delta.new_zeros(delta.shape[0], self.in_features)
            delta = wide.index_copy(1, _index(block.columns, delta.device), delta)
        if block.rows is not None:
            tall = delta.new_zeros(self.out_features, self.in_features)
            delta = tall.index_copy(0, _index(block.rows, delta.device), delta)
        return delta.T if self.transposed else delta

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Return True: a delta is additive, so PEFT can turn it into a LoRA by SVD."""
        return True


class TopoLinear(nn.Module, TopoLayer):
    """A linear layer (``nn.Linear``, GPT-2's ``Conv1D`` or a quantised one) with deltas beside it."""

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        block: Block,
        *,
        init_weights: bool = True,
        **kwargs: Any,
    ):
        super().__init__()
        TopoLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, block, init_weights=init_weights)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add deltas into the base weight; what was there is put aside, so that `unmerge` restores it bitwise.

        Parameters
        ----------
        safe_merge : bool
            Refuse a merged weight that is not finite.
        adapter_names : list of str, optional
            Which adapters; the active ones by default.

        Raises
        ------
        ValueError
            With ``safe_merge``, naming the adapter, if the merged weight is not finite.
        TypeError
            If the base layer's quantisation can't be undone and redone.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.topotuner_delta]
        if not names:
            return
        base = self.get_base_layer()
        if self.quantization_backend is not None and not self.quantization_backend.supports_merge:
            raise TypeError(
                f"A {type(base).__name__} can't be merged into: its weights can't be re-quantised. Keep the adapter "
                "beside the base model, or load the base without quantisation to merge."
            )
        with torch.no_grad():
            # Summed from the untouched weight each time: no rounding piles up over several adapters.
            original = self._original_weight()
            total = original.to(torch.promote_types(original.dtype, torch.float32))
            for name in [*self.merged_adapters, *names]:
                total = total + self.get_delta_weight(name).to(total.device, total.dtype)
            merged = total.to(original.dtype)
            if safe_merge and not torch.isfinite(merged).all():
                raise ValueError(f"Merging adapter {', '.join(names)!r} would give weights that are not finite.")
            if self._unmerged is None:
                self._unmerged = base.weight.data if self.quantization_backend is None else base.weight
            self.set_base_weight(merged.contiguous())
        self.merged_adapters.extend(names)

    def _original_weight(self) -> torch.Tensor:
        if self._unmerged is None:
            return self.get_base_weight()
        if self.quantization_backend is None:
            return self._unmerged
        base = self.get_base_layer()
        merged, base.weight = base.weight, self._unmerged
        original = self.get_base_weight()
        base.weight = merged
        return original

    def unmerge(self) -> None:
        """Put the base weight back that merging took away; bitwise."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        base = self.get_base_layer()
        if self.quantization_backend is None:
            base.weight.data = self._unmerged
        else:
            base.weight = self._unmerged
        self._unmerged = None
        self.merged_adapters.clear()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return base(x) plus the active deltas of x, in the dtype of base(x)."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        for name in self.active_adapters:
            if name not in self.topotuner_delta or name in self.merged_adapters:
                continue
            block = self.topotuner_blocks[name]
            part = x if block.columns is None else _take_columns(x, block.columns)
            change = self.topotuner_delta[name](part).to(result.dtype)
            result = result + change if block.rows is None else _add_rows(result, change, block.rows)
        return result

    def __repr__(self) -> str:
        return "topotuner." + super().__repr__()


def _take_columns(x: torch.Tensor, columns: Ranges) -> torch.Tensor:
    """Return the input features (..., m) of (..., n) that ``columns`` covers."""
    if len(columns) == 1:
        start, stop = columns[0]
        return x[..., start:stop]
    return x.index_select(-1, _index(columns, x.device))


def _add_rows(result: torch.Tensor, change: torch.Tensor, rows: Ranges) -> torch.Tensor:
    """Add (..., m) to the m output features of (..., n) that ``rows`` covers."""
    if len(rows) == 1:
        start, stop = rows[0]
        return result + F.pad(change, (start, result.shape[-1] - stop))
    return result.index_add(-1, _index(rows, result.device), change)
