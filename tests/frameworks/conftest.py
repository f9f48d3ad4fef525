from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.frameworks.bed import PYTHON, patience
from tests.runtime.bed import Bed, beds


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    """A run directory whose agents and ranks run with the frameworks' Python."""
    patience(monkeypatch)

    def made() -> Iterator[Callable[..., Bed]]:
        yield from beds(tmp_path)

    for make in made():
        yield make(PYTHON)
