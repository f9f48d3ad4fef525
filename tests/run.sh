#!/usr/bin/env bash
# The tests in the order of their cost, so that what is cheap fails first; then a summary of what ran.
#   tests/run.sh          everything that CI runs
#   tests/run.sh --all    the full matrix as well, and the dated table in docs/
#   tests/run.sh --lint   only the checks that read the code
set -uo pipefail
cd "$(dirname "$0")/.."
PY=${CI_PYTHON:-.venv/bin/python}
BIN=$(dirname "$PY")
MODE=${1:-}
SUMMARY=()
FAILED=0
AGAIN=""
LOG=$(mktemp -d)
export PYTHONDONTWRITEBYTECODE=1

stage() { # NAME COMMAND...
  local name=$1 start=$SECONDS; shift
  printf '\n=== %s\n' "$name"
  "$@" 2>&1 | tee "$LOG/out"
  ended "$name" "${PIPESTATUS[0]}" $((SECONDS - start)) "$LOG/out"
}

live() { # NAME PYTEST-ARGUMENTS...
  # Tests that play real processes against clocks: on a busy machine one may lose a race that is its own. What fails is
  # run once more, alone; both results are printed, and the summary says so. What is broken fails twice.
  local name=$1 start=$SECONDS rc; shift
  printf '\n=== %s\n' "$name"
  "$PY" -m pytest -q "$@" 2>&1 | tee "$LOG/out"
  rc=${PIPESTATUS[0]}
  if [ "$rc" = 1 ]; then
    printf '\n=== %s: ONCE MORE, what failed\n' "$name"
    "$PY" -m pytest -q --lf --lfnf=none "$@" 2>&1 | tee "$LOG/again"
    rc=${PIPESTATUS[0]}
    AGAIN=" | once more: $(grep -E '[0-9]+ (passed|failed|error)' "$LOG/again" | tail -1 | sed -E 's/=+ ?//g; s/ in [0-9.]+s.*//')"
  fi
  ended "$name" "$rc" $((SECONDS - start)) "$LOG/out"
}

beside() { # NAME PYTEST-ARGUMENTS...
  # Begun now, told by `beside_ended`: tests that mostly wait (a cluster's scheduler, a node that has to be missed).
  BESIDE=$1 BESIDE_AT=$SECONDS; shift
  BESIDE_ARGS=("$@" -o "cache_dir=$LOG/cache")
  printf '\n=== %s: begun, beside what follows\n' "$BESIDE"
  ("$PY" -m pytest -q "${BESIDE_ARGS[@]}" > "$LOG/beside" 2>&1; echo $? > "$LOG/beside.rc") &
  BESIDE_PID=$!
}

beside_ended() {
  local name=${BESIDE:-} rc
  [ -n "$name" ] || return 0
  wait "$BESIDE_PID"; BESIDE=""
  rc=$(cat "$LOG/beside.rc")
  printf '\n=== %s\n' "$name"
  cat "$LOG/beside"
  if [ "$rc" = 1 ]; then
    printf '\n=== %s: ONCE MORE, what failed\n' "$name"
    "$PY" -m pytest -q --lf --lfnf=none "${BESIDE_ARGS[@]}" 2>&1 | tee "$LOG/again"
    rc=${PIPESTATUS[0]}
    AGAIN=" | once more: $(grep -E '[0-9]+ (passed|failed|error)' "$LOG/again" | tail -1 | sed -E 's/=+ ?//g; s/ in [0-9.]+s.*//')"
  fi
  ended "$name" "$rc" $((SECONDS - BESIDE_AT)) "$LOG/beside"
}

ended() { # NAME RC SECONDS OUTPUT
  local said
  said=$(grep -E '^(=+ )?.*[0-9]+ (passed|failed|skipped|error)' "$4" | tail -1 | sed -E 's/=+ ?//g; s/ in [0-9.]+s.*//')$AGAIN
  AGAIN=""
  grep -E '^SKIPPED' "$4" >> "$LOG/skipped"
  SUMMARY+=("$(printf '%-28s %-8s %4d s  %s' "$1" "$([ "$2" = 0 ] && echo ok || echo FAILED)" "$3" "$said")")
  if [ "$2" != 0 ]; then FAILED=1; fi
}

summary() {
  beside_ended
  printf '\n=== Summary\n'
  printf '%s\n' "${SUMMARY[@]}"
  if [ -s "$LOG/skipped" ]; then
    printf '\nSkipped, with the reason:\n'; sort "$LOG/skipped" | uniq -c
  else
    printf '\nNothing was skipped.\n'
  fi
  rm -rf "$LOG"
  exit $FAILED
}
stop_if_failed() { [ $FAILED = 0 ] || summary; }

stage "ruff" "$BIN/ruff" check airflow_gpu tests dags benchmarks
stage "format" "$BIN/ruff" format --check airflow_gpu tests dags benchmarks
stage "mypy" "$BIN/mypy"
stage "layers" "$BIN/lint-imports"
[ "$MODE" = --lint ] && summary
stop_if_failed
# A real mpirun, where it may be installed; without it its tests are skipped, and the summary says so.
if ! command -v mpirun >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  stage "packages" bash -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openmpi-bin libopenmpi-dev gcc libc6-dev >/dev/null'
  FAILED=0
fi
stage "request and lifecycle" "$PY" -m pytest -q tests/gang tests/placement
stop_if_failed
live "runtime in the job" tests/runtime
live "run directory and stores" tests/rundir tests/stores tests/checkpoints
live "driver" tests/driver
stop_if_failed
if [ "$MODE" = --all ]; then export FAULTS=all FAULT_RUNS=500 SLURM_WAYS=all; fi
if [ "$MODE" = --all ]; then
  beside "Slurm" tests/slurm
else # the bed is proven by what is proven on it
  beside "Slurm" tests/slurm tests/conformance/test_slurm.py --ignore tests/slurm/test_bed.py
fi
live "local target" tests/targets
live "sweep and commands" tests/sweep tests/cli --ignore tests/sweep/test_airflow.py
stop_if_failed
live "faults at every call" -s tests/faults
stop_if_failed
if [ "$MODE" = --all ]; then
  live "conformance" tests/conformance --table docs/conformance.md
else
  live "conformance" tests/conformance --ignore tests/conformance/test_slurm.py
fi
beside_ended
stop_if_failed
live "pages in the UI" tests/plugin
live "in a real Airflow" tests/airflow tests/sweep/test_airflow.py
# 6 GB of libraries: installed with --all, used where `make frameworks` has put them before; else skipped, loudly.
if [ "$MODE" = --all ]; then stage "libraries of frameworks" make --no-print-directory frameworks; FAILED=0; fi
live "frameworks" tests/frameworks
stop_if_failed
stage "demo" "$PY" -m tests.beds.demo --home "$LOG/demo"
live "documentation" tests/docs
summary
