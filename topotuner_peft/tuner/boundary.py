"""No gradient below the lowest trained layer.

A gradient is needed down to the lowest layer that trains, and no further. Two habits of the ecosystem undo
that: ``enable_input_require_grads`` (TRL calls it for every PEFT model when gradient checkpointing is on, its
default) lets the embeddings' output require grad, so that the backward pass and the recomputation of every
checkpoint run down to the first layer; and reentrant checkpointing needs an input that requires grad to work at
all. Both are met at one place: layers below the boundary run without grad, and the boundary layer's input is
cut off and, under reentrant checkpointing, made a leaf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..projections import layer_stack, strip_wrappers

_HOOK = "_topotuner_boundary"


class GradientBoundary:
    """Knows, at each forward pass of a model, which layer is the lowest that trains.

    The answer is computed anew each time from ``requires_grad``, so that switching adapters or unfreezing
    modules by hand is never missed. In doubt there is no boundary: a trained parameter outside the stack of layers
    (embeddings, a vision tower) or ``inputs_embeds`` that require grad mean that gradients flow as without us.

    Attributes
    ----------
    lowest : int or None
        Index of the lowest layer that trains, during a training forward pass with a boundary; else None.
    """

    def __init__(self, model: nn.Module, stack: str, layers: nn.ModuleList):
        self.lowest: int | None = None
        # Kept in tuples: as attributes of a module they would be registered a second time.
        self._above = _modules_above(model, stack)
        self._layers = tuple(layers)

    @classmethod
    def install(cls, model: nn.Module) -> None:
        """Watch a model's stack of layers; does nothing for models without exactly one such stack."""
        if hasattr(model, _HOOK):
            return
        found = _layer_stack(model)
        if found is None:
            return
        boundary = cls(model, *found)
        for index, layer in enumerate(found[1]):
            layer.__class__ = _guarded_class(type(layer))
            layer.__dict__["_topotuner_guard"] = (boundary, index)
        handles = (
            model.register_forward_pre_hook(boundary.before_forward, with_kwargs=True),
            model.register_forward_hook(boundary.after_forward, always_call=True),
        )
        model.__dict__[_HOOK] = (boundary, handles)

    @staticmethod
    def remove(model: nn.Module) -> None:
        """Undo `install`."""
        installed = model.__dict__.pop(_HOOK, None)
        if installed is None:
            return
        boundary, handles = installed
        for handle in handles:
            handle.remove()
        for layer in boundary._layers:
            # A layer that was copied or pickled in its own way may have lost its guard.
            if layer.__dict__.pop("_topotuner_guard", None) is not None:
                layer.__class__ = type(layer)._topotuner_unguarded

    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the boundary for the forward pass that begins."""
        self.lowest = None
        if not model.training or not torch.is_grad_enabled():
            return
        embeds = kwargs.get("inputs_embeds")
        if embeds is not None and embeds.requires_grad:
            return
        lowest = None
        inside = set()
        for index, layer in enumerate(self._layers):
            parameters = list(layer.parameters())
            inside.update(map(id, parameters))
            if lowest is None and any(parameter.requires_grad for parameter in parameters):
                lowest = index
        above = {id(parameter) for module in self._above for parameter in module.parameters()}
        outside = (p for p in model.parameters() if p.requires_grad and id(p) not in inside and id(p) not in above)
        if next(outside, None) is None and lowest is not None:
            self.lowest = lowest

    def after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forget the boundary: layers called in another way than through the model run as without us."""
        self.lowest = None


def _layer_stack(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Return the model's one list of layers that holds adapters, or None."""
    from .layer import TopoLayer

    stacks = set()
    for path, module in model.named_modules():
        if isinstance(module, TopoLayer):
            stacks.add(layer_stack(strip_wrappers(path) + "."))
    if len(stacks) != 1 or None in stacks:
        return None
    (stack,) = stacks
    by_path = {strip_wrappers(path): module for path, module in model.named_modules()}
    layers = by_path.get(stack)
    is_encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    if not isinstance(layers, nn.ModuleList) or is_encoder_decoder:
        return None
    return stack, layers


def _modules_above(model: nn.Module, stack: str) -> tuple[nn.Module, ...]:
    """Return modules that surely come after the layers: an output head that is not tied to the embeddings."""
    if not hasattr(model, "get_output_embeddings"):
        return ()
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or getattr(head, "weight", None) is getattr(embeddings, "weight", None):
        return ()
    return (head,)


_GUARDED: dict[type, type] = {}


def _guarded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a layer's class that minds the boundary, with the same name.

    Changing an instance's class is what torch's own ``fully_shard`` does: ``isinstance`` and the names that
    wrapping policies look for stay, and so does the module tree. Hooks on ``forward`` would come too late, since
    several versions of transformers checkpoint the layer around them.
    """
    if cls not in _GUARDED:
        _GUARDED[cls] = type(
            cls.__name__,
            (cls,),
            {
                "__call__": _guarded_call,
                "__reduce_ex__": _guarded_reduce,
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
                "__doc__": cls.__doc__,
                "_topotuner_unguarded": cls,
            },
        )
    return _GUARDED[cls]


def _guarded_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call = type(self)._topotuner_unguarded.__call__
    boundary, index = self.__dict__.get("_topotuner_guard", (None, 0))
    if boundary is None or boundary.lowest is None or index > boundary.lowest or not torch.is_grad_enabled():
        return call(self, *args, **kwargs)
    if index < boundary.lowest:
        with torch.no_grad():
            return _call_without_checkpointing(call, self, args, kwargs)
    leaf = _needs_leaf(self)
    # Of the positional arguments the first is the hidden states; a mask that requires grad would slow attention down.
    args = tuple(_cut(value, leaf and position == 0) for position, value in enumerate(args))
    kwargs = {name: _cut(value, leaf and name == "hidden_states") for name, value in kwargs.items()}
    return call(self, *args, **kwargs)


def _call_without_checkpointing(call: Any, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Without grad there is nothing to recompute, and reentrant checkpointing would warn about that.
    if not getattr(layer, "gradient_checkpointing", False):
        return call(layer, *args, **kwargs)
    layer.gradient_checkpointing = False
    try:
        return call(layer, *args, **kwargs)
    finally:
        layer.gradient_checkpointing = True


def _needs_leaf(layer: nn.Module) -> bool:
    """Return whether the layer is checkpointed in the reentrant way, which trains nothing without such an input."""
    if not getattr(layer, "gradient_checkpointing", False):
        return False
    function = getattr(layer, "_gradient_checkpointing_func", None)
    return getattr(function, "keywords", {}).get("use_reentrant", True) is not False


def _cut(value: Any, leaf: bool) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    value = value.detach()
    return value.requires_grad_() if leaf else value


def _guarded_reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    # The dynamic class can't be found by name, so what the layer's own class says is wrapped: a copied or pickled
    # model keeps its boundary.
    guarded, unguarded = type(self), type(self)._topotuner_unguarded
    function, args, *rest = unguarded.__reduce_ex__(self, protocol)
    function = unguarded if function is guarded else function
    args = tuple(unguarded if value is guarded else value for value in args)
    return (_rebuild_guarded, (function, args), *rest)


def _rebuild_guarded(function: Any, args: tuple[Any, ...]) -> nn.Module:
    layer = function(*args)
    layer.__class__ = _guarded_class(type(layer))
    return layer
