"""The pages: routes, who may see them, and what a refusal looks like.

Purpose: three addresses for the gang of one task instance, below the place
where :class:`airflow_gpu.plugin.GangPlugin` mounts them::

    /<dag>/<run>/<task>/<map index>                      the page
    /<dag>/<run>/<task>/<map index>/run.json             the same as JSON
    /<dag>/<run>/<task>/<map index>/log/<life>/<rank>    output of a rank

``?incarnation=`` names an older run of the same task instance, ``?life=`` a
life whose ranks are wanted although it is an old one. A log is text; a browser
gets it in a page. ``?offset=`` is a byte, from the end if it is negative;
``?raw=1`` asks for text.

Who: whoever may read task instances of the DAG, with the session cookie of the
UI or a token; what ranks have printed is only for who may read task logs.

Limits: what the pages do not get in time they name as missing.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Annotated, Any
from urllib.parse import quote

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException as StarletteHTTPException

from airflow_gpu.gang.entries import seconds
from airflow_gpu.plugin import MOUNT
from airflow_gpu.plugin.collect import NoRun, find, gather, rank_log
from airflow_gpu.plugin.reading import NotSet
from airflow_gpu.plugin.timeline import draw, span
from airflow_gpu.plugin.view import build
from airflow_gpu.rundir.store import StoreError

LOG_PAGE = 1024 * 1024
"""Bytes of a log on one page."""

REFRESH, REFRESH_ABSENT = 5, 15
"""Seconds between looks of an open page: while there is no verdict, and while there is no run."""

_HIGHEST = 9_999_999
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")

app = FastAPI(title="GPU gangs", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

read_task = requires_access_dag("GET", DagAccessEntity.TASK_INSTANCE)
read_logs = requires_access_dag("GET", DagAccessEntity.TASK_LOGS)


def may_read_logs(request: Request, user: GetUserDep) -> bool:
    """Whether the reader may see what ranks have printed."""
    try:
        read_logs(request, user)
    except HTTPException as error:
        if error.status_code == 403:
            return False
        raise
    return True


Incarnation = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")]


async def _view(
    dag_id: str,
    run_id: str,
    task_id: str,
    map_index: str,
    incarnation: str | None,
    life: int | None,
    logs: bool,
) -> dict[str, Any]:
    now = time.time()
    store, facts, opened = await find(dag_id, run_id, task_id, _map_index(map_index), incarnation)
    await gather(store, facts, opened, now=now, life=life)
    return build(facts, now=now, logs=logs)


def _map_index(text: str) -> int:
    """Airflow's UI leaves the placeholder of a task that is not mapped as it is: ``{MAP_INDEX}``."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else -1


# -- routes --------------------------------------------------------------------------------------------

_PAGE = "/{dag_id}/{run_id}/{task_id}/{map_index}"


@app.get(_PAGE, dependencies=[Depends(read_task)], response_class=HTMLResponse)
async def page(
    request: Request,
    dag_id: str,
    run_id: str,
    task_id: str,
    map_index: str,
    logs: Annotated[bool, Depends(may_read_logs)],
    incarnation: Incarnation = None,
    life: Annotated[int | None, Query(ge=1, le=_HIGHEST)] = None,
) -> Response:
    """The gang of a task instance."""
    view = await _view(dag_id, run_id, task_id, map_index, incarnation, life, logs)
    refresh = 0 if view["state"]["final"] or not view["newest"] else REFRESH
    here = str(view["key"]["map_index"])
    return _html(
        "gang.html",
        view=view,
        picture=draw(view),
        here=here,
        refresh=refresh,
        chosen=incarnation,
        shown_life=life,
    )


@app.get(f"{_PAGE}/run.json", dependencies=[Depends(read_task)])
async def as_json(
    dag_id: str,
    run_id: str,
    task_id: str,
    map_index: str,
    logs: Annotated[bool, Depends(may_read_logs)],
    incarnation: Incarnation = None,
    life: Annotated[int | None, Query(ge=1, le=_HIGHEST)] = None,
) -> Response:
    """The gang of a task instance, for programs."""
    view = await _view(dag_id, run_id, task_id, map_index, incarnation, life, logs)
    return JSONResponse(view, headers=_HEADERS)


@app.get(f"{_PAGE}/log/{{life:int}}/{{rank:int}}", dependencies=[Depends(read_logs)])
async def log(
    request: Request,
    dag_id: str,
    run_id: str,
    task_id: str,
    map_index: str,
    life: int,
    rank: int,
    incarnation: Incarnation = None,
    offset: Annotated[int, Query(ge=-(2**53), le=2**53)] = 0,
    raw: bool = False,
) -> Response:
    """A part of the output of one rank."""
    if not (1 <= life <= _HIGHEST and 0 <= rank <= _HIGHEST):
        raise NoRun(f"There is no rank {rank} of a life {life}.")
    store, facts, opened = await find(dag_id, run_id, task_id, _map_index(map_index), incarnation)
    channel, size = await rank_log(store, facts, opened, life, rank)
    start = max(0, size + offset) if offset < 0 else min(offset, size)
    data = await channel.log(life, rank, start, LOG_PAGE)
    start, data = _whole_lines(start, data, size, from_end=offset < 0)
    end = start + len(data)
    suffix = f"&incarnation={quote(incarnation)}" if incarnation else ""
    following = f"?offset={end}{suffix}"
    text = data.decode("utf-8", "replace")
    if raw or not _is_browser(request):
        headers = {**_HEADERS, "X-Log-Offset": str(start), "X-Log-Size": str(size), "Vary": "Accept"}
        if data:
            headers["Link"] = f'<{following}{"&raw=1" if raw else ""}>; rel="next"'
        return PlainTextResponse(text, headers=headers)
    return _html(
        "log.html",
        run=str(facts.key),
        life=life,
        rank=rank,
        text=_ESCAPES.sub("", text),
        start=start,
        end=end,
        size=max(size, end),
        step=LOG_PAGE,
        suffix=suffix,
        back=f"../../../{facts.key.map_index}"
        + (f"?incarnation={quote(incarnation)}" if incarnation else ""),
    )


def _whole_lines(start: int, data: bytes, size: int, *, from_end: bool) -> tuple[int, bytes]:
    """Cut a page at the ends of lines where it has some, else not within a character."""
    if from_end and start > 0 and (cut := data.find(b"\n") + 1):
        start, data = start + cut, data[cut:]
    if len(data) == LOG_PAGE and start + len(data) < size:
        if cut := data.rfind(b"\n") + 1:
            data = data[:cut]
        else:
            while data and data[-1] & 0xC0 == 0x80:
                data = data[:-1]
            data = data[:-1]
    return start, data


# -- refusals, in words --------------------------------------------------------------------------------


@app.exception_handler(NoRun)
async def _no_run(request: Request, error: NoRun) -> Response:
    return _words(request, 404, "No gang here", str(error), refresh=REFRESH_ABSENT)


@app.exception_handler(NotSet)
async def _not_set(request: Request, error: NotSet) -> Response:
    return _words(request, 503, "This Airflow is not set up for gangs", str(error))


@app.exception_handler(StoreError)
async def _unreadable(request: Request, error: StoreError) -> Response:
    return _words(request, 503, "The run directory cannot be read now", str(error), refresh=REFRESH_ABSENT)


@app.exception_handler(RequestValidationError)
async def _wrong(request: Request, error: RequestValidationError) -> Response:
    wrong = ", ".join(str(item["loc"][-1]) for item in error.errors())
    return _words(request, 404, "There is no such page", f"Not understood in its address: {wrong}.")


@app.exception_handler(StarletteHTTPException)
async def _refused(request: Request, error: StarletteHTTPException) -> Response:
    titles = {401: "Please sign in", 403: "Not for you", 404: "There is no such page"}
    told = {
        401: "This page needs a session of Airflow's UI, or a token.",
        403: "You may not read this of the DAG. An administrator of this Airflow can change that.",
        404: "Pages of gangs have addresses of the form /gpu/<dag>/<run>/<task>/<map index>.",
    }
    status = error.status_code
    title = titles.get(status, "This did not work")
    return _words(
        request,
        status,
        title,
        told.get(status, str(error.detail)),
        detail=str(error.detail),
        login=status == 401,
    )


def _words(
    request: Request,
    status: int,
    title: str,
    message: str,
    *,
    detail: str = "",
    login: bool = False,
    refresh: int = 0,
) -> Response:
    """An error as the caller reads it: a page, JSON, or text."""
    if request.url.path.endswith("/run.json"):
        return JSONResponse(
            {"detail": detail or message, "title": title}, status_code=status, headers=_HEADERS
        )
    if not _is_browser(request):
        return PlainTextResponse(f"{title}. {detail or message}\n", status_code=status, headers=_HEADERS)
    sign_in = ""
    if login:
        base = str(request.scope.get("root_path", "")).removesuffix(MOUNT)
        sign_in = f"{base}/api/v2/auth/login?next={quote(str(request.url), safe='')}"
    return _html("words.html", status, title=title, message=message, sign_in=sign_in, refresh=refresh)


def _is_browser(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


# -- HTML ----------------------------------------------------------------------------------------------

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}

_templates = Environment(
    loader=PackageLoader("airflow_gpu.plugin"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _html(name: str, status: int = 200, **values: Any) -> HTMLResponse:
    nonce = secrets.token_urlsafe(16)
    # What ranks wrote is escaped; and if it were not, no script of theirs would run.
    policy = (
        f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
    )
    text = _templates.get_template(name).render(nonce=nonce, **{"refresh": 0, **values})
    return HTMLResponse(
        text, status, headers={**_HEADERS, "Content-Security-Policy": policy, "Vary": "Accept"}
    )


def _when(text: str | None, *, after: str | None = None) -> str:
    """A time in UTC; without its date if that is the one of ``after``."""
    if not text:
        return "–"
    day, clock = text[:10], text[11:19]
    return clock if after is not None and after[:10] == day else f"{day} {clock}"


def _between(begin: str | None, end: str | None) -> str:
    return span(seconds(end) - seconds(begin)) if begin and end else "–"


def _bytes(size: Any) -> str:
    if not isinstance(size, (int, float)):
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _number(value: Any, digits: int = 2) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, (int, float)) and not isinstance(value, bool) else "–"


_templates.filters.update(when=_when, between=_between, bytes=_bytes, number=_number)
