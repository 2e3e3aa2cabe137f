#!/usr/bin/env bash
# Runs the run of the settings on the TPU, from whatever state things are in, until it is done: makes
# the TPU if it is not there, installs the project, starts the run, watches it, and does all of that
# again when a spot slice is taken away. The run goes on from the last copy in the bucket.
#
#   launch/run.sh --dry-run
#   launch/run.sh               until the run is done; Ctrl-C leaves it running, call it again to
#                               watch again
#   launch/run.sh --detach      start it and return (then nobody makes a lost slice again)
#   launch/run.sh --stop        stop it: the rollout under way is saved, all is copied to the bucket
#   launch/run.sh --again       go on with a run that is done, after more steps in FLAGS
#
# The TPU is paid for until launch/delete.sh, also after the run is done.
# exit codes: 0 done, 1 failed or bad settings, 2 bad command line, 130 stopped
#
# options: --settings FILE (launch/settings.env), --set KEY=VALUE, --dry-run, --detach, --stop,
# --again, --help

set -euo pipefail
# shellcheck source=launch/settings.sh
source "$(dirname "$0")/settings.sh"
# shellcheck source=launch/slices.sh
source "$(dirname "$0")/slices.sh"
# shellcheck source=launch/hosts.sh
source "$(dirname "$0")/hosts.sh"

main() {
    local made_again=0 verb=start code=()
    begin "$@"
    only --detach --stop --again
    host_lines
    if given --stop; then
        stop_it
        return
    fi
    check_hosts
    look_at_run absent
    case $SEEN in
    done)
        given --again || { say "run $RUN is done; its results are in $ROOT/runs/$RUN. Choose another RUN, or go on with --again" && return; }
        ;;
    running) verb=keep code=(--keep-code) ;; # a run keeps the code that it began with
    esac
    case $SEEN in done | failed* | stopped) write_object "$ROOT/state/$RUN" starting ||
        refuse "$ROOT cannot be written: $(head -c 500 "$SCRATCH/problem")" ;; esac
    while :; do
        "$HERE/create.sh" "${COMMON[@]}"
        "$HERE/setup.sh" "${COMMON[@]}" "${code[@]}"
        on_hosts "$verb" || refuse "the run could not be started on all hosts; what they said stands above, launch/logs.sh shows more"
        [[ $DRY_RUN == no ]] || return 0
        if given --detach; then
            say "run $RUN is under way; launch/logs.sh --follow shows it, launch/status.sh says how it stands"
            return
        fi
        watch_it
        made_again=$((made_again + 1))
        ((made_again <= RECREATIONS)) || refuse "$NAME was lost $made_again times, RECREATIONS=$RECREATIONS; calling this again goes on from the last copy"
        say "$NAME was lost ($STANDS: $DETAIL): making it again, $made_again of at most $RECREATIONS times"
        verb=keep code=(--keep-code)
    done
}

on_hosts() { on_every_host "$WORK $1${WORDS[*]:+ }${WORDS[*]}"; }

stop_it() {
    on_every_host "$WORK stop" || refuse "the run could not be stopped on all hosts; what they said stands above"
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
        done) say "run $RUN is done: $ROOT/runs/$RUN. $NAME is still paid for; launch/delete.sh ends that" && exit 0 ;;
        stopped) say "run $RUN was stopped; calling this again goes on with it. $NAME is still paid for" && exit 130 ;;
        esac
        look_at_slices absent
        if [[ $seen == failed* ]]; then
            # A slice of several hosts goes host by host, and the programs of the others fail of it.
            [[ $ALL_HOSTS != 1 && $STANDS =~ ^(dead|absent|going|partial)$ ]] ||
                refuse "run $RUN $seen; see launch/logs.sh. $NAME is still paid for; launch/delete.sh ends that"
            write_object "$ROOT/state/$RUN" starting || true
        fi
        case $STANDS in
        dead | absent | going | partial) break ;;
        ready)
            if on_hosts keep >"$SCRATCH/keep" 2>&1; then
                misses=0
                [[ $seen != interrupted ]] || begun_again=$((begun_again + 1))
                ((begun_again <= RECREATIONS)) || refuse "run $RUN broke off $begun_again times, RECREATIONS=$RECREATIONS; see launch/logs.sh of all hosts. $NAME is still paid for"
            else
                misses=$((misses + 1))
            fi
            ;;
        *) misses=$((misses + 1)) ;;
        esac
        ((misses < 20)) || refuse "$NAME could not be reached $misses times ($DETAIL): $(tail -n 3 "$SCRATCH/keep" 2>/dev/null); the run may go on, and calling this again watches it again"
    done
    PATIENT=no
}

main "$@"
