"""The bare driver as processes on the real local target, spoilt or killed at a call, by chance.

``bare.py`` is one process of Airflow's side: it takes the run and drives it, or
ends it for a person. ``zygote.py`` forks such processes from one that has
everything imported. ``stories.py`` plays runs: it starts successors as Airflow
would, preempts, clears. ``ledger.py`` judges them by what the ranks themselves
wrote down (a file lock says when two of them compute at once), by the target's
own list of jobs, and by the processes of this machine.
"""
