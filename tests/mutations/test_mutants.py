"""The proof against the oracle: it accepts only mutants that are right, and all plans that are not mutated."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import distgemm
from tests.mutations.mutants import KINDS, agree
from tests.mutations.oracle import judge
from tests.mutations.run import bases, one, said, scenarios
from tests.unit.interleavings import fault
from tests.unit.mutations import mutations
from tests.unit.test_verify_interleavings import small


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", distgemm.list_schedules())
def test_plans_that_are_not_mutated_are_right_and_proved(name: str) -> None:
    plans = [(scenario, plan) for scenario, plan in bases() if plan.schedule == name]
    assert len(plans) > 10
    for scenario, plan in plans:
        assert judge(plan).kind == "right", scenario
        assert said(plan) == "accepted", scenario
        assert agree(plan) == plan


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(100))
def test_the_proof_accepts_only_mutants_that_are_right(part: int) -> None:
    """The mutants of ``python tests/mutations/run.py --count 100000``, in parts."""
    seen = set()
    for number in range(part * 1000, (part + 1) * 1000):
        kind, name, oracle, proof, why = one(number, 0, bases())
        assert proof in ("accepted", "refused"), f"{kind}, {name}: {proof}"
        assert proof == "refused" or oracle == "right", f"{kind}, {name}: {oracle}: {why}"
        seen.add((kind, oracle))
    assert {kind for kind, _ in seen} == set(KINDS)
    assert {oracle for _, oracle in seen} == {"right", "wrong", "undefined", "no plan"}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "workspace", "sync", "mechanism"),
    [
        ("all_gather_1d_tiling_cd_rotating_a", "full", "credit", "push"),
        ("all_gather_1d_tiling_cd_rotating_a", "full", "barrier", "pull"),
        ("all_gather_1d_tiling_k_rotating_a", "bounded", "barrier", "push"),
        ("reduce_scatter_1d_tiling_a_rotating_c", "bounded", "credit", "push"),
        ("reduce_scatter_1d_tiling_a_rotating_c", "full", "credit", "store"),
        ("reduce_scatter_1d_pairwise_a", "full", "credit", "pull"),
    ],
)
def test_the_oracle_finds_what_the_execution_of_all_orders_finds(
    name: str, workspace: str, sync: str, mechanism: str
) -> None:
    """A second oracle explores every order of the ops of small plans; the two agree on each mutation."""
    plan = small(name, (2,), 1, workspace, sync, mechanism)
    judged = set()
    for mutation in mutations(plan):
        verdict = judge(mutation.plan)
        judged.add(verdict.kind)
        if verdict.kind == "undefined":
            continue
        found = fault(mutation.plan, exhaustive=True)
        # The second oracle refuses work that is done twice and copies of nothing, which change no result.
        harmless = found is not None and ("has multiplied" in found or "before anything arrived" in found)
        assert (verdict.kind == "right") == (found is None) or harmless, f"{mutation.what}: {verdict}: {found}"
    assert judged == {"right", "wrong", "undefined"}


def test_the_oracle_shares_no_code_with_the_package() -> None:
    tree = ast.parse((Path(__file__).parent / "oracle.py").read_text())
    imported = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    imported += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported and not [name for name in imported if name.startswith(("distgemm", "tests"))]


def test_every_mechanism_workspace_and_schedule_is_mutated() -> None:
    chosen = {scenario for scenario, _ in bases()}
    for field in range(7):
        assert {scenario[field] for scenario in chosen} == {scenario[field] for scenario in scenarios()}  # type: ignore[index]
    assert len(chosen) > 800
