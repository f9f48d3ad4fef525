"""The package ``airflow_gpu`` of a job that has nothing but runtime.pyz.

Purpose: inside the archive this file is ``airflow_gpu/__init__.py``. If the
job's Python has a really installed ``airflow_gpu`` as well, this module becomes
that one; only ``airflow_gpu.runtime`` still comes from the archive, so that the
handle always speaks the same language as the agent that runs it.

Limits: an installed package that cannot be imported is passed over, with a
warning.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Optional


def _installed(archive: str) -> Optional[ModuleSpec]:
    path = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != archive]
    for finder in sys.meta_path:
        # Editable installs bring finders of their own; the path's is asked without the archive.
        if finder is PathFinder:
            spec = PathFinder.find_spec("airflow_gpu", path)
        else:
            find = getattr(finder, "find_spec", None)
            spec = find("airflow_gpu", None) if find is not None else None
        if spec is not None and spec.loader is not None and spec.origin not in (None, "namespace", __file__):
            return spec
    return None


def _become_installed() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    archive = os.path.dirname(here)
    if os.path.abspath(sys.argv[0] if sys.argv else "") == archive:
        return  # the archive runs as a program: the agent depends on nothing else
    spec = _installed(archive)
    if spec is None or spec.loader is None:
        return
    module = sys.modules[__name__]
    module.__file__ = spec.origin
    module.__path__ = [here, *(spec.submodule_search_locations or [])]
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        import warnings

        warnings.warn(f"the installed airflow_gpu could not be loaded: {error}", ImportWarning, stacklevel=2)


if (
    os.path.basename(__file__) == "__init__.py"
):  # as a module of the installed package it is only carried along
    _become_installed()
