"""The simulator: predicted times of a plan on a machine."""

from distgemm.simulator.costs import predict_unfused
from distgemm.simulator.engine import MAX_STREAMS, simulate
from distgemm.simulator.machine import Machine, list_machines
from distgemm.simulator.timeline import FLAG_LANE, Event, Timeline, arrivals, joined, lane_order, op_title

__all__ = [
    "FLAG_LANE",
    "MAX_STREAMS",
    "Event",
    "Machine",
    "Timeline",
    "arrivals",
    "joined",
    "lane_order",
    "list_machines",
    "op_title",
    "predict_unfused",
    "simulate",
]
