"""The ``distgemm`` command: its options, its subcommands, and how it reports a caller's mistake."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from distgemm.cli.bench import bench_command
from distgemm.cli.build import build_command
from distgemm.cli.demo import demo_command
from distgemm.cli.doctor import doctor_command
from distgemm.cli.list import list_command
from distgemm.cli.output import say
from distgemm.cli.plan import plan_command
from distgemm.cli.show import show_command
from distgemm.cli.simulate import simulate_command
from distgemm.cli.trace import trace_command
from distgemm.cli.tune import tune_command
from distgemm.cli.tune_gemm import tune_gemm_command
from distgemm.cli.verify import verify_command
from distgemm.cli.warmup import warmup_command
from distgemm.gemm.nvcc import CacheError
from distgemm.plan.plan import PlanError
from distgemm.schedulers import list_schedules

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Reports a caller's mistake as one line on stderr, with exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, PlanError, CacheError) as error:
            message = str(error)
        except typer.BadParameter as error:
            message = _of_parameter(error)
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename is not None:
                raise
            message = f"output cannot be written: {error.strerror}"  # to standard output, or to a file that is open
        command = self.commands.get(ctx.invoked_subcommand)
        names = [parameter.name for parameter in command.params] if command else []
        say(f"error: {_in_option_names(' '.join(message.split()), names)}")
        raise typer.Exit(2) from None


def _of_parameter(error: Any) -> str:
    """What is wrong with an option or an argument, with its name."""
    if error.param is None or not error.message:
        return str(error.format_message())
    name = max(error.param.opts, key=len) if error.param.param_type_name == "option" else error.param.metavar
    return f"{name}: {error.message}"


def _in_option_names(message: str, names: list[str]) -> str:
    """A message of the library with option names for the names of Python's arguments, and meshes as --mesh has them."""
    message = re.sub(r"(?<=\bmesh )\(\d+(?:, \d+)*,?\)", lambda sides: "x".join(re.findall(r"\d+", sides[0])), message)
    options = {name: f"--{name.replace('_', '-')}" for name in names} | {"world_size": "--ranks"}
    first = re.match(r"(\w+)(?= is )", message)  # the argument that is wrong
    if first and first[0] in options:
        message = f"{options[first[0]]}{message[first.end() :]}"
    options = {name: option for name, option in options.items() if "_" in name}
    return re.sub(r"(?<![\w-])\w+(?!\w)", lambda word: options.get(word[0], word[0]), message)


app = typer.Typer(
    name="distgemm",
    cls=_Commands,
    help="Tensor-parallel GEMMs: schedules, plans, their proofs and predictions, kernels, measurements. bench, trace, "
    "tune and tune-gemm need GPUs, the other commands do not; demo uses GPUs if there are some.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            number = version("distgemm")
        except PackageNotFoundError:
            number = "(not installed)"
        typer.echo(f"distgemm {number}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Import a .py file or a module that registers schedules of your own, for the command that follows; "
            "repeatable.",
            show_default=False,
        ),
    ] = None,
) -> None:
    for given in imports or []:
        _import(given)


def _import(given: str) -> None:
    """Import a module, or a file as Python would run it, but under another name. It must register schedules."""
    if not given:
        raise ValueError(f"--import is a .py file or a module, got {given!r}")
    path = Path(given)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise ValueError(f"--import {given}: there is no such file")
    if not is_file and path.is_file():
        raise ValueError(f"--import {given}: the name of a file with Python code ends in .py")
    before = list_schedules()
    # A file imports modules of its own folder, and a module is found from the current folder.
    sys.path.insert(0, str(path.resolve().parent if is_file else Path.cwd()))
    try:
        if is_file:
            # The bare stem may be the name of another module.
            spec = spec_from_file_location(f"distgemm_import_{path.stem}", path.resolve())
            assert spec is not None and spec.loader is not None
            module = module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            import_module(given)
    except (Exception, SystemExit) as error:
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(path.resolve())]
        where = f"line {lines[-1]}: " if lines else ""
        raise ValueError(f"--import {given}: {where}{type(error).__name__}: {error}") from None
    if list_schedules() == before:
        raise ValueError(f"--import {given} registers no schedule: it must call distgemm.register_schedule")


app.command("list")(list_command)
app.command("show")(show_command)
app.command("plan")(plan_command)
app.command("verify")(verify_command)
app.command("simulate")(simulate_command)
app.command("demo")(demo_command)
app.command("doctor")(doctor_command)
app.command("bench")(bench_command)
app.command("trace")(trace_command)
app.command("tune")(tune_command)
app.command("tune-gemm")(tune_gemm_command)
app.command("warmup")(warmup_command)
app.command("build")(build_command)
