#!/usr/bin/env bash
# A Python that makes an environment with a pip that records, and a notepad-jax to test with.
set -euo pipefail
case "$1 ${2:-}" in
"-c "*) exit 0 ;; # it is new enough
"-m venv")
    mkdir -p "$3/bin"
    cat >"$3/bin/python" <<'PIP'
#!/usr/bin/env bash
echo "$*" >>"$WORLD/pip"
[[ ! -e $WORLD/pip_fails ]]
PIP
    cat >"$3/bin/notepad-jax" <<'TRAIN'
#!/usr/bin/env bash
# Writes a folder as training does: config.json first, then a checkpoint and a line a step. Of
# several hosts the first does; the others keep turns when they are stopped, and find them again.
[[ $1 == --version ]] && echo "notepad-jax 0" && exit
said="$*" several=no elsewhere=""
while (($#)); do
    case $1 in
    --name) folder=runs/$2 checkpoints=runs/$2/checkpoints ;;
    --hosts=*) several=yes ;;
    --config.checkpoint.folder=*) elsewhere=${1#*=} ;;&
    --config.checkpoint.folder=gs://*) checkpoints=$WORLD/bucket/${1#*gs://}/${folder#runs/}/checkpoints ;;
    esac
    shift
done
training=$(cat "$WORLD/training" 2>/dev/null)
if [[ $several == yes && $HOST_INDEX != 0 ]]; then
    turns=$folder/under_way-$HOST_INDEX.jsonl
    [[ ! -e $turns ]] || cat "$turns" >>"$WORLD/turns"
    trap 'mkdir -p "$folder"; echo "turns of $HOST_INDEX" >"$turns"; exit 143' TERM
    echo "$said" >>"$WORLD/trained"
    case $training in
    "fails on $HOST_INDEX") exit 1 ;;
    fails*) exit 134 ;; # jax ends a process whose peer is gone
    waits) while :; do sleep 0.05; done ;;
    esac
    exit
fi
echo "$said" >>"$WORLD/trained"
mkdir -p "$checkpoints" "$folder"
echo "{\"checkpoint\": {\"folder\": \"$elsewhere\"}}" >"$folder/config.json"
touch "$folder/.lock"
steps=$(cat "$folder/metrics.jsonl" 2>/dev/null | wc -l)
step() {
    steps=$((steps + 1))
    mkdir "$checkpoints/.$steps.writing"
    echo "weights $steps" >"$checkpoints/.$steps.writing/params"
    mv "$checkpoints/.$steps.writing" "$checkpoints/$steps"
    rm -rf "$checkpoints/$((steps - 2))"
    echo "{\"step\": $steps}" >>"$folder/metrics.jsonl"
}
trap 'step; exit 130' TERM
step
mkdir -p "$checkpoints/.9.writing" # a save under way
case $training in
fails) exit 1 ;;
"fails on "*) exit 134 ;;
stops) exit 130 ;;
waits) while :; do sleep 0.05; done ;;
*) step ;;
esac
TRAIN
    chmod +x "$3/bin/python" "$3/bin/notepad-jax"
    ;;
*) exit 1 ;;
esac
