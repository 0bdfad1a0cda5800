"""What ``schedule="auto"`` takes on GPUs: the fastest of a few schedules and the unfused program, measured once.

Tuned configurations are kept in ``plans_<GPU>.json`` in the cache folder, over the file of that name that ships with
the package. ``docs/tuning.md`` says what they depend on, and what happens where there is none.
"""

from distgemm.tune.cache import CACHE, bucket, key_of, look_up
from distgemm.tune.candidates import Candidate, candidates, list_candidates, predicted, register_candidate
from distgemm.tune.config import UNFUSED, TunedConfig
from distgemm.tune.ranks import config_of, make
from distgemm.tune.search import Tuned, finalists, measurable, tune
from distgemm.tune.select import executable, fitting, select

__all__ = [
    "CACHE",
    "UNFUSED",
    "Candidate",
    "Tuned",
    "TunedConfig",
    "bucket",
    "candidates",
    "config_of",
    "executable",
    "finalists",
    "fitting",
    "key_of",
    "list_candidates",
    "look_up",
    "make",
    "measurable",
    "predicted",
    "register_candidate",
    "select",
    "tune",
]
