#!/usr/bin/env bash
# Says how the TPU and the run of the settings stand. Changes nothing.
#
#   launch/status.sh
#   launch/status.sh --set RUN=second
#
# What is paid for is said of all zones, and of other launches of the project, too: whatever carries the
# label `notepad` that these scripts give.
#
# The TPU is absent, coming (in the queue, or being made), ready (paid for), going (being deleted),
# partial (launch/create.sh makes the rest) or dead (taken away or failed; launch/run.sh or
# launch/create.sh makes it again). The run is absent, starting, running, done, failed, stopped or
# interrupted (launch/run.sh goes on with it).
#
# options: --settings FILE (launch/settings.env), --set KEY=VALUE, --dry-run, --help

set -euo pipefail
# shellcheck source=launch/settings.sh
source "$(dirname "$0")/settings.sh"
# shellcheck source=launch/slices.sh
source "$(dirname "$0")/slices.sh"

main() {
    local slice
    begin "$@"
    only --
    BILL=yes # whatever is refused on the way, as a TPU of other settings
    look_at_slices ready
    [[ $DRY_RUN == yes ]] || echo "TPU $NAME ($TPU x $SLICES, $CAPACITY, $ZONE): $STANDS ($DETAIL)"
    if [[ $DRY_RUN == yes || $STANDS != absent ]]; then
        if [[ $WAY == queued ]]; then
            show_all "${QUEUED[@]}" describe "$NAME" "${AT[@]}" "--format=yaml(state,createTime)"
        else
            for ((slice = 0; slice < SLICES; slice++)); do
                show_all "${GROUPS_OF[@]}" list-instances "$NAME-$slice" "${AT[@]}"
            done
        fi
    fi
    look_at_run running
    [[ $DRY_RUN == yes ]] || echo "run $RUN: $SEEN"
    look "" gcloud storage cat "$ROOT/runs/$RUN/metrics.jsonl"
    [[ $DRY_RUN == yes || $SEEN == absent ]] || echo "last step in the bucket: $(tail -n 1 <<<"$SEEN")"
    show_paid
}

# What is there in all zones, and what is paid for.
show_paid() {
    local line way name zone state kind
    BILL=no
    look_everywhere
    [[ $DRY_RUN == no ]] || return 0
    for line in "${FOUND[@]}"; do
        IFS=, read -r way name zone state kind _ <<<"$line"
        echo "$zone: $way $name ($kind) is $state"
    done
    add_up ""
    ((CHIPS_PAID == 0)) || echo "other launches of $PROJECT are paid for: $(hourly) ($WHERE)"
    bill aloud 2>&1
}

show_all() {
    look "" "$@"
    [[ $DRY_RUN == yes ]] || echo "$SEEN"
}

main "$@"
