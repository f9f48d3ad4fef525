"""What is particular of a store behind SSH: unusual servers, broken connections, links, host keys. See test_store.py too."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_gpu.gang.identity import RunKey, run_path
from airflow_gpu.rundir import store as store_module
from airflow_gpu.rundir.contents import Contents
from airflow_gpu.rundir.sftp import sftp_options
from airflow_gpu.rundir.store import Entry, Exists, Missing, Store, StoreError
from airflow_gpu.sweeping.listing import run_dirs
from tests.beds.stores import race as races
from tests.beds.stores.servers import Unavailable
from tests.beds.stores.sshd import Sshd, sshd
from tests.sweep.test_listing import begin

LINK, RENAME = "hardlink@openssh.com", "posix-rename@openssh.com"
OPEN, READ, WRITE, LSTAT, OPENDIR = 3, 5, 6, 7, 11


@pytest.fixture(scope="module")
def server() -> Iterator[Sshd]:
    yield from _served()


@pytest.fixture(scope="module")
def plain_server() -> Iterator[Sshd]:
    """One without hard links."""
    yield from _served(subsystem="-P hardlink")


@pytest.fixture
def faulty() -> Iterator[Sshd]:
    yield from _served(faulty=True)


def _served(**how: Any) -> Iterator[Sshd]:
    try:
        with sshd(**how) as running:
            yield running
    except Unavailable as reason:
        pytest.skip(f"sftp IS NOT PROVED HERE: {reason}")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(store_module, "LONGEST_WAIT", 0.05)


def fresh(server: Sshd, **options: Any) -> tuple[Store, Path]:
    """A new store, and its folder."""
    name = secrets.token_hex(6)
    return Store(f"{server.uri}/{name}", {**server.options, **options}), server.folder / name


# -- names on disk are the paths


async def test_the_files_are_those_of_the_runtime(server: Sshd) -> None:
    """Whole, nothing hidden beside them, and readable in both directions."""
    store, folder = fresh(server)
    data = secrets.token_bytes(1 << 20)
    await store.create("lives/0001.json", data)
    await store.put("lives/progress.json", data[:10])
    assert (folder / "lives/0001.json").read_bytes() == data
    assert sorted(os.listdir(folder / "lives")) == ["0001.json", "progress.json"]
    here = Store(str(folder))
    await here.create("lives/0002.json", b"two")
    assert await store.get("lives/0002.json") == b"two"
    for one, other in ((store, here), (here, store)):
        await one.create(f"both/{other.folder is None}", b"")
        with pytest.raises(Exists):
            await other.create(f"both/{other.folder is None}", b"x")


async def test_large_files_and_ranges_of_them(server: Sshd) -> None:
    store, folder = fresh(server)
    data = secrets.token_bytes((20 << 20) + 7)
    folder.mkdir()
    (folder / "big").write_bytes(data)
    assert await store.get("big") == data
    assert await store.get("big", 5, 17 << 20) == data[5 : 5 + (17 << 20)]
    assert await store.get("big", 3 << 20) == data[3 << 20 :]


async def test_unfinished_files_are_hidden(server: Sshd) -> None:
    store, folder = fresh(server)
    await store.create("a/b", b"x")
    (folder / "a/.tmp-0123").write_bytes(b"half")
    assert await store.names("a") == ["b"]
    assert await store.list() == [Entry("a/b", 1)]
    await store.delete_tree("a")
    assert os.listdir(folder) == []


async def test_a_file_where_a_folder_should_be(server: Sshd) -> None:
    store, _ = fresh(server)
    await store.create("a", b"x")
    for path in ["a/b", "a/b/c"]:
        with pytest.raises(StoreError) as refused:
            await store.create(path, b"x")
        assert type(refused.value) is StoreError


async def test_a_folder_that_may_not_be_written(server: Sshd) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    store, folder = fresh(server)
    folder.mkdir(mode=0o500)
    with pytest.raises(StoreError, match="permission denied"):
        await store.create("a", b"x")


# -- connections


async def test_one_connection_for_all_stores_of_a_process(server: Sshd) -> None:
    gc.collect()
    stores = [
        fresh(server, timeout=41)[0] for _ in range(5)
    ]  # an option of its own: no other test's connection
    before = len(server.sessions())
    await asyncio.gather(*(store.create(f"x/{n}", b"%d" % n) for store in stores for n in range(20)))
    assert len(server.sessions()) == before + 1
    del stores
    gc.collect()
    await _until(lambda: len(server.sessions()) <= before)


async def test_a_connection_that_is_killed_while_files_are_created(server: Sshd) -> None:
    store, folder = fresh(server)
    ended = threading.Event()
    killed = 0

    def kill() -> None:
        nonlocal killed
        while not ended.wait(1.0):
            killed += server.hang_up()

    killer = threading.Thread(target=kill)
    killer.start()
    contents = {f"c/{n:03d}": secrets.token_bytes(3000) for n in range(120)}
    try:
        for path, data in contents.items():
            await store.create(path, data)
            assert await store.get(path) == data
    finally:
        ended.set()
        killer.join()
    assert killed > 0
    assert {path: (folder / path).read_bytes() for path in contents} == contents
    assert await store.names("c") == [path[2:] for path in contents]


async def test_a_server_that_is_away_and_comes_back(server: Sshd) -> None:
    store = Store("sftp://127.0.0.1:9/folder", server.options)
    with pytest.raises(StoreError, match="no connection") as away:
        await store.get("a")
    assert type(away.value) is not StoreError  # it may pass: tried again, and said so by its kind


@pytest.mark.parametrize("at", [OPEN, WRITE, "fsync@openssh.com", LINK, LSTAT])
@pytest.mark.parametrize("action", ["cut", "lose"])
async def test_a_create_that_is_cut_off(faulty: Sshd, action: str, at: int | str) -> None:
    store, folder = fresh(faulty)
    await store.create("first", b"x")
    faulty.fail((action, at), (action, at))
    await store.create("a/b", b"ours")
    assert faulty.left() == []
    assert (folder / "a/b").read_bytes() == b"ours"
    with pytest.raises(Exists):
        await store.create("a/b", b"theirs")
    assert await store.names("a") == ["b"]


async def test_a_create_whose_answer_was_lost_is_not_ours(faulty: Sshd) -> None:
    store, folder = fresh(faulty)
    await store.create("a", b"theirs")
    faulty.fail(("lose", LSTAT), ("lose", LSTAT))
    with pytest.raises(Exists):
        await store.create("a", b"ours")
    assert faulty.left() == []
    assert (folder / "a").read_bytes() == b"theirs"


async def test_a_link_that_nfs_repeats_is_ours(faulty: Sshd) -> None:
    """The server is told that the name is taken, by the very link that took it."""
    store, folder = fresh(faulty)
    await store.create("z", b"")  # the first on a connection asks for links before it makes one
    faulty.fail(("twice", LINK))
    await store.create("a", b"ours")
    assert faulty.left() == []
    assert sorted(os.listdir(folder)) == ["a", "z"]
    assert (folder / "a").read_bytes() == b"ours"


@pytest.mark.parametrize("action", ["cut", "lose"])
async def test_other_work_that_is_cut_off(faulty: Sshd, action: str) -> None:
    store, folder = fresh(faulty)
    await store.put("f/a", b"old")
    for at in (WRITE, RENAME):
        faulty.fail((action, at), (action, at))
        await store.put("f/a", b"new %s" % str(at).encode())
        assert (folder / "f/a").read_bytes() == b"new %s" % str(at).encode()
        assert faulty.left() == []
    faulty.fail((action, READ), (action, OPEN), (action, LSTAT))
    assert await store.get("f/a") == b"new " + RENAME.encode()
    faulty.fail((action, OPENDIR), (action, OPENDIR))
    assert await store.names("f") == ["a"]
    faulty.fail((action, OPENDIR), (action, OPENDIR))
    await store.delete_tree("f")
    assert faulty.left() == []
    assert not (folder / "f").exists()


async def test_a_server_that_does_not_answer(faulty: Sshd) -> None:
    store, _ = fresh(faulty, timeout=2)
    await store.create("a", b"x")
    faulty.fail(("freeze", READ))
    assert await store.get("a") == b"x"
    assert faulty.left() == []


# -- servers without an extension


async def test_without_hard_links_the_first_create_counts(plain_server: Sshd) -> None:
    store, folder = fresh(plain_server)
    await store.prove()
    await store.create("a", b"first")
    with pytest.raises(Exists):
        await store.create("a", b"second")
    assert (folder / "a").read_bytes() == b"first"
    assert os.listdir(folder) == ["a"]  # nothing hidden was left


async def test_without_hard_links_sixteen_writers(
    plain_server: Sshd, capsys: pytest.CaptureFixture[str]
) -> None:
    store, _ = fresh(plain_server)
    outcome = await asyncio.to_thread(races.race, store.uri, plain_server.options, slots=20)
    line = await outcome.judge(store, 20, 16)
    with capsys.disabled():
        print(f"\n    without hard links: {line}")


async def test_without_hard_links_half_a_file_is_waited_for(plain_server: Sshd) -> None:
    store, folder = fresh(plain_server)
    await store.create("x", b"{}")
    whole = json.dumps({"kind": "owner", "text": "long" * 100}).encode()
    for half in (b"", whole[:50]):
        (folder / "a").write_bytes(half)
        reading = asyncio.create_task(store.get("a"))
        await asyncio.sleep(0.3)
        assert not reading.done()
        (folder / "a").write_bytes(whole)
        assert await reading == whole
    (folder / "a").write_bytes(whole[:50])
    assert await store.get("a") == whole[:50]  # after a while it is as it is


async def test_with_hard_links_nothing_is_waited_for(server: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_gpu.rundir.sftp.HALF", 1e6)
    store, _ = fresh(server)
    await store.create("a", b"{")
    assert await store.get("a") == b"{"


async def test_without_hard_links_a_create_that_is_cut_off(faulty: Sshd) -> None:
    faulty.hide(LINK)
    store, folder = fresh(faulty)
    for action in ("cut", "lose"):
        faulty.fail((action, WRITE), (action, WRITE))
        await store.create(f"a/{action}", b"ours")
        assert faulty.left() == []
        assert (folder / f"a/{action}").read_bytes() == b"ours"
    faulty.fail(*[("cut", WRITE)] * 3)
    with pytest.raises(StoreError, match="removed by hand"):
        await store.create("a/b", b"ours")


async def test_without_posix_rename_and_fsync(faulty: Sshd) -> None:
    faulty.hide(RENAME, "fsync@openssh.com")
    store, folder = fresh(faulty)
    for data in (b"one", b"two"):
        await store.put("a", data)
        assert (folder / "a").read_bytes() == data
    await store.create("b", b"x")
    assert sorted(os.listdir(folder)) == ["a", "b"]


# -- links


async def test_no_link_below_the_root_is_followed(server: Sshd, tmp_path: Path) -> None:
    store, folder = fresh(server)
    secret = tmp_path / "secret"
    (secret / "deep").mkdir(parents=True)
    for path in (secret / "key", secret / "deep/key"):
        path.write_text("hunter2")
    await store.create("run/file", b"x")
    (folder / "run/link").symlink_to(secret / "key")
    (folder / "run/folder").symlink_to(secret)
    (folder / "run/loop").symlink_to("loop")
    (folder / "run/nowhere").symlink_to("not/there")
    os.mkfifo(folder / "run/pipe")
    contents = Contents(store, "run")
    for path in ["link", "folder/key", "folder/deep/key", "loop", "nowhere", "pipe", "folder"]:
        with pytest.raises(Missing):
            await store.get(f"run/{path}")
        assert await contents.read(path, 10) is None
        assert not await store.exists(f"run/{path}")
    for below in ("run/folder", "run/folder/deep"):
        assert await store.list(below) == []
        assert await store.names(below) == []
        with pytest.raises(StoreError, match="symbolic link"):
            await store.create(f"{below}/new", b"x")
        with pytest.raises(StoreError, match="symbolic link"):
            await store.put(f"{below}/key", b"x")
        with pytest.raises(StoreError, match="symbolic link"):
            await store.delete_tree(below)
        await store.delete(f"{below}/key")
    assert await store.list() == [Entry("run/file", 1)]
    assert [file.path for file in (await contents.walk()).files] == ["file"]
    await store.put("run/link", b"mine")  # in the place of the link
    assert (folder / "run/link").read_bytes() == b"mine"
    (folder / "run/link").unlink()
    (folder / "run/link").symlink_to(secret / "key")
    await store.delete("run/link")
    assert not (folder / "run/link").is_symlink()
    await store.delete_tree("run")
    assert os.listdir(folder) == []
    found = {str(path.relative_to(secret)): path.read_text() for path in secret.rglob("key")}
    assert found == {"key": "hunter2", "deep/key": "hunter2"}


async def test_the_root_may_lie_behind_a_link(server: Sshd) -> None:
    _, folder = fresh(server)
    folder.mkdir()
    link = server.folder / secrets.token_hex(6)
    link.symlink_to(folder)
    store = Store(f"{server.uri}/{link.name}", server.options)
    await store.create("a/b", b"x")
    assert await store.list() == [Entry("a/b", 1)]
    assert (folder / "a/b").read_bytes() == b"x"


# -- host keys, log-in, secrets


async def test_a_wrong_host_key_is_refused(server: Sshd, tmp_path: Path) -> None:
    other = (server.keys / "user_key.pub").read_text()
    with pytest.raises(StoreError, match="host key is not the one") as refused:
        await fresh(server, host_key=other)[0].get("a")
    assert type(refused.value) is StoreError
    for text in (server.host_key, " ".join(server.host_key.split()[:2]), server.host_key.split()[1]):
        assert await fresh(server, host_key=text)[0].list() == []
    known = tmp_path / "known_hosts"
    known.write_text("")
    with pytest.raises(StoreError, match="host key is not the one"):
        await fresh(server, host_key="", known_hosts=known)[0].get("a")
    known.write_text(f"[127.0.0.1]:{server.port} {server.host_key}")
    assert await fresh(server, host_key="", known_hosts=str(known))[0].list() == []


def test_an_unknown_host_is_refused_unless_asked_otherwise(server: Sshd, tmp_path: Path) -> None:
    """With nothing said of host keys, and a home without any."""
    script = """if True:
        import asyncio, json, sys
        from airflow_gpu.rundir.store import Store, StoreError
        try:
            print(asyncio.run(Store(sys.argv[1], json.loads(sys.argv[2])).list()))
        except StoreError as error:
            print(error)
    """

    def says(**options: Any) -> str:
        given = {"key_file": server.options["key_file"], "timeout": 20, **options}
        command = [sys.executable, "-c", script, server.uri + "/none", json.dumps(given)]
        environment = {**os.environ, "HOME": str(tmp_path)}
        environment.pop("SSH_AUTH_SOCK", None)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert "host key is not the one" in says()
    for not_true in (False, "false", ""):
        assert "host key is not the one" in says(no_host_key_check=not_true)
    for true in (True, "true", "True"):
        assert says(no_host_key_check=true) == "[]\n"


async def test_log_ins(server: Sshd, tmp_path: Path) -> None:
    key = (server.keys / "user_key").read_text()
    store, _ = fresh(server, key_file="", private_key=key)
    assert await store.list() == []
    locked = tmp_path / "locked"
    locked.write_text(key)
    locked.chmod(0o600)
    change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "hunter2hunter2", "-f", str(locked)]
    subprocess.run(change, check=True, capture_output=True)
    for given in ({"key_file": str(locked)}, {"key_file": "", "private_key": locked.read_text()}):
        assert await fresh(server, private_key_passphrase="hunter2hunter2", **given)[0].list() == []
        with pytest.raises(StoreError, match=r"cannot be used") as refused:
            await fresh(server, private_key_passphrase="hunter3hunter3", **given)[0].list()
        assert "hunter" not in f"{refused.value!r}"
    with pytest.raises(StoreError, match="No such file"):
        await fresh(server, key_file=str(tmp_path / "none"))[0].list()


async def test_no_secret_in_errors(server: Sshd, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
    text = stranger.read_text()
    store, _ = fresh(server, key_file="", private_key=text, password="hunter2hunter2")
    with pytest.raises(StoreError, match="refuses the log-in") as refused:
        await store.create("a", b"x")
    assert type(refused.value) is StoreError
    said = f"{refused.value!r} {refused.value.__cause__!r} {store!r} {store._cached!r}"
    assert "hunter2" not in said
    assert not any(line in said for line in text.split("\n") if line)


def test_without_the_library(tmp_path: Path) -> None:
    script = """if True:
        import sys
        sys.modules["asyncssh"] = None
        from airflow_gpu.rundir.store import Store, StoreError
        try:
            Store("sftp://host/folder")
        except StoreError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'airflow-gpu[sftp]'" in done.stdout


def test_one_folder_has_one_uri() -> None:
    uris = ["sftp://me@Host:22/shared/gangs/", "sftp://me@host/shared/gangs"]
    assert {Store(uri).uri for uri in uris} == {"sftp://me@host/shared/gangs"}
    assert Store("sftp://me@host:2222/x").uri == "sftp://me@host:2222/x"
    assert Store("sftp://[::1]/x").uri == "sftp://[::1]/x"


def test_options_of_a_connection() -> None:
    extra = {
        "key_file": "/k",
        "host_key": "AAAA",
        "no_host_key_check": "false",
        "compress": "true",
        "private_key": "",
    }
    conn = SimpleNamespace(
        conn_type="ssh", login="me", password="pw", port=None, host="h", extra_dejson=extra
    )
    assert sftp_options(conn) == {
        "username": "me",
        "password": "pw",
        "key_file": "/k",
        "host_key": "AAAA",
        "no_host_key_check": "false",
    }
    assert Store("sftp://h/x", sftp_options(SimpleNamespace(**{**vars(conn), "extra_dejson": {}}))).uri


# -- for its callers


async def test_contents_with_names_of_all_kinds(server: Sshd) -> None:
    store, folder = fresh(server)
    names = [
        "a b/c%20d",
        "ü, #1?.bin",
        "new\nline",
        "empty/dir/x",
        b"no-utf8-\xff".decode(errors="surrogateescape"),
    ]
    contents = Contents(store, "run/checkpoints")
    data = secrets.token_bytes((9 << 20) + 1)
    for name in names:
        await contents.write(name, len(data), lambda: iter([data[: 1 << 20], data[1 << 20 :]]))
        assert await contents.create(f"{name}.json", b"{}")
        assert not await contents.create(f"{name}.json", b"{}")
    (folder / "run/checkpoints/hollow/deep").mkdir(parents=True)
    walked = await contents.walk()
    assert [file.path for file in walked.files] == sorted([*names, *(f"{name}.json" for name in names)])
    assert walked.folders == ["a b", "empty", "empty/dir", "hollow", "hollow/deep"]
    assert all(abs(file.at - time.time()) < 3600 for file in walked.files)
    for name in names:
        assert (await contents.digest(name) or (0,))[0] == len(data)
        assert (folder / "run/checkpoints" / name).read_bytes() == data
    reader = await contents.opened()
    assert b"".join(contents.blocks(reader, names[0], len(data))) == data
    for outside in ("../../x", "..", "a b/../c", ""):
        assert await contents.read(outside, 1) is None
        with pytest.raises(StoreError):
            await contents.create(outside or "..", b"x")
    await contents.remove("a b/c%20d")
    await contents.remove("a b/c%20d")
    await contents.remove_tree("empty")
    assert not (folder / "run/checkpoints/empty").exists()


async def test_a_write_that_fails_midway_leaves_nothing(server: Sshd) -> None:
    store, folder = fresh(server)
    contents = Contents(store, "run")

    def blocks() -> Iterator[bytes]:
        yield b"x" * 100
        raise StoreError("the source is gone")

    with pytest.raises(StoreError, match="source is gone"):
        await contents.write("a", 9 << 20, blocks)
    assert os.listdir(folder / "run") == []


async def test_run_directories_are_found(server: Sshd) -> None:
    store, _ = fresh(server)
    expected = {}
    for run, entries in (("r1", 3), ("r2", 0)):
        key = RunKey("prod", "dag", run, "fit")
        await begin(store, key, "aaaaaaaaaa", entries, files=1)
        expected[run_path(key, "aaaaaaaaaa")] = entries
    await begin(store, RunKey("other", "dag", "r1", "fit"), "bbbbbbbbbb", 1)
    found = await run_dirs(store, "prod")
    assert {path: run.entries for path, run in found.items()} == expected
    assert all(abs(run.touched - time.time()) < 3600 for run in found.values())
    assert await run_dirs(store, "nobody") == {}


async def _until(true: Any) -> None:
    for _ in range(200):
        if true():
            return
        await asyncio.sleep(0.05)
    assert true()
