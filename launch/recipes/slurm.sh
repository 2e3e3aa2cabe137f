#!/usr/bin/env bash
# A fleet on Slurm: a trainer, and readers as an array, over one folder that all nodes see.
#
#   RUNS=/shared/runs NAME=mine READERS=4 launch/recipes/slurm.sh --config=qwen2_5_7b --config.grpo.tis_cap=2
#
# Called from the checkout, with the environment active, which all nodes see too. The words behind it
# are those of `notepad-jax train`. NODE and READER_NODE are options of sbatch (--gres=gpu:1, a partition,
# a time), in one word each or several. Slurm starts a job again whose node fails or is taken away, and
# each task of the array alone; readers end when the run has ended.

set -euo pipefail
: "${RUNS:?say RUNS, a folder that all nodes see}" "${NAME:?say NAME, what the run is called}"
mkdir -p "$RUNS/$NAME" # readers may be there first
read -ra node <<<"${NODE:-}"
read -ra reader_node <<<"${READER_NODE:-${NODE:-}}"
common=(--parsable --requeue --open-mode=append "--chdir=$PWD")

train=$(printf '%q ' notepad-jax train "$@" --name "$NAME" "--config.checkpoint.folder=$RUNS" \
    --config.fleet.apart=true "--config.fleet.bundles=${READERS:-1}" --config.rollout.max_rounds=1)
folder=$(printf '%q' "runs/$NAME")
sbatch "${common[@]}" "${node[@]}" --job-name="$NAME" \
    --wrap="[ ! -d $folder ] || again=--resume; exec $train \$again"

rollout=$(printf '%q ' notepad-jax rollout "$RUNS/$NAME" --as)
sbatch "${common[@]}" "${reader_node[@]}" --job-name="$NAME-readers" --array="0-$((${READERS:-1} - 1))" \
    --wrap="exec ${rollout}reader-\$SLURM_ARRAY_TASK_ID"
