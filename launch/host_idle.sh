#!/usr/bin/env bash
# Runs on a TPU host from its boot on, as root: ends the TPU when nobody has used it for IDLE_MINUTES.
#
# The host's startup script, which create.sh gives it, so it is there before the first ssh and needs
# nobody who watches. Used means: an installation or a run holds its lock, or somebody is logged in. A
# queued resource is deleted, if the host's service account may (roles/tpu.admin); otherwise, and with
# WAY=group, the host is switched off, and a host of Compute Engine that is off costs its disk alone.
# Beside: host_run.sh and setup.lock of hosts.sh, whose locks these are.

set -uo pipefail
shopt -s nullglob

main() {
    local limit idle=0
    limit=$(attribute notepad-idle-minutes)
    [[ $limit =~ ^[1-9][0-9]*$ ]] || exit 0
    while ((idle < limit)); do
        sleep 60
        if used; then idle=0; else idle=$((idle + 1)); fi
    done
    echo "nobody has used this host for $limit minutes; it is given back"
    delete || poweroff
}

attribute() {
    curl --silent --fail --max-time 5 --header "Metadata-Flavor: Google" \
        "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1" || true
}

used() {
    local lock
    for lock in "${HOMES:-/home}"/*/notepad/{run,setup}.lock /root/notepad/{run,setup}.lock; do
        [[ ! -e $lock ]] || flock --nonblock "$lock" true || return 0
    done
    who | grep -q .
}

delete() {
    local project zone name
    IFS=/ read -r project zone name <<<"$(attribute notepad-queued)"
    [[ -n $name ]] && gcloud compute tpus queued-resources delete "$name" "--project=$project" "--zone=$zone" --force --quiet --async
}

main
