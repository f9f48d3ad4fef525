"""The promise of `create`, held against every store that `Store` accepts; and what happens on a bad wire."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore

from airflow_gpu.rundir import store as store_module
from airflow_gpu.rundir.store import Entry, Exists, Missing, NoBucket, Store, StoreError
from tests.beds.stores import race as races
from tests.beds.stores.servers import SERVERS, Server
from tests.beds.stores.started import ALL, started
from tests.beds.stores.wire import Cut, Lose, Refuse, Truncate, Wire

SLOTS = 200
WRITERS = 16
EVERY_CHARACTER = "v1/AZaz09._=+-/b=20c=2Fd+e/x=3D.json"


@pytest.fixture(scope="session")
def running() -> Iterator[dict[str, Server]]:
    """Servers, each started when it is first asked for."""
    with started() as servers:
        yield servers


@pytest.fixture(params=["folder", "memory", *ALL])
def store(request: pytest.FixtureRequest, running: dict[str, Server], tmp_path: Path) -> Store:
    """A store of each kind, with nothing in it."""
    if request.param == "folder":
        return Store(str(tmp_path / "run dir %20 ü"))
    if request.param == "memory":
        return Store("memory://")
    server = running[request.param]
    return Store(f"{server.uri}/{secrets.token_hex(6)}", server.options)


@pytest.fixture(params=list(SERVERS))
def server(request: pytest.FixtureRequest, running: dict[str, Server]) -> Server:
    return running[request.param]


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(store_module, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(store_module, "TRIES", 4)


# -- what every store does


async def test_only_the_first_create_counts(store: Store) -> None:
    await store.create("journal/000001.json", b"first")
    with pytest.raises(Exists, match="000001"):
        await store.create("journal/000001.json", b"second")
    with pytest.raises(Exists):
        await store.create("journal/000001.json", b"first")  # the same bytes are no excuse
    assert await store.get("journal/000001.json") == b"first"


async def test_prove_passes_and_leaves_nothing(store: Store) -> None:
    await store.create("kept", b"x")
    await store.prove()
    assert await store.list() == [Entry("kept", 1)]


async def test_put_overwrites(store: Store) -> None:
    await store.put("progress.json", b"longer than the next")
    await store.put("progress.json", b"next")
    assert await store.get("progress.json") == b"next"


async def test_ranges(store: Store) -> None:
    await store.put("log", b"0123456789")
    await store.put("empty", b"")
    assert await store.get("log", 3) == b"3456789"
    assert await store.get("log", 3, 4) == b"3456"
    assert await store.get("log", 8, 100) == b"89"
    assert await store.get("log", 0, 3) == b"012"
    for beyond in [(10,), (10, 5), (11,), (1000, 1), (0, 0), (10, 0)]:
        assert await store.get("log", *beyond) == b"", beyond
    for anything in [(), (0, 5), (1,), (0, 0)]:
        assert await store.get("empty", *anything) == b"", anything
    for args in [(-1,), (0, -1)]:
        with pytest.raises(ValueError, match="range"):
            await store.get("log", *args)


async def test_what_is_missing(store: Store) -> None:
    for args in [(), (5,), (5, 5), (0, 0)]:
        with pytest.raises(Missing, match="a/b"):
            await store.get("a/b", *args)
    assert not await store.exists("a/b")
    assert await store.list("a") == []
    assert await store.list() == []
    assert await store.names("a") == []
    await store.delete("a/b")
    await store.delete_tree("a")


async def test_listings_go_by_whole_segments(store: Store) -> None:
    for path in ["lives/0002.json", "lives/0001/nodes/0000.json", "lives/0001.json", "lives/00012/x", "top"]:
        await store.create(path, path.encode())
    assert await store.list("lives/0001") == [Entry("lives/0001/nodes/0000.json", 26)]
    assert [e.path for e in await store.list("lives")] == [
        "lives/0001.json",
        "lives/0001/nodes/0000.json",
        "lives/00012/x",
        "lives/0002.json",
    ]
    assert await store.list("lives/0001.json") == []
    assert await store.names("lives") == ["0001", "0001.json", "00012", "0002.json"]
    assert await store.names() == ["lives", "top"]
    assert await store.exists("lives/0001.json")
    assert not await store.exists("lives/0001")


async def test_removing(store: Store) -> None:
    for path in ["run/a", "run/b/c", "runs/d"]:
        await store.create(path, b"x")
    await store.delete("run/a")
    assert not await store.exists("run/a")
    await store.delete_tree("run")
    assert [e.path for e in await store.list()] == ["runs/d"]
    assert await store.names() == ["runs"]
    await store.create("run/a", b"a new one")
    with pytest.raises(StoreError):
        await store.delete_tree("")


async def test_every_allowed_character_is_kept(store: Store) -> None:
    await store.create(EVERY_CHARACTER, b"x")
    assert await store.get(EVERY_CHARACTER) == b"x"
    assert await store.list("v1") == [Entry(EVERY_CHARACTER, 1)]
    assert await store.names("v1/AZaz09._=+-") == ["b=20c=2Fd+e"]


async def test_more_files_than_a_page_of_a_listing(store: Store) -> None:
    if store.uri.startswith("gs:"):
        pytest.skip("fake-gcs-server answers with everything in one page")
    paths = [f"many/{n:04d}" for n in range(1100)]
    await asyncio.gather(*(store.put(path, b"") for path in paths))
    assert [e.path for e in await store.list("many")] == paths
    assert len(await store.names("many")) == 1100
    await store.delete_tree("many")
    assert await store.list() == []


@pytest.mark.parametrize(
    "path",
    ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a b", "a%20b", "ü", "a#1", "a\n", "a\\b"],
)
async def test_other_paths_are_refused(path: str) -> None:
    store = Store("memory://")
    for refused in [store.create(path, b""), store.put(path, b""), store.get(path), store.delete_tree(path)]:
        with pytest.raises(StoreError, match="a path is segments"):
            await refused


async def test_names_of_unfinished_files_are_refused() -> None:
    with pytest.raises(StoreError, match="unfinished"):
        await Store("memory://").create("a/.tmp-x", b"")


# -- races


@pytest.mark.parametrize("name", ALL)
async def test_sixteen_writers_in_four_processes(
    name: str, running: dict[str, Server], capsys: pytest.CaptureFixture[str]
) -> None:
    server = running[name]
    store = Store(f"{server.uri}/{secrets.token_hex(6)}", server.options)
    slots = SLOTS // 4 if name == "sftp" else SLOTS  # each of its questions is encrypted, in Python
    outcome = await asyncio.to_thread(races.race, store.uri, server.options, slots=slots)
    _tell(capsys, await outcome.judge(store, slots, WRITERS))


async def test_sixteen_writers_of_three_kinds_on_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Store, obstore itself, and plain Python as in the runtime: all directions at once."""
    store = Store(str(tmp_path / "folder"))
    tmp_path.joinpath("folder").mkdir()
    kinds = ("store", "store", "link", "obstore")
    outcome = await asyncio.to_thread(races.race, store.uri, {}, slots=SLOTS, kinds=kinds)
    line = await outcome.judge(store, SLOTS, WRITERS)
    assert sorted(os.listdir(tmp_path / "folder/race")) == [f"{n:06d}.json" for n in range(SLOTS)]
    _tell(capsys, line)


async def test_sixteen_writers_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    store = Store("memory://")
    outcome = await races.race_here(store, slots=SLOTS, writers=WRITERS)
    _tell(capsys, await outcome.judge(store, SLOTS, WRITERS))


def _tell(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        print(f"\n    {line}")


# -- a bad wire


async def test_the_condition_is_on_the_wire(server: Server) -> None:
    """Which condition each store is sent, so that a change of obstore's is seen."""
    with Wire(server.port) as wire:
        await Store(f"{server.uri}/{secrets.token_hex(6)}", server.through(wire.port)).create("a", b"x")
    (sent,) = wire.sent("PUT")
    header = {"gcs": ("x-goog-if-generation-match", "0")}.get(server.name, ("if-none-match", "*"))
    assert sent.headers[header[0]] == header[1]


@pytest.mark.usefixtures("_quick")
async def test_a_create_whose_answer_was_lost_is_ours(server: Server) -> None:
    with Wire(server.port) as wire:
        store = Store(f"{server.uri}/{secrets.token_hex(6)}", server.through(wire.port))
        wire.faults.extend([Lose(), Lose(), Cut()])
        await store.create("a", b"ours")
        assert len(wire.sent("PUT")) == 4
        assert await store.get("a") == b"ours"
        with pytest.raises(Exists):
            await store.create("a", b"theirs")


@pytest.mark.usefixtures("_quick")
async def test_a_create_whose_answer_was_lost_is_not_ours(server: Server) -> None:
    with Wire(server.port) as wire:
        store = Store(f"{server.uri}/{secrets.token_hex(6)}", server.through(wire.port))
        await store.create("a", b"theirs")
        wire.faults.append(Lose())
        with pytest.raises(Exists):
            await store.create("a", b"ours")
        assert await store.get("a") == b"theirs"


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("status", [500, 503, 429, 408])
async def test_a_refusal_that_passes_is_tried_again(server: Server, status: int) -> None:
    with Wire(server.port) as wire:
        store = Store(f"{server.uri}/{secrets.token_hex(6)}", server.through(wire.port))
        for write in (store.create, store.put):
            wire.faults.extend([Refuse(status)] * 2)
            await write("a", b"x")
        assert len(wire.sent("PUT")) == 6
        wire.method = "GET"
        wire.faults.extend([Refuse(status), Cut()])
        assert await store.get("a") == b"x"


@pytest.mark.usefixtures("_quick")
async def test_an_answer_that_breaks_off_is_asked_for_again(server: Server) -> None:
    with Wire(server.port, method="GET") as wire:
        store = Store(f"{server.uri}/{secrets.token_hex(6)}", server.through(wire.port))
        await store.put("a", b"0123456789" * 1000)
        for args in [(), (5,), (5, 5000)]:
            wire.faults.append(Truncate())
            assert len(await store.get("a", *args)) > 4000
        wire.faults.append(Truncate())
        assert await store.list() == [Entry("a", 10000)]
        assert len(wire.sent("GET")) == 8


@pytest.mark.usefixtures("_quick")
async def test_a_collision_is_not_an_answer(server: Server) -> None:
    """409 with nothing there: S3 gives it to both of two colliding requests, so it must not mean Exists."""
    with Wire(server.port) as wire:
        store = Store(f"{server.uri}/{secrets.token_hex(6)}", server.through(wire.port))
        wire.faults.append(Refuse(409))
        await store.create("a", b"x")
        wire.faults.append(Refuse(409))
        await store.put("a", b"y")
        assert len(wire.sent("PUT")) == 4


@pytest.mark.usefixtures("_quick")
async def test_a_refusal_that_stays(server: Server) -> None:
    with Wire(server.port) as wire:
        store = Store(f"{server.uri}/{secrets.token_hex(6)}", server.through(wire.port))
        for status in [301, 400, 401, 403]:
            wire.faults.append(Refuse(status))
            with pytest.raises(StoreError) as refused:
                await store.create("a", b"x")
            assert type(refused.value) is StoreError
        assert len(wire.sent("PUT")) == 4
        wire.faults.extend([Refuse(503)] * 4)
        with pytest.raises(StoreError, match="503"):
            await store.create("a", b"x")
        assert len(wire.sent("PUT")) == 8
        await store.create("a", b"x")


@pytest.mark.usefixtures("_quick")
async def test_a_bucket_that_is_not_there(server: Server) -> None:
    store = Store(server.uri.replace("bucket", "nosuch"), server.options)
    for write in (store.create, store.put):
        with pytest.raises(StoreError, match="does not exist"):
            await write("a", b"x")
    said = StoreError if server.name == "gcs" else NoBucket  # which answers 500, as the cloud does not
    for listing in (store.list, store.names):
        with pytest.raises(said):
            await listing("a")


async def test_azure_by_its_other_names(running: dict[str, Server]) -> None:
    server, folder = running["azure"], secrets.token_hex(6)
    await Store(f"az://bucket/{folder}", server.options).create("a", b"x")
    for scheme in ("abfs", "abfss"):
        store = Store(f"{scheme}://bucket/{folder}", server.options)
        assert await store.get("a") == b"x"
        with pytest.raises(Exists):
            await store.create("a", b"y")


async def test_prove_finds_a_store_that_ignores_the_condition(running: dict[str, Server]) -> None:
    server = running["gcs"]  # the one whose requests carry no signature, so that a header can get lost
    with Wire(server.port, strip=("x-goog-if-generation-match",)) as wire:
        store = Store(f"{server.uri}/{secrets.token_hex(6)}", server.through(wire.port))
        with pytest.raises(StoreError, match="does not honour create-only"):
            await store.prove()
        assert await store.list() == []


async def test_prove_finds_a_store_that_checks_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exists-then-write, as fsspec's mode="create" does it: right alone, wrong in a race."""

    async def create(self: Store, path: str, data: bytes) -> None:
        if await self.exists(path):
            raise Exists(path)
        await self.put(path, data)

    monkeypatch.setattr(Store, "create", create)
    with pytest.raises(StoreError, match="racing writers were accepted"):
        await Store("memory://").prove()


# -- a local folder


async def test_names_on_disk_are_the_paths(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    await store.create(EVERY_CHARACTER, b"one")
    assert (tmp_path / EVERY_CHARACTER).read_bytes() == b"one"
    obstore.put(LocalStore(prefix=tmp_path), "by-obstore/" + EVERY_CHARACTER, b"two", mode="create")
    assert (tmp_path / "by-obstore" / EVERY_CHARACTER).read_bytes() == b"two"
    plain = tmp_path / "by-python" / EVERY_CHARACTER
    plain.parent.mkdir(parents=True)
    plain.write_bytes(b"three")
    assert [e.path for e in await store.list()] == [
        "by-obstore/" + EVERY_CHARACTER,
        "by-python/" + EVERY_CHARACTER,
        EVERY_CHARACTER,
    ]
    assert await store.get("by-python/" + EVERY_CHARACTER) == b"three"
    with pytest.raises(Exists):
        await store.create("by-python/" + EVERY_CHARACTER, b"four")


async def test_unfinished_files_are_hidden(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    await store.create("lives/0001.json", b"x")
    for unfinished in [".tmp-0123", "0002.json#1", "0002.json#12"]:
        (tmp_path / "lives" / unfinished).write_bytes(b"half")
    assert await store.list() == [Entry("lives/0001.json", 1)]
    assert await store.names("lives") == ["0001.json"]
    await store.delete_tree("lives")
    assert os.listdir(tmp_path) == []


async def test_one_folder_has_one_uri(tmp_path: Path) -> None:
    one, two = Store(f"{tmp_path}/a b//./"), Store(f"file://{tmp_path}/a%20b")
    assert one.uri == two.uri == f"file://{tmp_path}/a%20b"
    await one.create("x", b"")
    assert await two.exists("x")


async def test_reading_makes_no_folder_and_writing_makes_all(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "not/there/yet"))
    assert await store.list() == []
    assert os.listdir(tmp_path) == []
    await store.create("a/b/c", b"x")
    assert (tmp_path / "not/there/yet/a/b/c").read_bytes() == b"x"


async def test_modes_follow_the_umask(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, sys; from airflow_gpu.rundir.store import Store; os.umask(0o027)\n"
        "asyncio.run(Store(sys.argv[1]).create('a/b', b'x'))"
    )
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script, str(tmp_path)], check=True)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o640


async def test_a_created_file_is_flushed_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, link = os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("flush"), fsync(fd)))
    monkeypatch.setattr(os, "link", lambda a, b: (order.append("link"), link(a, b)))
    await Store(str(tmp_path)).create("a", b"x")
    assert order == ["flush", "link", "flush"]


async def test_a_link_whose_answer_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS repeats a link whose answer was lost, and then says that the name exists."""
    link = os.link

    def lossy(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", lossy)
    await Store(str(tmp_path)).create("a", b"x")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a"]


async def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match="no hard links"):
        await Store(str(tmp_path)).create("a", b"x")
    assert os.listdir(tmp_path) == []


async def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    await store.create("a", b"x")
    for path in ["a/b", "a/b/c"]:
        with pytest.raises(StoreError) as refused:
            await store.create(path, b"x")
        assert type(refused.value) is StoreError


@pytest.mark.usefixtures("_quick")
async def test_a_stale_handle_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, stale = os.link, [OSError(errno.ESTALE, "Stale file handle")]

    def once_stale(source: str, target: str) -> None:
        if stale:
            raise stale.pop()
        link(source, target)

    monkeypatch.setattr(os, "link", once_stale)
    await Store(str(tmp_path)).create("a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"


async def test_a_growing_log_is_read_in_pieces(tmp_path: Path) -> None:
    store, seen = Store(str(tmp_path)), b""
    log = tmp_path / "rank-00000.log"
    for n in range(20):
        with log.open("ab") as file:
            file.write(b"line %d\n" % n)
        seen += await store.get("rank-00000.log", len(seen), 5)
    while piece := await store.get("rank-00000.log", len(seen)):
        seen += piece
    assert seen == log.read_bytes()


# -- URIs, options, secrets, processes


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("relative/folder", "unknown scheme ''"),
        ("ftp://host/folder", "known are file:///folder, s3://bucket/prefix"),
        ("https://host/folder", "unknown scheme 'https'"),
        ("/", "absolute path below /"),
        ("file://host/folder", "absolute path"),
        ("sftp://host", "a path below /"),
        ("sftp://host/", "a path below /"),
        ("sftp:///folder", "sftp://user@host:22/folder"),
        ("sftp://me:secret@host/folder", "credentials are options"),
        ("s3://", "bucket or container is missing"),
        ("s3://bucket/a b", "a path is segments"),
        ("s3://bucket/../other", "a path is segments"),
        ("az://container/p", "Account must be specified"),
    ],
)
def test_uris_that_cannot_be_used(uri: str, says: str) -> None:
    with pytest.raises(StoreError) as refused:
        Store(uri)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("uri", "options", "says"),
    [
        ("s3://b", {"acces_key_id": "hunter2hunter2"}, "acces_key_id"),
        ("s3://b", {"conditional_put": "disabled"}, "must be 'etag'"),
        ("s3://b", {"timeout": "hunter2hunter2"}, "Duration"),
        ("s3://b", {"region": None}, "None"),
        ("gs://b", {"service_account_key": "hunter2hunter2"}, "cannot be opened"),
        ("az://b", {"account_name": "acc", "account_key": "hunter2hunter2"}, "cannot be opened"),
        ("sftp://h/p", {"pasword": "hunter2hunter2"}, "unknown options ['pasword']"),
        ("sftp://h/p", {"private_key": "hunter2hunter2"}, "private_key cannot be used"),
        ("sftp://h/p", {"host_key": "hunter2hunter2"}, "no key as in known_hosts"),
        ("/folder", {"access_key_id": "hunter2hunter2"}, "takes no options"),
        ("memory://x", {"access_key_id": "hunter2hunter2"}, "takes no options"),
        ("s3://user:hunter2hunter2@bucket/p", {}, "credentials are options"),
        ("s3://bucket/p?sig=hunter2hunter2", {}, "credentials are options"),
    ],
)
def test_options_that_cannot_be_used(uri: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(StoreError) as refused:
        Store(uri, options)
    assert says in str(refused.value)
    assert "hunter2" not in f"{refused.value!r}{refused.value.__cause__!r}"


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("uri", "options"),
    [
        ("s3://bucket", {"endpoint": "http://127.0.0.1:9", "access_key_id": "hunter2id"}),
        (
            "az://bucket",
            {"endpoint": "http://127.0.0.1:9/a", "account_name": "a", "sas_key": "?sig=hunter2%3D"},
        ),
        ("gs://bucket", {"base_url": "http://127.0.0.1:9", "bearer_token": "hunter2hunter2"}),
    ],
)
async def test_no_secret_in_errors(uri: str, options: dict[str, object]) -> None:
    extra = {"secret_access_key": "hunter2key"} if uri.startswith("s3") else {}
    store = Store(uri, {**options, **extra, "allow_http": True})
    with pytest.raises(StoreError, match="error sending request") as failed:
        await store.create("a", b"x")
    assert "hunter2" not in f"{failed.value!r} {store!r} {failed.value.__cause__!r}"


def test_the_environment_cannot_switch_the_condition_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    assert Store("s3://bucket")._cached.config["conditional_put"] == "etag"


async def test_memory_is_shared_by_name() -> None:
    name = secrets.token_hex(6)
    await Store(f"memory://{name}").create("a", b"x")
    assert await Store(f"memory://{name}/").exists("a")
    assert not await Store("memory://").exists("a")


def test_a_forked_process_is_told(tmp_path: Path) -> None:
    script = """if True:
        import asyncio, os, sys
        from airflow_gpu.rundir.store import Store, StoreError
        asyncio.run(Store(sys.argv[1]).create("a", b"x"))
        if os.fork() == 0:
            try:
                asyncio.run(Store(sys.argv[1]).get("a"))
            except StoreError as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()
    """
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert "was forked" in done.stdout


def test_short_processes_end_well(tmp_path: Path) -> None:
    """obstore's own coroutines abort some processes at their end; ours must not."""
    script = """if True:
        import asyncio, sys
        from airflow_gpu.rundir.store import Store
        async def main():
            store = Store(sys.argv[1])
            await asyncio.gather(*(store.names() for _ in range(8)))
        asyncio.run(main())
    """
    command = [sys.executable, "-c", script, str(tmp_path)]
    ends = [subprocess.run(command, timeout=30).returncode for _ in range(5)]
    assert -signal.SIGABRT not in ends
    assert set(ends) == {0}
