"""distgemm verify: which plans it proves, what it prints and how it fails."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import distgemm
from distgemm import Plan
from distgemm.cli import verify as command
from distgemm.cli.options import squarest_meshes
from distgemm.gemm.per_tile.order import TileOrder
from distgemm.plan.ops import Gemm
from distgemm.schedulers import Hop, Route, registry
from tests.unit.command import invoke, refusal, succeed
from tests.unit.test_cli import schedule_2d
from tests.unit.test_explorer import unpacked

__all__ = ["schedule_2d"]  # a fixture


PAIRED = [name for name in distgemm.list_schedules() if "xor" in name]
"""Schedules for powers of two."""


def ranks(*sizes: int) -> list[str]:
    return [word for size in sizes for word in ("--ranks", str(size))]


SYNCS = ("credit", "barrier")


def results(text: str) -> list[tuple[str, ...]]:
    rows = [line.split() for line in text.splitlines()[2:-1] if not line.startswith(" ")]
    return [(row[0], row[1], row[5]) for row in rows]


def test_verify_one() -> None:
    text = succeed("verify", "gemm+rs", *ranks(1, 2, 4, 6))
    assert results(text) == [("gemm+rs", size, "proved") for size in ("1", "2", "4", "6")]
    assert text.endswith("4 proved, 0 failed, 0 skipped\n")
    plans = {
        mechanism: [
            distgemm.make_plan(distgemm.GemmProblem(101, 77, 59), "gemm+rs", 4, mechanism=mechanism, **how)
            for how in ({"workspace": one, "sync": other} for one in ("full", "bounded") for other in SYNCS)
        ]
        for mechanism in ("push", "pull", "store")
    }
    counts = {
        mechanism: sum(len(plan.ops(rank)) for plan in of_it for rank in range(4)) for mechanism, of_it in plans.items()
    }
    assert re.search(rf"^gemm\+rs +4 +12 +{sum(counts.values())} ", text, re.MULTILINE)
    for mechanism, count in counts.items():
        text = succeed("verify", "gemm+rs", "--ranks", "4", "--mechanism", mechanism)
        assert re.search(rf"^gemm\+rs +4 +4 +{count} ", text, re.MULTILINE)


def test_verify_all_skips_what_cannot_be() -> None:
    text = succeed("verify", "all", "--ranks", "3", "--workspace", "full", "--sync", "credit")
    found = {name: result for name, _, result in results(text)}
    assert list(found) == distgemm.list_schedules()
    assert {name for name, result in found.items() if result == "skipped"} == {*PAIRED}
    assert "a power of two, got 3" in re.sub(r"\s+", " ", text)


def test_verify_all_proves_every_mesh() -> None:
    text = succeed("verify", "all", *ranks(8, 12), "--workspace", "full", "--sync", "credit")
    found = {(name, mesh): result for name, mesh, result in results(text)}
    for name, meshes in (
        ("tensor_parallel_2d", ("2x4", "4x2", "3x4", "4x3")),
        ("tensor_parallel_2d_rs", ("2x4", "4x2", "3x4", "4x3")),
        ("tensor_parallel_2d_nested", ("2x4", "4x2", "3x4", "4x3")),
        ("tensor_parallel_3d", ("2x2x2", "2x2x3", "3x2x2")),
        ("all_reduce_1d_pairwise_a", ("8", "12")),
        ("all_reduce_1d_tiling_a_rotating_c", ("8", "12")),
    ):
        assert {mesh: result for (one, mesh), result in found.items() if one == name} == dict.fromkeys(meshes, "proved")


def test_verify_as_json() -> None:
    found = json.loads(succeed("verify", "all", "--ranks", "3", "--sync", "credit", "--json", "-"))
    assert [each["schedule"] for each in found if each["result"] == "skipped"] == PAIRED
    assert next(each["reason"] for each in found if each["reason"]).endswith("a power of two, got 3")


def test_verify_default_is_one_to_eight() -> None:
    text = succeed("verify", "gemm+rs", "--workspace", "full", "--sync", "credit")
    assert [size for _, size, _ in results(text)] == list("12345678")


def test_verify_meshes(schedule_2d: str) -> None:
    text = succeed("verify", schedule_2d, *ranks(1, 3, 4, 6))
    assert [mesh for _, mesh, _ in results(text)] == ["1x1", "1x3", "3x1", "2x2", "2x3", "3x2"]
    assert [mesh for _, mesh, _ in results(succeed("verify", schedule_2d, "--mesh", "1x4"))] == ["1x4"]
    text = succeed("verify", "--mesh", "2x2", "--ranks", "4")
    assert {result for name, _, result in results(text) if name == "gemm+rs"} <= {"skipped"}
    assert (schedule_2d, "2x2", "proved") in results(text)


def test_meshes() -> None:
    assert squarest_meshes(8, 1) == [(8,)]
    assert squarest_meshes(8, 3) == [(2, 2, 2)]
    assert squarest_meshes(12, 3) == [(2, 2, 3), (3, 2, 2)]


def test_verify_reports_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*arguments: Any, **keywords: Any) -> Plan:
        plan = distgemm.make_plan(*arguments, **keywords)
        if plan.world_size != 2:
            return plan
        return plan.replace_ops(1, [op for op in plan.ops(1) if not isinstance(op, Gemm)])

    monkeypatch.setattr(command, "make_plan", broken)
    done = invoke("verify", "gemm+rs", *ranks(1, 2, 3))
    assert done.exit_code == 1
    assert [result for _, _, result in results(done.stdout)] == ["proved", "failed", "proved"]
    assert done.stdout.endswith("2 proved, 1 failed, 0 skipped\n")
    with pytest.raises(distgemm.PlanError) as failure:
        broken(distgemm.GemmProblem(101, 77, 59), "gemm+rs", 2).verify()
    assert str(failure.value) in done.stderr
    assert "gemm+rs on 2: workspace full, sync credit, mechanism push: " in done.stderr
    pytest.importorskip("mpld3")
    page = tmp_path / "failure.html"
    done = invoke("verify", "gemm+rs", *ranks(1, 2, 3), "-o", str(page))
    assert done.exit_code == 1 and done.stderr.endswith(f"wrote {page}\n")
    (model,) = unpacked(page.read_text())["models"]
    assert model["failure"]["message"] == str(failure.value) and model["ranks"] == 2
    assert refusal("verify", "gemm+rs", "-o", "a.svg") == "error: -o takes a .html file, got 'a.svg'"


@pytest.mark.parametrize("error", [distgemm.PlanError("a hop to rank 9"), ValueError("a rank gets no tile")])
def test_a_schedule_that_gives_no_plan_fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Only what the registry refuses is skipped."""

    def refuse(*arguments: Any, **keywords: Any) -> Plan:
        raise error

    monkeypatch.setattr(command, "make_plan", refuse)
    done = invoke("verify", "gemm+rs", *ranks(2, 3))
    assert done.exit_code == 1 and str(error) in done.stderr
    assert [result for _, _, result in results(done.stdout)] == ["failed", "failed"]
    monkeypatch.setattr("distgemm.cli.plan.make_plan", refuse)
    done = invoke("plan", "gemm+rs", "--ranks", "2")
    assert (done.exit_code, done.stderr) == (2, f"error: {error}\n")


@pytest.fixture
def broken_builders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    registry.register_schedule("a_test_of_none")(lambda mesh: None)  # type: ignore[arg-type, return-value]
    registry.register_schedule("a_test_of_errors")(lambda mesh: mesh[7])  # type: ignore[arg-type, return-value]


def test_all_goes_on_after_a_builder_that_is_wrong(broken_builders: None) -> None:
    done = invoke("verify", "all", "--ranks", "2", "--workspace", "full", "--sync", "credit")
    assert done.exit_code == 1
    found = {name: result for name, _, result in results(done.stdout)}
    assert {name for name, result in found.items() if result == "failed"} == {"a_test_of_none", "a_test_of_errors"}
    assert found["all_gather_1d_ring_a"] == "proved"
    assert "a_test_of_errors on 2: the builder of schedule 'a_test_of_errors', " in done.stderr
    text = succeed("simulate", "all", "--ranks", "2", "--m", "64", "--n", "64", "--k", "64")
    assert "failed: a_test_of_none on 2: the builder of schedule 'a_test_of_none', " in text
    assert "all_gather_1d_ring_a" in text


@dataclass(frozen=True)
class WrongHops:
    """A route from a rank that does not exist, or that divides by zero."""

    rank: int

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        return [Hop(self.rank, 1 // self.rank)]


@dataclass(frozen=True)
class Builder:
    schedule: distgemm.DistributedTileScheduler

    def __call__(self, mesh: tuple[int, ...]) -> distgemm.DistributedTileScheduler:
        return self.schedule


def test_all_goes_on_after_a_route_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    for name, rank in (("a_test_of_zero", 0), ("a_test_of_hops", 9)):
        schedule = replace(distgemm.get_schedule("ag+gemm", 2), name=name, route=Route(a=WrongHops(rank)))
        registry.register_schedule(name)(Builder(schedule))  # type: ignore[arg-type]
    zero = "the route WrongHops of A(0, 0, 0) raised ZeroDivisionError: "
    hops = "the route WrongHops of A(0, 0, 0) returns Hop(src=9, "
    done = invoke("verify", "all", "--ranks", "2", "--workspace", "full", "--sync", "credit")
    assert done.exit_code == 1 and zero in done.stderr and hops in done.stderr
    failed = {name for name, _, result in results(done.stdout) if result == "failed"}
    assert failed == {"a_test_of_zero", "a_test_of_hops"}
    text = " ".join(succeed("simulate", "all", "--ranks", "2", "--m", "64", "--n", "64", "--k", "64").split())
    for name, says in (("a_test_of_zero", zero), ("a_test_of_hops", hops)):
        assert f"failed: {name} on 2: {name}: {says}" in text
    assert "all_gather_1d_ring_a" in text


def test_hosts_that_do_not_divide_the_ranks_are_skipped() -> None:
    text = succeed("verify", "gemm+rs", *ranks(1, 2, 3, 4), "--ranks-per-host", "2")
    assert text.endswith("2 proved, 0 failed, 2 skipped\n")
    assert "--ranks-per-host 2 does not divide 3 ranks" in text
    assert "does not divide" in refusal("verify", "gemm+rs", "--ranks", "3", "--ranks-per-host", "2")


def test_verify_per_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are proved for schedules that have an order of tiles, others are skipped, and a failure is told."""
    gemm = ("--m", "1024", "--n", "1024", "--k", "512")
    text = succeed("verify", "all", "--ranks", "4", "--per-tile", "128x128x64_2x1_pingpong", *gemm)
    proved = r"^reduce_scatter_1d_pairwise_a, 128x128x64_2x1_pingpong +4 +256 +192 +192 +\d+ +proved"
    assert re.search(proved, text, re.MULTILINE)
    assert "all_gather_1d_pairwise_xor_a is not executed per tile: each rank multiplies one shard" in text
    assert "12 proved, 0 failed, 11 skipped" in text
    assert succeed("verify", "gemm+ar", *ranks(1, 8), "--per-tile", "all").endswith("\n3 proved, 0 failed, 1 skipped\n")
    assert "128x256" in refusal("verify", "gemm+rs", "--ranks", "4", "--per-tile", "128x256")
    for option in (("--mechanism", "pull"), ("--sync", "credit"), ("--workspace", "full"), ("--ranks-per-host", "2")):
        said = refusal("verify", "gemm+rs", "--ranks", "4", "--per-tile", "all", *option)
        assert "are about plans, and --per-tile proves none" in said
    monkeypatch.setattr(TileOrder, "at", lambda order, ticket: order.of_unit(0, ticket % order.units))
    failed = invoke("verify", "gemm+rs", "--ranks", "2", "--per-tile", "128x128x64_2x1_pingpong", *gemm)
    assert failed.exit_code == 1 and "each rank multiplies each of" in failed.stderr


def test_show_per_tile() -> None:
    text = succeed(
        "show", "gemm+rs", "--ranks", "2", "--per-tile", "128x256x64_2x1_cooperative", "--m", "512", "--n", "512"
    )
    assert text.startswith("rank 0 of 2: 1x2 clusters of tiles in each shard") and "shard 0, block 0  [2]  [3]" in text
