"""The programs of docs/frameworks.md, each in a gang of two ranks as it stands on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.transcript import blocks
from tests.frameworks.bed import missing, needs
from tests.runtime.bed import Bed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
PROGRAMS = [block.body for block in blocks(PAGE) if block.kind == "python" and block.skip is None]


def libraries(program: str) -> list[str]:
    return sorted(
        set(re.findall(r"^\s*(?:import|from) (torch|jax|lightning|transformers)\b", program, re.MULTILINE))
    )


def test_the_page_has_programs() -> None:
    assert {name for program in PROGRAMS for name in libraries(program)} == {
        "jax",
        "lightning",
        "torch",
        "transformers",
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "program",
    [pytest.param(text, marks=needs(*libraries(text)), id="-".join(libraries(text))) for text in PROGRAMS],
)
def test_program(bed: Bed, program: str) -> None:
    assert not missing(*libraries(program))
    job = bed.payload(script=program, nodes=1, checkpoint={"interval": 0.2, "keep": 2})
    assert bed.run(job, JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1") == [0], bed.log(0)
    assert bed.manifests(), "it saves: " + bed.log(0)
