"""Faults at every call, and the proof that nothing runs twice, nothing is left behind and no false end is told.

Between Airflow and a gang there are processes (workers, triggerers), stores and
platforms, and each of their calls may fail, be late, arrive twice, or be the
last thing that a process does. These tests do not guess where that hurts: they
play a story once, number its calls, and play it again with each fault at each
call.

The matrix (``matrix.py``, ``test_matrix.py``)
    *stories* (``scenarios.py``: a success, preemptions, lost nodes, errors,
    Clear, mark failed, hand-over, limits, things that are away) x *calls* (what
    driver, trigger, operator, run directory and target ask of the outside,
    about 100 to 300 a story) x *kinds of faults* (``seam.py`` has the table),
    and pairs of faults by chance. On a clock that jumps (``clock.py``), so a
    run takes some milliseconds. CI plays a part of the single faults in which
    every call has its turn; ``FAULTS=all`` plays all of them.

What is real there
    ``Driver``, ``step``, ``Journal``, ``Channel``, ``slot.take``, ``Observer``,
    ``Watcher``, staging, the record, ``GangTrigger``, ``GangOperator``, the
    sweep, and the rules by which a job claims its life
    (``airflow_gpu.runtime.claim``). The stores are files in memory, held to the
    real stores' contract by ``test_disk.py``.

What is a model
    Airflow (``airflow.py``: tries, workers, triggerers, people) and a platform
    that keeps the truth apart from what it reports (``platform.py``). The
    invariants (``invariants.py`` has the list) are judged by that truth alone.

Planted bugs (``bugs.py``, ``test_bugs.py``)
    The product with one thing broken on purpose; each is caught, and by the
    invariant that is about it. A bug that is not caught is a hole in the matrix.

On the real local target (``real/``)
    Drivers as processes, killed by SIGKILL or spoilt at a call, on a real
    cluster folder with real gangs; judged by the target's own records and the
    lives. ``FAULT_RUNS`` says how many (60; 500 with ``FAULTS=all``), ``FAULT_SEED``
    which.

Two at once (``together.py``, ``test_together.py``)
    Two processes that start to drive the same run at the same moment, on a real
    store, with a platform that refuses no name: 200 times, 1,000 with ``FAULTS=all``.

To look into one: ``python -m tests.faults.matrix "mark failed" --show 20`` and
``python -m tests.faults.show "mark failed" 57:kill-before``.
"""
