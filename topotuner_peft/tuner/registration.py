"""Making PEFT know the method.

PEFT has no plugin mechanism: its methods are members of the enum ``PeftType``. The enum is extended by one
member, once, in the way its own members are made, so that everything PEFT and transformers do with a type
(``PeftType("TOPOTUNER")``, ``.value``, JSON, pickle) works.
"""

from __future__ import annotations

from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_MIXED_MODEL_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.utils import PeftType, register_peft_method

NAME = "topotuner"


def peft_type() -> PeftType:
    """Return the member of ``PeftType`` for this method, added if it is not there."""
    value = NAME.upper()
    if value in PeftType._value2member_map_:
        return PeftType(value)
    member = str.__new__(PeftType, value)
    member._name_ = value
    member._value_ = value
    member.__objclass__ = PeftType
    member._sort_order_ = len(PeftType._member_names_)
    PeftType._member_names_.append(value)
    PeftType._member_map_[value] = member
    PeftType._value2member_map_[value] = member
    # Since Python 3.12 attribute access no longer goes through the member map; Enum forbids plain setattr.
    type.__setattr__(PeftType, value, member)
    if hasattr(PeftType, "_hashable_values_"):  # Python 3.13 and newer keep this list as well
        PeftType._hashable_values_.append(value)
    return member


def register(config_cls: type, model_cls: type) -> None:
    """Register the method with PEFT; a second call, after a reload or re-import, takes the first one's place.

    Raises
    ------
    RuntimeError
        If another package owns the name.
    """
    member = peft_type()
    owner = PEFT_TYPE_TO_CONFIG_MAPPING.get(member)
    if owner is None:
        register_peft_method(name=NAME, config_cls=config_cls, model_cls=model_cls)
        return
    if (owner.__module__, owner.__qualname__) != (config_cls.__module__, config_cls.__qualname__):
        raise RuntimeError(
            f"PEFT already has a method {NAME!r}, from {owner.__module__}.{owner.__qualname__}. Two packages can't "
            "own one name: import only one of them."
        )
    PEFT_TYPE_TO_CONFIG_MAPPING[member] = config_cls
    PEFT_TYPE_TO_TUNER_MAPPING[member] = model_cls
    PEFT_TYPE_TO_PREFIX_MAPPING[member] = model_cls.prefix
    PEFT_TYPE_TO_MIXED_MODEL_MAPPING.pop(member, None)
