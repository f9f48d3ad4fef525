#!/bin/bash -l
#SBATCH --job-name=train-fit-k3j2h1-1
#SBATCH --comment=airflow-gpu?installation=prod&incarnation=abcdefghij&attempt=1&_digest=sha256%3Aabababababababababababababababababababababababababababababababab&_channel=%2Fshared%2Fgangs%2Fv1%2Fprod%2Ftrain%2Frun-1%2Ffit%2F_%2Fabcdefghij
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --time=1443
#SBATCH --signal=TERM@180
#SBATCH --dependency=singleton
#SBATCH --output=/shared/gangs/v1/prod/train/run-1/fit/_/abcdefghij/payload/0001/slurm-%j.log
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
srun \
  --nodes=8 \
  --ntasks=8 \
  --ntasks-per-node=1 \
  --kill-on-bad-exit=0 \
  --wait=0 \
  --export=ALL \
  --mpi=none \
  ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} \
  --output=/shared/gangs/v1/prod/train/run-1/fit/_/abcdefghij/payload/0001/slurm-%j-%n.log \
  --open-mode=append \
  --container=/images/bundle \
  python3 /shared/gangs/v1/prod/train/run-1/fit/_/abcdefghij/payload/0001/runtime.pyz agent /shared/gangs/v1/prod/train/run-1/fit/_/abcdefghij/payload/0001/job.json
code=$?
exit "$code"
