"""One package, however it is reached, and nothing heavy in it at import; the README's examples are true."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = "tests/unit/test_bench_example.json"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(*command: str, cwd: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COLUMNS")}
    environment["PYTHONIOENCODING"] = "utf-8"
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, encoding="utf-8", check=False)


def python(code: str, cwd: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", code, cwd=cwd, path=path)


def test_import_is_light() -> None:
    done = python("import sys, distgemm; print([m for m in ('torch', 'cuda', 'rich', 'typer') if m in sys.modules])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_names_that_need_torch_are_there() -> None:
    done = python(
        "import distgemm; print(distgemm.tune.tune.__name__, distgemm.nn.__name__)\n"
        "print([getattr(distgemm, name) for name in distgemm.__all__] and distgemm.none)"
    )
    assert done.stdout == "tune distgemm.nn\n"
    first, *_, last = done.stderr.splitlines()
    assert first.startswith("Traceback") and last == "AttributeError: module 'distgemm' has no attribute 'none'"


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["show", "ag+gemm", "--ranks", "8"], ["--version"], ["bench", "-h"], ["bench", "--from", EXAMPLE]],
)
def test_command_is_light(arguments: list[str]) -> None:
    code = (
        "import sys; from distgemm.cli.main import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        "print([m for m in ('torch', 'cuda', 'matplotlib', 'scipy') if m in sys.modules], file=sys.stderr)"
    )
    done = python(code)
    assert (done.stderr, done.returncode) == ("[]\n", 0)
    assert done.stdout


@pytest.mark.parametrize("name", ["layouts", "schedulers"])
def test_bare_import_fails(name: str) -> None:
    done = python(f"import {name}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: import distgemm.{name}, not {name}"


@pytest.mark.parametrize("name", ["layouts", "schedulers"])
def test_links(name: str) -> None:
    link = ROOT / "distgemm" / name
    if not (ROOT / ".git").exists():
        pytest.skip("not in a git checkout")
    assert link.is_symlink() and link.readlink() == Path("..") / name
    stored = run("git", "ls-files", "--stage", f"distgemm/{name}")
    if stored.returncode:
        pytest.skip(f"git says: {stored.stderr.strip()}")
    # 120000: git stores it as a symbolic link, and not the files behind it.
    assert re.fullmatch(rf"120000 \w+ 0\tdistgemm/{name}\n", stored.stdout)


def test_bare_checkout(tmp_path: Path) -> None:
    """A copy of the checkout serves from PYTHONPATH, without an installation."""
    for name in ("layouts", "schedulers", "distgemm"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import distgemm.layouts; print(distgemm.layouts.__file__, len(distgemm.list_schedules()) > 5)"
    done = python(code, cwd=tmp_path, path=tmp_path)
    assert done.stderr == ""
    assert done.stdout == f"{tmp_path / 'distgemm' / 'layouts' / '__init__.py'} True\n"


def test_module_is_the_command() -> None:
    done = run(sys.executable, "-m", "distgemm", "--version")
    assert re.fullmatch(r"distgemm (\d+\.\d+\.\d+|\(not installed\))\n", done.stdout)


def test_readme_python() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    done = python(code)
    assert done.returncode == 0, done.stderr
    _, *printed = done.stdout.splitlines()
    # A print prints what its comment says.
    commented = re.findall(r"^print\(.*\)  # (TileCoord\(.*\)|\d+)", code, re.MULTILINE)
    assert len(commented) == 2 and printed == commented


def test_readme_commands() -> None:
    (block,) = re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    found = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
    assert len(found) >= 4
    for command, output in zip(found[::2], found[1::2], strict=True):
        program, *arguments = shlex.split(command)
        assert program == "distgemm"
        done = run(sys.executable, "-m", "distgemm", *arguments)
        assert done.returncode == 0, done.stderr

        def comparable(text: str) -> list[str]:
            # Times differ, and with them the widths of a table's columns.
            lines = [re.sub(r"[ ─]+", " ", line).strip() for line in text.rstrip().splitlines()]
            return [re.sub(r"\d+ proved$", "MS proved", line) for line in lines]

        assert comparable(done.stdout) == comparable(output), command


@pytest.mark.sample(0)  # five seconds
def test_skips_for_lack_of_gpus_are_visible(tmp_path: Path) -> None:
    """A test marked gpu(1000) is skipped with the reason; torch is imported only when there is one."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu(count): devices\n")
    plain = "import sys\n\ndef test_plain():\n    assert 'torch' not in sys.modules\n"
    (tmp_path / "test_plain.py").write_text(plain)
    pytest_run = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    done = run(*pytest_run, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout
    (tmp_path / "test_gpu.py").write_text("import pytest\n\n@pytest.mark.gpu(1000)\ndef test_many():\n    pass\n")
    done = run(*pytest_run, "test_gpu.py", cwd=tmp_path)
    assert re.search(r"SKIPPED \[1\] .*needs 1000 CUDA devices: \w+", done.stdout), done.stdout
    assert "1 skipped" in done.stdout
