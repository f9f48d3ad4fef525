#!/bin/bash -l
#SBATCH --job-name=train-fit-k3j2h1-1
#SBATCH --comment=airflow-gpu?installation=prod&incarnation=abcdefghij&attempt=1&_digest=sha256%3Aabababababababababababababababababababababababababababababababab&_channel=%2Fshared%2Fgangs%2Fv1%2Fprod%2Ftrain%2Frun-1%2Ffit%2F_%2Fabcdefghij
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:h100:8
#SBATCH --cpus-per-task=96
#SBATCH --mem=512000M
#SBATCH --partition=train,spare
#SBATCH --account=research
#SBATCH --qos=normal
#SBATCH --reservation=llm
#SBATCH --constraint=nvlink&ib
#SBATCH --switches=1
#SBATCH --time=1443
#SBATCH --signal=TERM@180
#SBATCH --nice=1000
#SBATCH --dependency=singleton
#SBATCH --exclude=gpu03,gpu04
#SBATCH --output=/shared/gangs/v1/prod/train/run-1/fit/_/abcdefghij/payload/0001/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --chdir=/tmp
#SBATCH --export=NIL
#SBATCH --requeue
#SBATCH --exclusive
#SBATCH --gpu-bind=closest
#SBATCH --wait-all-nodes=1
# airflow-gpu: gang train-fit-k3j2h1-1, one agent a node.
umask 077
# A handler, not "ignore": what is ignored here would stay ignored in the agents.
trap : HUP INT TERM USR1 USR2 CONT
unset SLURM_EXPORT_ENV SBATCH_EXPORT
export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin}" HOME="${HOME:-$(echo ~)}" USER="${USER:-$(id -un)}"
export GANG_SECRETS_FILE=/shared/gangs/.secrets-train-fit-k3j2h1-1.json
module load cuda/12.4 nccl || exit 71
export NCCL_DEBUG=WARN
ulimit -l unlimited
srun \
  --nodes=8 \
  --ntasks=8 \
  --ntasks-per-node=1 \
  --kill-on-bad-exit=0 \
  --wait=0 \
  --export=ALL \
  --mpi=pmix \
  ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} \
  --output=/shared/gangs/v1/prod/train/run-1/fit/_/abcdefghij/payload/0001/slurm-%j-%n.log \
  --open-mode=append \
  --cpu-bind=cores \
  python3 /shared/gangs/v1/prod/train/run-1/fit/_/abcdefghij/payload/0001/runtime.pyz agent /shared/gangs/v1/prod/train/run-1/fit/_/abcdefghij/payload/0001/job.json
code=$?
# A gang that left on a notice goes on. Slurm itself sees to that only where it sent the notice (24.11).
[ "$code" = 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
