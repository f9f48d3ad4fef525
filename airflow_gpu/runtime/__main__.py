"""``python -m airflow_gpu.runtime``: the same as running runtime.pyz."""

from __future__ import annotations

import sys

from airflow_gpu.runtime.cli import main

sys.exit(main())
