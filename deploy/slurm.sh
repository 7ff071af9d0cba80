#!/usr/bin/env bash
# A run on a SLURM allocation: Ray on all of its nodes, the driver on the first.
#
#   sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh my.toml /shared/runs/my-run
#
# The run directory and the model are on a file system that all nodes share; dora-rl[engine,train,ray] is
# installed in the environment that the job starts with. Requeued after a preemption or a time limit,
# the job resumes its run. What each worker needs of a node is in [runtime.ray] of the configuration.
#SBATCH --job-name=dora-rl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
set -euo pipefail

config=${1:?usage: sbatch deploy/slurm.sh CONFIG.toml RUN_DIRECTORY}
run=${2:?usage: sbatch deploy/slurm.sh CONFIG.toml RUN_DIRECTORY}
port=${DORA_RL_RAY_PORT:-6379}

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(head -n 1 <<<"$nodes")
count=$(wc -l <<<"$nodes")
address=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address)
address=${address%% *}:$port

# Whoever can call a Ray cluster can run code on it: this one takes no call without its token.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
export RAY_USAGE_STATS_ENABLED=0

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="${address%:*}" --port="$port" --include-dashboard=false --block &
ray=$!
if [[ $count -gt 1 ]]; then
    # A node that fails takes its instances along and nothing else (--kill-on-bad-exit=0).
    srun --overlap --nodes=$((count - 1)) --ntasks=$((count - 1)) --exclude="$head" \
        --kill-on-bad-exit=0 ray start --address="$address" --block &
    ray="$ray $!"
fi
# shellcheck disable=SC2086  # one process id, or two
trap 'kill $ray 2>/dev/null || true' EXIT

# Until all nodes are there; instances that find no room now would wait for it, too.
for _ in $(seq 60); do
    up=$(RAY_ADDRESS=$address python -c \
        'import ray; ray.init(logging_level="ERROR"); print(sum(n["Alive"] for n in ray.nodes()))' \
        2>/dev/null || echo 0)
    [[ $up -ge $count ]] && break
    sleep 5
done
echo "Ray has ${up:-0} of $count nodes at $address"

export RAY_ADDRESS=$address
if [[ -f $run/ledger.sqlite ]]; then
    dora-rl train --resume "$run" --plain &
else
    dora-rl train "$config" --set runtime.kind=ray --out "$run" --plain &
fi
driver=$!
# SLURM's notice before a time limit or a preemption: the run finishes its step, saves and ends.
trap 'kill -TERM $driver 2>/dev/null || true' TERM
code=0
wait $driver || code=$?
if kill -0 $driver 2>/dev/null; then # the signal has interrupted the wait, not the run
    code=0
    wait $driver || code=$?
fi
if [[ $code -eq 130 ]]; then # stopped as it was asked to
    scontrol requeue "$SLURM_JOB_ID"
    code=0
fi
exit $code
