"""What ``schedule="auto"`` takes on GPUs: the fastest of a few schedules and the unfused program, measured once.

Choices are kept in ``plans_<GPU>.json`` in the cache folder, over the file of that name that ships with the package.
``docs/tuning.md`` says what they depend on, and what happens where there is none.
"""

from distgemm.tune.cache import bucket, choices_file, key_of, look_up, record
from distgemm.tune.candidates import candidates, predicted
from distgemm.tune.config import UNFUSED, Choice
from distgemm.tune.ranks import make
from distgemm.tune.search import Tuned, finalists, measurable, tune
from distgemm.tune.select import choose, executable, fitting

__all__ = [
    "UNFUSED",
    "Choice",
    "Tuned",
    "bucket",
    "candidates",
    "choices_file",
    "choose",
    "executable",
    "finalists",
    "fitting",
    "key_of",
    "look_up",
    "make",
    "measurable",
    "predicted",
    "record",
    "tune",
]
