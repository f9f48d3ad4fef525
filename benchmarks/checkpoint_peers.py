"""How fast Orbax and torch.distributed.checkpoint save the same bytes as a plain file, from one process.

Run by ``checkpoint.py`` with the Python that has these libraries; needs nothing else.

Example::

    python benchmarks/checkpoint_peers.py /scratch/peers 536870912
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(folder: Path, size: int) -> None:
    found: dict[str, Callable[[Path, Any], None]] = {}
    if importlib.util.find_spec("orbax"):
        found["Orbax"] = _orbax
    if importlib.util.find_spec("torch"):
        found["torch.distributed.checkpoint"] = _dcp
    if not found:
        print(
            "Neither Orbax nor PyTorch is installed in this Python: no peer beside it. `make frameworks` installs them."
        )
        return
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    data = np.frombuffer(bytearray(os.urandom(1 << 20)) * (size >> 20), dtype=np.float32)
    for name, save in found.items():
        save(folder / f"{name}-warm", data[: 1 << 18])  # what is loaded once is not the save's
        begun = time.perf_counter()
        with (folder / f"plain-{name}").open("wb", buffering=0) as file:
            view = memoryview(data).cast("B")
            while view:
                view = view[file.write(view[: 1 << 24]) :]
            os.fsync(file.fileno())
        plain = time.perf_counter() - begun
        begun = time.perf_counter()
        save(folder / name, data)
        took = time.perf_counter() - begun
        print(
            f"{name}: {size / 2**30:.2f} GiB from one process in {took:.2f} s; "
            f"{plain / took:.2f} of the speed of plain write+fsync ({plain:.2f} s)"
        )


def _orbax(folder: Path, data: Any) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as saver:
        saver.save(folder, {"weights": data})


def _dcp(folder: Path, data: Any) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"weights": torch.from_numpy(data)}, checkpoint_id=str(folder), no_dist=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
