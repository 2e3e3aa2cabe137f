#!/usr/bin/env bash
# Runs the run of the settings on the TPU, from whatever state things are in, until it is done: makes
# the TPU if it is not there, installs the project, starts the run, watches it, and does all of that
# again when a spot slice is taken away. The run goes on from the last copy in the bucket.
#
#   launch/run.sh --dry-run
#   launch/run.sh               until the run is done; Ctrl-C leaves it running, call it again to
#                               watch again
#   launch/run.sh --detach      start it and return (then nobody makes a lost slice again)
#   launch/run.sh --delete-when-done   the same, and delete the TPU when the run has ended: done, failed
#                               or stopped (not while it could not be copied to the bucket)
#   launch/run.sh --stop        stop it: the rollout under way is saved, all is copied to the bucket
#   launch/run.sh --again       go on with a run that is done, after more steps in FLAGS
#
# The TPU is paid for until launch/delete.sh, also after the run is done: the last line says how much. Hosts
# that nobody uses give it back after IDLE_MINUTES.
# exit codes: 0 done, 1 failed or bad settings, 2 bad command line, 130 stopped
#
# options: --settings FILE (launch/settings.env), --set KEY=VALUE, --dry-run, --detach, --stop,
# --again, --delete-when-done, --help

set -euo pipefail
# shellcheck source=launch/settings.sh
source "$(dirname "$0")/settings.sh"
# shellcheck source=launch/slices.sh
source "$(dirname "$0")/slices.sh"
# shellcheck source=launch/hosts.sh
source "$(dirname "$0")/hosts.sh"

main() {
    local verb=start code=()
    begin "$@"
    only --detach --stop --again --delete-when-done
    ! given --detach || ! given --delete-when-done ||
        wrong "--delete-when-done is for whoever watches; with --detach the hosts give the TPU back after IDLE_MINUTES=$IDLE_MINUTES"
    ! given --stop || ! given --delete-when-done ||
        wrong "--delete-when-done is for whoever watches; launch/delete.sh stops the run, waits until it is copied, and deletes the TPU"
    host_lines
    if given --stop; then
        BILL=yes
        stop_it
        return
    fi
    check_hosts
    BILL=yes
    look_at_run absent
    case $SEEN in
    done)
        given --again || { say "run $RUN is done; its results are in $ROOT/runs/$RUN. Choose another RUN, or go on with --again" && over 0; }
        ;;
    running)
        look_at_slices ready
        if [[ $STANDS == ready ]]; then
            verb=keep code=(--keep-code) # a run keeps the code that it began with
        else
            say "run $RUN was under way on a TPU that is gone; it goes on with the code of this checkout"
        fi
        ;;
    esac
    case $SEEN in done | failed* | stopped) write_object "$ROOT/state/$RUN" starting ||
        refuse "$ROOT cannot be written: $(head -c 500 "$SCRATCH/problem")" ;; esac
    while :; do
        make_it
        if begin_run; then
            [[ $DRY_RUN == no ]] || return 0
            if given --detach; then
                say "run $RUN is under way; launch/logs.sh --follow shows it, launch/status.sh says how it stands"
                return
            fi
            watch_it
        fi
        once_more "was lost ($STANDS: $DETAIL)"
        verb=keep code=(--keep-code)
    done
}

# Makes the TPU. A first request that fails is for whoever called; later ones are made again.
make_it() {
    until CALLED=yes "$HERE/create.sh" "${COMMON[@]}"; do
        ((MADE_AGAIN)) || exit 1
        once_more "could not be had"
    done
}

# Counts a slice that was lost, or a request that failed, and waits: longer each time.
MADE_AGAIN=0
once_more() {
    local pause
    MADE_AGAIN=$((MADE_AGAIN + 1))
    ((MADE_AGAIN <= RECREATIONS)) || refuse "$NAME $1, and RECREATIONS=$RECREATIONS are used up; calling this again goes on from the last copy"
    say "$NAME $1: making it again, $MADE_AGAIN of at most $RECREATIONS times"
    for ((pause = 1; pause < MADE_AGAIN; pause++)); do sleep "$POLL_SECONDS"; done
}

# Brings the run onto the hosts. Returns 1 if the slice is lost on the way.
begin_run() {
    if CALLED=yes "$HERE/setup.sh" "${COMMON[@]}" "${code[@]}" && find_first && on_hosts "$TRIES" "$verb"; then return; fi
    patiently look_for_answer || true
    is_lost || refuse "the run could not be started on all hosts; what they said stands above, launch/logs.sh shows more"
    return 1
}

# Groups know nothing of one another, so each host of several slices is told where the first one is:
# sets FIRST to its address, which the first host itself says.
find_first() {
    [[ $WAY == group && $SLICES -gt 1 ]] || return 0
    here
    scratch
    patiently find_instances || return 1
    if ! ask_host 0 "$ANSWER_SECONDS" "$WORK address"; then
        cat "$SCRATCH/host-0"
        return 1
    fi
    if [[ $DRY_RUN == yes ]]; then
        cat "$SCRATCH/host-0"
        FIRST=ADDRESS
    else
        FIRST=$(tail -n 1 "$SCRATCH/host-0")
    fi
    host_lines
}

look_for_answer() {
    local PATIENT=yes
    look_at_slices absent
    [[ $STANDS != unknown ]]
}

# Coming is lost, too, once it was ready: Google or another run.sh makes it again.
is_lost() { [[ $STANDS =~ ^(dead|absent|going|partial|coming)$ ]]; }

# Asks each host up to $1 times for the verb $2.
on_hosts() { on_every_host "$1" "$ANSWER_SECONDS" "$WORK $2${WORDS[*]:+ }${WORDS[*]}"; }

stop_it() {
    # A host waits half an hour for the run to be saved.
    on_every_host "$TRIES" "$((1800 + ANSWER_SECONDS))" "$WORK stop" || refuse "the run could not be stopped on all hosts; what they said stands above"
}

# Returns when the slice is lost. Ends the script when the run has ended. `keep` is nothing for a
# run that runs or has just ended, and mends a host that was restarted; of several hosts all begin
# again then, which is not done for ever either.
watch_it() {
    local misses=0 begun_again=0 seen
    say "watching run $RUN; Ctrl-C leaves it running, launch/logs.sh --follow shows what it says"
    PATIENT=yes
    while :; do
        sleep "$POLL_SECONDS"
        look_at_run absent
        seen=$SEEN
        case $seen in
        done) say "run $RUN is done: $ROOT/runs/$RUN" && over 0 ;;
        stopped) say "run $RUN was stopped; calling this again goes on with it" && over 130 ;;
        esac
        look_at_slices absent
        if [[ $seen == failed* ]]; then
            # A slice of several hosts goes host by host, and the programs of the others fail of it.
            { ((ALL_HOSTS > 1)) && is_lost; } || { say "run $RUN $seen; see launch/logs.sh" && over 1 "$seen"; }
            write_object "$ROOT/state/$RUN" starting || true
        fi
        ! is_lost || break
        case $STANDS in
        ready)
            # In a shell of its own: whoever is interrupted meanwhile still has standard error.
            if (on_hosts 1 keep) >"$SCRATCH/keep" 2>&1; then
                misses=0
                [[ $seen != interrupted ]] || begun_again=$((begun_again + 1))
                ((begun_again <= RECREATIONS)) || refuse "run $RUN broke off $begun_again times, RECREATIONS=$RECREATIONS; see launch/logs.sh of all hosts"
            else
                misses=$((misses + 1))
            fi
            ;;
        *) misses=$((misses + 1)) ;;
        esac
        ((misses < TRIES)) || refuse "$NAME could not be reached $misses times ($DETAIL): $(tail -n 3 "$SCRATCH/keep" 2>/dev/null); the run may go on, and calling this again watches it again"
    done
    PATIENT=no
}

# Ends the script with exit code $1 when the run has ended. Hosts that have not copied all of it, as the
# state $2 says then, are not deleted.
over() {
    if given --delete-when-done && [[ ${2:-} != *"failed to copy"* ]]; then
        CALLED=no "$HERE/delete.sh" "${COMMON[@]}" --now || true
    fi
    exit "$1"
}

main "$@"
