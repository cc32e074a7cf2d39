#!/usr/bin/env bash
# truestep over two machines of a SLURM cluster: sbatch examples/launch/slurm.sh CONFIG.yaml
# The configuration, the model and the run's directory are on a disk that every machine sees.
#SBATCH --job-name=truestep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@600
# The last three lines: a job that is preempted or whose machine fails is queued again, and writes on in the same log; ten
# minutes before its time is over it gets a SIGTERM, on which the run ends after the step in hand and saves.
set -euo pipefail

CONFIG=${1:?usage: sbatch slurm.sh CONFIG.yaml}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# How long torchrun waits for its processes to save before it kills them.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=570
# How many CPU threads each process computes with.
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:29500" \
    -m truestep train "$CONFIG"
