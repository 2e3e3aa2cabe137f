#!/usr/bin/env bash
# Shows what the hosts of the run wrote: what is in the bucket, also after the TPU is gone.
#
#   launch/logs.sh                     the last 100 lines of the first host
#   launch/logs.sh --host=3 --lines=1000
#   launch/logs.sh --follow            live, from the host itself; Ctrl-C leaves the run alone
#
# The bucket is SYNC_SECONDS old at most. Metrics, checkpoints and the archive lie beside the logs:
# gcloud storage rsync --recursive BUCKET/NAME/runs/RUN runs/RUN brings them here.
#
# options: --settings FILE (launch/settings.env), --set KEY=VALUE, --dry-run, --help

set -euo pipefail
# shellcheck source=launch/settings.sh
source "$(dirname "$0")/settings.sh"
# shellcheck source=launch/slices.sh
source "$(dirname "$0")/slices.sh"
# shellcheck source=launch/hosts.sh
source "$(dirname "$0")/hosts.sh"

main() {
    local option host=0 lines=100 follow=no
    begin "$@"
    for option in "${REST[@]}"; do
        case $option in
        --follow) follow=yes ;;
        --host=*) host=${option#*=} ;;
        --lines=*) lines=${option#*=} ;;
        *) wrong "there is no option ${option@Q}; see $SCRIPT --help" ;;
        esac
    done
    if [[ ! $host =~ ^(0|[1-9][0-9]{0,4})$ ]] || ((host >= ALL_HOSTS)); then
        wrong "--host=$host: there are hosts 0 to $((ALL_HOSTS - 1))"
    fi
    [[ $lines =~ ^[1-9][0-9]{0,8}$ ]] || wrong "--lines=$lines is no number of lines"
    if [[ $follow == yes ]]; then
        here
        BILL=yes # whoever looks at the host sees that it is there
        [[ $WAY == queued ]] || find_instances || exit 1
        on_host "$host" "tail -n $lines -F notepad/logs/$RUN.log"
        return
    fi
    look "" gcloud storage cat "$ROOT/logs/$RUN/host-$host.log"
    [[ $DRY_RUN == no ]] || return 0
    [[ $SEEN != absent ]] || refuse "there is no log of run $RUN, host $host, in $ROOT/logs yet; launch/status.sh says how the run stands, --follow asks the host"
    tail -n "$lines" <<<"$SEEN"
}

main "$@"
