"""A manifest is untrusted: whatever is in it, reading it answers a manifest whose files stay in their folder, or BadManifest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu.runtime import manifest as module
from airflow_gpu.runtime.checkpoint import choose
from airflow_gpu.runtime.claim import Ancestor
from airflow_gpu.runtime.files import Folder
from airflow_gpu.runtime.manifest import BadManifest, Entry, Manifest

DIGEST = "0" * 64
GOOD: dict[str, Any] = {
    "life": 1,
    "step": 5,
    "world_size": 2,
    "files": [{"path": "a/b", "size": 1, "sha256": DIGEST}],
}

ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(
        ["..", "../x", "/etc/passwd", "a//b", "a/./b", "\0", "\ud800", "manifest.json", DIGEST]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FILES = st.lists(
    st.fixed_dictionaries({}, optional={"path": ANY, "size": ANY, "sha256": ANY | st.just(DIGEST)})
)
BODIES = ANY | st.fixed_dictionaries(
    {}, optional={"life": ANY, "step": ANY, "world_size": ANY, "writer": ANY, "at": ANY, "files": FILES | ANY}
)


def parsed(data: bytes) -> Manifest | None:
    try:
        return Manifest.parse(data)
    except BadManifest:
        return None


@given(BODIES)
def test_any_json(body: Any) -> None:
    found = parsed(json.dumps(body).encode("utf-8", "surrogatepass"))
    for entry in found.files if found else ():
        inside = os.path.normpath(os.path.join("/root", entry.path))
        assert inside.startswith("/root/")
        assert inside == f"/root/{entry.path}"
        assert 0 <= entry.size < 2**63


@given(st.binary())
def test_any_bytes(data: bytes) -> None:
    found = parsed(data)
    assert found is None or isinstance(found.step, int)


@given(st.sampled_from(sorted(GOOD)), ANY)
def test_one_field_wrong(field: str, value: Any) -> None:
    """A manifest that is taken has the kinds that it promises; the good one is taken."""
    assert Manifest.parse(json.dumps(GOOD).encode()).files == (Entry("a/b", 1, DIGEST),)
    found = parsed(json.dumps({**GOOD, field: value}).encode())
    if found is not None:
        assert all(type(number) is int for number in (found.life, found.step, found.world_size))


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 1_000_000,
        b'{"a":' * 1_000_000,
        json.dumps(GOOD).encode().replace(b'"step": 5', b'"step": ' + b"9" * 1_000_000),
        json.dumps(GOOD).encode().replace(b'"step": 5', b'"step": 1e400'),
        json.dumps(GOOD).encode().replace(b'"step": 5', b'"step": NaN'),
        json.dumps(GOOD).encode().replace(b'"step": 5', b'"step": true'),
        json.dumps(GOOD).encode().replace(b'"step": 5', b'"step": -1'),
        json.dumps({**GOOD, "files": GOOD["files"] * 2}).encode(),
        b"\xff\xfe",
    ],
    ids=["deep", "deep objects", "long number", "infinite", "nan", "bool", "negative", "twice", "no UTF-8"],
)
def test_refused(data: bytes) -> None:
    with pytest.raises(BadManifest):
        Manifest.parse(data)


@pytest.mark.parametrize(
    "path", ["../x", "/x", "a/../../x", "a//b", ".", "", "a\0b", "bad.json", ".tmp-x", "\ud800"]
)
def test_paths_that_are_refused(path: str) -> None:
    with pytest.raises(BadManifest, match="path"):
        Manifest.parse(json.dumps({**GOOD, "files": [{"path": path, "size": 1, "sha256": DIGEST}]}).encode())


def test_what_is_no_file_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe does not hold the reader up, a folder is no manifest, and too many bytes are not read to their end."""
    path = tmp_path / "manifest.json"
    os.mkfifo(path)
    with pytest.raises(BadManifest, match="regular"):
        Manifest.load(str(tmp_path))
    path.unlink()
    path.mkdir()
    with pytest.raises(BadManifest, match="regular"):
        Manifest.load(str(tmp_path))
    path.rmdir()
    assert Manifest.load(str(tmp_path)) is None
    with open(path, "wb") as file:  # sparse: it costs no disk
        file.truncate(100 * 1024**3)
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    with pytest.raises(BadManifest, match="larger than 1000 bytes"):
        Manifest.load(str(tmp_path))


def test_a_claim_passes_over_all_of_that(tmp_path: Path) -> None:
    for name, text in (("step-000000001", "[" * 100_000), ("step-000000002", "{}"), ("step-000000003", "\0")):
        folder = tmp_path / "checkpoints/0001" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(text)
    said: list[str] = []
    assert choose(Folder(str(tmp_path)), [Ancestor(1)], said.append, 1.0) is None
    assert len(said) == 3
