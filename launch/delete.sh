#!/usr/bin/env bash
# Deletes the TPU of the settings, so that it costs nothing any more. What is in the bucket stays.
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
    begin "$@"
    only --now
    given --now || stop_run
    delete_slices
    [[ $DRY_RUN == no ]] || return 0
    if ((DELETED == 0)); then
        say "there is no $NAME in $ZONE; nothing is paid for by the hour"
    else
        say "$NAME is deleted; nothing of it is paid for by the hour any more"
    fi
    say "$ROOT stays, and its storage is paid for; remove it with: gcloud storage rm --recursive $ROOT"
}

stop_run() {
    PATIENT=yes
    look_at_run running
    PATIENT=no
    [[ $SEEN == running || $SEEN == starting ]] || return 0
    "$HERE/run.sh" "${COMMON[@]}" --stop || say "the run could not be stopped; deleting all the same"
}

main "$@"
