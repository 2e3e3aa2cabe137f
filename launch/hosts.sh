# shellcheck shell=bash
# Commands on the hosts of the slices: how each is reached, and what is said there.
#
# A host keeps everything in the folder notepad of its home: code (this project), venv, runs, logs.
# What is done there stands in host_setup.sh and host_run.sh, which travel with the code; here are
# only the lines that call them. Above: the scripts. Beside: slices.sh. Below: gcloud.sh.

# Sets INSTALL to the line that brings code from the bucket and installs it, and WORK to the one
# that calls host_run.sh with the run of the settings; a verb and the flags follow it.
host_lines() {
    INSTALL="rm -rf notepad/code.new && mkdir -p notepad/code.new"
    INSTALL+=" && gcloud storage cat $ROOT/code.tar.gz | tar -xz -C notepad/code.new"
    INSTALL+=" && bash notepad/code.new/launch/host_setup.sh"
    WORK="ROOT=$ROOT RUN=$RUN COMMAND=$COMMAND CONFIG=$CONFIG SYNC_SECONDS=$SYNC_SECONDS"
    WORK+=" HOSTS=$HOSTS ALL_HOSTS=$ALL_HOSTS"
    WORK+=" bash notepad/code/launch/host_run.sh"
}

# Runs a shell command on every host at once, with HOST_INDEX=0, 1, ... before it. What a host says
# is shown, behind its number where there are several. Returns 1 if it failed on any.
on_every_host() {
    local host first failed=0 pids=() at_once=32
    here
    scratch
    [[ $WAY == queued ]] || find_instances || return 1
    for ((first = 0; first < ALL_HOSTS; first += at_once)); do
        pids=()
        for ((host = first; host < ALL_HOSTS && host < first + at_once; host++)); do
            on_host "$host" "$1" >"$SCRATCH/host-$host" 2>&1 &
            pids+=($!)
        done
        for ((host = first; host < first + ${#pids[@]}; host++)); do
            wait "${pids[host - first]}" || failed=$((failed + 1))
            if ((ALL_HOSTS == 1)) || [[ $DRY_RUN == yes ]]; then
                cat "$SCRATCH/host-$host"
            else
                sed "s/^/host $host: /" "$SCRATCH/host-$host"
            fi
        done
    done
    ((failed == 0)) || say "$failed of $ALL_HOSTS hosts failed"
    ((failed == 0))
}

# The command line that reaches host $1, with $2 for what it does there, as the array REACH.
reach() {
    local tunnel=()
    [[ $IAP == no ]] || tunnel=(--tunnel-through-iap)
    if [[ $WAY == queued ]]; then
        REACH=("${QUEUED[@]}" ssh "$NAME" "${AT[@]}" "--node=$(($1 / HOSTS))" "--worker=$(($1 % HOSTS))")
    else
        REACH=(gcloud compute ssh "${INSTANCES[$1]}" "${AT[@]}")
    fi
    REACH+=("${tunnel[@]}" --quiet "--command=HOST_INDEX=$1 $2")
}

on_host() {
    local REACH
    reach "$1" "$2"
    if [[ $DRY_RUN == yes ]]; then show "${REACH[@]}"; else "${REACH[@]}" </dev/null; fi
}

# Sets INSTANCES to the names of all hosts, slice after slice. A dry run does not know them.
find_instances() {
    local slice names
    INSTANCES=()
    for ((slice = 0; slice < SLICES; slice++)); do
        look "" "${GROUPS_OF[@]}" list-instances "$NAME-$slice" "${AT[@]}" "--format=value(instance.basename())"
        if [[ $DRY_RUN == yes ]]; then
            mapfile -t names < <(seq -f "HOST-%g-OF-$NAME-$slice" 0 $((HOSTS - 1)))
        else
            mapfile -t names < <(sort <<<"$SEEN")
        fi
        if ((${#names[@]} != HOSTS)) || [[ -z ${names[0]} || $SEEN == absent || $SEEN == unknown ]]; then
            say "$NAME-$slice has not its $HOSTS host(s) yet; see launch/status.sh"
            return 1
        fi
        INSTANCES+=("${names[@]}")
    done
}
