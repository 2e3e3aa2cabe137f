#!/usr/bin/env bash
# A gcloud that records what it is asked and plays a small Google Cloud in the folder $WORLD.
#
# calls       every call: arguments ended by NUL, the call by a line feed and NUL
# fail        lines REGEX|||MESSAGE: a call that matches says MESSAGE and fails
# queued/X    a queued resource: its state, one a line; each look at it moves on to the next line
# group/X     a managed instance group: the states of its hosts, separated by blanks, in the same way
# groups.size the size of each group; template/X, policy/X: the rest of the managed way
# on_create   what a new queued resource or group begins as
# bucket/X    the bucket X, as a folder; hosts/N: the home of host N, where ssh runs its command
# no/X        things of that kind that the zone does not have

set -euo pipefail
# Hosts write side by side, and bash writes line by line.
(
    flock 8
    printf '%s\0' "$@" $'\n' >>"$WORLD/calls"
) 8>>"$WORLD/calls.lock"

lost() { echo "ERROR: (gcloud) $1" >&2 && exit 1; }

if [[ -e $WORLD/fail ]]; then
    while IFS= read -r line; do
        [[ ! $* =~ ${line%%|||*} ]] || lost "${line#*|||}"
    done <"$WORLD/fail"
fi

option() { # the value of --$1=
    local word
    for word in "${WORDS[@]}"; do [[ $word != "--$1="* ]] || echo "${word#*=}"; done
}

step() { # prints the first line of a file, and drops it while there is another
    head -n 1 "$1"
    if (($(wc -l <"$1") > 1)); then sed -i 1d "$1"; fi
}

resource() { # kind verb name
    local file=$WORLD/$1/$3
    mkdir -p "$WORLD/$1"
    case $2 in
    create)
        [[ ! -e $file ]] || lost "ALREADY_EXISTS: $3"
        case $1 in
        queued | group) cat "$WORLD/on_create" >"$file" ;;
        template) option machine-type >"$file" ;;
        *) echo "$3" >"$file" ;;
        esac
        [[ $1 != queued ]] || option accelerator-type >"$file.type"
        [[ $1 != group ]] || option size >"$file.size"
        ;;
    delete)
        [[ -e $file ]] || lost "NOT_FOUND: $3"
        rm -f "$file" "$file".*
        ;;
    describe)
        [[ -e $file ]] || lost "NOT_FOUND: Resource '$3' was not found"
        case $1:$(option format) in
        queued:*state.state*) printf '%s\t%s\n' "$(step "$file")" "$(cat "$file.type" 2>/dev/null)" ;;
        queued:yaml*) echo "state: $(head -n 1 "$file")" ;;
        group:*targetSize*) cat "$file.size" ;;
        template:*machineType*) cat "$file" ;;
        *) echo "$3" ;;
        esac
        ;;
    esac
}

list_instances() {
    local file=$WORLD/group/$1 number
    [[ -e $file ]] || lost "NOT_FOUND: $1"
    if [[ $(option format) == *instanceStatus* ]]; then
        step "$file" | tr ' ' '\n'
    else
        for ((number = $(head -n 1 "$file" | wc -w) - 1; number >= 0; number--)); do echo "$1-h$number"; done
    fi
}

ssh_to() { # host
    [[ -d $WORLD/hosts ]] || return 0
    local home=$WORLD/hosts/$1
    [[ -d $home ]] || lost "host $1 cannot be reached"
    cd "$home"
    HOME=$home exec bash -c "$(option command)"
}

place() { # a URL or a path, as a path here
    if [[ $1 == gs://* ]]; then
        local rest=${1#gs://}
        [[ -d $WORLD/bucket/${rest%%/*} ]] || lost "gs://${rest%%/*} not found: 404."
        echo "$WORLD/bucket/${rest%/}"
    else
        echo "$1"
    fi
}

storage() { # verb from to
    local from to without=()
    case $1 in
    cp)
        to=$(place "${!#}")
        if [[ ${!#} == */ ]]; then
            mkdir -p "$to"
            for from in "${@:2:$#-2}"; do
                from=$(place "$from")
                compgen -G "$from" >"$WORLD/matched.$$" || lost "The following URLs matched no objects or files"
                while read -r from; do cp "$from" "$to/"; done <"$WORLD/matched.$$"
                rm "$WORLD/matched.$$"
            done
            return
        fi
        mkdir -p "$(dirname "$to")"
        if [[ $2 == - ]]; then cat >"$to"; else cp "$2" "$to"; fi
        ;;
    cat)
        from=$(place "$2")
        [[ -f $from ]] || lost "The following URLs matched no objects or files: $2"
        cat "$from"
        ;;
    ls)
        from=$(place "$2")
        [[ -d $from ]] || lost "One or more URLs matched no objects."
        ls "$from"
        ;;
    rsync)
        from=$(realpath "$(place "$2")") to=$(realpath -m "$(place "$3")")
        [[ -z $(option exclude) ]] || without=(-not -regex "[.]/$(option exclude | tr -d '^')")
        (cd "$from" && find . -type d "${without[@]}" -printf '%P\n') | while read -r path; do mkdir -p "$to/$path"; done
        # An object is there whole or not at all, whenever a host is lost.
        (cd "$from" && find . -type f "${without[@]}" -printf '%P\n') | while read -r path; do
            cp -a "$from/$path" "$to/$path.part"
            mv "$to/$path.part" "$to/$path"
        done
        if [[ " ${WORDS[*]} " == *" --delete-unmatched-destination-objects "* ]]; then
            (cd "$to" && find . -mindepth 1 -printf '%P\n') | while read -r path; do
                [[ -e $from/$path ]] || rm -rf "${to:?}/$path"
            done
        fi
        ;;
    rm) rm -rf "$(place "$2")" ;;
    esac
}

WORDS=("$@") PLAIN=()
for word in "$@"; do [[ $word == --* ]] || PLAIN+=("$word"); done
case "${PLAIN[*]}" in
"compute tpus queued-resources ssh "*) ssh_to "$(($(option node) * ${HOSTS_OF_A_SLICE:-1} + $(option worker)))" ;;
"compute ssh "*) [[ ${PLAIN[2]} =~ -([0-9]+)-h([0-9]+)$ ]] && ssh_to "$((BASH_REMATCH[1] * ${HOSTS_OF_A_SLICE:-1} + BASH_REMATCH[2]))" ;;
"compute tpus queued-resources list") ls "$WORLD/queued" 2>/dev/null || true ;;
"compute tpus queued-resources "*) resource queued "${PLAIN[3]}" "${PLAIN[4]}" ;;
"compute instance-templates "*) resource template "${PLAIN[2]}" "${PLAIN[3]}" ;;
"compute resource-policies create "*) resource policy create "${PLAIN[4]}" ;;
"compute resource-policies "*) resource policy "${PLAIN[2]}" "${PLAIN[3]}" ;;
"compute instance-groups managed list") for file in "$WORLD"/group/*-[0-9]; do [[ ! -e $file ]] || basename "$file"; done ;;
"compute instance-groups managed list-instances "*) list_instances "${PLAIN[4]}" ;;
"compute instance-groups managed "*) resource group "${PLAIN[3]}" "${PLAIN[4]}" ;;
"compute tpus accelerator-types "* | "compute machine-types "*)
    kind=${PLAIN[${#PLAIN[@]} - 1]}
    [[ ! -e $WORLD/no/$kind ]] || lost "NOT_FOUND: $kind"
    echo "$kind"
    ;;
"storage buckets create "*) mkdir "$WORLD/bucket/${PLAIN[3]#gs://}" ;;
"storage buckets "* | "auth "* | "projects "* | "billing "* | "services "* | "iam "* | "compute instances list") ;;
"storage "*) storage "${PLAIN[@]:1}" ;;
*) lost "the fake knows no: $*" ;;
esac
