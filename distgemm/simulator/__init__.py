"""The simulator: predicted times of a plan on a machine."""

from distgemm.simulator.engine import Event, Timeline, arrivals, predict_unfused, simulate
from distgemm.simulator.machine import Machine, list_machines

__all__ = ["Event", "Machine", "Timeline", "arrivals", "list_machines", "predict_unfused", "simulate"]
