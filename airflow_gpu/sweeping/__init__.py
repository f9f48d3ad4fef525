"""Finds gangs that nobody wants any more, and ends them.

A person's Clear or "mark as failed" reaches a gang through its trigger. Where
no trigger lived at that moment, a gang is left behind. A sweep goes through the
run directories and asks the targets, then Airflow, and ends what is left:

- :mod:`.decide` says what is done in which case; a table, pure;
- :mod:`.listing` finds the run directories, :mod:`.looking` puts together what
  journals, targets and Airflow say;
- :mod:`.ending` acts;
- :mod:`.sweep` joins them and reports.

Nothing here imports Airflow: whoever asks it comes in as :class:`.airflow.AsksAirflow`.
"""
