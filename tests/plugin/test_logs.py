"""Logs of ranks: paging, and what is not a log."""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx
import pytest

from airflow_gpu.plugin.app import LOG_PAGE
from tests.plugin import rundirs
from tests.plugin.conftest import address
from tests.plugin.rundirs import Made

TEXT = {"Accept": "text/plain"}


async def pages(client: httpx.AsyncClient, made: Made, rest: str) -> list[str]:
    """All pages of a log, by their links."""
    found, url = [], address(made, rest)
    while url:
        answer = await client.get(url, headers=TEXT)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        found.append(answer.text)
        link = re.fullmatch(r'<(.*)>; rel="next"', answer.headers.get("link", ""))
        url = address(made, rest.partition("?")[0]) + link[1] if link else ""
    return found


async def test_pages_of_text_end_with_lines_and_lose_nothing(client: httpx.AsyncClient, root: Path) -> None:
    made = await rundirs.stopped(root)
    log = "".join(f"step {n}: größer\n" for n in range(120_000)).encode()
    await made.log(1, 2, log)
    found = await pages(client, made, "/log/1/2")
    assert len(found) == 4
    assert found[-1] == ""
    assert "".join(found) == log.decode()
    assert all(page.endswith("\n") and len(page.encode()) <= LOG_PAGE for page in found[:-1])


async def test_one_endless_line_is_cut_between_characters(client: httpx.AsyncClient, root: Path) -> None:
    made = await rundirs.stopped(root)
    await made.log(1, 2, b"x" + "€".encode() * 500_000)
    found = await pages(client, made, "/log/1/2?raw=1")
    assert "".join(found) == "x" + "€" * 500_000


async def test_from_the_end(client: httpx.AsyncClient, root: Path) -> None:
    made = await rundirs.stopped(root)
    await made.log(1, 2, b"first line\nsecond line\nthird line\n")
    answer = await client.get(address(made, "/log/1/2?offset=-15&raw=1"))
    assert answer.text == "third line\n"
    answer = await client.get(address(made, "/log/1/2?offset=-1000&raw=1"))
    assert answer.text.startswith("first line")
    answer = await client.get(address(made, "/log/1/2?offset=1000&raw=1"))
    assert answer.text == ""


async def test_in_a_browser(client: httpx.AsyncClient, root: Path) -> None:
    made = await rundirs.stopped(root)
    await made.log(
        1, 2, b"\x1b[31mred\x1b[0m <b>bold</b>\n" + b"y" * 79 + b"\n" + (b"z" * 79 + b"\n") * 20_000
    )
    answer = await client.get(address(made, "/log/1/2"))
    assert answer.headers["content-type"].startswith("text/html")
    assert "<pre>red &lt;b&gt;bold&lt;/b&gt;\n" in answer.text
    following = re.search(r'<a href="(\?offset=\d+)" rel="next">next</a>', answer.text)
    assert following
    last = await client.get(address(made, "/log/1/2") + following[1])
    assert "look for more" in last.text
    assert 'href="../../../-1#logs"' in last.text


async def test_there_is_none(client: httpx.AsyncClient, root: Path) -> None:
    made = await rundirs.stopped(root)
    for rest, words in (
        ("/log/1/8", "Rank 8 of life 1"),
        ("/log/2/0", "has no life 2"),  # a fence
        ("/log/9/0", "has no life 9"),
    ):
        answer = await client.get(address(made, rest))
        assert answer.status_code == 404
        assert words in answer.text
        answer = await client.get(address(made, rest), headers=TEXT)
        assert answer.status_code == 404
        assert words in answer.text
        assert "<" not in answer.text


# -- what a rank may put where its log is expected -----------------------------------------------------


async def refused(client: httpx.AsyncClient, made: Made) -> None:
    answer = await client.get(address(made, "/log/1/0"), headers=TEXT)
    assert answer.status_code in (404, 503), answer.text
    assert "top secret" not in answer.text
    page = await client.get(address(made))
    assert page.status_code == 200
    assert "top secret" not in page.text


@pytest.fixture
async def made(root: Path) -> Made:
    (root / "airflow.cfg").write_text('{"v": 1, "tail": "top secret", "rank": 0, "ranks": []}')
    return await rundirs.running(root)  # one that has ended is not read again


@pytest.fixture
def log(made: Made) -> Path:
    return made.folder / "lives/0001/logs/rank-00000.log"


async def test_a_link_to_a_file(client: httpx.AsyncClient, root: Path, made: Made, log: Path) -> None:
    log.unlink()
    log.symlink_to(root / "airflow.cfg")
    await refused(client, made)
    for record in ("failure.json", "progress.json"):
        (made.folder / "lives/0001" / record).symlink_to(root / "airflow.cfg")
    await refused(client, made)
    page = await client.get(address(made))
    assert "is a link" in page.text


async def test_a_link_to_a_folder(client: httpx.AsyncClient, root: Path, made: Made, log: Path) -> None:
    (root / "secrets").mkdir()
    (root / "secrets/rank-00000.log").write_text("top secret")
    logs = log.parent
    logs.rename(logs.with_name("moved"))
    logs.symlink_to(root / "secrets")
    await refused(client, made)
    logs.unlink()
    logs.symlink_to(Path(os.path.relpath(root / "secrets", logs.parent)))
    await refused(client, made)
    logs.unlink()
    logs.mkdir()
    (logs / "rank-00000.log").write_text("fine")
    assert (await client.get(address(made, "/log/1/0"), headers=TEXT)).text == "fine"


async def test_a_pipe_a_folder_and_an_endless_record(
    client: httpx.AsyncClient, made: Made, log: Path
) -> None:
    log.unlink()
    os.mkfifo(log)
    await refused(client, made)
    log.unlink()
    log.mkdir()
    await refused(client, made)
    failure = made.folder / "lives/0001/failure.json"
    with failure.open("wb") as file:
        file.truncate(10**12)  # sparse
    answer = await client.get(address(made))
    assert answer.status_code == 200
    assert "more than 4194304 bytes" in answer.text


async def test_a_hard_read_error_is_said(client: httpx.AsyncClient, root: Path, made: Made) -> None:
    state = root / "state"
    state.rename(root / "moved")
    state.write_text("a file where the state is")
    answer = await client.get(address(made))
    assert answer.status_code == 503
    assert "cannot be read now" in answer.text
