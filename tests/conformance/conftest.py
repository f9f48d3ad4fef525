"""``--table FILE``: the dated table of scenarios and targets, for the documentation."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.conformance.suite import Scenarios

WAYS = {
    "TestRest": "slurm 24.11 REST",
    "TestSsh": "slurm 24.11 SSH",
    "TestCommand": "slurm 24.11 commands",
    "TestOldRest": "slurm 22.05 REST",
    "TestOldSsh": "slurm 22.05 SSH",
    "TestOldCommand": "slurm 22.05 commands",
}

_RESULTS: dict[tuple[str, str], str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--table", type=Path, default=None, help="write the table of scenarios x targets to this file"
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and not (report.when == "setup" and not report.passed):
        return
    path, _, name = report.nodeid.rpartition("::")
    module = path.split("::")[0].rpartition("/")[2]
    if hasattr(Scenarios, name.split("[")[0]):
        target = module.removeprefix("test_").removesuffix(".py")
        if "::Test" in path and target == "slurm":
            target = WAYS.get(path.rpartition("::")[2], target)
        _RESULTS[(name, target)] = {"passed": "yes", "failed": "**no**"}.get(report.outcome, report.outcome)


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--table", None)
    if path is None or not _RESULTS:
        return
    targets = sorted({target for _, target in _RESULTS})
    lines = [
        "# Conformance",
        "",
        "One suite, `tests/conformance/suite.py`, run against each target on a real system. `make test-all` writes",
        f"this page; this one is of {datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}.",
        "",
        "| scenario | what is seen | " + " | ".join(targets) + " |",
        "|---|---|" + "---|" * len(targets),
    ]
    for name in [name for name in vars(Scenarios) if name.startswith("test_")]:
        words = (getattr(Scenarios, name).__doc__ or "").strip().split("\n")[0]
        cells = [_RESULTS.get((name, target), "not run") for target in targets]
        lines.append(
            f"| {name.removeprefix('test_').replace('_', ' ')} | {words} | " + " | ".join(cells) + " |"
        )
    Path(path).write_text("\n".join(lines) + "\n")
