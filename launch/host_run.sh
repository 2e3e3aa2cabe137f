#!/usr/bin/env bash
# Runs on a TPU host: starts the run there, keeps a copy of it in the bucket, stops it.
#
#   host_run.sh start FLAGS...   in the background; does nothing if it runs already, or somebody else
#                                has run it to its end since the caller looked
#   host_run.sh keep FLAGS...    the same, but does nothing if it has ended here, either
#   host_run.sh work FLAGS...    in the foreground: what start and a Kubernetes pod run
#   host_run.sh address          the address of the first host of this slice
#   host_run.sh stop             SIGTERM, and wait until all is saved and copied
#
# ROOT (gs://...), RUN, COMMAND, CONFIG, SYNC_SECONDS, HOSTS (of a slice), ALL_HOSTS and HOST_INDEX
# are set by launch/run.sh; so are READERS, where others read for the run, and FIRST, the address of the first host, where slices do not know of one
# another. Every host copies its log; host 0 copies the run's folder too, brings it
# back before it goes on after the slice was lost, and writes how the run stands to ROOT/state/RUN.
# Several hosts are one run (--hosts=auto), which writes its checkpoints into the bucket itself, each
# host its part; what is copied then are the run's other files, and the turns that each host kept.
# One lock, run.lock, is held from the first line to the last copy. Beside: host_setup.sh.

set -euo pipefail
shopt -s nullglob
cd "$HOME/notepad"
LOG=logs/$RUN.log
HERE=$HOME/notepad/code/launch

main() {
    local verb=$1
    shift
    [[ $verb != address ]] || { address && return; }
    number
    case $verb in
    start | keep) start "$verb" "$@" ;;
    work) work "$@" ;;
    stop) stop ;;
    esac
}

# The run's folder belongs to its first process, so several hosts are counted as jax counts them: by
# the number of the slice, and of the worker in it. Where nobody tells, they are in order already, and
# so are the pods of Kubernetes, whose own numbers jax takes.
number() {
    local worker slice
    several && [[ -z ${JOB_COMPLETION_INDEX:-} ]] || return 0
    worker=$(attribute agent-worker-number)
    slice=$(attribute tpu-env | sed -n "s/^MEGASCALE_SLICE_ID: *'\([0-9]*\)'.*/\1/p")
    [[ $worker =~ ^[0-9]+$ ]] || worker=$((HOST_INDEX % HOSTS))
    [[ $slice =~ ^[0-9]+$ ]] || slice=$((HOST_INDEX / HOSTS))
    export HOST_INDEX=$((slice * HOSTS + worker))
}

# Slices that were made each by itself become one run as those of Kubernetes do: by what libtpu and jax
# read from the environment.
join() {
    [[ -n ${FIRST:-} ]] || return 0
    export MEGASCALE_COORDINATOR_ADDRESS=$FIRST MEGASCALE_NUM_SLICES=$((ALL_HOSTS / HOSTS))
    export MEGASCALE_SLICE_ID=$((HOST_INDEX / HOSTS))
}

# Of the list of the slice's hosts, as NAME:ID:ADDRESS or as addresses alone, the first is the first.
address() {
    local first
    first=$(attribute worker-network-endpoints)
    first=${first%%,*}
    first=${first##*:}
    echo "${first:-$(hostname -I | cut -d ' ' -f 1)}"
}

attribute() {
    curl --silent --fail --max-time 5 --header "Metadata-Flavor: Google" \
        "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1" || true
}

several() { ((ALL_HOSTS > 1)); }

# Whether checkpoints go into the bucket directly: neither other hosts nor readers see this disk.
shared() { several || ((${READERS:-0})); }

# The lock is taken here and passed on, so that there is no moment in which two could start.
start() {
    local verb=$1
    shift
    exec 9>run.lock
    # Not at once: whoever only looks holds it for a moment.
    if ! flock --wait 0.2 9; then
        [[ $(cat run.name) == "$RUN" ]] && echo "$RUN runs" && return
        echo "another run is under way here: $(cat run.name); stop it, or wait for it" >&2
        exit 1
    fi
    # Looked at with the lock in hand: a run that ends right now has left this file before.
    if [[ $verb == keep && $(cat run.ended 2>/dev/null) == "$RUN" ]]; then
        echo "$RUN has ended"
        # Its word may have crossed that of the first, which has begun again meanwhile.
        [[ $(cat run.outcome) != failed* ]] || ((HOST_INDEX == 0)) || tell "$(cat run.outcome)"
        return
    fi
    # Whoever starts has written over any end it knew of: this one is of another caller's run, since.
    if [[ $verb == start && $(gcloud storage cat "$ROOT/state/$RUN" 2>/dev/null) =~ ^(done|failed|stopped) ]]; then
        echo "$RUN has ended meanwhile"
        return
    fi
    echo "$RUN" >run.name
    rm -f run.pid run.ended
    bring_log
    LOCKED=yes setsid --fork nohup bash "$HERE/host_run.sh" work "$@" >>"$LOG" 2>&1 </dev/null
    echo "$RUN started"
}

stop() {
    if flock --nonblock run.lock true; then
        echo "nothing runs"
        return
    fi
    local tries
    # A start removes the number of the last run, so this is no stranger's.
    for ((tries = 0; tries < 100; tries++)); do
        touch stop.asked
        if [[ -s run.pid ]] && kill -TERM "$(cat run.pid)"; then break; fi
        if flock --nonblock run.lock true; then break; fi
        sleep 0.1
    done
    # A rollout under way is saved first; with a large model that takes a while.
    flock --wait 1800 run.lock true || { echo "the run has not stopped after 30 minutes" >&2 && exit 1; }
    echo "$RUN stopped"
}

# ---------------------------------------------------------------- the run

work() {
    if [[ ${LOCKED:-no} == no ]]; then
        exec 9>run.lock
        flock --nonblock 9 || { echo "a run is under way here" >&2 && exit 1; }
        echo "$RUN" >run.name
        rm -f run.pid run.ended
        bring_log
    fi
    unset LOCKED
    rm -f stop.asked
    TERMINATED=no CHILD="" TOLD=no
    trap 'TERMINATED=yes; [[ -z $CHILD ]] || kill -TERM "$CHILD"' TERM INT
    echo $$ >run.pid
    trap '[[ $TOLD == yes ]] || ended "failed before it began"' EXIT
    tell running
    bring_back
    local words=("$COMMAND" --config "$CONFIG" --name "$RUN") code=0
    if several; then
        join
        local where=auto
        # Told outright: whether such a host's metadata suffice for jax to find the others is not known.
        [[ -z ${FIRST:-} ]] || where=$FIRST:8482,$ALL_HOSTS,$HOST_INDEX
        words+=("--hosts=$where")
    fi
    if shared; then
        words+=("--config.checkpoint.folder=$ROOT/runs")
    elif [[ $COMMAND != eval ]]; then
        words+=(--config.checkpoint.folder=) # also of a run that began on several hosts
    fi
    # Each reader has a part of every step, unless the flags say otherwise; a fleet replaces no group.
    ((${READERS:-0} == 0)) ||
        words+=(--config.fleet.apart=true "--config.fleet.bundles=$READERS" --config.rollout.max_rounds=1)
    # Of several hosts the first decides this for all.
    ((HOST_INDEX)) || [[ ! -d runs/$RUN ]] || words+=(--resume)
    cd code
    echo "$(date -u +%FT%TZ) notepad-jax ${words[*]} $*"
    ../venv/bin/notepad-jax "${words[@]}" "$@" 9>&- &
    CHILD=$!
    cd ..
    [[ $TERMINATED == no ]] || kill -TERM "$CHILD"
    follow || code=$?
    CHILD=""
    echo "$(date -u +%FT%TZ) notepad-jax ended with exit code $code"
    finish "$code"
}

# Waits for the child and returns its exit code; meanwhile copies every SYNC_SECONDS.
follow() {
    local nap ended code
    while :; do
        sleep "$SYNC_SECONDS" 9>&- &
        nap=$!
        ended="" code=0
        wait -n -p ended "$CHILD" "$nap" || code=$?
        if [[ ${ended:-} == "$nap" ]]; then
            copy || echo "the bucket could not be written; the next copy is in $SYNC_SECONDS s" >&2
            continue
        fi
        kill "$nap" 2>/dev/null || true
        [[ ${ended:-} != "$CHILD" ]] || return "$code"
        # Neither: a signal, which was passed on. The child's end is waited for.
    done
}

finish() {
    local stands="failed with exit code $1"
    several && (($1 < 128)) && stands+=" on host $HOST_INDEX"
    if (($1 == 0)); then
        stands="done"
    elif [[ -e stop.asked ]]; then
        stands=stopped
    elif [[ $TERMINATED == yes ]]; then
        stands=interrupted # the host goes down, so the run is to go on elsewhere
    elif (($1 == 130)); then
        stands=stopped # somebody stopped the program itself
    elif several && (($1 > 128)); then
        stands=interrupted # jax ends its process when another one is gone; that one knows why
    fi
    if ! copy; then
        echo "the last copy to the bucket failed; everything is still in $HOME/notepad/runs/$RUN" >&2
        case $stands in
        failed*) stands+=", failed to copy the run to the bucket" ;;
        done | stopped) stands="failed to copy the run to the bucket" ;;
        esac
    fi
    copy_log || true
    ! several || copy_turns || true
    ended "$stands"
    exit "$1"
}

ended() {
    echo "$1" >run.outcome
    [[ $1 == interrupted ]] || echo "$RUN" >run.ended
    tell "$1"
    TOLD=yes
}

# ---------------------------------------------------------------- the bucket

# Host 0 tells, and of several also one whose program failed by itself; that one's word stays until
# run.sh is called again.
tell() {
    if several && [[ $1 != failed* ]]; then
        [[ $(gcloud storage cat "$ROOT/state/$RUN" 2>/dev/null) != failed* ]] || return 0
    fi
    [[ $HOST_INDEX != 0 && $1 != failed* ]] || echo "$1" | gcloud storage cp - "$ROOT/state/$RUN" --quiet ||
        echo "the bucket could not be told: $1" >&2
}

# A new host has no folder of the run; the bucket may have one, and the turns that hosts kept.
bring_back() {
    local there="" less=()
    ! shared || less=("--exclude=^(checkpoints|fleet|kept|policy)/.*") # they are read where they are
    ! several || bring_turns
    ((HOST_INDEX == 0)) || return 0
    # One host alone has its steps here; those of a time with more hosts, or readers, come along.
    if ! shared && grep -qsF "\"$ROOT/runs\"" "runs/$RUN/config.json"; then
        mkdir -p "runs/$RUN/checkpoints"
        if ! gcloud storage rsync --recursive "$ROOT/runs/$RUN/checkpoints" "runs/$RUN/checkpoints" --quiet; then
            ended "failed to read the bucket"
            exit 1
        fi
    fi
    [[ ! -d runs/$RUN ]] || return 0
    there=$(gcloud storage ls "$ROOT/runs/$RUN/" 2>&1) || {
        grep -qi 'matched no objects' <<<"$there" && return
        echo "the bucket cannot be read: $there" >&2
        ended "failed to read the bucket"
        exit 1
    }
    rm -rf "incoming/$RUN"
    mkdir -p "incoming/$RUN"
    if ! gcloud storage rsync --recursive "$ROOT/runs/$RUN" "incoming/$RUN" --quiet "${less[@]}"; then
        ended "failed to read the bucket"
        exit 1
    fi
    mv "incoming/$RUN" "runs/$RUN"
    echo "went on from $ROOT/runs/$RUN"
}

# The bucket gets a picture of one moment: checkpoints as links, since they do not change once they
# have their name, then the files that grow. Nothing is removed there before all of the new is.
copy() {
    copy_log || true
    ((HOST_INDEX == 0)) && [[ -d runs/$RUN ]] || return 0
    rm -rf picture
    mkdir -p "picture/$RUN"
    local step
    # Of several hosts they are in the bucket; what lies here is of a time when there was one.
    shared || for step in "runs/$RUN"/checkpoints/*; do
        mkdir -p "picture/$RUN/checkpoints"
        # One that is removed right now is given up: a newer one is there.
        cp -al "$step" "picture/$RUN/checkpoints/" 2>/dev/null || rm -rf "picture/$RUN/checkpoints/${step##*/}"
    done
    for step in "runs/$RUN"/*; do
        [[ $step == */checkpoints ]] || cp -a "$step" "picture/$RUN/"
    done
    local to=(gcloud storage rsync --recursive "picture/$RUN" "$ROOT/runs/$RUN" --quiet)
    "${to[@]}" || return
    # Checkpoints that are there and not in the picture were written there.
    shared || "${to[@]}" --delete-unmatched-destination-objects
}

# The turns of the rollout under way that hosts other than the first kept when they were stopped.
# A file has the number of its process in its name, so each takes its own, whatever host it is on.
copy_turns() {
    local files=("runs/$RUN"/under_way-*.jsonl)
    ((${#files[@]} == 0)) || gcloud storage cp "${files[@]}" "$ROOT/turns/$RUN/" --quiet
}

bring_turns() {
    local files=()
    ((HOST_INDEX)) || return 0 # those of the first are in the run's folder
    files=("runs/$RUN"/under_way-*.jsonl)
    ((${#files[@]} == 0)) || return 0
    mkdir -p "runs/$RUN"
    gcloud storage cp "$ROOT/turns/$RUN/*" "runs/$RUN/" --quiet 2>/dev/null || rmdir "runs/$RUN" || true
}

# What the run said on a host that is lost.
bring_log() {
    [[ -s $LOG ]] || gcloud storage cat "$ROOT/logs/$RUN/host-$HOST_INDEX.log" >"$LOG" 2>/dev/null || true
}

copy_log() { gcloud storage cp "$LOG" "$ROOT/logs/$RUN/host-$HOST_INDEX.log" --quiet; }

main "$@"
