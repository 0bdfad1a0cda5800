"""GemmProblem: what it accepts, what it fills in, what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from distgemm import GemmProblem


def test_equal_problems_are_one_key():
    assert GemmProblem(m=np.int64(4), n=5, k=6) == GemmProblem(4, 5, 6)
    assert hash(GemmProblem(4, 5, 6, m_per_rank=[1, 3])) == hash(GemmProblem(4, 5, 6, m_per_rank=(1, 3)))
    assert GemmProblem(4, 5, 6) != GemmProblem(4, 5, 6, dtype="float16")


@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        ("float64", "float64"),
        ("float32", "float32"),
        ("tfloat32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float8_e4m3fn", "bfloat16"),
    ],
)
def test_output_and_partial_types_follow_the_input(dtype: str, out: str):
    problem = GemmProblem(1, 1, 1, dtype=dtype)
    assert (problem.out_dtype, problem.partial_dtype) == (out, out)
    assert GemmProblem(1, 1, 1, dtype=dtype, out_dtype="float32").partial_dtype == "float32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"m": 0}, "m is an integer >= 1, got 0"),
        ({"n": -3}, "n is an integer >= 1, got -3"),
        ({"k": 2.5}, r"k is an integer >= 1, got 2\.5"),
        ({"l": 0}, "l is an integer >= 1, got 0"),
        ({"m": True}, "got True"),
        ({"m": "4"}, "got '4'"),
        ({"dtype": "bf16"}, "dtype is one of float64, .* got 'bf16'"),
        ({"dtype": None}, "got None"),
        ({"out_dtype": "int8"}, "out_dtype is one of"),
        ({"out_dtype": "float8_e4m3fn"}, "out_dtype is one of"),
        ({"partial_dtype": "float8_e4m3fn"}, "partial_dtype is one of"),
        ({"m_per_rank": (4, -1, 5)}, "m_per_rank\\[1\\] is an integer >= 0, got -1"),
        ({"m_per_rank": (4, 5)}, "sum is a multiple of m = 8, not 9, got"),
        ({"m_per_rank": ()}, "sum is a multiple of m = 8, not 0, got"),
        ({"m_per_rank": 8}, "m_per_rank is a tuple of integers"),
        ({"m_per_rank": (4.0, 4)}, r"got 4\.0"),
        ({"m": 2**31}, "m is an integer from 1 to 2147483647, got 2147483648"),
        ({"n": 2**40}, "n is an integer from 1 to 2147483647, got 1099511627776"),
        ({"k": 10**400}, "k is an integer from 1 to 2147483647, got 1.000e.400"),
        ({"l": -(10**5000)}, "l is an integer >= 1, got -1.000e.5000"),
        ({"m_per_rank": (2**40,)}, "m_per_rank\\[0\\] is an integer from 0 to 2147483647"),
        ({"dtype": "x" * 10**6}, r"dtype is one of .*, got 'x+\.\.\.x+'$"),
        ({"out_dtype": ""}, "out_dtype is one of .*, got ''"),
        ({"partial_dtype": 0}, "partial_dtype is one of .*, got 0"),
    ],
)
def test_bad_problems_are_refused_where_they_are_made(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        GemmProblem(**{"m": 8, "n": 8, "k": 8, **arguments})
