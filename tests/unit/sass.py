"""The machine code of kernels, as nvdisasm prints it."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import files
from pathlib import Path


def nvdisasm() -> Path:
    """The path of nvdisasm: that of the package nvidia-cuda-nvdisasm, which the extra "dev" installs."""
    found = [Path(str(file.locate())) for file in files("nvidia-cuda-nvdisasm") or () if file.name == "nvdisasm"]
    path = shutil.which(str(found[0])) if found else None
    if path is None:
        raise RuntimeError("the package nvidia-cuda-nvdisasm has no program nvdisasm: pip install -e '.[dev]'")
    return Path(path)


def main_loop(cubin: Path) -> list[str]:
    """The names of the instructions from the first to the last wgmma of a kernel, without modifiers."""
    return _between(cubin, "GMMA")


def loads(cubin: Path) -> list[str]:
    """The same, from the first to the last load by TMA."""
    return _between(cubin, "UTMALDG")


def instructions(cubin: Path) -> list[str]:
    """The names of all instructions, with modifiers such as those of ``LDG.E.128.STRONG.SYS``."""
    printed = subprocess.run([nvdisasm(), "-c", cubin], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)", printed, re.MULTILINE)


def _between(cubin: Path, name: str) -> list[str]:
    names = [each.partition(".")[0] for each in instructions(cubin)]
    found = [i for i, each in enumerate(names) if each.endswith(name)]
    return names[found[0] : found[-1] + 1]
