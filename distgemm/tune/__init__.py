"""Tuning for ``schedule="auto"``: measures schedules and the unfused program on the GPUs, and records the fastest.

The cache folder has one file of tuned configurations for each GPU, ``plans_<GPU>.json``. Its entries replace those of
the file with the same name that ships with the package. ``docs/tuning.md`` says what a configuration depends on, and
what runs if there is none.
"""

from distgemm.tune.cache import CACHE, bucket, key_of, look_up
from distgemm.tune.candidates import Candidate, list_candidates, predicted, register_candidate, shortlist
from distgemm.tune.config import UNFUSED, TunedConfig
from distgemm.tune.ranks import config_of, make
from distgemm.tune.search import Tuned, finalists, measurable, tune
from distgemm.tune.select import executable, fitting, select

__all__ = [
    # tuned configurations and where they are kept
    "CACHE",
    "UNFUSED",
    "TunedConfig",
    "bucket",
    "key_of",
    "look_up",
    # what "auto" considers
    "Candidate",
    "list_candidates",
    "predicted",
    "register_candidate",
    "shortlist",
    # measuring
    "Tuned",
    "finalists",
    "measurable",
    "tune",
    # selecting
    "config_of",
    "executable",
    "fitting",
    "make",
    "select",
]
