"""What is made of measured times: roofs and shares, tables, files, pictures. The example's figures are invented."""

from __future__ import annotations

import copy
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from distgemm.bench.cases import jobs
from distgemm.bench.report import (
    OURS,
    PART,
    PEER,
    best,
    draw,
    failures,
    figures,
    hidden_share,
    load,
    notes,
    roofs,
    row_table,
    save,
    summary,
    summary_table,
    wrong,
)
from distgemm.bench.run import Settings
from distgemm.cli import common as command_line
from distgemm.cli import main as cli

EXAMPLE = Path(__file__).with_name("test_bench_example.json")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *arguments], env={"COLUMNS": "140"})


def method(name: str, kind: str, *rounds: float, error: str = "", wrong: bool = False) -> dict[str, Any]:
    found = {"name": name, "kind": kind, "captured": True, "detail": "", "rounds": list(rounds)}
    return found | {"error": error, "wrong": wrong}


def row(*methods: dict[str, Any]) -> dict[str, Any]:
    facts = {"model": "llama-3-8b", "layer": "fc2", "op": "gemm+rs", "m": 1000, "n": 500, "k": 2000}
    return facts | {"ranks": 4, "tp": 8, "methods": list(methods)}


PARTS = (
    method("cuBLAS alone", PART, 3.0, 3.0, 9.0),
    method("CUTLASS alone", PART, 2.0),
    method("copies alone", PART, 1.0),
)


# --- figures --------------------------------------------------------------------------------------------


def test_roofs() -> None:
    times = {"cuBLAS alone": 3.0, "CUTLASS alone": 2.0, "copies alone": 1.0, "NCCL alone": 0.1, "x": 0.1}
    assert roofs(times, 4) == {
        "gemm": "CUTLASS alone",
        "gemm_ms": 2.0,
        "copies_ms": 1.0,
        "roof_ms": 2.0,
        "pipeline_roof_ms": 2.25,
    }
    bound = roofs(times | {"copies alone": 8.0}, 2)
    assert (bound["roof_ms"], bound["pipeline_roof_ms"]) == (8.0, 9.0)
    only = roofs({"cuBLAS alone": 3.0, "copies alone": 1.0}, 4)
    assert (only["gemm"], only["roof_ms"]) == ("cuBLAS alone", 3.0)
    for lacking in ({"copies alone": 1.0}, {"cuBLAS alone": 3.0}):
        assert roofs(lacking, 4)["roof_ms"] is None
        assert roofs(lacking, 4)["pipeline_roof_ms"] is None


def test_hidden_share() -> None:
    assert hidden_share(2.0, 2.0, 1.0) == 1.0
    assert hidden_share(2.25, 2.0, 1.0) == 0.75
    assert hidden_share(3.0, 2.0, 1.0) == 0.0
    assert hidden_share(1.5, 2.0, 1.0) == 1.0  # clipped
    assert hidden_share(4.0, 2.0, 1.0) == 0.0  # clipped


def test_figures() -> None:
    found = figures(
        row(
            method("ours", OURS, 4.0, 2.5, 2.4),
            method("broken", OURS, error="all ranks: no"),
            method("NCCL + cuBLAS", PEER, 5.0),
            *PARTS,
        )
    )
    ours, broken, nccl, cublas, _, copies = found["methods"]
    assert (ours["ms"], ours["min_ms"], ours["max_ms"]) == (2.5, 2.4, 4.0)
    assert ours["tflops"] == 2 * 1000 * 500 * 2000 / 4 / 2.5e-3 / 1e12
    assert (ours["efficiency"], ours["pipeline_efficiency"]) == (2.0 / 2.5, 2.25 / 2.5)
    assert (ours["hidden"], ours["relative"]) == (0.5, 0.5)
    assert (nccl["hidden"], nccl["relative"], nccl["efficiency"]) == (0.0, 1.0, 0.4)
    assert {broken[name] for name in ("ms", "min_ms", "tflops", "efficiency", "hidden", "relative")} == {None}
    assert cublas["ms"] == 3.0
    assert cublas["tflops"] and cublas["efficiency"] is None and cublas["relative"] is None
    assert copies["tflops"] is None
    assert figures(found) == found  # of a file that has them already


def test_figures_without_roofs_or_nccl() -> None:
    (ours, _) = figures(row(method("ours", OURS, 2.0), method("cuBLAS alone", PART, 1.0)))["methods"]
    assert ours["ms"] == 2.0
    assert ours["tflops"]
    assert (ours["efficiency"], ours["hidden"], ours["relative"]) == (None, None, None)


def test_summary_takes_the_best_of_each_kind() -> None:
    one = figures(row(method("a", OURS, 4.0), method("b", OURS, 2.5), method("NCCL + cuBLAS", PEER, 5.0), *PARTS))
    two = figures(
        row(
            method("a", OURS, 8.0),
            method("NCCL + cuBLAS", PEER, 16.0),
            method("torch fused", PEER, 4.0),
            method("c", OURS, error="no"),
            *PARTS,
        )
    )
    three = figures(row(method("a", OURS, error="no"), method("NCCL + cuBLAS", PEER, 1.0)))
    assert [best(two, kind)["name"] for kind in (OURS, PEER)] == ["a", "torch fused"]  # type: ignore[index]
    assert best(three, OURS) is None
    found = summary([one, two, three])
    assert found["peer"] == pytest.approx(math.sqrt(2.0 * 0.5))
    assert found["least_peer"] == 0.5
    assert found["unfused"] == pytest.approx(2.0)
    assert found["efficiency"] == pytest.approx(math.sqrt(0.8 * 0.25))
    assert summary([three]) == {}


# --- files and tables -----------------------------------------------------------------------------------


def example() -> dict[str, Any]:
    return load(EXAMPLE)


def text(what: Any) -> str:
    into = io.StringIO()
    Console(width=160, file=into).print(what)
    return into.getvalue()


def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save(example(), path)
    assert load(path) == example()
    assert json.loads(path.read_text()) == json.loads(EXAMPLE.read_text())
    assert list(tmp_path.iterdir()) == [path]  # nothing half-written stays


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"rows": [{}]}', '{"rows": []}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"x\.json is not what distgemm bench --json wrote"):
        load(tmp_path / "x.json")
    with pytest.raises(ValueError, match="No such file"):
        load(tmp_path / "y.json")


def test_table_of_a_row() -> None:
    found = example()["rows"][1]
    said = text(row_table(found))
    assert "70b fc2 gemm+rs m=8192: 8192 x 8192 x 14336 on 4 ranks, n and k of each rank as with 8" in said
    lines = {
        each["name"]: line
        for each in found["methods"]
        for line in said.splitlines()
        if line.startswith(f"{each['name']}  ")
    }
    assert set(lines) == {each["name"] for each in found["methods"]}  # none is left out
    assert lines["reduce_scatter_1d_tiling_a_rotating_c chunks=2"].split()[2:] == [
        *["0.7210", "7", "%", "667", "97", "%", "106", "%", "92", "%", "68", "%"]
    ]
    assert lines["copies alone"].split()[2:] == [*["0.2600", "7", "%", "-", "-", "-", "-", "-"]]
    assert "failed" in lines["reduce_scatter_1d_pairwise_a chunks=4"]
    times = [line.split(" 7 %")[0].split()[-1] for line in said.splitlines() if " 7 %" in line]
    assert times == sorted(times, key=float)
    assert "as with" not in text(row_table(found | {"tp": 4}))
    assert failures(found) == [
        "reduce_scatter_1d_pairwise_a chunks=4 failed: all ranks: OutOfMemoryError: CUDA out of memory"
    ]


def test_copies_that_take_nothing_are_not_measured() -> None:
    for ms in (0.0, -0.001):
        (ours, _, _) = figures(
            row(method("ours", OURS, 2.0), method("cuBLAS alone", PART, 1.0), method("copies alone", PART, ms))
        )["methods"]
        assert ours["efficiency"] is ours["hidden"] is None and ours["ms"] == 2.0


def test_summary_table_and_notes() -> None:
    result = example()
    said = text(summary_table(result))
    shown = [line.split()[:3] for line in said.splitlines() if line.startswith("70b")]
    assert shown == [["70b", row["layer"], row["op"]] for row in result["rows"]]
    lines = notes(result)
    assert lines[0].startswith("geometric means: the best peer takes 1.")
    assert lines[-1] == "quack: not installed"
    result["rows"] = result["rows"][:1]
    result |= {"complete": False, "about": result["about"] | {"quack": "0.6.5"}, "peers": False}
    lines = notes(result)
    assert "gemm+ar" not in "\n".join(lines)
    assert lines[-2:] == ["quack: 0.6.5, not measured", "the run was cut short: 1 of 3 rows"]


def test_wrong_results_are_listed() -> None:
    result = example()
    assert wrong(result) == []
    result["rows"][0]["methods"][0] |= {"error": "rank 1: bad", "wrong": True}
    assert wrong(result) == [
        "70b fc1 ag+gemm m=8192, all_gather_1d_tiling_cd_rotating_a chunks=1 provider=cutlass: rank 1: bad"
    ]


# --- pictures -------------------------------------------------------------------------------------------


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(example(), tmp_path / "x.svg")
    svg = (tmp_path / "x.svg").read_text()
    for said in ("distgemm, best", "NCCL + cuBLAS", "torch fused, eager", "70b fc2 gemm+ar m=8192", "efficiency"):
        assert said in svg
    assert " alone" not in svg
    draw(example(), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(example() | {"rows": []}, tmp_path / "y.svg")


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    done = invoke("--from", str(EXAMPLE), "--plot", "x.svg")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "pictures need matplotlib: pip install 'distgemm[pictures]'" in done.stderr


# --- the command ----------------------------------------------------------------------------------------


def test_from_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = invoke("--from", str(EXAMPLE), "--plot", str(tmp_path / "x.svg"))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("4 x H200 of a fable, driver 580.0, CUDA 13.0, torch 2.11.0, NCCL 2.28.9, NVLS off")
    assert "reduce_scatter_1d_pairwise_a chunks=4 failed: all ranks: OutOfMemoryError" in done.stdout
    assert "all rows" in done.stdout
    assert (tmp_path / "x.svg").exists()
    assert invoke("--from", "none.json").exit_code == 2


def measure(monkeypatch: pytest.MonkeyPatch, path: Path, end: dict[str, Any] | Exception) -> Result:
    """A run whose ranks write the example and then end in this way."""

    def launch(function: Any, ranks: int, todo: Any, settings: Settings, to: Path, **how: Any) -> list[Any]:
        assert (function.__name__, ranks, to, how) == ("run_rank", 2, path, {"backend": "nccl", "timeout": 9.0})
        assert settings.command.startswith("distgemm")
        if path.parent.name != "nothing":
            save(example(), path)
        if isinstance(end, Exception):
            raise end
        return [end] * ranks

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("distgemm.runtime.launch.launch", launch)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return invoke("--json", str(path), "--timeout", "9")


def test_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert jobs(["llama-3-70b"], ["fc1"], ["ag+gemm"], [8192], 2, 8)  # what the run is asked for exists
    done = measure(monkeypatch, tmp_path / "x.json", example())
    assert done.exit_code == 0, done.output  # a method that failed is no error
    bad = copy.deepcopy(example())
    bad["rows"][0]["methods"][0] |= {"error": "rank 1: bad", "wrong": True, "ms": None}
    done = measure(monkeypatch, tmp_path / "x.json", bad)
    assert done.exit_code == 1
    assert "WRONG: 70b fc1 ag+gemm m=8192, all_gather_1d_tiling_cd_rotating_a chunks=1" in done.stderr


def test_a_run_that_is_cut_short_shows_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = measure(monkeypatch, tmp_path / "x.json", RuntimeError("rank 1 was killed"))
    assert (done.exit_code, "all rows" in done.stdout) == (1, True)
    assert done.stderr == "error: rank 1 was killed\n"
    (tmp_path / "nothing").mkdir()
    save(example(), tmp_path / "nothing" / "x.json")  # of an earlier run
    done = measure(monkeypatch, tmp_path / "nothing" / "x.json", RuntimeError("rank 1 was killed"))
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "error: rank 1 was killed\n")
