#!/usr/bin/env bash
# Brings the project to every host of the TPU and installs it. launch/run.sh does this by itself.
#
#   launch/setup.sh --dry-run
#   launch/setup.sh                 this checkout's last commit goes to the bucket, and from there
#                                   to all hosts
#   launch/setup.sh --keep-code     the hosts take what is in the bucket already
#   launch/setup.sh --code-only     the bucket alone; what launch/gke.sh needs
#
# What is not committed does not travel. Called again it installs only what changed; on a host with
# a run under way the code stays as it is.
#
# options: --settings FILE (launch/settings.env), --set KEY=VALUE, --dry-run, --keep-code,
# --code-only, --help

set -euo pipefail
# shellcheck source=launch/settings.sh
source "$(dirname "$0")/settings.sh"
# shellcheck source=launch/slices.sh
source "$(dirname "$0")/slices.sh"
# shellcheck source=launch/hosts.sh
source "$(dirname "$0")/hosts.sh"

main() {
    begin "$@"
    only --keep-code --code-only
    given --code-only || BILL=yes
    given --keep-code || upload
    ! given --code-only || return 0
    host_lines
    say "installing on $ALL_HOSTS host(s); the first time takes some minutes"
    on_every_host "$TRIES" "$((15 * ANSWER_SECONDS))" "bash -c ${INSTALL@Q}" ||
        refuse "the project is not on all hosts; what they said stands above, and calling this again goes on"
}

upload() {
    local archive=(git -C "$HERE/.." archive --format=tar.gz HEAD)
    local copy=(gcloud storage cp - "$ROOT/code.tar.gz" --quiet)
    if [[ $DRY_RUN == yes ]]; then
        echo "$(show "${archive[@]}") | $(show "${copy[@]}")"
        return
    fi
    git -C "$HERE/.." rev-parse --verify --quiet HEAD >/dev/null ||
        refuse "this is no git checkout, and what travels to the hosts is a commit; clone the project with git"
    [[ -z $(git -C "$HERE/.." status --porcelain) ]] || say "there are changes that are not committed; they stay here"
    scratch
    patiently send ||
        refuse "the code could not be copied to $ROOT: $(head -c 500 "$SCRATCH/problem" | tr '\n' ' ')"
}

send() { "${archive[@]}" | within "$((15 * ANSWER_SECONDS))" "${copy[@]}" >"$SCRATCH/problem" 2>&1; }

main "$@"
