"""Faults on a real Slurm: daemons stopped and started, replies lost, tokens over, drivers twice, at each phase of a gang."""
