"""Install the package with an extra into the environment this runs in: ``python tools/install.py EXTRA``.

Torch first, since which build it is decides between 200 MB and several GB: the CPU build where there is no NVIDIA
GPU, the default one where there is.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

TORCH = "2.13.0"
# The official index of CPU builds; on Linux the default index only has CUDA builds.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def pip(*arguments: str, check: bool = True) -> bool:
    """Run pip, quietly; return whether it succeeded."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, check=check, stderr=None if check else subprocess.DEVNULL)
    return done.returncode == 0


def install_torch() -> None:
    """Install torch unless it is there."""
    if importlib.util.find_spec("torch") is not None:
        return
    if sys.platform != "linux" or shutil.which("nvidia-smi"):
        print("Installing torch …", flush=True)
        pip("torch>=2.6")
        return
    print("Installing torch (no GPU here, so the CPU build) …", flush=True)
    # A local version can only come from an index or folder that the user has configured to hold CPU builds.
    if pip(f"torch=={TORCH}+cpu", check=False) or pip("torch>=2.6", "--index-url", CPU_INDEX, check=False):
        return
    print(f"No CPU build at {CPU_INDEX}: installing the default build, which is large …", flush=True)
    pip(f"torch=={TORCH}")


def main(extra: str) -> None:
    """Install torch, then the package in place with the extra."""
    install_torch()
    print(f"Installing topotuner-peft[{extra}] and what it needs …", flush=True)
    pip("--editable", f".[{extra}]")


if __name__ == "__main__":
    main(sys.argv[1])
