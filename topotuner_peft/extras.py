"""Clear errors for packages that only an extra installs."""

from __future__ import annotations

from importlib.util import find_spec


def require(extra: str, *modules: str) -> None:
    """Raise if a module that an extra brings is not installed.

    Raises
    ------
    ModuleNotFoundError
        Naming what is missing and how to install it.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; run: "
            f'pip install "topotuner-peft[{extra}]"'
        )
