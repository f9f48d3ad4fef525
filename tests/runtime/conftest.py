from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.beds.stores.started import Servers, started
from tests.runtime.bed import OLD_PYTHON, PYTHON, Bed, beds
from tests.runtime.objects import ObjectBed, object_beds


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that ask for ``each_python`` run with this Python and with the oldest that jobs may have."""
    if "each_python" in metafunc.fixturenames:
        old = pytest.param(
            OLD_PYTHON,
            id="py38",
            marks=pytest.mark.skipif(not os.path.exists(OLD_PYTHON), reason=f"no Python 3.8 at {OLD_PYTHON}"),
        )
        metafunc.parametrize("each_python", [pytest.param(PYTHON, id="this"), old])


@pytest.fixture
def make_bed(tmp_path: Path) -> Iterator[Callable[..., Bed]]:
    yield from beds(tmp_path)


@pytest.fixture
def bed(make_bed: Callable[..., Bed]) -> Bed:
    return make_bed()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with started() as servers:
        yield servers


@pytest.fixture
def make_objects(tmp_path: Path, servers: Servers) -> Iterator[Callable[[str], ObjectBed]]:
    yield from object_beds(tmp_path, servers)
