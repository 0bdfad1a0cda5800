"""The program of own_schedule.md, and what it prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from blocks import DOCS, ROOT, table

OWN_FILE = "ring_b.py"
"""The name under which own_schedule.md has its program saved."""


def own_program() -> str:
    """The first program of own_schedule.md."""
    return str(re.findall(r"```python\n(.*?)```", (DOCS / "own_schedule.md").read_text(encoding="utf-8"), re.S)[0])


def run_beside_own_program(*arguments: str) -> str:
    """What Python prints in a folder that has that program. In another process, as it registers a schedule."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / OWN_FILE).write_text(own_program(), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
        environment.pop("COLUMNS", None)
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the program in own_schedule.md fails, {arguments}:\n{done.stderr}")
    return done.stdout


@table
def own_schedule_output() -> str:
    """What the program prints."""
    return f"```text\n{run_beside_own_program(OWN_FILE)}```"


@table
def own_schedule_command(*command: str) -> str:
    """A command that knows the schedule, and what it prints; of ``verify``, which prints times, the last line."""
    printed = run_beside_own_program("-m", "distgemm", "--import", OWN_FILE, *command)
    if command[0] == "verify":
        printed = f"...\n{printed.splitlines()[-1]}\n"
    return f"```console\n$ distgemm --import {OWN_FILE} {shlex.join(command)}\n{printed}```"
