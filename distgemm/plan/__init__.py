"""Plans: the ops of every rank for one product, derived from a schedule, and their verification.

This package imports neither torch nor CUDA.
"""

from distgemm.plan.derive import make_plan
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import GemmProblem

__all__ = ["GemmProblem", "Plan", "PlanError", "make_plan"]
