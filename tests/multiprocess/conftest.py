"""Ranks of these tests are forked, except in the tests of the launcher."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def forked(request: pytest.FixtureRequest) -> Iterator[None]:
    from tests.forked import fork_ranks

    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ != "tests.multiprocess.test_launch":
            fork_ranks(patch)
        yield
