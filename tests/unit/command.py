"""Runs the distgemm command within the test's process."""

from __future__ import annotations

import functools

import typer.testing
from typer.testing import CliRunner, Result

from distgemm.cli.main import app

__all__ = ["invoke", "refusal", "succeed"]

# The runner would build all commands anew in each call, which takes longer than most calls.
typer.testing._get_command = functools.cache(typer.testing._get_command)


def invoke(*arguments: str, columns: int = 150) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


def succeed(*arguments: str, columns: int = 150) -> str:
    """What the command prints; it must succeed, and say nothing on stderr."""
    done = invoke(*arguments, columns=columns)
    assert (done.exit_code, done.stderr) == (0, ""), done.stderr
    return done.stdout


def refusal(*arguments: str) -> str:
    """The one line with which the command refuses its arguments."""
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line
