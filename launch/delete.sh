#!/usr/bin/env bash
# Deletes the TPU of the settings, in whatever zone and however it was asked for, so that it costs nothing
# any more. What is in the bucket stays.
#
#   launch/delete.sh --dry-run
#   launch/delete.sh              stop the run under way and save it, then delete
#   launch/delete.sh --now        delete at once; up to SYNC_SECONDS of the run are lost
#
# Called again it deletes what is left, and says so when nothing is. If the run cannot be stopped,
# everything is deleted all the same: not to pay comes first.
#
# options: --settings FILE (launch/settings.env), --set KEY=VALUE, --dry-run, --now, --help

set -euo pipefail
# shellcheck source=launch/settings.sh
source "$(dirname "$0")/settings.sh"
# shellcheck source=launch/slices.sh
source "$(dirname "$0")/slices.sh"

main() {
    local failed=0
    begin "$@"
    only --now
    BILL=yes
    given --now || stop_run
    delete_slices everywhere || failed=1
    [[ $DRY_RUN == no ]] || return 0
    forget_run
    BILL=no # it is said aloud from here on
    if ((failed)); then
        bill aloud
        refuse "not all of $NAME could be deleted; what gcloud said stands above, and calling this again goes on"
    fi
    if ((DELETED == 0)); then say "there was no $NAME, in any zone"; else say "$NAME is deleted"; fi
    bill aloud
    say "$ROOT stays, and its storage is paid for; remove it with: gcloud storage rm --recursive $ROOT"
}

stop_run() {
    PATIENT=yes
    look_at_run running
    PATIENT=no
    [[ $SEEN == running || $SEEN == starting ]] || return 0
    CALLED=yes "$HERE/run.sh" "${COMMON[@]}" --stop || say "the run could not be stopped; deleting all the same"
}

# A run that nobody stopped is broken off: whoever goes on with it begins on new hosts, with their code.
forget_run() {
    PATIENT=yes
    look_at_run absent
    PATIENT=no
    [[ $SEEN != running && $SEEN != starting ]] || write_object "$ROOT/state/$RUN" interrupted || true
}

main "$@"
