"""Slurm through slurmrestd: jobs, accounting and nodes as JSON, with a token.

Purpose: one HTTP client with kept connections for all gangs of a cluster. The version is
found by asking; requests and answers of v0.0.36 to v0.0.45 (Slurm 21.08 to 26.05) are known.

How jobs are watched: ``/jobs/state/`` (24.05 on) answers for a thousand jobs in
milliseconds, so only jobs whose state has changed, or that were last read in full
``FULL_SECONDS`` ago, are asked for one by one. Older versions are asked for each job, or for all
at once where that is less.

What it does not do: send a submit twice. Questions and cancels are repeated.

Limits: slurmrestd has no question for one user's jobs: a list of them reads all of the cluster's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from airflow_gpu.targets.base import TargetError
from airflow_gpu.targets.slurm import records
from airflow_gpu.targets.slurm.access import AccessError, NoAccounting, NodeInfo, lines, refusal
from airflow_gpu.targets.slurm.batch import Batch
from airflow_gpu.targets.slurm.config import SlurmConfig
from airflow_gpu.targets.slurm.records import Record, Undecodable, number
from airflow_gpu.targets.slurm.tokens import Tokens, claims

VERSIONS: Final = tuple(range(45, 35, -1))
"""Of the REST API, the newest first."""

STATE_SINCE: Final = 41
"""The version from which on ``/jobs/state/`` exists."""

FULL_SPACING: Final = 0.6
"""Seconds a job that these are, at least: a thousand jobs cost no more than a hundred full answers a minute."""

BY_NAME_SINCE: Final = 40
"""The version from which on accounting answers for a name; older ones refuse the question."""

FULL_SECONDS: Final = 60.0
"""For so long a job whose state stays the same is not read in full."""

MOST_NAMED: Final = 100
"""Ids in one question for states; for more, the states of all jobs of the cluster are read: some ms for a thousand."""

SINGLES: Final = 50
"""More jobs than this are read by one question for all jobs, where there is no ``/jobs/state/``."""

AT_ONCE: Final = 8
"""Requests to one slurmrestd."""

TIMEOUT: Final = 30.0

Query = Mapping[str, str] | list[tuple[str, str]] | None

_UNKNOWN_JOB: Final = 2017
_ALREADY_DONE: Final = (2017, 2021)


class _Passing(TargetError):
    """An error after which the same question may be answered."""


class Rest:
    """One slurmrestd.

    :param name: of the connection, for errors.
    """

    def __init__(self, name: str, config: SlurmConfig, tokens: Tokens) -> None:
        self._name = name
        self._config = config
        self._tokens = tokens
        self._client: httpx.AsyncClient | None = None
        self._version: int | None = None
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._known: dict[int, tuple[tuple[str, ...], float, Record]] = {}  # words, when read, record

    # -- jobs

    async def submit(self, batch: Batch) -> int:
        version = await self.version()
        job = batch.rest_job(version)
        body = {"script": batch.script, "job": job}
        status, answer = await self._send("POST", f"/slurm/v0.0.{version}/job/submit", json=body)
        errors = _errors(answer)
        # Some versions put it into "result", some beside it.
        found = number(answer.get("job_id")) or number((answer.get("result") or {}).get("job_id"))
        if status == 200 and found and not errors:
            return found
        said = lines([error for _, error in errors]) or f"HTTP {status}"
        raise refusal(self._name, said)

    async def jobs(self, ids: Collection[int]) -> list[Record]:
        wanted = sorted(set(ids))
        if not wanted:
            return []
        version = await self.version()
        if version < STATE_SINCE:
            return await self._older(wanted, version)
        states = await self._states(wanted, version)
        now = time.monotonic()
        fresh_for = max(FULL_SECONDS, len(wanted) * FULL_SPACING)
        answer: dict[int, Record] = {}
        stale = []
        for job, words in states.items():
            known = self._known.get(job)
            # Not all of them become stale at once.
            if (
                known is not None
                and known[0] == words
                and now - known[1] < fresh_for * (0.75 + job % 50 / 100)
            ):
                answer[job] = known[2]
            else:
                stale.append(job)
        for job, record in zip(
            stale, await asyncio.gather(*(self._job(job, version) for job in stale)), strict=True
        ):
            if record is not None:
                answer[job] = record
                self._known[job] = (states[job], now, record)
        if len(self._known) > 2 * len(wanted) + 1000:  # of gangs that nobody asks for any more
            self._known = {job: known for job, known in self._known.items() if now - known[1] < 3 * fresh_for}
        return list(answer.values())

    async def mine(self) -> list[Record]:
        version = await self.version()
        answer = await self._get(f"/slurm/v0.0.{version}/jobs")
        user = await self.user()
        return self._records(
            job for job in answer.get("jobs") or () if not user or job.get("user_name") in (user, None, "")
        )

    async def history(self, ids: Collection[int]) -> list[Record]:
        version = await self.version()
        answers = await asyncio.gather(
            *(self._ask_accounting(f"/slurmdb/v0.0.{version}/job/{job}") for job in sorted(set(ids)))
        )
        return [record for rows in answers for record in records.latest(rows).values()]

    async def named(self, name: str, *, sure: bool) -> list[Record]:
        # The controller has no question by name: it would send every job of the cluster. Accounting has one.
        version = await self.version()
        found: list[Record] = []
        if version < BY_NAME_SINCE:
            sure = True
        else:
            user = await self.user()
            params = {"job_name": name, **({"users": user} if user else {})}
            try:
                rows = await self._ask_accounting(f"/slurmdb/v0.0.{version}/jobs", params)
                found = [record for record in records.latest(rows).values() if record.name == name]
            except NoAccounting:
                sure = True
        if sure:
            now = {record.id: record for record in await self.mine() if record.name == name}
            found = [*now.values(), *(record for record in found if record.id not in now)]
        return found

    async def signal(self, job: int, name: str) -> None:
        await self._end(job, {"signal": name})

    async def cancel(self, job: int) -> None:
        await self._end(job, {})

    async def nodes(self) -> list[NodeInfo]:
        version = await self.version()
        answer = await self._get(f"/slurm/v0.0.{version}/nodes")
        return [_node(node) for node in answer.get("nodes") or ()]

    async def kill_wait(self) -> float | None:
        return None

    async def user(self) -> str:
        """Whose jobs they are; empty where the token does not say."""
        if self._config.user:
            return self._config.user
        told = claims(await self._tokens.token()) if not self._plain_socket else {}
        return str(told.get("sun") or told.get("username") or "")

    async def version(self) -> int:
        """The newest version of the API that both sides know.

        :raises AccessError: there is none.
        """
        if self._version is None:
            if self._config.api_version:
                self._version = int(self._config.api_version.rpartition(".")[2])
                return self._version
            for version in VERSIONS:
                status, _ = await self._ask("GET", f"/slurm/v0.0.{version}/ping")
                if status == 200:
                    self._version = version
                    break
            else:
                raise AccessError(
                    f"{self._name}: {self._config.url} answers, but not as a slurmrestd of v0.0.{VERSIONS[-1]} to "
                    f"v0.0.{VERSIONS[0]}: is it one, and does it load the plugin openapi/slurmctld? Else set api_version"
                )
        return self._version

    async def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    # -- how

    async def _states(self, wanted: list[int], version: int) -> dict[int, tuple[str, ...]]:
        # One parameter for each: slurmrestd refuses a comma in a query. More than a few are as quickly read with all others.
        which = [("job_id", str(job)) for job in wanted] if len(wanted) <= MOST_NAMED else None
        answer = await self._get(f"/slurm/v0.0.{version}/jobs/state/", which)
        try:
            told = dict(records.of_state(job) for job in answer.get("jobs") or ())
        except Undecodable as error:
            raise TargetError(f"{self._name}: {error}") from None
        return {job: told[job] for job in wanted if job in told}

    async def _older(self, wanted: list[int], version: int) -> list[Record]:
        if len(wanted) > SINGLES:
            every = await self._get(f"/slurm/v0.0.{version}/jobs")
            asked = set(wanted)
            return [record for record in self._records(every.get("jobs") or ()) if record.id in asked]
        found = await asyncio.gather(*(self._job(job, version) for job in wanted))
        return [record for record in found if record is not None]

    async def _job(self, job: int, version: int) -> Record | None:
        answer = await self._get(f"/slurm/v0.0.{version}/job/{job}", absent=_UNKNOWN_JOB)
        return next((record for record in self._records(answer.get("jobs") or ()) if record.id == job), None)

    def _records(self, jobs: Iterable[Mapping[str, Any]]) -> list[Record]:
        try:
            return [records.of_rest(job) for job in jobs]
        except Undecodable as error:
            raise TargetError(f"{self._name}: {error}") from None

    async def _ask_accounting(self, path: str, params: Query = None) -> list[Record]:
        answer = await self._get(path, params, absent=_UNKNOWN_JOB)
        try:
            return [records.of_accounting(job) for job in answer.get("jobs") or ()]
        except Undecodable as error:
            raise TargetError(f"{self._name}: {error}") from None

    async def _end(self, job: int, params: Mapping[str, str]) -> None:
        version = await self.version()
        async for attempt in _again():
            with attempt:
                status, answer = await self._ask("DELETE", f"/slurm/v0.0.{version}/job/{job}", params=params)
        errors = _errors(answer)
        if status == 200 and not errors:
            return
        if status == 404 or any(code in _ALREADY_DONE for code, _ in errors):
            return
        raise TargetError(
            f"{self._name}: job {job} could not be ended: {lines([words for _, words in errors])}"
        )

    async def _get(self, path: str, params: Query = None, absent: int | None = None) -> dict[str, Any]:
        """The answer to a question. With ``absent``: an error of that number is an empty answer."""
        async for attempt in _again():
            with attempt:
                status, answer = await self._ask("GET", path, params=params)
        errors = _errors(answer)
        if absent is not None and (status == 404 or any(code == absent for code, _ in errors)):
            return {}
        if status == 304:
            return {}
        if status != 200 or errors:
            said = lines([words for _, words in errors]) or f"HTTP {status}"
            if path.startswith("/slurmdb") and "accounting" in said.lower() and "disabled" in said.lower():
                raise NoAccounting(f"{self._name}: {said}")
            raise TargetError(f"{self._name}: {said}")
        return answer

    async def _ask(self, method: str, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
        """One request that may be repeated. Raises _Passing for what may pass."""
        status, answer = await self._send(method, path, **more)
        errors = _errors(answer)
        if status in (429, 502, 503, 504) or (status == 500 and not errors):
            raise _Passing(f"{self._name}: slurmrestd answers with HTTP {status}")
        if any(_is_passing(words) for _, words in errors):
            raise _Passing(f"{self._name}: {lines([words for _, words in errors])}")
        return status, answer

    async def _send(self, method: str, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
        """One request, with a token that is good: asked for anew when it is refused.

        :raises AccessError: no token is good.
        """
        token = None
        for _ in range(2):
            token = None if self._plain_socket else await self._tokens.token(not_this=token)
            status, answer = await self._request(method, path, token, **more)
            if not _refused(status, answer):
                return status, answer
            if not self._tokens.renewable:
                break
        said = lines([words for _, words in _errors(answer)]) or f"HTTP {status}"
        raise AccessError(
            f"{self._name}: slurmrestd refuses the token ({said}): is it over, of another cluster, or of another user "
            "than 'user' names? `scontrol token` makes one"
        )

    async def _request(
        self, method: str, path: str, token: str | None, **more: Any
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Accept": "application/json"}
        if token is not None:
            headers["X-SLURM-USER-TOKEN"] = token
            if self._config.user:
                headers["X-SLURM-USER-NAME"] = self._config.user
        try:
            async with self._gate:
                answer = await self._open().request(method, path, headers=headers, **more)
        except (httpx.HTTPError, OSError) as error:
            raise _Passing(f"{self._name}: {self._config.url} does not answer: {_words(error)}") from None
        try:
            body = answer.json() if answer.content else {}
        except ValueError:
            body = {"errors": [{"description": answer.text[:200]}]} if answer.status_code >= 400 else {}
        return answer.status_code, body if isinstance(body, dict) else {}

    @property
    def _plain_socket(self) -> bool:
        """A Unix socket tells who asks by itself (rest_auth/local)."""
        return self._config.scheme == "unix" and not (self._config.token or self._tokens.renewable)

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            config = self._config
            socket = config.url.removeprefix("unix://") if config.scheme == "unix" else None
            verify: Any = config.verify
            if config.ca_file:
                import ssl

                verify = ssl.create_default_context(cafile=config.ca_file)
            self._client = httpx.AsyncClient(
                base_url="http://slurmrestd" if socket else config.url,
                transport=httpx.AsyncHTTPTransport(uds=socket) if socket else None,
                verify=verify,
                timeout=TIMEOUT,
                limits=httpx.Limits(max_connections=AT_ONCE, keepalive_expiry=30.0),
                trust_env=False,
            )
        return self._client


def _again() -> AsyncRetrying:
    return AsyncRetrying(
        stop=stop_after_attempt(4),
        wait=wait_random_exponential(multiplier=0.2, max=3.0),
        retry=retry_if_exception_type(_Passing),
        reraise=True,
    )


def _refused(status: int, answer: Mapping[str, Any]) -> bool:
    if status in (401, 403, 511):
        return True
    words = " ".join(words.lower() for _, words in _errors(answer))
    return status >= 400 and ("authentication" in words or "token" in words) and "munge" not in words


def _is_passing(words: str) -> bool:
    text = words.lower()
    signs = (
        "unable to contact",
        "timed out",
        "zero bytes",
        "connection refused",
        "temporarily",
        "slurmdbd",
        "database",
    )
    return any(sign in text for sign in signs)


def _errors(answer: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Numbers and words of an answer's errors, in the shapes of all versions."""
    found = []
    for error in answer.get("errors") or ():
        if not isinstance(error, Mapping):
            found.append((0, str(error)))
            continue
        code = number(error.get("error_number")) or number(error.get("error_code")) or 0
        words = [str(error.get(name) or "") for name in ("error", "description")]
        found.append((code, ": ".join(dict.fromkeys(word for word in words if word))))
    return found


def _node(node: Mapping[str, Any]) -> NodeInfo:
    states = node.get("state") or ""
    flags = node.get("state_flags") or []
    words = [states, *flags] if isinstance(states, str) else list(states)
    features = node.get("active_features") or node.get("features") or ""
    return NodeInfo(
        name=str(node.get("name") or node.get("hostname") or ""),
        states=tuple(str(word).upper() for word in words if word),
        gres=str(node.get("gres") or ""),
        gres_used=str(node.get("gres_used") or ""),
        cpus=number(node.get("cpus")) or 0,
        cpus_used=number(node.get("alloc_cpus")) or 0,
        memory=number(node.get("real_memory")) or 0,
        memory_used=number(node.get("alloc_memory")) or 0,
        partitions=tuple(node.get("partitions") or ()),
        features=tuple(features.split(",")) if isinstance(features, str) else tuple(features),
        reason=str(node.get("reason") or ""),
    )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
