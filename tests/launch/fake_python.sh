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
# Writes a folder as training does: config.json first, then a checkpoint and a line a step.
[[ $1 == --version ]] && echo "notepad-jax 0" && exit
echo "$*" >>"$WORLD/trained"
while (($#)); do
    case $1 in
    --name) folder=runs/$2 ;;
    esac
    shift
done
mkdir -p "$folder/checkpoints"
echo '{}' >"$folder/config.json"
touch "$folder/.lock"
steps=$(cat "$folder/metrics.jsonl" 2>/dev/null | wc -l)
step() {
    steps=$((steps + 1))
    mkdir "$folder/checkpoints/.$steps.writing"
    echo "weights $steps" >"$folder/checkpoints/.$steps.writing/params"
    mv "$folder/checkpoints/.$steps.writing" "$folder/checkpoints/$steps"
    rm -rf "$folder/checkpoints/$((steps - 2))"
    echo "{\"step\": $steps}" >>"$folder/metrics.jsonl"
}
trap 'step; exit 130' TERM
step
mkdir "$folder/checkpoints/.9.writing" # a save under way
case $(cat "$WORLD/training" 2>/dev/null) in
fails) exit 1 ;;
stops) exit 130 ;;
waits) while :; do sleep 0.05; done ;;
*) step ;;
esac
TRAIN
    chmod +x "$3/bin/python" "$3/bin/notepad-jax"
    ;;
*) exit 1 ;;
esac
