"""Versions of the packages that a number depends on, for every file we write."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("topotuner-peft", "torch", "transformers", "peft", "trl", "gudhi", "pot", "numpy")


def package_versions() -> dict[str, str]:
    """Return distribution name → installed version."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            # Run from a source tree that is not installed; saying so beats leaving the key out.
            found[name] = "not installed"
    return found
