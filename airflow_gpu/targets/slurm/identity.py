"""Who a job is, in its comment: the labels of an attempt as one word of plain letters.

Purpose: the comment is kept by the controller for as long as it knows the job, and is
shown by every interface. Nothing in it needs quoting anywhere.

Limits: accounting keeps comments only where the administrator switched that on
(``AccountingStoreFlags=job_comment``), so from there a job is known by its id and name.

Example::

    >>> text = to_comment({"airflow-gpu/attempt": "1"}, "sha256:ab", "/shared/gangs/x")
    >>> of_comment(text)
    ({'airflow-gpu/attempt': '1'}, 'sha256:ab', '/shared/gangs/x')
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlencode

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "airflow-gpu?"
LABEL: Final = "airflow-gpu/"


def to_comment(labels: Mapping[str, str], digest: str, channel: str) -> str:
    """One word of letters, digits and ``?=&%._-``."""
    plain = {name.removeprefix(LABEL): value for name, value in labels.items()}
    return PREFIX + urlencode({**plain, "_digest": digest, "_channel": channel})


def of_comment(text: str) -> tuple[dict[str, str], str, str] | None:
    """Labels, digest and channel; None for a comment that is none of ours."""
    if not text.startswith(PREFIX):
        return None
    found = dict(parse_qsl(text.removeprefix(PREFIX), keep_blank_values=True))
    digest, channel = found.pop("_digest", ""), found.pop("_channel", "")
    return {LABEL + name: value for name, value in found.items()}, digest, channel


def incarnation_of(labels: Mapping[str, str]) -> str:
    return labels.get(LABEL + "incarnation", "")
