"""From what was read of a run to what people see: words, ends and colours.

Purpose: makes one JSON object of :class:`~airflow_gpu.plugin.collect.Facts`;
the HTML page shows it and ``run.json`` hands it out. Pure, except that ``now``
is given.

Limits: it does not ask the target. What a gang does now is told from what its
ranks and its driver have written down.

A *tone* is how something ended, or where it stands, for its colour: ``good``,
``bad`` (the user's code or the request), ``infra`` (the platform took it),
``stop`` (somebody ended it), ``run``, ``idle``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from airflow_gpu.gang.entries import iso, seconds
from airflow_gpu.gang.run import Attempt, Run
from airflow_gpu.plugin.collect import Facts, LifeFacts
from airflow_gpu.plugin.lives import TONES, view_life, whole, words

OUTCOME_TONES = {"success": "good", "failed": "bad", "cancelled": "stop"}


def build(facts: Facts, *, now: float, logs: bool) -> dict[str, Any]:
    """The view of a run, as JSON.

    :param logs: may the reader see what ranks have printed?
    """
    run = facts.run
    lives = {
        attempt.number: [one for one in facts.lives if one.life.attempt == attempt.number]
        for attempt in run.attempts
    }
    attempts = [_attempt(attempt, lives[attempt.number], now, logs) for attempt in run.attempts]
    checkpoints = [
        {"life": life["life"], **saved}
        for one in attempts
        for life in one["lives"]
        for saved in life["checkpoints"]
    ]
    gang = _gang(facts)
    return {
        "v": 1,
        "read_at": iso(now),
        "key": asdict(facts.key),
        "run": str(facts.key),
        "incarnation": facts.incarnation,
        "newest": facts.incarnation == facts.incarnations[0]["incarnation"],
        "incarnations": facts.incarnations,
        "journal": facts.journal,
        "state": _state(run, attempts),
        "gang": gang,
        "verdict": _verdict(facts),
        "failure": _first_failure(run, attempts),
        "owners": _owners(facts),
        "attempts": attempts,
        "checkpoints": checkpoints,
        "newest_checkpoint": _newest_checkpoint(attempts, checkpoints),
        "cost": _cost(run, attempts, gang),
        "fences": [
            {"life": fence.number, "attempt": fence.attempt, "at": iso(fence.at)} for fence in facts.fences
        ],
        "lives_left_out": facts.lives_left_out,
        "logs_shown": logs,
        "missing": facts.missing,
    }


# -- the request ---------------------------------------------------------------------------------------


def _gang(facts: Facts) -> dict[str, Any]:
    """The shape that the newest owner asked for. No environment: it is not for every reader of a page."""
    asked: Mapping[str, Any] = {}
    for entry in facts.entries:
        if entry.get("kind") == "owner" and isinstance(entry.get("gang"), dict):
            asked = entry["gang"]
    gpus = whole(asked.get("gpus_per_node")) or 0
    launch = str(asked.get("launch") or "rank")
    return {
        "nodes": whole(asked.get("nodes")),
        "ranks_per_node": whole(asked.get("ranks_per_node")) or gpus or 1,
        "gpus_per_node": gpus,
        "accelerator": asked.get("accelerator"),
        "image": asked.get("image"),
        "launch": launch,
        "runs": next((kind for kind in ("function", "script", "command") if asked.get(kind)), None),
        "targets": asked.get("targets"),
    }


# -- owners and the verdict ----------------------------------------------------------------------------


def _owners(facts: Facts) -> list[dict[str, Any]]:
    verdicts = {entry.get("epoch"): entry for entry in facts.entries if entry.get("kind") == "verdict"}
    owners = []
    for owner in facts.run.owners:
        verdict = verdicts.get(owner.epoch) or {}
        owners.append(
            {
                "owner": owner.epoch,
                "try": owner.try_number,
                "reason": owner.reason,
                "at": iso(owner.at),
                "deadline": None if owner.deadline is None else iso(owner.deadline),
                "resume": owner.resume,
                "note": owner.note,
                "task_instance": owner.ti_id,
                "outcome": verdict.get("outcome"),
                "outcome_tone": OUTCOME_TONES.get(str(verdict.get("outcome")), "idle"),
                "cause": verdict.get("cause"),
                "ended": verdict.get("at"),
            }
        )
    return owners


def _verdict(facts: Facts) -> dict[str, Any] | None:
    verdict = facts.run.verdict
    if verdict is None:
        return None
    return {
        "outcome": verdict.outcome,
        "tone": OUTCOME_TONES.get(verdict.outcome, "idle"),
        "cause": verdict.cause.value,
        "cause_words": words(verdict.cause),
        "message": verdict.message,
        "at": iso(verdict.at),
        "owner": verdict.epoch,
    }


def _cost(run: Run, attempts: Sequence[Mapping[str, Any]], gang: Mapping[str, Any]) -> dict[str, Any] | None:
    """As in the record of the verdict; before it, counted from the lives so far."""
    if run.verdict is not None and isinstance(run.verdict.record.get("cost"), dict):
        told = run.verdict.record["cost"]
        return {name: _finite(told.get(name)) for name in ("node_hours", "gpu_hours", "usd")} | {
            "so_far": False
        }
    hours = usd = 0.0
    for attempt in attempts:
        chosen = attempt["placement"].get("chosen") or {}
        price = chosen.get("price_per_node_hour")
        for life in attempt["lives"]:
            held = (
                max(0.0, seconds(life["ended"] or life["seen"]) - seconds(life["started"]))
                * life["nodes"]
                / 3600
            )
            hours += held
            usd += held * float(price) if isinstance(price, (int, float)) else 0.0
    if not hours:
        return None
    return {
        "node_hours": round(hours, 6),
        "gpu_hours": round(hours * gang["gpus_per_node"], 6),
        "usd": round(usd, 4),
        "so_far": True,
    }


# -- where it stands -----------------------------------------------------------------------------------


def _state(run: Run, attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One word, its tone and one sentence for the headline."""
    if run.verdict is not None:
        verdict = run.verdict
        cause = "" if verdict.success else f" ({words(verdict.cause)})"
        return {
            "word": f"{verdict.outcome}{cause}",
            "tone": OUTCOME_TONES.get(verdict.outcome, "idle"),
            "final": True,
            "sentence": "",
        }
    word, tone, sentence = "starting", "idle", "A target is being chosen."
    if attempts:
        last = attempts[-1]
        life = last["lives"][-1] if last["lives"] else None
        where = f"attempt {last['attempt']} on {last['target']}"
        if last["ended"]:
            word, sentence = (
                "between attempts",
                f"{where.capitalize()} is over ({last['cause_words']}); the next one follows.",
            )
        elif last["stop"]:
            word, tone = "stopping", "stop"
            sentence = (
                f"{where.capitalize()} was asked to end: {last['stop']['detail'] or last['stop']['reason']}."
            )
        elif life is not None:
            word, tone, sentence = life["word"], life["tone"], f"Life {life['life']}, {where}{_step(life)}."
        elif last["submitted"]:
            word, sentence = (
                "waiting",
                f"{where.capitalize()} is submitted as {last['platform_id']}; no rank has started yet.",
            )
        else:
            word, sentence = "submitting", f"{where.capitalize()} is being submitted."
    return {"word": word, "tone": tone, "final": False, "sentence": sentence}


def _step(life: Mapping[str, Any]) -> str:
    progress = life["progress"]
    if not progress or progress["step"] is None:
        return ""
    total = f" of {progress['total']}" if progress["total"] else ""
    return f", at step {progress['step']}{total}"


# -- attempts ------------------------------------------------------------------------------------------


def _attempt(attempt: Attempt, lives: Sequence[LifeFacts], now: float, logs: bool) -> dict[str, Any]:
    outcome, stop = attempt.outcome, attempt.stop
    after = [*lives[1:], None]
    shown = (
        [view_life(attempt, *pair, now=now, logs=logs) for pair in zip(lives, after, strict=True)]
        if lives
        else []
    )
    failure = outcome.failure if outcome else None
    told = (
        _failure(asdict(failure), attempt.number, outcome.life if outcome else None, logs)
        if failure
        else None
    )
    if told is None and outcome is None and lives and lives[-1].failure:
        told = _failure(lives[-1].failure, attempt.number, lives[-1].life.number, logs)
    return {
        "attempt": attempt.number,
        "name": attempt.name,
        "owner": attempt.epoch,
        "target": attempt.target,
        "channel": attempt.channel,
        "platform_id": attempt.platform_id,
        "started": iso(attempt.at),
        "submitted": None if attempt.submitted_at is None else iso(attempt.submitted_at),
        "ended": iso(outcome.at) if outcome else None,
        "cause": outcome.cause.value if outcome else None,
        "cause_words": words(outcome.cause) if outcome else None,
        "tone": TONES.get(outcome.cause, "idle") if outcome else "run",
        "detail": outcome.detail if outcome else "",
        "restarts": outcome.restarts if outcome else max((one.life.restart for one in lives), default=0),
        "resume": attempt.resume,
        "checkpoint": asdict(outcome.checkpoint) if outcome and outcome.checkpoint else None,
        "stop": None
        if stop is None
        else {"reason": stop.reason, "detail": stop.detail, "at": iso(stop.at), "owner": stop.epoch},
        "failure": told,
        "placement": _placement(attempt.offer),
        "lives": shown,
    }


def _first_failure(run: Run, attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What made the last attempt fail, unless the run goes on after it."""
    if not attempts or (run.verdict is not None and run.verdict.success):
        return None
    last = attempts[-1]
    if run.verdict is None and last["tone"] not in ("bad", "run"):
        return None
    failure: dict[str, Any] | None = last["failure"]
    return failure


_OFFER = (
    "target",
    "accelerator",
    "provisioning",
    "price_per_node_hour",
    "free_nodes",
    "total_nodes",
    "source",
    "at",
    "expected_wait",
)


def _placement(decision: Mapping[str, Any]) -> dict[str, Any]:
    """The decision with all fields of its offers, whatever version wrote it; empty when there is none."""
    chosen, others = decision.get("chosen"), decision.get("others")
    if not isinstance(chosen, dict) and not others:
        return {}
    return {
        "chosen": {name: _finite(chosen.get(name)) for name in _OFFER} if isinstance(chosen, dict) else None,
        "others": [
            {**{name: _finite(one.get(name)) for name in _OFFER}, "reason": str(one.get("reason") or "")}
            for one in others or []
            if isinstance(one, dict)
        ],
    }


def _failure(body: Mapping[str, Any], attempt: int, life: int | None, logs: bool) -> dict[str, Any]:
    tail = str(body.get("tail") or "")
    return {
        "cause": str(body.get("cause") or "rank"),
        "rank": whole(body.get("rank")),
        "node": whole(body.get("node")),
        "host": str(body.get("host") or ""),
        "exit_code": whole(body.get("exit_code")),
        "signal": str(body["signal"]) if body.get("signal") else None,
        "message": str(body.get("message") or ""),
        "tail": tail if logs else "",
        "tail_hidden": bool(tail) and not logs,
        "attempt": attempt,
        "life": life,
    }


def _newest_checkpoint(
    attempts: Sequence[Mapping[str, Any]], checkpoints: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """What a next life would start from, as far as can be told."""
    for attempt in reversed(attempts):
        for life in reversed(attempt["lives"]):
            complete = [one for one in life["checkpoints"] if one["complete"]]
            if complete:
                return {"life": life["life"], "step": complete[-1]["step"]}
            return dict(life["from"]) if life["from"] else None
        if attempt["checkpoint"]:
            return dict(attempt["checkpoint"])
    return None


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
