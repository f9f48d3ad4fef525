"""Who a run is: its key, where its directory lies, what its attempts are called.

Purpose: one task instance has one slot, a slot has incarnations, an
incarnation has attempts, and each has one name that everybody can compute
again. ``docs/run-directory.md`` is the contract.

What it does not do: it makes no incarnation (that is a random draw) and reads
nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from dataclasses import dataclass
from typing import Final

UNMAPPED: Final = -1
"""``map_index`` of a task that is not mapped, as in Airflow."""

LABEL_PREFIX: Final = "airflow-gpu/"

_SEGMENT_LONGEST: Final = 120
_SEGMENT_KEPT: Final = 100
_SEGMENT_BYTES: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")

# Systems add to a job's name: an indexed Kubernetes Job its index, a JobSet
# "-<role>-<job>-<index>-<5 random>", KubeRay "-worker-...". The sum must stay
# a DNS label of 63, so the name itself stays near 40.
_SLUG_LONGEST: Final = 24
_TASK_SHARE: Final = 12
_HASH_LENGTH: Final = 12  # of base 32: 60 bits
_LABEL_LONGEST: Final = 63
_DIGEST_SHOWN: Final = 32  # a whole SHA-256 has 64 hex digits, one more than a label may
_LABEL_CUT: Final = re.compile(r"(?:^|-)[0-9a-f]{12}$")
_LABEL: Final = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class RunKey:
    """The task instance that a run belongs to. Retries and Clear do not change it.

    :param installation: id of this Airflow; two Airflows on one cluster never meet.
    :param map_index: index of a mapped task, -1 for one that is not mapped.

    Raises ValueError for an empty id. ``str(key)`` is for people: ``dag/run/task[3]``.
    """

    installation: str
    dag_id: str
    run_id: str
    task_id: str
    map_index: int = UNMAPPED

    def __post_init__(self) -> None:
        for name in ("installation", "dag_id", "run_id", "task_id"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"RunKey: {name} must be a non-empty text, got {value!r}")
        index: object = self.map_index
        if isinstance(index, bool) or not isinstance(index, int) or index < UNMAPPED:
            raise ValueError(f"RunKey: map_index must be -1 or more, got {self.map_index!r}")

    def __str__(self) -> str:
        mapped = "" if self.map_index == UNMAPPED else f"[{self.map_index}]"
        return f"{self.dag_id}/{self.run_id}/{self.task_id}{mapped}"


def segment(text: str) -> str:
    """``text`` as one segment of a path, on any store.

    Keeps ``A-Z a-z 0-9 . _ -``, writes any other byte as ``=XX``, and cuts what
    is longer than 120 characters to 100, ``-`` and 16 hex digits of the SHA-256
    of the whole (encoded) segment. ``.`` and ``..``, which are no names on a
    file system, are written ``=2E`` and ``=2E=2E``. Different texts have
    different segments (a text of 117 characters could be made up to look like
    one that was cut). Raises ValueError for an empty text.

    >>> segment("scheduled__2026-01-01T00:00:00+00:00")
    'scheduled__2026-01-01T00=3A00=3A00=2B00=3A00'
    """
    if not text:
        raise ValueError("a path segment must not be empty")
    if text in (".", ".."):
        return "=2E" * len(text)
    raw = text.encode("utf-8", "surrogatepass")
    whole = "".join(chr(byte) if byte in _SEGMENT_BYTES else f"={byte:02X}" for byte in raw)
    if len(whole) <= _SEGMENT_LONGEST:
        return whole
    return f"{whole[:_SEGMENT_KEPT]}-{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def slot_path(key: RunKey) -> str:
    """Path of the slot of a task instance, relative to a state URI or channel.

    >>> slot_path(RunKey("prod", "train", "r1", "fit"))
    'v1/prod/train/r1/fit/_'
    """
    mapped = "_" if key.map_index == UNMAPPED else str(key.map_index)
    return "/".join(("v1", *map(segment, (key.installation, key.dag_id, key.run_id, key.task_id)), mapped))


def run_path(key: RunKey, incarnation: str) -> str:
    """Path of a run directory: its slot and its incarnation.

    Raises ValueError for an incarnation that is no plain name or is the
    slot's own ``incarnations``.

    >>> run_path(RunKey("prod", "train", "r1", "fit", 3), "abcdefgh23")
    'v1/prod/train/r1/fit/3/abcdefgh23'
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", incarnation) or incarnation == "incarnations":
        raise ValueError(f"not an incarnation: {incarnation!r}")
    return f"{slot_path(key)}/{incarnation}"


def attempt_name(key: RunKey, incarnation: str, attempt: int) -> str:
    """Name of an attempt on its target: readable slug, hash of key and incarnation, number.

    A DNS label that starts with a letter, so also a Slurm job name and a
    SageMaker name, and short enough (42 characters below attempt 1000) for the
    suffixes that Kubernetes controllers add. The same attempt always has the
    same name. Raises ValueError for an attempt below 1.

    >>> attempt_name(RunKey("prod", "train", "r1", "fit"), "abcdefgh23", 2)
    'train-fit-hpyf6g52kao7-2'
    """
    if attempt < 1:
        raise ValueError(f"attempts count from 1, got {attempt}")
    task = _slug(key.task_id)
    dag = _slug(key.dag_id)[: max(_SLUG_LONGEST - 1 - len(task), _SLUG_LONGEST - 1 - _TASK_SHARE)]
    slug = re.sub("-+", "-", f"{dag}-{task}").strip("-")[:_SLUG_LONGEST].strip("-")
    if not slug[:1].isalpha():
        slug = f"g-{slug}"[:_SLUG_LONGEST].strip("-") if slug else "gang"
    return f"{slug}-{_hash(key, incarnation)}-{attempt}"


def labels(key: RunKey, incarnation: str, attempt: int, digest: str) -> dict[str, str]:
    """What every object of an attempt carries, in values that Kubernetes takes as labels.

    An id that is a legal label value stays as it is; any other is made readable
    and gets 12 hex digits of its SHA-256, so different ids have different
    values. ``map-index`` of an unmapped task is ``none``; of the digest the
    first 32 hex digits are shown. Look objects up by calling this again.

    >>> labels(RunKey("prod", "train", "a:b", "fit"), "abcdefgh23", 1, "0" * 64)["airflow-gpu/run"]
    'a-b-6783a31eabf6'
    """
    values = {
        "installation": key.installation,
        "dag": key.dag_id,
        "run": key.run_id,
        "task": key.task_id,
        "map-index": "none" if key.map_index == UNMAPPED else str(key.map_index),
        "incarnation": incarnation,
        "attempt": str(attempt),
        "digest": digest.removeprefix("sha256:")[:_DIGEST_SHOWN],
    }
    return {LABEL_PREFIX + name: _label(value) for name, value in values.items()}


def _slug(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")


def _hash(key: RunKey, incarnation: str) -> str:
    # JSON keeps the parts apart: ("a", "bc") and ("ab", "c") differ.
    parts = [key.installation, key.dag_id, key.run_id, key.task_id, key.map_index, incarnation]
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return base64.b32encode(digest).decode().lower()[:_HASH_LENGTH]


def _label(value: str) -> str:
    # A value that ends as if it had been cut gets a hash too, so that it cannot pass for the one that was.
    if len(value) <= _LABEL_LONGEST and _LABEL.fullmatch(value) and not _LABEL_CUT.search(value):
        return value
    tail = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    head = re.sub(r"[^A-Za-z0-9_.]+", "-", value).strip("-_.")[: _LABEL_LONGEST - 13].strip("-_.")
    return f"{head}-{tail}" if head else tail
