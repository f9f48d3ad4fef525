#!/bin/bash -l
#SBATCH --job-name=train-fit-k3j2h1-1
#SBATCH --comment=airflow-gpu?installation=prod&incarnation=abcdefghij&attempt=1&_digest=sha256%3Aabababababababababababababababababababababababababababababababab&_channel=s3%3A%2F%2Fbucket%2Fgangs%2Fx
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --time=1443
#SBATCH --signal=TERM@180
#SBATCH --dependency=singleton
#SBATCH --output=/dev/null
#SBATCH --open-mode=append
#SBATCH --chdir=/tmp
#SBATCH --export=NIL
#SBATCH --no-requeue
# airflow-gpu: gang train-fit-k3j2h1-1, one agent a node.
umask 077
# A handler, not "ignore": what is ignored here would stay ignored in the agents.
trap : HUP INT TERM USR1 USR2 CONT
unset SLURM_EXPORT_ENV SBATCH_EXPORT
export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin}" HOME="${HOME:-$(echo ~)}" USER="${USER:-$(id -un)}"
base64 -d > /tmp/airflow-gpu-train-fit-k3j2h1-1-6cb851c2e0c8ac45.tar.gz <<'AIRFLOW_GPU_PAYLOAD' || exit 71
H4sIAAAAAAACA+3TuVLCUBSA4YuCCoKIbCIuoLiwhZv1ojyNzFCYGQMTSKGM706w0qEmKfJ/zTlz
mlP97nyqucu5J/ZIhhwpf6fcnSHjz769K1MZoiVFBILl6t0PX4pkWv8IJJgfeKuPz5m2+PqOr39l
/e9fl7pj038kUgeH6czR8Uk2d5ovnBXPSxflSrVWv2xcNa9vbu9a7fuHzuPT80u31x8MtZHUDdOy
HTV+fZtQDwAAAAAAAAAAAAAAQPw2+ENlYgAoAAA=
AIRFLOW_GPU_PAYLOAD
sbcast --force /tmp/airflow-gpu-train-fit-k3j2h1-1-6cb851c2e0c8ac45.tar.gz /tmp/airflow-gpu-train-fit-k3j2h1-1-6cb851c2e0c8ac45.tar.gz || exit 71
srun \
  --nodes=8 \
  --ntasks=8 \
  --ntasks-per-node=1 \
  --kill-on-bad-exit=0 \
  --wait=0 \
  --export=ALL \
  --mpi=none \
  ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} \
  /bin/sh -c 'umask 077; rm -rf "$1"; mkdir "$1" && tar -xzf "$1.tar.gz" -C "$1" || exit 71; shift; exec "$@"' airflow-gpu /tmp/airflow-gpu-train-fit-k3j2h1-1-6cb851c2e0c8ac45 python3 /tmp/airflow-gpu-train-fit-k3j2h1-1-6cb851c2e0c8ac45/runtime.pyz agent /tmp/airflow-gpu-train-fit-k3j2h1-1-6cb851c2e0c8ac45/job.json
code=$?
srun --overlap --nodes=8 --ntasks=8 --ntasks-per-node=1 rm -rf /tmp/airflow-gpu-train-fit-k3j2h1-1-6cb851c2e0c8ac45 /tmp/airflow-gpu-train-fit-k3j2h1-1-6cb851c2e0c8ac45.tar.gz >/dev/null 2>&1
exit "$code"
