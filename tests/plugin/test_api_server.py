"""The pages inside a real API server: who gets in, and what an address can reach.

SQLite, SimpleAuthManager with users and passwords (not "all admins", which
hides authorization bugs). The plugin comes from a plugins folder, and the
connection of the state store from the database of that Airflow.
"""

from __future__ import annotations

import ast
import asyncio
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.beds.airflow import AirflowBed
from tests.plugin import rundirs
from tests.plugin.conftest import BROWSER, address
from tests.plugin.rundirs import Made

PLUGIN = "from airflow_gpu.plugin import GangPlugin\n"
REPOSITORY = Path(__file__).parents[2]


class ApiServer(AirflowBed):
    """Only the API server, without an entry point of ours."""

    def up(self) -> None:
        passwords = {"admin": self.password, "viewer": self.password}
        (self.home / "passwords.json").write_text(json.dumps(passwords))
        plugins = self.home / "plugins"
        plugins.mkdir()
        (plugins / "gangs.py").write_text(PLUGIN)
        self.env |= {
            "PYTHONPATH": str(REPOSITORY),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(plugins),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin,viewer:viewer",
            "AIRFLOW__GPU__INSTALLATION": rundirs.INSTALLATION,
            "AIRFLOW__GPU__STATE_URI": f"file://{self.home}/state",
            "AIRFLOW__GPU__STATE_CONN_ID": "gpu_state",
        }
        subprocess.run(
            [sys.executable, "-m", "airflow", "db", "migrate"],
            env=self.env, check=True, stdout=self._log("migrate"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.start("api-server", "api-server", "--apps", "core")
        self.until(self._answers, "an API server")

    def down(self) -> None:
        if "api-server" in self.processes:
            self.kill("api-server")  # it holds nothing, and is slow to say good-bye
        super().down()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/api/v2/version", trust_env=False, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def token(self, user: str) -> str:
        body = {"username": user, "password": self.password}
        answer = httpx.post(f"{self.url}/auth/token", json=body, trust_env=False, timeout=30)
        answer.raise_for_status()
        return str(answer.json()["access_token"])

    def raw(self, target: str, token: str | None) -> tuple[int, str]:
        """A request whose address no client has tidied up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {"Cookie": f"_token={token}"} if token else {}
        connection.putrequest("GET", target, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    home = tmp_path_factory.mktemp("api-server")
    with ApiServer(home, home / "dags") as running:
        yield running


@pytest.fixture(scope="module")
def made(server: ApiServer) -> Made:
    """A run there, and the connection that names the credentials of its store."""
    made = asyncio.run(rundirs.failed(server.home))
    answer = httpx.get(
        f"{server.url}/gpu{address(made)}",
        cookies={"_token": server.token("admin")},
        trust_env=False,
        timeout=60,
    )
    assert answer.status_code == 503
    assert "gpu_state" in answer.text, "a connection that is missing is named"
    server.post("/connections", {"connection_id": "gpu_state", "conn_type": "generic"})
    return made


def browser(server: ApiServer, *, cookie: str = "", token: str = "") -> httpx.Client:
    headers = {**BROWSER, **({"Authorization": f"Bearer {token}"} if token else {})}
    cookies = {"_token": cookie} if cookie else {}
    return httpx.Client(
        base_url=f"{server.url}/gpu", headers=headers, cookies=cookies, trust_env=False, timeout=30
    )


RESTS = ("", "/run.json", "/log/3/5", "/log/3/5?raw=1", "/log/999/0")


def test_anonymous_gets_nothing(server: ApiServer, made: Made) -> None:
    with browser(server) as nobody:
        for rest in RESTS:
            answer = nobody.get(address(made, rest))
            assert answer.status_code == 401, rest
            assert "gpu-01" not in answer.text
        page = nobody.get(address(made)).text
        assert "Sign in to Airflow" in page
        assert "/api/v2/auth/login?next=" in page
        answer = nobody.get(address(made, "/run.json"))
        assert answer.json() == {"detail": "Not authenticated", "title": "Please sign in"}
        for path in ("/openapi.json", "/docs", "/redoc", "/", "/d/r/t", "/d/r/t/-1/nothing"):
            assert nobody.get(path).status_code == 404
    for wrong in ("x", "a.b.c"):
        for how in ({"cookie": wrong}, {"token": wrong}):
            with browser(server, **how) as nobody:
                assert nobody.get(address(made)).status_code in (401, 403)


def test_the_login_leads_back(server: ApiServer, made: Made) -> None:
    with browser(server) as nobody:
        page = nobody.get(address(made)).text
        link = page.partition('<p><a href="')[2].partition('"')[0].replace("&amp;", "&")
        answer = nobody.get(f"{server.url}{link}")
        assert answer.status_code == 307
        assert "next=" in answer.headers["location"]


@pytest.mark.parametrize("user", ["admin", "viewer"])
def test_the_cookie_of_the_ui_and_a_token_get_in(server: ApiServer, made: Made, user: str) -> None:
    token = server.token(user)
    with browser(server, cookie=token) as somebody:
        page = somebody.get(address(made, last="{MAP_INDEX}"))
        assert page.status_code == 200
        assert "rank 5, exit code 1" in page.text
        assert "shape mismatch" in page.text
        log = somebody.get(address(made, "/log/3/5"))
        assert log.status_code == 200
        assert "Traceback" in log.text
    with browser(server, token=token) as program:
        answer = program.get(address(made, "/run.json"))
        assert answer.status_code == 200
        assert answer.json()["state"]["word"] == "failed (application error)"


def test_no_address_leaves_the_run_directory(server: ApiServer, made: Made) -> None:
    token = server.token("admin")
    (server.home / "rank-00000.log").write_text("top secret")
    up = [
        "..",
        "%2e%2e",
        "..%2f..%2f..",
        "%2e%2e%2f%2e%2e",
        "%252e%252e",
        "=2E=2E",
        "..%5c..",
        "%00",
        "~",
        "/etc/passwd",
        "%2Fetc%2Fpasswd",
    ]
    base = ["train_llm", "manual__2026-03-01T08%3A00%3A00%2B00%3A00", "failed", "-1"]
    targets = []
    for bad in up:
        for place in range(4):
            parts = [*base[:place], bad, *base[place + 1 :]]
            targets += ["/gpu/" + "/".join(parts) + rest for rest in ("", "/run.json", "/log/3/5")]
        page = "/gpu/" + "/".join(base)
        targets += [f"{page}/log/{bad}/0", f"{page}/log/3/{bad}", f"{page}/{bad}", f"{page}/log/3/5/{bad}"]
        targets += [f"{page}/run.json?incarnation={bad}", f"{page}/log/3/5?incarnation={bad}"]
    for target in targets:
        status, text = server.raw(target, token)
        assert status in (200, 307, 400, 404), target
        if status == 200:  # what is no map index means "not mapped": this very run
            assert target.startswith("/gpu/" + "/".join(base[:3]) + "/"), target
            assert "incarnation" not in target
            assert "train_llm" in text or "Traceback" in text, target
        assert "top secret" not in text, target
        assert "root:" not in text, target
    assert server.raw("/gpu/" + "/".join(base), token)[0] == 200
    assert server.raw("/gpu/" + "/".join(base), None)[0] == 401


def test_the_tab_is_announced(server: ApiServer, made: Made) -> None:
    found = server.get("/plugins")["plugins"]
    ours = next(one for one in found if one["name"] == "airflow_gpu")
    assert ours["external_views"][0]["href"] == "gpu/{DAG_ID}/{RUN_ID}/{TASK_ID}/{MAP_INDEX}"
    assert ours["external_views"][0]["destination"] == "task_instance"
    assert ours["fastapi_apps"][0]["url_prefix"] == "/gpu"


def test_the_plugin_is_light() -> None:
    """It is imported in every component, so it brings nothing along."""
    tree = ast.parse((REPOSITORY / "airflow_gpu/plugin/__init__.py").read_text())
    modules = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert modules == {"__future__", "asyncio", "collections.abc", "typing", "airflow.plugins_manager"}
