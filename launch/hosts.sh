# shellcheck shell=bash
# shellcheck disable=SC2034 # TRIES and PATIENT are for what is called from here
# Commands on the hosts of the slices: how each is reached, and what is said there.
#
# A host keeps everything in the folder notepad of its home: code (this project), venv, runs, logs.
# What is done there stands in host_setup.sh and host_run.sh, which travel with the code; here are
# only the lines that call them. Above: the scripts. Beside: slices.sh. Below: gcloud.sh.

# Sets INSTALL to the line that brings code from the bucket and installs it, and WORK to the one
# that calls host_run.sh with the run of the settings; a verb and the flags follow it.
FIRST="" # the address of the first host, where hosts have to be told
host_lines() {
    # One installation at a time: two who install side by side would take turns in one folder.
    INSTALL="mkdir -p notepad && exec 8>notepad/setup.lock && flock 8"
    INSTALL+=" && rm -rf notepad/code.new && mkdir notepad/code.new"
    INSTALL+=" && gcloud storage cat $ROOT/code.tar.gz | tar -xz -C notepad/code.new"
    INSTALL+=" && bash notepad/code.new/launch/host_setup.sh"
    WORK="ROOT=$ROOT RUN=$RUN COMMAND=$COMMAND CONFIG=$CONFIG SYNC_SECONDS=$SYNC_SECONDS"
    WORK+=" HOSTS=$HOSTS ALL_HOSTS=$ALL_HOSTS"
    ((READERS == 0)) || WORK+=" READERS=$READERS"
    [[ -z $FIRST ]] || WORK+=" FIRST=$FIRST"
    # Whoever installs takes the code away for a moment: not while a run is begun here, nor the other
    # way round. What is left running behind does not hold this lock.
    WORK+=" flock --shared --close notepad/setup.lock bash notepad/code/launch/host_run.sh"
}

# Runs the shell command $3 on every host at once, with HOST_INDEX=0, 1, ... before it; it may take $2
# seconds, and a host that does not answer is asked $1 times in all. What a host says is shown, behind
# its number where there are several. Returns 1 if it failed on any.
on_every_host() {
    local host first failed=0 pids=() at_once=32 TRIES=$1
    here
    scratch
    [[ $WAY == queued ]] || patiently find_instances || return 1
    for ((first = 0; first < ALL_HOSTS; first += at_once)); do
        pids=()
        for ((host = first; host < ALL_HOSTS && host < first + at_once; host++)); do
            ask_host "$host" "$2" "$3" &
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
    # ssh itself notices within two minutes that nobody is there.
    REACH+=("${tunnel[@]}" "--ssh-flag=-o ConnectTimeout=30 -o ServerAliveInterval=30 -o ServerAliveCountMax=4" --quiet "--command=HOST_INDEX=$1 $2")
}

# Runs the shell command $3 on host $1, for at most $2 seconds, and writes what the host says to
# SCRATCH/host-N. Asks again only where the host did not answer: what it answers stands, good or bad.
ask_host() {
    local REACH
    reach "$1" "$3; echo answered \$?"
    if [[ $DRY_RUN == yes ]]; then
        show "${REACH[@]}" >"$SCRATCH/host-$1"
        return
    fi
    patiently answers "$1" "$2" || true
    return "$(sed -n 's/^answered \([0-9]*\)$/\1/p' "$SCRATCH/answer-$1" | tail -n 1 | grep . || echo 255)"
}

answers() {
    within "$2" "${REACH[@]}" </dev/null >"$SCRATCH/answer-$1" 2>&1 || (($? != 124)) ||
        echo "no answer within $2 s" >>"$SCRATCH/answer-$1"
    grep -v '^answered [0-9]*$' "$SCRATCH/answer-$1" >"$SCRATCH/host-$1" || true
    grep -q '^answered [0-9]*$' "$SCRATCH/answer-$1"
}

# Runs a shell command on a host for as long as it takes; what the host says is shown.
on_host() {
    local REACH
    reach "$1" "$2"
    if [[ $DRY_RUN == yes ]]; then show "${REACH[@]}"; else "${REACH[@]}" </dev/null; fi
}

# Sets INSTANCES to the names of all hosts, slice after slice. A dry run does not know them.
find_instances() {
    local slice names PATIENT=yes
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
