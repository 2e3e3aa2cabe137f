#!/usr/bin/env bash
# A gcloud that records what it is asked and plays a small Google Cloud in the folder $WORLD.
#
# calls       every call: arguments ended by NUL, the call by a line feed and NUL
# fail        lines REGEX|||MESSAGE: a call that matches says MESSAGE and fails
# drops       lines REGEX|||N: the first N calls that match are dropped, as ssh drops connections
# hangs       lines REGEX: a call that matches never answers
# race/X      somebody else makes X at the moment that it is asked for
# queued/X    a queued resource: its state, one a line; each look at it moves on to the next line
# group/X     a managed instance group: the states of its hosts, separated by blanks, in the same way
# groups.size the size of each group; template/X, policy/X: the rest of the managed way
# elsewhere/Z the same for zone Z, if it is there; everything else is in us-east5-a
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

if [[ -e $WORLD/hangs ]]; then
    while IFS= read -r line; do
        [[ ! $* =~ $line ]] || sleep 1000
    done <"$WORLD/hangs"
fi

dropped() { # whether this call is one of those that are dropped; counts down
    local line left found=1 lines=()
    exec 7>>"$WORLD/drops.lock"
    flock 7
    while IFS= read -r line; do
        left=${line#*|||}
        if ((found)) && ((left > 0)) && [[ $* =~ ${line%%|||*} ]]; then found=0 line=${line%%|||*}'|||'$((left - 1)); fi
        lines+=("$line")
    done <"$WORLD/drops"
    printf '%s\n' "${lines[@]}" >"$WORLD/drops"
    exec 7>&-
    return "$found"
}

if [[ -e $WORLD/drops ]] && dropped "$@"; then
    echo "kex_exchange_identification: Connection reset by peer" >&2
    exit 255
fi

option() { # the value of --$1=
    local word
    for word in "${WORDS[@]}"; do [[ $word != "--$1="* ]] || echo "${word#*=}"; done
}

alone() { # from here on no other call changes what there is: Google's own changes are whole, too
    exec 6>>"$WORLD/resources.lock"
    flock 6
}

step() { # prints the first line of a file, and drops it while there is another
    head -n 1 "$1"
    if (($(wc -l <"$1") > 1)); then sed -i 1d "$1"; fi
}

at() { # the folder of the zone that is asked for
    local zone
    zone=$(option zone)
    if [[ -n $zone && -d $WORLD/elsewhere/$zone ]]; then echo "$WORLD/elsewhere/$zone"; else echo "$WORLD"; fi
}

everywhere() { # all files DIR/*, as "file name zone"
    local file
    for file in "$WORLD/$1"/* "$WORLD"/elsewhere/*/"$1"/*; do
        [[ -e $file && $file != *.type && $file != *.size ]] || continue
        [[ $file =~ /elsewhere/([a-z0-9-]+)/ ]] || BASH_REMATCH=(x us-east5-a)
        echo "$file ${file##*/} ${BASH_REMATCH[1]}"
    done
}

list_queued() {
    local file name zone
    everywhere queued | while read -r file name zone; do
        echo "$name,$zone,$(head -n 1 "$file"),$(cat "$file.type"),${name%-elsewhere},"
    done
}

list_hosts() {
    local file name zone state number machine
    everywhere group | while read -r file name zone; do
        number=0 machine=$(cat "$(dirname "$file")/../template/${name%-*}" 2>/dev/null || echo ct6e-standard-4t)
        for state in $(head -n 1 "$file"); do
            echo "$name-h$number,$zone,$state,$machine,${name%-*}"
            number=$((number + 1))
        done
    done
}

list_groups() {
    local file name zone
    everywhere group | while read -r file name zone; do echo "$name,$zone"; done
}

resource() { # kind verb name
    local file
    alone
    file=$(at)/$1/$3
    mkdir -p "$(dirname "$file")"
    case $2 in
    create)
        [[ ! -e $WORLD/race/$3 ]] || mv "$WORLD/race/$3" "$file"
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
    local file number
    alone
    file=$(at)/group/$1
    [[ -e $file ]] || lost "NOT_FOUND: $1"
    if [[ $(option format) == *instanceStatus* ]]; then
        step "$file" | tr ' ' '\n'
    else
        for ((number = $(head -n 1 "$file" | wc -w) - 1; number >= 0; number--)); do echo "$1-h$number"; done
    fi
}

ssh_to() { # host
    [[ -d $WORLD/hosts ]] || { echo "answered 0" && return; }
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
        # An object is there whole or not at all, whoever else writes it or reads it.
        if [[ $2 == - ]]; then cat >"$to.$$"; else cp "$2" "$to.$$"; fi
        mv "$to.$$" "$to"
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
        [[ -z $(option exclude) ]] || without=(-regextype posix-extended -not -regex "[.]/$(option exclude | tr -d '^')")
        (cd "$from" && find . -type d "${without[@]}" -printf '%P\n') | while read -r path; do mkdir -p "$to/$path"; done
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

[[ $1 != alpha ]] || shift
WORDS=("$@") PLAIN=()
for word in "$@"; do [[ $word == --* ]] || PLAIN+=("$word"); done
case "${PLAIN[*]}" in
"compute tpus queued-resources ssh "*) ssh_to "$(($(option node) * ${HOSTS_OF_A_SLICE:-1} + $(option worker)))" ;;
"compute ssh "*) [[ ${PLAIN[2]} =~ -([0-9]+)-h([0-9]+)$ ]] && ssh_to "$((BASH_REMATCH[1] * ${HOSTS_OF_A_SLICE:-1} + BASH_REMATCH[2]))" ;;
"compute tpus queued-resources list") list_queued ;;
"compute instances list") list_hosts ;;
"compute tpus queued-resources "*) resource queued "${PLAIN[3]}" "${PLAIN[4]}" ;;
"compute instance-templates "*) resource template "${PLAIN[2]}" "${PLAIN[3]}" ;;
"compute resource-policies create "*) resource policy create "${PLAIN[4]}" ;;
"compute resource-policies "*) resource policy "${PLAIN[2]}" "${PLAIN[3]}" ;;
"compute instance-groups managed list") list_groups ;;
"compute instance-groups managed list-instances "*) list_instances "${PLAIN[4]}" ;;
"compute instance-groups managed "*) resource group "${PLAIN[3]}" "${PLAIN[4]}" ;;
"compute tpus accelerator-types "* | "compute machine-types "*)
    kind=${PLAIN[${#PLAIN[@]} - 1]}
    [[ ! -e $WORLD/no/$kind ]] || lost "NOT_FOUND: $kind"
    echo "$kind"
    ;;
"storage buckets create "*) mkdir "$WORLD/bucket/${PLAIN[3]#gs://}" ;;
"storage buckets "* | "auth "* | "projects "* | "billing "* | "services "* | "iam "*) ;;
"storage "*) storage "${PLAIN[@]:1}" ;;
*) lost "the fake knows no: $*" ;;
esac
