# shellcheck shell=bash
# shellcheck disable=SC2034 # what is set here is read by the scripts
# The settings of all launch scripts: read from one file, checked before anything happens.
#
# Sourced by each script first, which then calls `begin "$@"`. The file is read and not executed;
# a key that does not exist, a value with odd characters and a topology that nobody sells are each
# one line that names the setting and the mend. Above: the scripts. Below: tpus.sh (what a
# generation and a topology mean) and gcloud.sh (how commands are shown and run).

if ((BASH_VERSINFO[0] < 5)); then
    echo "the launch scripts need bash 5, and this is ${BASH_VERSION}; on macOS: brew install bash" >&2
    exit 1
fi

LC_ALL=C # so that [a-z] means these 26 letters

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SCRIPT=launch/$(basename "$0")
# shellcheck source=launch/gcloud.sh
source "$HERE/gcloud.sh"
# shellcheck source=launch/tpus.sh
source "$HERE/tpus.sh"

# The defaults; settings.env.example explains each.
NAME="" PROJECT="" ZONE="" BUCKET=""
TPU=v5p:2x2x1 SLICES=1 WAY=group CAPACITY=on-demand RESERVATION="" VALID_FOR="" RUN_FOR=1d RECREATIONS=10
NETWORK="" SUBNETWORK="" SERVICE_ACCOUNT="" IAP=no PRICE=""
COMMAND=train CONFIG=quickstart RUN=first FLAGS="" SYNC_SECONDS=300 POLL_SECONDS=30
ANSWER_SECONDS=120 TRIES=10 IDLE_MINUTES=60
GKE_IMAGE=google/cloud-sdk:slim GKE_SERVICE_ACCOUNT=default
ROLLOUTS=0 TRAINER_IMAGE="" TRAINER="" TRAINER_POOL="" READERS=0 READERS_TPU=""
KEYS=(NAME PROJECT ZONE BUCKET TPU SLICES WAY CAPACITY RESERVATION VALID_FOR RUN_FOR RECREATIONS NETWORK
    SUBNETWORK SERVICE_ACCOUNT IAP PRICE COMMAND CONFIG RUN FLAGS SYNC_SECONDS POLL_SECONDS ANSWER_SECONDS
    TRIES IDLE_MINUTES GKE_IMAGE GKE_SERVICE_ACCOUNT ROLLOUTS TRAINER_IMAGE TRAINER TRAINER_POOL READERS
    READERS_TPU)

DRY_RUN=no
KUBERNETES=no # gke.sh asks nobody for slices
COMMON=() # the options of this call that every script has, for scripts that call scripts
REST=()   # the options that are left to the script

# Reads the command line and the settings, checks all of them, sets what follows from them.
begin() {
    local file=$HERE/settings.env changes=() change
    while (($#)); do
        case $1 in
        --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" && exit 0 ;;
        --dry-run) DRY_RUN=yes COMMON+=("$1") ;;
        --settings | --set)
            (($# > 1)) || wrong "$1 needs a value; see $SCRIPT --help"
            if [[ $1 == --set ]]; then changes+=("$2"); else file=$2; fi
            COMMON+=("$1" "$2")
            shift
            ;;
        *) REST+=("$1") ;;
        esac
        shift
    done
    [[ -r $file ]] || refuse "there are no settings in $file; copy launch/settings.env.example there and fill it in"
    read_file "$file"
    for change in "${changes[@]}"; do assign "$change" "--set"; done
    check_settings
    trap leave EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    [[ $DRY_RUN == yes ]] || command -v gcloud >/dev/null ||
        refuse "there is no gcloud on this machine; install the Google Cloud CLI, or see the commands with --dry-run"
    [[ $DRY_RUN == yes ]] || command -v timeout >/dev/null ||
        refuse "there is no 'timeout' on this machine, which ends what hangs; on macOS: brew install coreutils"
}

# Every way out, Ctrl-C too. A script that may leave something behind that costs money sets BILL, and
# then the last line says what; one that another script calls leaves that to it.
BILL=no
leave() {
    local code=$?
    trap - EXIT
    [[ $BILL == no || $DRY_RUN == yes || ${CALLED:-no} == yes ]] || bill quiet || true
    [[ -z ${SCRATCH:-} ]] || rm -rf "$SCRATCH"
    exit "$code"
}

read_file() {
    local line number=0
    while IFS= read -r line || [[ -n $line ]]; do
        number=$((number + 1))
        line=${line%$'\r'}
        [[ $line =~ ^[[:space:]]*(#|$) ]] || assign "$line" "$1, line $number"
    done <"$1"
}

# Takes KEY=VALUE from $2; a pair of quotes around the value is dropped.
assign() {
    local key=${1%%=*} value=${1#*=}
    [[ $1 == *=* ]] || refuse "$2: '$1' is not KEY=VALUE"
    [[ " ${KEYS[*]} " == *" $key "* ]] || refuse "$2: $key is no setting; there are: ${KEYS[*]}"
    value=${value%"${value##*[![:space:]]}"}
    if [[ $value =~ ^\"(.*)\"$ || $value =~ ^\'(.*)\'$ ]]; then value=${BASH_REMATCH[1]}; fi
    printf -v "$key" %s "$value"
}

# Refuses the setting $1 unless it matches $2 as a whole; $3 says what it should be.
must() {
    [[ ${!1} =~ ^($2)$ ]] || refuse "$1=${!1@Q} cannot be: $3"
}

may() { [[ -z ${!1} ]] || must "$@"; }

check_settings() {
    local key word
    for key in NAME PROJECT ZONE BUCKET; do
        [[ -n ${!key} ]] || refuse "$key is empty; set it in the settings file (see launch/settings.env.example)"
    done
    must NAME '[a-z]([a-z0-9-]{0,38}[a-z0-9])?' "small letters, digits and '-', at most 40, beginning with a letter"
    must PROJECT '([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]' "a project id, as my-project-123 (gcloud projects list)"
    must ZONE '[a-z]+-[a-z]+[0-9]+-[a-z0-9]+' "a zone, as us-east5-a"
    must BUCKET 'gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[A-Za-z0-9][A-Za-z0-9._-]*)*' "gs://bucket or gs://bucket/folder, without a '/' at the end"
    must SLICES '[1-9][0-9]{0,3}' "a whole number from 1 on"
    must WAY 'queued|group' "queued or group"
    must CAPACITY 'on-demand|spot|flex-start|reserved' "on-demand, spot, flex-start or reserved"
    may RESERVATION '[a-z]([a-z0-9-]{0,61}[a-z0-9])?' "the name of a reservation"
    may VALID_FOR '[1-9][0-9]*[smhd]' "a duration, as 30m, 6h or 2d"
    must RUN_FOR '[1-9][0-9]*[smhd]' "a duration, as 90m, 12h or 7d"
    must RECREATIONS '0|[1-9][0-9]{0,3}' "a whole number"
    may NETWORK '[a-z]([a-z0-9-]{0,61}[a-z0-9])?' "the name of a network"
    may SUBNETWORK '[a-z]([a-z0-9-]{0,61}[a-z0-9])?' "the name of a subnetwork"
    may SERVICE_ACCOUNT '[a-z0-9-]+@[a-z0-9.-]+' "an address, as trainer@my-project-123.iam.gserviceaccount.com"
    must IAP 'yes|no' "yes or no"
    may PRICE '[0-9]{1,4}([.][0-9]{1,4})?' "dollars for a chip and an hour, as 2.94"
    must COMMAND 'train|quickstart|eval' "train, quickstart or eval"
    must CONFIG '[A-Za-z0-9_][A-Za-z0-9_./-]*' "the name of a config, or its path from the project's folder"
    must RUN '[A-Za-z0-9][A-Za-z0-9._-]{0,99}' "letters, digits, '-', '_' and '.', beginning with a letter or digit"
    must SYNC_SECONDS '[1-9][0-9]{0,4}' "a whole number of seconds from 1 on"
    must POLL_SECONDS '[0-9]{1,5}([.][0-9])?' "a number of seconds"
    must ANSWER_SECONDS '[1-9][0-9]{0,4}' "a whole number of seconds from 1 on"
    must TRIES '[1-9][0-9]{0,3}' "a whole number from 1 on"
    must IDLE_MINUTES '0|[1-9][0-9]{0,4}' "a whole number of minutes, or 0"
    must GKE_IMAGE '[A-Za-z0-9][A-Za-z0-9._/:@-]*' "the name of a container image"
    must GKE_SERVICE_ACCOUNT '[a-z0-9]([a-z0-9.-]*[a-z0-9])?' "a Kubernetes service account"
    must ROLLOUTS '0|[1-9][0-9]{0,2}' "a whole number"
    may TRAINER_IMAGE '[A-Za-z0-9][A-Za-z0-9._/:@-]*' "the name of a container image"
    may TRAINER '[A-Za-z0-9_./][A-Za-z0-9_./,:=@%+ -]*' "a command line, with letters, digits, blanks and _./,:=@%+-"
    may TRAINER_POOL '[a-z]([a-z0-9-]{0,61}[a-z0-9])?' "the name of a node pool"
    must READERS '0|[1-9][0-9]{0,2}' "a whole number"
    # A blank inside a flag cannot be said here, so every other odd character is refused, too: what
    # is left means the same in a shell, over ssh and in a manifest.
    read -ra WORDS <<<"$FLAGS"
    for word in "${WORDS[@]}"; do
        [[ $word =~ ^--[a-z][A-Za-z0-9_.-]*(=[A-Za-z0-9_./,:=@%+-]*)?$ ]] ||
            refuse "FLAGS has ${word@Q}: say each option as --key=value, with letters, digits and _./,:=@%+-"
        [[ ! $word =~ ^--(name|resume|config|step|hosts|config.checkpoint.folder)(=|$) ]] ||
            refuse "FLAGS has $word: RUN, CONFIG, BUCKET and TPU say that, and run.sh decides when a run is resumed"
        [[ $READERS == 0 || ! $word =~ ^--config.fleet.(apart|readers)= ]] ||
            refuse "FLAGS has $word: READERS=$READERS says that; leave it out"
    done
    tpu_facts TPU
    check_ways
    REGION=${ZONE%-*}
    ROOT=$BUCKET/$NAME # where in the bucket everything of this launch lies
}

# What fits with what.
check_ways() {
    [[ $READERS == 0 || $COMMAND == train ]] || refuse "READERS=$READERS read for COMMAND=train, and COMMAND=$COMMAND reads by itself; set READERS=0"
    ((READERS == 0 || ROLLOUTS == 0)) || refuse "READERS=$READERS read for our trainer, and ROLLOUTS=$ROLLOUTS serve somebody else's; set one of them to 0"
    [[ $READERS != 0 || -z $READERS_TPU ]] || refuse "READERS_TPU=$READERS_TPU is for READERS above 0; leave it empty here"
    if [[ $KUBERNETES == yes ]]; then
        [[ $CAPACITY != reserved || -n $RESERVATION ]] || refuse "CAPACITY=reserved needs RESERVATION, the name of the reservation"
        return
    fi
    [[ $WAY == group || $GENERATION != tpu7x ]] || refuse "TPU=$TPU has no queued resources; set WAY=group"
    [[ $WAY == queued || $GENERATION != v5e ]] || refuse "TPU=$TPU has no managed instance groups; set WAY=queued"
    if [[ $WAY == queued && $TOPOLOGY != "$USUAL" ]]; then
        refuse "TPU=$TPU: a queued resource of $CHIPS chips is always $USUAL; set TPU=$GENERATION:$USUAL, or WAY=group"
    fi
    if [[ $CAPACITY == reserved && $WAY == group ]]; then
        [[ -n $RESERVATION ]] || refuse "CAPACITY=reserved with WAY=group needs RESERVATION, the name of the reservation"
    elif [[ -n $RESERVATION ]]; then
        refuse "RESERVATION=$RESERVATION is for CAPACITY=reserved with WAY=group; leave it empty here"
    fi
    [[ -z $VALID_FOR || $WAY == queued ]] || refuse "VALID_FOR=$VALID_FOR is for WAY=queued; leave it empty here"
}

# What several hosts can run. Called by what starts a run; create.sh makes slices of any kind.
check_hosts() {
    ((ALL_HOSTS > 1)) || return 0
    [[ $COMMAND == train ]] ||
        refuse "COMMAND=$COMMAND runs on one host, and SLICES=$SLICES of TPU=$TPU has $ALL_HOSTS; take $GENERATION:$ONE_HOST and SLICES=1, or COMMAND=train"
    if [[ $KUBERNETES == yes ]]; then
        ((SLICES == 1 || HOSTS > 1)) || refuse "SLICES=$SLICES of TPU=$TPU: Kubernetes joins slices of several hosts only; take a larger TPU, or SLICES=1"
    fi
}

# Refuses options that the script does not have; its own are the arguments.
only() {
    local option
    for option in "${REST[@]}"; do
        [[ " $* " == *" $option "* ]] || wrong "there is no option ${option@Q}; see $SCRIPT --help"
    done
}

# Whether the option $1 was given.
given() { [[ " ${REST[*]} " == *" $1 "* ]]; }
