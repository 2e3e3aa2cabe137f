# shellcheck shell=bash
# shellcheck disable=SC2034,SC2153 # what is set here is read by the scripts, and the other way round
# What there is of a launch, in all zones and of both ways, and what it costs an hour.
#
# Not to pay unawares comes first: so the project is asked, and not the settings, which may have
# changed since something was made. Prices are those of notepad_jax/planner/prices.txt, which `plan`
# reads, too, or PRICE. Above: slices.sh and the scripts. Below: gcloud.sh, tpus.sh.

# Sets FOUND to a line WAY,NAME,ZONE,STATE,KIND,LAUNCH,COUNT for each queued resource and each labelled
# host of the project in any zone, and UNSURE to yes where a list could not be had.
look_everywhere() {
    local PATIENT=yes queued="" instances="" node="tpu.nodeSpec[0].node"
    FOUND=() UNSURE=no
    if [[ $WAY == queued ]]; then
        queued=$NAME,$ZONE,ACTIVE,$ACCELERATOR,$NAME,$SLICES
    else
        instances=$NAME-0-HOST,$ZONE,RUNNING,$MACHINE,$NAME
    fi
    list queued "$queued" gcloud compute tpus queued-resources list "--project=$PROJECT" --zone=- \
        "--format=csv[no-heading](name.basename(),name.segment(3),state.state,$node.acceleratorType.basename(),$node.labels.notepad,tpu.nodeSpec[0].multisliceParams.nodeCount)"
    list host "$instances" gcloud compute instances list "--project=$PROJECT" "--filter=labels.notepad:*" \
        "--format=csv[no-heading](name,zone.basename(),status,machineType.basename(),labels.notepad)"
}

# Adds what the command after the second argument lists to FOUND, behind $1; $2 is what a dry run takes.
list() {
    local way=$1 line
    look "${@:2}"
    if [[ $SEEN == absent || $SEEN == unknown ]]; then
        # An API that was never switched on has nothing.
        grep -Eq 'SERVICE_DISABLED|has not been used in project' "$SCRATCH/problem" || UNSURE=yes
        return
    fi
    while IFS= read -r line; do
        [[ -z $line ]] || FOUND+=("$way,$line")
    done <<<"$SEEN"
}

# Adds up FOUND: sets CHIPS_PAID and DOLLARS (an hour, without what has no known price; 0.00 if
# nothing is paid for), WHERE ("4 chips of v5p in us-east5-a; ..."), and UNPRICED to the generations
# without a price. $1 is the launch, or "" for all others than NAME.
add_up() {
    local line way name zone state kind launch count place price nodes=1
    local -A chips=()
    [[ $WAY == group ]] || nodes=$SLICES # where gcloud does not say how many
    CHIPS_PAID=0 DOLLARS=0.00 WHERE="" UNPRICED=""
    for line in "${FOUND[@]}"; do
        IFS=, read -r way name zone state kind launch count <<<"$line"
        [[ $way == host ]] || launch=$name
        if [[ -n $1 ]]; then [[ $launch == "$1" ]] || continue; else [[ $launch != "$NAME" ]] || continue; fi
        [[ $state =~ ^(ACTIVE|SUSPENDING|DELETING|RUNNING|STOPPING)$ ]] || continue
        chips_of "$kind"
        [[ $way == host ]] || OF_KIND=$((OF_KIND * ${count:-$nodes}))
        place="$KIND_OF in $zone"
        chips[$place]=$((${chips[$place]:-0} + OF_KIND))
        CHIPS_PAID=$((CHIPS_PAID + OF_KIND))
        price=$(price_of "$KIND_OF")
        if [[ -n $price ]]; then
            DOLLARS=$(awk "BEGIN { printf \"%.2f\", $DOLLARS + $OF_KIND * $price }")
        elif [[ " $UNPRICED " != *" $KIND_OF "* ]]; then
            UNPRICED+="${UNPRICED:+ }$KIND_OF"
        fi
    done
    for place in "${!chips[@]}"; do WHERE+="${WHERE:+; }${chips[$place]} chips of $place"; done
}

# Prints dollars for a chip of $1 and an hour, or nothing where that is not known.
price_of() {
    local table=$HERE/../notepad_jax/planner/prices.txt column=2
    if [[ -n $PRICE && $1 == "$GENERATION" ]]; then
        echo "$PRICE"
    elif [[ -r $table ]]; then
        [[ $CAPACITY != spot ]] || column=3
        awk -v chip="$1" -v column="$column" '$1 == chip { print $column }' "$table"
    fi
}

# "$16.80 an hour", as far as that is known, of what was added up.
hourly() {
    local less=""
    [[ $CAPACITY != flex-start ]] || less=", at most: that is the price on demand"
    [[ $CAPACITY != reserved ]] || less=", which the reservation costs, used or not"
    if [[ -z $UNPRICED ]]; then
        echo "\$$DOLLARS an hour$less"
    else
        echo "\$$DOLLARS an hour and what ${UNPRICED// / and } costs (PRICE of the settings says that)"
    fi
}

# One line about what is paid for; nothing, if nothing is and $1 is "quiet".
bill() {
    look_everywhere
    add_up "$NAME"
    if ((CHIPS_PAID)); then
        say "$NAME is still paid for: $(hourly) ($WHERE); launch/delete.sh ends that"
    elif [[ $UNSURE == yes ]]; then
        say "gcloud did not say what is paid for ($(head -c 300 "$SCRATCH/problem" | tr '\n' ' ')): take it that $NAME is, and call launch/status.sh until it says otherwise"
    elif [[ $1 != quiet ]]; then
        say "nothing of $NAME is paid for by the hour, in any zone"
    fi
}
