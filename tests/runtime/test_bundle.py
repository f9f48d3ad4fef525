"""The one file that jobs are given."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from airflow_gpu.runtime import bundle
from tests.runtime.bed import BOTH_PYTHONS, OLD_PYTHON, PYTHON


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "runtime.pyz"
    path.write_bytes(bundle.build())
    return path


def run(python: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **env}
    return subprocess.run(
        [python, *words], env=environment, capture_output=True, text=True, check=False, cwd="/"
    )


def test_same_bytes_from_every_python() -> None:
    digest = hashlib.sha256(bundle.build()).hexdigest()
    assert bundle.build() is bundle.build()
    root = str(Path(bundle.__file__).parents[2])
    code = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1]); import airflow_gpu.runtime.bundle as b; "
        "print(hashlib.sha256(b.build()).hexdigest())"
    )
    for python in filter(os.path.exists, (PYTHON, OLD_PYTHON)):
        assert run(python, "-S", "-c", code, root).stdout.strip() == digest


def test_holds_the_runtime_and_nothing_else() -> None:
    names = zipfile.ZipFile(io.BytesIO(bundle.build())).namelist()
    assert names == sorted(names)
    assert {"__main__.py", "airflow_gpu/__init__.py", "airflow_gpu/runtime/agent.py"} <= set(names)
    assert all(
        n in ("__main__.py", "airflow_gpu/__init__.py")
        or n.startswith(("airflow_gpu/runtime/", "airflow_gpu/frameworks/"))
        for n in names
    )
    assert len(bundle.build()) < 700_000  # a ConfigMap holds 1 MiB, in base64, with the function beside it


@pytest.mark.parametrize("python", BOTH_PYTHONS)
def test_needs_nothing_but_python(pyz: Path, python: str) -> None:
    said = run(python, "-S", "-c", "from airflow_gpu.runtime import gang; print(gang)", PYTHONPATH=str(pyz))
    assert said.stdout.startswith("<class 'airflow_gpu.runtime.api.gang'>"), said.stderr
    assert run(python, str(pyz)).returncode == 64
    assert "usage" in run(python, str(pyz), "agent").stderr


def test_an_installed_package_is_not_hidden(pyz: Path, tmp_path: Path) -> None:
    package = tmp_path / "airflow_gpu"
    (package / "runtime").mkdir(parents=True)
    (package / "__init__.py").write_text("installed = True\nfrom airflow_gpu.extra import more\n")
    (package / "extra.py").write_text("more = 7\n")
    (package / "runtime" / "__init__.py").write_text("raise SystemExit('the installed runtime')\n")
    code = (
        "import airflow_gpu; from airflow_gpu.runtime import gang; import airflow_gpu.extra as e; "
        "print(airflow_gpu.installed, airflow_gpu.more, e.__file__, airflow_gpu.__file__, gang.__module__)"
    )
    said = run(PYTHON, "-c", code, PYTHONPATH=f"{pyz}:{tmp_path}")
    expected = f"True 7 {package}/extra.py {package}/__init__.py airflow_gpu.runtime.api"
    assert said.stdout.strip() == expected, said.stderr


def test_a_broken_installed_package_does_no_harm(pyz: Path, tmp_path: Path) -> None:
    (tmp_path / "airflow_gpu").mkdir()
    (tmp_path / "airflow_gpu/__init__.py").write_text("import there_is_no_such_module\n")
    code = "from airflow_gpu.runtime import gang; print('ok')"
    assert run(PYTHON, "-c", code, PYTHONPATH=f"{pyz}:{tmp_path}").stdout == "ok\n"


def test_the_real_package(pyz: Path) -> None:
    root = str(Path(bundle.__file__).parents[2])
    code = "import airflow_gpu, airflow_gpu.runtime as r; print(airflow_gpu.__file__, r.__file__)"
    said = run(sys.executable, "-c", code, PYTHONPATH=f"{pyz}:{root}")
    assert said.stdout.split() == [
        f"{root}/airflow_gpu/__init__.py",
        f"{pyz}/airflow_gpu/runtime/__init__.py",
    ]


def test_the_agent_never_loads_an_installed_package(pyz: Path, tmp_path: Path) -> None:
    (tmp_path / "airflow_gpu").mkdir()
    (tmp_path / "airflow_gpu/__init__.py").write_text("raise SystemExit('loaded')\n")
    said = run(PYTHON, str(pyz), "agent", "/no/such/job.json", PYTHONPATH=str(tmp_path))
    assert said.returncode == 64
    assert "cannot read the payload /no/such/job.json" in said.stderr
