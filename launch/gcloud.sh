# shellcheck shell=bash
# shellcheck disable=SC2034,SC2153 # what is set here is read by the scripts, and the other way round
# How the launch scripts speak: to people, and to gcloud.
#
# Every command goes through `act` (it changes something) or `look` (it reads). With --dry-run both
# print the exact command, quoted so that it can be pasted, and run nothing. Without it each command
# that changes something is shown on standard error before it runs. Above: slices.sh, the scripts.

say() { printf '%s: %s\n' "$SCRIPT" "$*" >&2; }
refuse() { say "$*" && exit 1; }
wrong() { say "$*" && exit 2; } # the command line is wrong

# Prints a command as a shell reads it.
show() {
    local word line=()
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./,:=@%+~-]+$ ]]; then line+=("$word"); else line+=("${word@Q}"); fi
    done
    echo "${line[*]}"
}

# A folder for what commands say; `leave` removes it.
scratch() {
    [[ -n ${SCRATCH:-} ]] || SCRATCH=$(mktemp -d)
}

# Runs a command for at most $1 seconds. What hangs, as ssh to a slice that vanished, ends with 124.
within() { timeout --kill-after=10 "$@"; }

# Runs a command up to TRIES times, POLL_SECONDS apart, until it succeeds.
patiently() {
    local try
    for ((try = 1; try <= TRIES; try++)); do
        if "$@"; then return; fi
        ((try == TRIES)) || sleep "$POLL_SECONDS"
    done
    return 1
}

# Runs a command that creates or deletes something; the script ends where it fails, unless somebody
# else did the same meanwhile.
act() {
    local code=0 same=ALREADY_EXISTS'|already exists'
    if [[ $DRY_RUN == yes ]]; then
        show "$@"
        return
    fi
    echo "\$ $(show "$@")" >&2
    scratch
    (within "$((15 * ANSWER_SECONDS))" "$@") 2>"$SCRATCH/problem" || code=$?
    cat "$SCRATCH/problem" >&2
    ((code)) || return 0
    [[ " $* " != *" delete "* ]] || same=NOT_FOUND'|not found'
    ! grep -Eqi "$same" "$SCRATCH/problem" || return 0
    refuse "the last command failed; mend that and call this again: it goes on from there"
}

# Sets SEEN to what a command prints, or to "absent" where it looks for something that is not
# there. A dry run takes $1 for the answer. If nobody answered, SEEN is "unknown" while PATIENT is
# yes, and else the script ends.
PATIENT=no
look() {
    local assumed=$1
    shift
    if [[ $DRY_RUN == yes ]]; then
        show "$@"
        SEEN=$assumed
        return
    fi
    scratch
    local code=0
    SEEN=$(within "$ANSWER_SECONDS" "$@" 2>"$SCRATCH/problem") || code=$?
    ((code)) || return 0
    ((code != 124)) || echo "no answer within $ANSWER_SECONDS s" >>"$SCRATCH/problem"
    if grep -Eqi 'NOT_FOUND|not found|matched no objects' "$SCRATCH/problem"; then
        SEEN=absent
    elif [[ $PATIENT == yes ]]; then
        SEEN=unknown
    else
        refuse "'$(show "$@")' failed: $(head -c 1000 "$SCRATCH/problem" | tr '\n' ' ')"
    fi
}

# Writes the text $2 as the object $1.
write_object() {
    if [[ $DRY_RUN == yes ]]; then
        echo "echo ${2@Q} | $(show gcloud storage cp - "$1" --quiet)"
        return
    fi
    scratch
    echo "$2" | within "$ANSWER_SECONDS" gcloud storage cp - "$1" --quiet >"$SCRATCH/problem" 2>&1
}

# Refuses a bucket that cannot be written, before anything that costs money exists.
check_bucket() {
    write_object "$ROOT/writable" "yes" && return
    local bucket=${BUCKET#gs://}
    refuse "BUCKET=$BUCKET cannot be written; make it: gcloud storage buckets create gs://${bucket%%/*} --project=$PROJECT --location=$REGION --uniform-bucket-level-access, or see who you are: gcloud auth list (gcloud said: $(head -c 500 "$SCRATCH/problem" | tr '\n' ' '))"
}

# Sets SEEN to how the run stands, as its first host last wrote it: running, done, failed CODE,
# stopped (somebody asked), interrupted (the host went down), starting, or absent.
look_at_run() { look "$1" gcloud storage cat "$ROOT/state/$RUN"; }
