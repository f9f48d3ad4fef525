"""How a machine is split into nodes, with a stand-in for nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_gpu.targets.local.machine import Gpu, MachineError, build_nodes, detect_gpus, parse_gpus

EIGHT = [Gpu(i, "NVIDIA H200", 143771) for i in range(8)]


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_detected_gpus_are_split_evenly() -> None:
    made = build_nodes({"nodes": 3}, EIGHT)
    assert [node.gpus for node in made] == [(0, 1), (2, 3), (4, 5)]
    assert {node.accelerator for node in made} == {"NVIDIA H200"}
    assert all(node.cpus > 0 and node.memory > 0 for node in made)


def test_declared_gpus_where_there_are_none_are_pretended() -> None:
    made = build_nodes({"nodes": 2, "gpus_per_node": 8, "accelerator": "H100"}, [])
    assert [len(node.gpus) for node in made] == [8, 8]
    assert made[1].gpus[0] == 8
    assert made[0].accelerator == "H100"


def test_more_than_there_are_is_an_error_unless_pretended() -> None:
    with pytest.raises(MachineError, match="2 nodes x 8 GPUs are declared, but nvidia-smi lists 8"):
        build_nodes({"nodes": 2, "gpus_per_node": 8}, EIGHT)
    made = build_nodes({"nodes": 2, "gpus_per_node": 8, "pretend": True}, EIGHT)
    assert made[1].gpus == tuple(range(8, 16))
    assert made[0].accelerator is None


def test_a_node_of_mixed_gpus_has_no_one_name() -> None:
    mixed = [Gpu(0, "NVIDIA A100", 1), Gpu(1, "NVIDIA T4", 1)]
    assert [n.accelerator for n in build_nodes({"nodes": 1}, mixed)] == [None]
    assert [n.accelerator for n in build_nodes({"nodes": 2}, mixed)] == ["NVIDIA A100", "NVIDIA T4"]


def test_what_nvidia_smi_says() -> None:
    text = "0, NVIDIA H100 80GB HBM3, 81559\n1, NVIDIA GB10, [N/A]\n\n"
    assert parse_gpus(text) == [Gpu(0, "NVIDIA H100 80GB HBM3", 81559), Gpu(1, "NVIDIA GB10", 0)]
    with pytest.raises(MachineError, match="which is no GPU"):
        parse_gpus("Unable to determine the device handle")


def test_no_nvidia_smi_is_no_gpus_and_a_failing_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect_gpus() == []
    smi(tmp_path, monkeypatch, "echo '0, NVIDIA L4, 23034'")
    assert detect_gpus() == [Gpu(0, "NVIDIA L4", 23034)]
    smi(tmp_path, monkeypatch, "echo 'No devices were found'; exit 6")
    assert detect_gpus() == []
    smi(
        tmp_path,
        monkeypatch,
        "echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18",
    )
    with pytest.raises(MachineError, match="ended with 18: Failed to initialize NVML"):
        detect_gpus()
