"""A real Slurm cluster of eight pretended GPU nodes on one machine, for tests.

Debian's Slurm runs unchanged: `slurmctld`, `slurmdbd` with MariaDB, `slurmrestd`, `munged`, `sshd`, and one `slurmd` in
each node. Every node has an own network, process, host name and mount namespace, so that one can be killed at once, cut
off the network, or started again, and nothing is left when the first process of the cluster ends.

What it does not do: memory and devices are not enforced (no cgroups: a job can use more than it asked for), GPUs are
files that lead to `/dev/null`, and `/shared` and `/home` are folders of this machine, so that a node that is cut off its
network still reaches them. Processors are pretended, too: 64 in each node.

Needs root, Linux with overlayfs, and once per version some 650 MB from Debian's archive (35-90 s).

    with cluster("24.11", grace=20, nodes=8) as c:
        c.run("sbatch", "--wrap", "sleep 5", user="alice")
        httpx.get(f"{c.rest}/slurm/v0.0.42/ping", headers={"X-SLURM-USER-TOKEN": c.token("alice")})

`python -m tests.beds.slurm` brings one up for a person.
"""

from tests.beds.slurm.cluster import Cluster, cluster
from tests.beds.slurm.image import Unavailable, missing

__all__ = ["Cluster", "Unavailable", "cluster", "missing"]
