"""Which connection a store is opened with, when it is read, and that nothing of it is shown."""

from __future__ import annotations

import asyncio
import secrets
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu.hooks.stores import Credentials, NoConnection, NoSuchConnection, conn_ids, with_state
from airflow_gpu.rundir import _options as asked
from airflow_gpu.rundir.store import Store, StoreError
from tests.beds.stores.servers import Server

SECRET = "hunter2-is-the-secret"


def known(given: dict[str, str]) -> Credentials:
    async def find(conn_id: str) -> Any:
        raise AssertionError(conn_id)

    return Credentials(given, find)


@pytest.mark.parametrize(
    ("uri", "conn_id"),
    [
        ("s3://gangs/prod/x", "deep"),
        ("s3://gangs/prod", "deep"),
        ("s3://gangs/production", "bucket"),  # not a segment of it
        ("s3://gangs-too/prod", "all"),
        ("s3://gangs", "bucket"),
        ("s3://other/a", "all"),
        ("gs://gangs/prod", ""),
        ("abfs://c/x", "azure"),  # another word for az
        ("az://c", "azure"),
        ("az://c/open/x", ""),  # named, with the credentials of the environment
        ("file:///s3/gangs", ""),
        ("/s3:/gangs", ""),
        ("memory://gangs", ""),
    ],
)
def test_the_longest_prefix_counts_at_a_segment(uri: str, conn_id: str) -> None:
    given = {
        "s3://": "all", "s3://gangs": "bucket", "s3://gangs/prod/": "deep", "az://c": "azure", "az://c/open": "",
    }  # fmt: skip
    assert known(given).conn_id(uri) == conn_id
    assert known(dict(reversed(given.items()))).conn_id(uri) == conn_id


NAMES = st.lists(st.sampled_from(["a", "b", "ab"]), max_size=4)


@given(prefixes=st.lists(NAMES, max_size=8), names=NAMES)
def test_no_prefix_that_fits_is_longer(prefixes: list[list[str]], names: list[str]) -> None:
    given = {"s3://" + "/".join(prefix): str(len(prefix)) for prefix in prefixes}
    fitting = [len(prefix) for prefix in prefixes if names[: len(prefix)] == prefix]
    found = known(given).conn_id("s3://" + "/".join(names))
    assert found == (str(max(fitting)) if fitting else "")


def test_the_state_store_has_its_own_connection() -> None:
    given = {"s3://b": "bucket", "s3://b/state/deep": "deep", "s3://b/state": "not this one"}
    both = known(with_state(given, "s3://b/state", "state"))
    assert both.conn_id("s3://b/state") == "state"
    assert both.conn_id("s3://b/state/deep/x") == "deep"
    assert both.conn_id("s3://b/channel") == "bucket"
    alone = known(with_state({}, "s3://b/state", "state"))
    assert alone.conn_id("s3://b/channel") == "state", "the rest of its bucket, as the pages always had it"
    assert alone.conn_id("s3://c/channel") == ""
    folder = known(with_state(given, "file:///x", "state"))
    assert folder.conn_id("file:///x") == "state", "a folder needs none, but one that is named must be there"
    assert folder.conn_id("file:///x/y") == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("s3://b=aws", "must be a JSON object"),
        ('["s3://b"]', "must be a JSON object"),
        ('{"bucket": "aws"}', "'bucket' is no prefix of a store's URI"),
        ('{"file:///x": "aws"}', "known are s3://, gs://, az://"),
        ('{"s3://b?x=1": "aws"}', "is no prefix"),
        ('{"s3://b": 3}', "must be the id of one"),
    ],
)
def test_a_wrong_setting_is_named(text: str, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        conn_ids(text)
    assert says in str(refused.value)
    assert "[gpu] store_conn_ids" in str(refused.value)


def test_the_setting() -> None:
    assert conn_ids(None) == conn_ids(" ") == {}
    assert conn_ids('{"s3://b": "aws", "gs://": null}') == {"s3://b": "aws", "gs://": ""}


class Vault:
    """Where connections are: what it holds may change, and it may be away."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.key: str = server.options["secret_access_key"]
        self.asked = 0
        self.away: Exception | None = None

    async def find(self, conn_id: str) -> Any:
        self.asked += 1
        await asyncio.sleep(0)
        if self.away is not None:
            raise self.away
        extra = {"region_name": "us-east-1", "endpoint_url": self.server.options["endpoint"]}
        return SimpleNamespace(
            conn_id=conn_id,
            conn_type="aws",
            login=self.server.options["access_key_id"],
            password=self.key,
            host=None,
            port=None,
            extra_dejson=extra,
        )

    def store(self) -> Store:
        return Credentials({"s3://bucket": "vault"}, self.find).open(f"s3://bucket/{secrets.token_hex(6)}")


@pytest.fixture
def vault(s3: Server) -> Vault:
    return Vault(s3)


async def test_it_is_asked_at_first_use_and_once_for_all(vault: Vault) -> None:
    store = vault.store()
    assert vault.asked == 0
    await asyncio.gather(*(store.create(f"a/{n}", b"x") for n in range(20)))
    assert vault.asked == 1
    assert len(await store.names("a")) == 20
    assert vault.asked == 1


async def test_it_works_in_another_event_loop(vault: Vault) -> None:
    store = vault.store()
    await store.create("a", b"x")
    assert await asyncio.to_thread(lambda: asyncio.run(store.get("a"))) == b"x"


async def test_credentials_that_rotate(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is no good any more is replaced without a restart, and neither is shown."""
    store, good = vault.store(), vault.key
    monkeypatch.setattr(asked, "OPTIONS_AGE", 0.0)
    await store.create("a", b"x")
    vault.key = SECRET
    with pytest.raises(StoreError) as failed:
        await store.get("a")
    assert "403 Forbidden" in str(failed.value)
    vault.key = good
    assert await store.get("a") == b"x"
    shown = "".join(traceback.format_exception(failed.value)) + repr(store) + repr(failed.value)
    assert SECRET not in shown
    assert good not in shown


async def test_while_it_cannot_be_read_the_older_ones_serve(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "OPTIONS_AGE", 0.0)
    monkeypatch.setattr(asked, "ASK_AGAIN", 0.0)
    store = vault.store()
    await store.create("a", b"x")
    vault.away = OSError(f"cannot connect with {SECRET}")
    assert await store.get("a") == b"x"
    vault.away = None
    vault.key = SECRET
    with pytest.raises(StoreError, match="403 Forbidden"):
        await store.get("a")


async def test_without_any_it_fails_and_comes_back(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    store = vault.store()
    vault.away = OSError(f"cannot connect with {SECRET}")
    for _ in range(5):
        with pytest.raises(StoreError, match=r"connection 'vault' cannot be read now: OSError") as failed:
            await store.create("a", b"x")
        assert SECRET not in "".join(traceback.format_exception(failed.value))
    assert vault.asked == 1, "thousands of gangs may want it: it is not asked for each of them"
    monkeypatch.setattr(asked.time, "monotonic", lambda now=asked.time.monotonic: now() + asked.ASK_AGAIN)
    vault.away = None
    await store.create("a", b"x")


async def test_a_connection_that_is_not_there(vault: Vault) -> None:
    vault.away = NoSuchConnection("vault")
    with pytest.raises(NoConnection) as failed:
        await vault.store().ready()
    with pytest.raises(NoConnection, match="'vault'"):  # a folder needs none, but this one was named
        await Credentials({"file:///x": "vault"}, vault.find).open("file:///x").ready()
    for words in ("'vault'", "[gpu] store_conn_ids", "AIRFLOW_CONN_VAULT", "'aws'"):
        assert words in str(failed.value)


async def test_one_caller_that_is_cancelled_does_not_end_it_for_the_others(vault: Vault) -> None:
    gate = asyncio.Event()

    async def find(conn_id: str) -> Any:
        await gate.wait()
        return await vault.find(conn_id)

    store = Credentials({"s3://": "vault"}, find).open(f"s3://bucket/{secrets.token_hex(6)}")
    first = asyncio.create_task(store.create("a", b"x"))
    second = asyncio.create_task(store.create("b", b"x"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    gate.set()
    await second
    assert await store.names() == ["b"]


async def test_a_folder_takes_none(tmp_path: Any) -> None:
    given: dict[str, Any] = {}

    async def source() -> dict[str, Any]:
        return given

    await Store(str(tmp_path), source).create("a", b"x")
    given["access_key_id"] = SECRET
    with pytest.raises(
        StoreError, match=r"a local folder takes no options, not \['access_key_id'\]"
    ) as refused:
        await Store(str(tmp_path), source).get("a")
    assert SECRET not in str(refused.value)
    assert Credentials({"s3://": "x"}, lambda _: source()).open(str(tmp_path)).folder == tmp_path


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s3://b/x", ("AWS_ACCESS_KEY_ID", "'aws'", '{"s3://b": "ID"}', "STORE_CONN_IDS")),
        ("gs://b/x", ("GOOGLE_APPLICATION_CREDENTIALS", "'google_cloud_platform'")),
        ("abfs://b/x", ("AZURE_STORAGE_ACCOUNT_NAME", "'wasb'")),
    ],
)
def test_advice(uri: str, says: tuple[str, ...]) -> None:
    for words in says:
        assert words in known({}).advice(uri)
    assert "'named'" in known({uri: "named"}).advice(uri)
    assert known({}).advice("/folder") == ""


def test_hosts_behind_ssh() -> None:
    """Whoever logs in there, and at whatever port; a password has no place in a setting."""
    given = conn_ids(
        '{"sftp://login.cluster/shared": "ssh_shared", "sftp://airflow@login.cluster": "ssh_cluster"}'
    )
    known = Credentials(given, None)  # type: ignore[arg-type]
    assert known.conn_id("sftp://me@login.cluster:2222/shared/gangs") == "ssh_shared"
    assert known.conn_id("sftp://login.cluster/home/gangs") == "ssh_cluster"
    assert known.conn_id("sftp://other.cluster/shared/gangs") == ""
    with pytest.raises(ValueError, match="no prefix"):
        conn_ids('{"sftp://me:secret@host/x": "ssh"}')
