#!/usr/bin/env bash
# Makes the TPU of the settings, and waits until it is there. From then on it costs money by the
# hour, used or not, until launch/delete.sh.
#
#   launch/create.sh --dry-run           see the gcloud commands, run none of them
#   launch/create.sh                     ask for it and wait
#   launch/create.sh --no-wait           ask for it and return; launch/status.sh says how it stands
#   launch/create.sh --set CAPACITY=spot --set TPU=v6e:2x2
#
# Before anything is asked for, the settings are checked, the bucket is written to, and the zone is
# asked whether it has such a TPU. Called again it makes only what is missing: nothing if all is
# there. A request that failed or a slice that was taken away is deleted and asked for anew.
#
# options: --settings FILE (launch/settings.env), --set KEY=VALUE, --dry-run, --no-wait, --help

set -euo pipefail
# shellcheck source=launch/settings.sh
source "$(dirname "$0")/settings.sh"
# shellcheck source=launch/slices.sh
source "$(dirname "$0")/slices.sh"

main() {
    begin "$@"
    only --no-wait
    BILL=yes
    look_at_slices absent
    if [[ $STANDS == ready ]]; then
        say "$NAME is there: $(amount)"
        return
    fi
    check_bucket
    check_zone
    while [[ $STANDS == going || $STANDS == unknown ]]; do
        tell
        pause
    done
    if [[ $STANDS == dead ]]; then
        say "$NAME was taken away, or could not be had ($DETAIL): deleted, and asked for anew"
        delete_dead
    fi
    [[ $STANDS == coming ]] || create_slices
    [[ $DRY_RUN == no ]] || return 0
    if given --no-wait; then
        say "asked for: $(amount); launch/status.sh says when it is there"
        return
    fi
    wait_for_it
}

amount() {
    echo "$((CHIPS * SLICES)) chips of $GENERATION on $ALL_HOSTS host(s), $CAPACITY"
}

# Nobody waits in a queue for what the zone does not have.
check_zone() {
    if [[ $WAY == queued ]]; then
        look there gcloud compute tpus accelerator-types describe "$ACCELERATOR" "${AT[@]}" "--format=value(name)"
    else
        look there gcloud compute machine-types describe "$MACHINE" "${AT[@]}" "--format=value(name)"
    fi
    [[ $SEEN != absent ]] || refuse "ZONE=$ZONE has no TPU=$TPU; see Google's page \"TPU regions and zones\" for one that has"
}

# Sleeps, and looks again. A gcloud that does not answer is asked again, up to TRIES times.
SILENT=0
pause() {
    sleep "$POLL_SECONDS"
    PATIENT=yes
    look_at_slices absent
    PATIENT=no
    if [[ $STANDS == unknown ]]; then SILENT=$((SILENT + 1)); else SILENT=0; fi
    ((SILENT < TRIES)) || refuse "gcloud has not answered $SILENT times ($(head -c 500 "$SCRATCH/problem")); the request is where it was, see launch/status.sh"
}

# Deletes what is dead. Looked at once more right before: another run.sh may have made it again.
delete_dead() {
    look_at_slices dead
    [[ $STANDS == dead ]] || return 0
    delete_slices "$ZONE" || refuse "what is left of $NAME could not be deleted; see above, and call this again"
    STANDS=absent
}

# Says how it stands, when that is new.
TOLD=""
tell() {
    [[ $TOLD == "$STANDS" ]] || say "$NAME is $STANDS ($DETAIL); waiting (Ctrl-C leaves the request where it is)"
    TOLD=$STANDS
}

wait_for_it() {
    while :; do
        pause
        case $STANDS in
        ready) break ;;
        dead | going | absent) refuse "$NAME could not be had ($DETAIL); launch/status.sh says why, and calling this again asks anew" ;;
        esac
        tell
    done
    say "$NAME is there: $(amount)"
}

main "$@"
