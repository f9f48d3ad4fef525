"""The pages of runs in every stage, made by hand."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import httpx
import pytest

from airflow_gpu.gang.run import Cause, Failure
from tests.plugin import rundirs
from tests.plugin.conftest import address
from tests.plugin.rundirs import Made, key


async def text(client: httpx.AsyncClient, made: Made, rest: str = "", status: int = 200) -> str:
    answer = await client.get(address(made, rest))
    assert answer.status_code == status, answer.text
    return answer.text


async def data(client: httpx.AsyncClient, made: Made, query: str = "") -> dict:
    answer = await client.get(address(made, f"/run.json{query}"))
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- stages --------------------------------------------------------------------------------------------


async def test_success_after_two_preemptions(client: httpx.AsyncClient, root: Path) -> None:
    made = await rundirs.succeeded(root)
    page = await text(client, made)
    assert '<span class="pill good">success</span>' in page
    assert 'data-refresh="0"' in page
    assert "2 nodes × 4 ranks" in page
    assert "<noscript>" not in page
    assert page.count('class="bar infra"') == 2
    assert page.count('class="bar good"') == 1
    assert page.count('<g class="lost">') == 3  # two preemptions and the legend
    assert page.count('class="notice"') == 3
    assert "would have to wait" in page
    assert "not for the page" not in page, "the environment of the ranks is not shown"

    view = await data(client, made)
    assert view["missing"] == []
    assert view["state"] == {"word": "success", "tone": "good", "final": True, "sentence": ""}
    assert [(one["target"], one["cause"], one["restarts"]) for one in view["attempts"]] == [
        ("slurm_a", "preempted", 1),
        ("eks_spot", "succeeded", 0),
    ]
    lives = [life for one in view["attempts"] for life in one["lives"]]
    assert [(life["life"], life["word"], life["from"]) for life in lives] == [
        (1, "preempted", None),
        (2, "preempted", {"life": 1, "step": 910}),
        (4, "succeeded", {"life": 2, "step": 1300}),
    ]
    assert view["newest_checkpoint"] == {"life": 4, "step": 5000}
    assert view["fences"][0]["life"] == 3
    assert view["cost"] == {"node_hours": 3.5, "gpu_hours": 28.0, "usd": 43.75, "so_far": False}
    assert view["failure"] is None
    size = 8 * 3 * 2**30 + sum(range(8))
    assert view["checkpoints"][0].items() >= {"life": 1, "step": 400, "size": size, "complete": True}.items()
    killed = lives[1]["ranks"][1]["ranks"][3]
    assert (killed["signal"], killed["tone"]) == ("SIGKILL", "infra"), "the grace of the notice was over"


async def test_failure_shows_the_first_failing_rank(client: httpx.AsyncClient, root: Path) -> None:
    made = await rundirs.failed(root)
    page = await text(client, made)
    assert "failed (application error)" in page
    assert "rank 5, exit code 1" in page
    assert "gpu-01.cluster" in page
    assert "&lt;script&gt;alert(&#34;rank 5&#34;)&lt;/script&gt;" in page
    assert "<script>alert" not in page
    assert 'href="-1/log/3/5?offset=-65536"' in page
    assert re.search(r'<a class="chip bad first" href="-1/log/3/5"[^>]*>5 exit 1</a>', page)
    assert re.search(r'<a class="chip idle" href="-1/log/3/0"[^>]*>0 SIGTERM</a>', page), (
        "ended by the runtime"
    )
    assert page.count("not complete") == 2
    view = await data(client, made)
    assert [(one["reason"], one["outcome"]) for one in view["owners"]] == [
        ("start", "failed"),
        ("retry", "failed"),
    ]
    assert view["failure"]["tail"].endswith("vs [64, 512]")
    assert view["newest_checkpoint"] == {"life": 3, "step": 301}, "one without a manifest is none"


async def test_running(client: httpx.AsyncClient, root: Path) -> None:
    made = await rundirs.running(root)
    page = await text(client, made)
    assert '<span class="pill run">running</span>' in page
    assert "Life 2, attempt 1 on slurm_a, at step 1580 of 5000." in page
    assert 'data-refresh="5"' in page
    assert '<noscript><meta http-equiv="refresh"' in page
    assert ">now</text>" in page
    assert "reached step 1580 of 5000 (loss 0.0397)" in page
    assert "(SIGTERM to node 0)" in page
    view = await data(client, made)
    assert view["verdict"] is None
    assert view["cost"]["so_far"] is True
    assert view["cost"]["gpu_hours"] == pytest.approx(8 * (800 + 1600) / 3600, rel=0.02)
    chips = [rank["tone"] for node in view["attempts"][0]["lives"][1]["ranks"] for rank in node["ranks"]]
    assert chips == ["idle"] * 8


async def test_stopped(client: httpx.AsyncClient, root: Path) -> None:
    made = await rundirs.stopped(root)
    page = await text(client, made)
    assert "cancelled (stopped)" in page
    assert page.count('class="stopped"') == 2  # the mark and its legend
    assert "asked to end" in page


async def test_every_stage_before_the_first_life(client: httpx.AsyncClient, root: Path) -> None:
    made = Made(root, key("young"))
    page = await text(client, made, status=404)
    assert "No gang has been started for train_llm/manual__2026-03-01T08:00:00+00:00/young yet." in page
    assert 'data-refresh="15"' in page

    async def word() -> str:
        view = await data(client, made)
        page = await text(client, made)
        assert f'<span class="pill {view["state"]["tone"]}">{view["state"]["word"]}</span>' in page
        return f"{view['state']['word']}: {view['state']['sentence']}"

    await made.begin()
    assert await word() == "starting: A target is being chosen."
    await made.owner(0)
    assert await word() == "starting: A target is being chosen."
    await made.start(5, submitted=False)
    assert await word() == "submitting: Attempt 1 on slurm_a is being submitted."
    made = await Made(root, key("older")).begin()
    await made.owner(0)
    await made.start(5)
    assert await word() == "waiting: Attempt 1 on slurm_a is submitted as 4701; no rank has started yet."
    await made.life(60)
    assert await word() == "running: Life 1, attempt 1 on slurm_a."
    await made.notice(70)
    assert await word() == "saving after a notice: Life 1, attempt 1 on slurm_a."
    await made.put("lives/0001/failure.json", {"cause": "rank", "rank": 3, "exit_code": 9, "tail": "oh"})
    assert (await word()).startswith("failing: ")
    assert "rank 3, exit code 9" in await text(client, made)
    await made.stop(80, "deadline", "the deadline passed")
    assert await word() == "stopping: Attempt 1 on slurm_a was asked to end: the deadline passed."
    await made.over(90, Cause.PREEMPTED, "gone")
    assert await word() == "between attempts: Attempt 1 on slurm_a is over (preempted); the next one follows."


async def test_a_lost_node(client: httpx.AsyncClient, root: Path) -> None:
    made = await Made(root, key("lost")).begin()
    await made.owner(0)
    await made.start(5)
    await made.life(60)
    await made.over(600, Cause.NODE_LOST, "node 1 was lost", failure=Failure("node", None, 1, "gpu-01"))
    await made.verdict(601, "failed", Cause.NODE_LOST, "the budget for lost nodes is spent")
    page = await text(client, made)
    assert "node 1 was lost" in page
    assert "the budget for lost nodes is spent" in page
    assert '<g class="lost">' in page


# -- addresses -----------------------------------------------------------------------------------------


async def test_an_unmapped_task_is_whatever_is_no_number(client: httpx.AsyncClient, root: Path) -> None:
    plain = await rundirs.stopped(root, "mapped")
    mapped = await rundirs.running(root, "mapped", map_index=3)
    for last in ("{MAP_INDEX}", "-1", "undefined"):
        answer = await client.get(address(plain, last=last))
        assert answer.status_code == 200
        assert 'href="-1/run.json"' in answer.text
    page = await text(client, mapped)
    assert "mapped [3]" in page
    assert 'href="3/log/2/0"' in page
    assert (await client.get(address(plain, last="4"))).status_code == 404
    assert (await client.get(address(plain, last="-7"))).status_code == 404


async def test_older_incarnations(client: httpx.AsyncClient, root: Path) -> None:
    old = await rundirs.failed(root, "again")
    made = await Made(root, key("again"), incarnation="zzzzzzzz77").begin(2)
    await made.owner(0)
    page = await text(client, made)
    assert '<a class="mono" href="-1?incarnation=abcdefgh23"' in page
    assert "rank 5" not in page
    page = await text(client, made, "?incarnation=abcdefgh23")
    assert "This is an older run" in page
    assert "rank 5, exit code 1" in page
    assert 'href="-1/log/3/5?incarnation=abcdefgh23&amp;offset=-65536"' in page or (
        'href="-1/log/3/5?incarnation=abcdefgh23&offset=-65536"' in page
    )
    assert (await client.get(address(old, "/log/3/5?incarnation=abcdefgh23"))).status_code == 200
    assert (await client.get(address(old, "/log/3/5"))).status_code == 404
    for wrong in ("nothere222", "../../x", "incarnations", ""):
        answer = await client.get(address(made, "/run.json"), params={"incarnation": wrong})
        assert answer.status_code == 404, wrong


async def test_what_is_no_page(client: httpx.AsyncClient, root: Path) -> None:
    made = await rundirs.stopped(root)
    for rest in (
        "/",
        "/log/1",
        "/log/one/2",
        "/log/1/-2",
        "/log/0/0",
        "/log/1/99999999999999999999",
        "/lives/0001.json",
    ):
        answer = await client.get(address(made, rest))
        assert answer.status_code == 404, rest
        assert "<h1>" in answer.text
    assert (await client.get("/openapi.json")).status_code == 404
    assert (await client.get("/docs")).status_code == 404


async def test_settings_that_are_missing_are_said(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIRFLOW__GPU__INSTALLATION")
    answer = await client.get("/d/r/t/-1")
    assert answer.status_code == 503
    assert "AIRFLOW__GPU__INSTALLATION" in answer.text


async def test_headers(client: httpx.AsyncClient, root: Path) -> None:
    answer = await client.get(address(await rundirs.stopped(root)))
    policy = answer.headers["content-security-policy"]
    nonce = re.search(r"script-src 'nonce-([^']+)'", policy)
    assert nonce
    assert answer.text.count("<script") == answer.text.count(f'<script nonce="{nonce[1]}"')
    assert " style=" not in answer.text
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"


# -- who may read what ---------------------------------------------------------------------------------


async def test_output_is_only_for_who_may_read_logs(client: httpx.AsyncClient, root: Path) -> None:
    from airflow_gpu.plugin import app as pages

    made = await rundirs.failed(root)
    pages.app.dependency_overrides[pages.may_read_logs] = lambda: False
    page = await text(client, made)
    assert "shape mismatch" not in page
    assert "/log/" not in page
    assert "may read the logs" in page
    view = await data(client, made)
    assert "shape mismatch" not in json.dumps(view)
    assert view["failure"]["tail_hidden"] is True


# -- what cannot be read -------------------------------------------------------------------------------


async def test_a_channel_without_credentials(
    client: httpx.AsyncClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_gpu.plugin import collect

    monkeypatch.setattr(collect, "CHANNEL_LIMIT", 0.5)
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    made = await Made(root, key("elsewhere")).begin()
    await made.owner(0)
    for uri in ("s3://bucket/gangs", "az://container/gangs", "sftp://host/gangs", "file:///somewhere"):
        await made.start(
            5, channel=f"{uri}/{made.path}" if "somewhere" not in uri else "file:///somewhere/else"
        )
        await made.over(50, Cause.PREEMPTED, "gone")
    view = await data(client, made)
    assert len(view["missing"]) == 4
    assert all(f"attempt {n} on" in line for n, line in enumerate(view["missing"], 1))
    assert "credentials" in view["missing"][0]
    assert "not this run's" in view["missing"][3]
    page = await text(client, made)
    assert "cannot be shown" in page
    assert "attempt 4" in page
    assert (await client.get(address(made, "/log/1/0"))).status_code == 503


async def test_a_channel_in_the_same_store_object_store(
    client: httpx.AsyncClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_gpu.rundir.channel import Channel
    from airflow_gpu.rundir.journal import Journal
    from airflow_gpu.rundir.store import Store

    monkeypatch.setenv("AIRFLOW__GPU__STATE_URI", "memory://plugin-pages")
    made = Made(root, key("bucket"))
    made.state = Store("memory://plugin-pages")
    made.journal, made.channel = Journal(made.state, made.path), Channel(made.state, made.path)
    await made.begin()
    await made.owner(0)
    await made.start(5)
    await made.life(60)
    await made.save(100, 7)
    view = await data(client, made)
    assert view["missing"] == []
    assert view["newest_checkpoint"] == {"life": 1, "step": 7}
    answer = await client.get(address(made, "/log/1/3"), headers={"Accept": "*/*"})
    assert answer.text == "rank 3 of life 1 says hello\n"
    assert (await client.get(address(made, "/log/1/9"))).status_code == 404


async def test_a_journal_from_the_future_is_shown_up_to_there(client: httpx.AsyncClient, root: Path) -> None:
    made = await rundirs.running(root)
    entry = {
        "v": 9,
        "seq": made.journal.run.seq + 1,
        "kind": "moved",
        "at": "2026-01-01T00:00:00Z",
        "epoch": 1,
    }
    await made.state.put(f"{made.path}/journal/{entry['seq']:06d}.json", json.dumps(entry).encode())
    view = await data(client, made)
    assert view["state"]["word"] == "running"
    assert "shown up to entry 3" in view["missing"][0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("lives/0002/nodes/0000.json", {"node": 0, "ranks": [None, 3, {"rank": "x"}, {"rank": 1, "exit_code": "9"}]}),
        ("lives/0002/nodes/0000.json", {"node": [0], "ranks": {"rank": 0}}),
        ("lives/0002/nodes/0000.json", b"[1, 2"),
        ("lives/0002/failure.json", {"cause": 7, "rank": "../../etc", "tail": ["x"], "at": 1e300, "node": None}),
        ("lives/0002/progress.json", {"step": "many", "total": float("nan"), "at": "yesterday", "metrics": {"loss": float("nan"), "big": 10**400, "x": "y"}}),
        ("lives/0002/notice.json", {"at": {"x": 1}}),
        ("lives/0002/notice.json", []),
        ("checkpoints/0002/step-000000001/manifest.json", {"step": 10**400, "files": 3}),
        ("checkpoints/0002/step-000000001/manifest.json", {"step": 1, "files": [3, {"size": 10**400}], "at": "0001-01-01T00:00:00+14:00"}),
        ("lives/0003.json", {"attempt": 1, "at": "0001-01-01T00:00:00+00:00", "world_size": 10**9, "nodes": 3}),
        ("lives/0003.json", {"attempt": 77, "at": "2026-01-01T00:00:00Z"}),
        ("lives/0003.json", {"nonsense": 1}),
    ],
)  # fmt: skip
async def test_whatever_ranks_write_there_is_a_page(
    client: httpx.AsyncClient, root: Path, path: str, body: object
) -> None:
    made = await rundirs.running(root)
    await made.put(path, body)
    assert "attempt 1" in await text(client, made)
    await data(client, made)


# -- size ----------------------------------------------------------------------------------------------


async def test_a_large_gang_of_many_lives(client: httpx.AsyncClient, root: Path) -> None:
    made = await Made(root, key("large")).begin()
    await made.owner(0, gang={**rundirs.GANG, "nodes": 64, "gpus_per_node": 8})
    await made.start(5)
    log = made.log

    async def no_log(*_: object) -> None: ...

    for n in range(30):
        made.log = no_log if n else log  # type: ignore[method-assign]
        await made.life(100 * n + 10, ranks=512, nodes=64, restart=n)
        if n >= 21:
            await made.ends(100 * n + 90, [75] * 512, nodes=64)
        await made.save(100 * n + 50, n)
    begin = time.monotonic()
    page = await text(client, made)
    took = time.monotonic() - begin
    assert took < 6
    assert len(page) < 2_000_000
    assert page.count("Show the ranks of this life") == 22
    assert "Show the ranks" in page
    view = await data(client, made, "?life=1")
    first = view["attempts"][0]["lives"][0]
    assert first["ranks_read"] is True
    assert first["ranks"][63]["ranks"][7]["log_size"] == len("rank 511 of life 1 says hello\n")
    assert view["missing"] == []


async def test_a_run_that_has_ended_is_not_read_again(client: httpx.AsyncClient, root: Path) -> None:
    made = await rundirs.succeeded(root)
    first = await data(client, made)
    for name in ("0001", "0002", "0004"):
        (made.folder / "lives" / name / "nodes" / "0000.json").unlink()
    again = await data(client, made)
    assert again["attempts"][0]["lives"] == [
        {**life, "seen": again["attempts"][0]["lives"][i]["seen"]}
        for i, life in enumerate(first["attempts"][0]["lives"])
    ]
