"""What follows from measured times: roofs, shares, means; and files. The example's figures are invented."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distgemm.bench.report import (
    OURS,
    PART,
    PEER,
    Kind,
    best,
    failures,
    figures,
    load,
    notes,
    roofs,
    save,
    summary,
    wrong,
)
from distgemm.measure.roof import Roof
from tests.unit.command import refusal, succeed

EXAMPLE = Path(__file__).with_name("test_bench_example.json")


def method(name: str, kind: Kind, *rounds: float, error: str = "", wrong: bool = False) -> dict[str, Any]:
    found = {"name": name, "kind": kind, "captured": True, "detail": "", "rounds": list(rounds)}
    return found | {"error": error, "wrong": wrong}


def row(*methods: dict[str, Any]) -> dict[str, Any]:
    facts = {"model": "llama-3-8b", "layer": "fc2", "pattern": "gemm+rs", "m": 1000, "n": 500, "k": 2000}
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
    roof = Roof(gemm_ms=2.0, copies_ms=1.0, ranks=4)
    assert roof.hidden_share(2.0) == 1.0
    assert roof.hidden_share(2.25) == 0.75
    assert roof.hidden_share(3.0) == 0.0
    assert roof.hidden_share(1.5) == 1.0  # clipped
    assert roof.hidden_share(4.0) == 0.0  # clipped


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


# --- files and remarks -----------------------------------------------------------------------------------


def example() -> dict[str, Any]:
    return load(EXAMPLE)


def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save(example(), path)
    assert load(path) == example()
    assert json.loads(path.read_text()) == json.loads(EXAMPLE.read_text())
    assert list(tmp_path.iterdir()) == [path]  # nothing half-written stays


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"rows": [{}]}', '{"rows": []}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"x\.json(: it is no JSON| is not what distgemm bench --json wrote)"):
        load(tmp_path / "x.json")
    with pytest.raises(ValueError, match="No such file"):
        load(tmp_path / "y.json")
    os.mkfifo(tmp_path / "fifo.json")
    with pytest.raises(ValueError, match=r"fifo\.json: it is no regular file"):
        load(tmp_path / "fifo.json")


def test_a_file_with_times_alone(tmp_path: Path) -> None:
    result = json.loads(EXAMPLE.read_text())
    for row in result["rows"]:
        row["methods"] = [{name: each[name] for name in ("name", "kind", "rounds")} for each in row["methods"]]
    path = tmp_path / "x.json"
    save(result, path)
    (first, *_), *_ = (row["methods"] for row in load(path)["rows"])
    assert (first["error"], first["wrong"], first["detail"]) == ("", False, "") and first["ms"] > 0
    assert "all rows" in succeed("bench", "--from", str(path))


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["about"].pop("quack"),
        lambda found: found["about"].update(gpu=None),
        lambda found: found["rows"][0].pop("tp"),
        lambda found: found["rows"][0]["methods"][0].update(name=3),
        lambda found: found["rows"][0]["methods"][0].update(detail=3),
        lambda found: found.update(resumptions=[{"date": "", "anchors": [{"row": "x"}]}]),
        lambda found: found.update(resumptions=[{"date": "", "anchors": [{"row": "x", "ratio": "1"}]}]),
    ],
)
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_file_that_was_changed(command: str, change: Callable[[Any], object], tmp_path: Path) -> None:
    result, path = json.loads(EXAMPLE.read_text()), tmp_path / "x.json"
    change(result)
    save(result, path)
    assert "is not what distgemm bench --json wrote" in refusal(command, "--from", str(path))


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    """Nor /dev/null, where root could."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    save({"rows": []}, path)
    assert path.is_fifo() and json.loads(os.read(reader, 1000)) == {"rows": []}
    os.close(reader)


def test_a_result_is_not_saved_through_links(tmp_path: Path) -> None:
    """The file that becomes the result has a name that nobody foresees."""
    victim, path = tmp_path / "victim", tmp_path / "x.json"
    victim.write_text("precious")
    (tmp_path / f".{path.name}.{os.getpid()}").symlink_to(victim)
    path.symlink_to(victim)
    save(example(), path)
    assert victim.read_text() == "precious"
    assert load(path) == example()


def test_copies_that_take_nothing_are_not_measured() -> None:
    for ms in (0.0, -0.001):
        (ours, _, _) = figures(
            row(method("ours", OURS, 2.0), method("cuBLAS alone", PART, 1.0), method("copies alone", PART, ms))
        )["methods"]
        assert ours["efficiency"] is ours["hidden"] is None and ours["ms"] == 2.0


def test_notes() -> None:
    result = example()
    lines = notes(result)
    assert lines[0].startswith("geometric means: the fastest peer takes 1.")
    assert lines[-1] == "quack: not installed"
    result["rows"] = result["rows"][:1]
    result |= {"complete": False, "about": result["about"] | {"quack": "0.6.5"}, "peers": False}
    lines = notes(result)
    assert lines[-2:] == ["quack: 0.6.5, not measured", "the run was cut short: 1 of 3 rows"]


def test_failures() -> None:
    assert failures(example()["rows"][1]) == [
        "reduce_scatter_1d_pairwise_a chunks=4 failed: all ranks: OutOfMemoryError: CUDA out of memory"
    ]
    assert failures({"methods": [], "error": "no memory", "tune_error": "no kernel"}) == [
        "nothing was measured: no memory",
        "not tuned: no kernel",
    ]


def test_wrong_results_are_listed() -> None:
    result = example()
    assert wrong(result) == []
    result["rows"][0]["methods"][0] |= {"error": "rank 1: bad", "wrong": True}
    assert wrong(result) == [
        "70b fc1 ag+gemm m=8192, all_gather_1d_tiling_cd_rotating_a chunks=1 provider=cutlass: rank 1: bad"
    ]
