#!/usr/bin/env bash
# Runs on a TPU host, out of notepad/code.new: puts the code in its place and installs it.
#
# launch/setup.sh calls it on every host, launch/gke.sh in every container. The virtual environment
# stays from one call to the next and is filled anew when a list of requirements changed. A host
# whose system has no Python 3.11 gets one of its own. EXTRAS: of the project, beside tpu. Beside: host_run.sh.

set -euo pipefail
cd "$HOME/notepad"

main() {
    if ! flock --nonblock run.lock true; then
        echo "a run is under way here; the code stays as it is"
        rm -rf code.new
        return
    fi
    mkdir -p runs logs
    rm -rf code.old
    [[ ! -e code ]] || mv code code.old
    mv code.new code
    rm -rf code.old
    ln -s ../runs code/runs
    local wanted
    wanted=$(cat code/pyproject.toml code/constraints.txt | sha256sum)
    if [[ $(cat venv/installed 2>/dev/null) != "$wanted" ]]; then
        install
        echo "$wanted" >venv/installed
    fi
    venv/bin/notepad-jax --version
}

install() {
    rm -rf venv
    make_venv
    again 3 venv/bin/python -m pip install --quiet --constraint code/constraints.txt \
        --editable "code[tpu${EXTRAS:+,$EXTRAS}]"
    # Without its dependencies, which would bring TensorFlow; as in the Makefile.
    again 3 venv/bin/python -m pip install --quiet --no-deps \
        "$(sed -n 's/^\(google-jetstream==[0-9.]*\).*/\1/p' code/constraints.txt)"
}

make_venv() {
    local python
    for python in python3.13 python3.12 python3.11 python3; do
        if new_enough "$python" && "$python" -m venv venv; then return; fi
    done
    if command -v apt-get >/dev/null; then
        # At first boot the system updates itself, and holds apt's locks for minutes.
        again 40 as_root apt-get -o DPkg::Lock::Timeout=120 update -qq
        again 40 as_root apt-get -o DPkg::Lock::Timeout=120 install -y -qq python3-venv
        if new_enough python3 && python3 -m venv venv; then return; fi
    fi
    echo "this system has no Python 3.11; taking one through uv"
    rm -rf venv uv
    python3 -m venv uv
    uv/bin/python -m pip install --quiet uv
    uv/bin/uv venv --quiet --python 3.11 --seed venv
}

# Runs a command up to $1 times, PAUSE seconds apart, until it succeeds.
again() {
    local tries=$1
    shift
    while ! "$@"; do
        ((--tries)) || return 1
        echo "'$*' failed; once more in ${PAUSE:-15} s"
        sleep "${PAUSE:-15}"
    done
}

new_enough() {
    command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'
}

as_root() {
    if ((UID == 0)); then "$@"; else sudo "$@"; fi
}

main
