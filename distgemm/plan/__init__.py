"""Plans: what every rank does for one product, derived from a schedule and proved.

Planning imports neither torch nor CUDA.
"""

from distgemm.plan.derive import make_plan
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import GemmProblem

__all__ = ["GemmProblem", "Plan", "PlanError", "make_plan"]
