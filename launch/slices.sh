# shellcheck shell=bash
# shellcheck disable=SC2034,SC2153 # what is set here is read by the scripts, and the other way round
# The slices of a launch, both ways: how they stand, made, unmade.
#
# queued: one queued resource NAME, with one node, or SLICES nodes (a multislice).
# group:  one instance template NAME, where a slice has several hosts one workload policy NAME, and
#         a managed instance group NAME-0, NAME-1, ... for each slice, all its hosts at once.
# Each piece is looked for before it is made or deleted, so that a call that was cut short is
# finished by the next one. Every host gets host_idle.sh as its startup script. Above: the scripts. Beside: hosts.sh. Below: paid.sh, gcloud.sh.

# shellcheck source=launch/paid.sh
source "$HERE/paid.sh"

QUEUED=(gcloud compute tpus queued-resources)
GROUPS_OF=(gcloud compute instance-groups managed)
here() { AT=("--project=$PROJECT" "--zone=$ZONE"); }

# Sets STANDS to absent, coming, ready, going (being deleted), dead (taken away or failed; its name
# is still in use), partial (some slices are missing) or unknown (nobody answered), and DETAIL to
# what gcloud calls it. $1: what a dry run takes for it. Refuses what was made with other settings.
look_at_slices() {
    here
    if [[ $WAY == queued ]]; then look_at_queued "$1"; else look_at_groups "$1"; fi
}

look_at_queued() {
    local kind
    look "$1" "${QUEUED[@]}" describe "$NAME" "${AT[@]}" \
        "--format=value(state.state,tpu.nodeSpec[0].node.acceleratorType.basename())"
    IFS=$'\t' read -r SEEN kind <<<"$SEEN"
    same TPU "${kind:-$ACCELERATOR}" "$ACCELERATOR"
    DETAIL=$SEEN
    case $SEEN in
    ACTIVE) STANDS=ready ;;
    SUSPENDED | FAILED) STANDS=dead ;;
    SUSPENDING | DELETING) STANDS=going ;;
    absent | ready | unknown) STANDS=$SEEN ;;
    *) STANDS=coming ;; # ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING, CREATING
    esac
}

look_at_groups() {
    local slice found=0 running=0 lost=0
    DETAIL="gcloud did not answer"
    look "$1" gcloud compute instance-templates describe "$NAME" "--project=$PROJECT" "--format=value(properties.machineType)"
    [[ $SEEN =~ ^(absent|ready|unknown)$ ]] || same TPU "$SEEN" "$MACHINE"
    for ((slice = 0; slice < SLICES; slice++)); do
        look "$1" "${GROUPS_OF[@]}" describe "$NAME-$slice" "${AT[@]}" "--format=value(targetSize)"
        [[ $SEEN == unknown ]] && STANDS=unknown && return
        [[ $SEEN == absent ]] && continue
        found=$((found + 1))
        # Google took the hosts of flex-start away when their time was over.
        [[ $SEEN != 0 ]] || { lost=$((lost + 1)) && continue; }
        [[ $DRY_RUN == yes ]] || same "hosts a slice" "$SEEN" "$HOSTS"
        look RUNNING "${GROUPS_OF[@]}" list-instances "$NAME-$slice" "${AT[@]}" "--format=value(instanceStatus)"
        [[ $SEEN == unknown ]] && STANDS=unknown && return
        running=$((running + $(grep -c '^RUNNING$' <<<"$SEEN" || true)))
        lost=$((lost + $(grep -Ec '^(STOPPING|STOPPED|SUSPENDING|SUSPENDED|TERMINATED)$' <<<"$SEEN" || true)))
    done
    DETAIL="$running of $ALL_HOSTS hosts run"
    if ((found == 0)); then
        STANDS=absent
    elif ((lost)); then
        STANDS=dead
    elif ((found < SLICES)); then
        STANDS=partial
    elif ((running >= ALL_HOSTS)) || [[ $DRY_RUN == yes ]]; then
        STANDS=ready
    else
        STANDS=coming
    fi
}

same() {
    [[ $2 == "$3" ]] || refuse "$NAME is there with $1 of $2, and the settings ask for $3; delete it first (launch/delete.sh), or choose another NAME"
}

create_slices() {
    here
    if [[ $WAY == queued ]]; then create_queued; else create_groups; fi
}

# Sets IDLE to the options that let the hosts give themselves back; $1 is more that they must know.
idle_options() {
    IDLE=()
    ((IDLE_MINUTES == 0)) || IDLE=("--metadata=notepad-idle-minutes=$IDLE_MINUTES$1"
        "--metadata-from-file=startup-script=$HERE/host_idle.sh")
}

create_queued() {
    idle_options ",notepad-queued=$PROJECT/$ZONE/$NAME"
    local alpha=() command
    [[ $CAPACITY != flex-start ]] || alpha=(alpha) # the only gcloud that has it
    command=(gcloud "${alpha[@]}" "${QUEUED[@]:1}" create "$NAME" "${AT[@]}"
        "--accelerator-type=$ACCELERATOR" "--runtime-version=$RUNTIME")
    if ((SLICES == 1)); then
        command+=("--node-id=$NAME")
    else
        command+=("--node-count=$SLICES" "--node-prefix=$NAME")
    fi
    case $CAPACITY in
    spot) command+=(--spot) ;;
    flex-start) command+=(--provisioning-model=flex-start "--max-run-duration=$RUN_FOR") ;;
    reserved) command+=(--reserved) ;;
    esac
    [[ -z $VALID_FOR ]] || command+=("--valid-until-duration=$VALID_FOR")
    [[ -z $NETWORK ]] || command+=("--network=$NETWORK")
    [[ -z $SUBNETWORK ]] || command+=("--subnetwork=$SUBNETWORK")
    [[ $IAP == no ]] || command+=(--internal-ips)
    [[ -z $SERVICE_ACCOUNT ]] || command+=("--service-account=$SERVICE_ACCOUNT")
    act "${command[@]}" "${IDLE[@]}" --scopes=https://www.googleapis.com/auth/cloud-platform \
        "--labels=notepad=$NAME" --quiet
}

create_groups() {
    local slice policy=()
    [[ $CAPACITY != flex-start ]] || policy=(--target-size-policy-mode=bulk) # asked for as a whole, it waits
    look absent gcloud compute instance-templates describe "$NAME" "--project=$PROJECT" "--format=value(name)"
    [[ $SEEN != absent ]] || create_template
    if ((HOSTS > 1)); then
        policy=("--workload-policy=projects/$PROJECT/regions/$REGION/resourcePolicies/$NAME"
            --target-size-policy-mode=bulk)
        look absent gcloud compute resource-policies describe "$NAME" "--project=$PROJECT" "--region=$REGION" "--format=value(name)"
        [[ $SEEN != absent ]] ||
            act gcloud compute resource-policies create workload-policy "$NAME" "--project=$PROJECT" \
                "--region=$REGION" --type=HIGH_THROUGHPUT "--accelerator-topology=$TOPOLOGY" --quiet
    fi
    for ((slice = 0; slice < SLICES; slice++)); do
        look absent "${GROUPS_OF[@]}" describe "$NAME-$slice" "${AT[@]}" "--format=value(name)"
        [[ $SEEN != absent ]] ||
            act "${GROUPS_OF[@]}" create "$NAME-$slice" "${AT[@]}" "--template=$NAME" "--size=$HOSTS" \
                "${policy[@]}" --default-action-on-vm-failure=do-nothing --quiet
    done
}

create_template() {
    idle_options ""
    local command=(gcloud compute instance-templates create "$NAME" "--project=$PROJECT"
        "--machine-type=$MACHINE" "--image-family=$IMAGES" --image-project=ubuntu-os-accelerator-images
        --maintenance-policy=TERMINATE --boot-disk-size=200GB)
    case $CAPACITY in
    spot) command+=(--provisioning-model=SPOT --instance-termination-action=STOP) ;;
    flex-start) command+=(--provisioning-model=FLEX_START "--max-run-duration=$RUN_FOR"
        --instance-termination-action=DELETE --reservation-affinity=none) ;;
    reserved) command+=(--provisioning-model=RESERVATION_BOUND --reservation-affinity=specific
        "--reservation=$RESERVATION") ;;
    esac
    [[ -z $NETWORK ]] || command+=("--network=$NETWORK")
    [[ -z $SUBNETWORK ]] || command+=("--subnet=$SUBNETWORK" "--region=$REGION")
    [[ $IAP == no ]] || command+=(--no-address)
    [[ -z $SERVICE_ACCOUNT ]] || command+=("--service-account=$SERVICE_ACCOUNT")
    act "${command[@]}" "${IDLE[@]}" --scopes=https://www.googleapis.com/auth/cloud-platform \
        "--labels=notepad=$NAME" --quiet
}

# Deletes what there is, in the zone $1 and of the way WAY, or with "everywhere" in all zones and of both
# ways; sets DELETED to how many pieces that were. What cannot be deleted does not keep the rest:
# then it returns 1.
delete_slices() {
    local failed=0 line way name zone
    here
    DELETED=0
    if [[ $1 == everywhere ]]; then look_everywhere; else FOUND=("$WAY,$NAME,$1") UNSURE=no; fi
    if [[ $UNSURE == yes ]]; then
        say "gcloud did not list all zones ($(head -c 300 "$SCRATCH/problem" | tr '\n' ' ')); what is known of $ZONE is deleted"
        FOUND+=("queued,$NAME,$ZONE")
        failed=1
    fi
    for line in "${FOUND[@]}"; do
        IFS=, read -r way name zone _ <<<"$line"
        [[ $way == queued && $name == "$NAME" ]] || continue
        gone_after "${QUEUED[@]}" delete "$NAME" "--project=$PROJECT" "--zone=$zone" --force --quiet || failed=1
    done
    [[ $1 == everywhere || $WAY == group ]] || return "$failed"
    delete_groups "$1" || failed=1
    return "$failed"
}

# The groups that there are, and not those of the settings, which may have changed since.
delete_groups() {
    local assumed="" group groups name zone region failed=0 PATIENT=yes
    local -A regions=([$REGION]=yes)
    [[ $WAY == queued ]] || assumed=$NAME-0,$ZONE
    look "$assumed" "${GROUPS_OF[@]}" list "--project=$PROJECT" "--filter=name~^$NAME-[0-9]+\$" "--format=csv[no-heading](name,zone.basename())"
    if [[ $SEEN == absent || $SEEN == unknown ]]; then
        say "gcloud did not list the groups ($(head -c 300 "$SCRATCH/problem" | tr '\n' ' ')); those of $ZONE are deleted"
        SEEN=$(for ((name = 0; name < SLICES; name++)); do echo "$NAME-$name,$ZONE"; done)
        failed=1
    fi
    mapfile -t groups < <(grep . <<<"$SEEN" || true)
    for group in "${groups[@]}"; do
        IFS=, read -r name zone <<<"$group"
        [[ $name =~ ^$NAME-[0-9]+$ && ($1 == everywhere || $zone == "$1") ]] || continue
        regions[${zone%-*}]=yes
        gone_after "${GROUPS_OF[@]}" delete "$name" "--project=$PROJECT" "--zone=$zone" --quiet || failed=1
    done
    ((failed == 0)) || return 1 # what is in use cannot be deleted
    for region in "${!regions[@]}"; do
        gone_after gcloud compute resource-policies delete "$NAME" "--project=$PROJECT" "--region=$region" --quiet || failed=1
    done
    gone_after gcloud compute instance-templates delete "$NAME" "--project=$PROJECT" --quiet || failed=1
    return "$failed"
}

# Runs one deletion, unless there is nothing to delete: `describe` in the place of `delete` says so.
# Whoever does not answer is taken to have it. Returns 1 if it could not be deleted.
gone_after() {
    local word describe=() PATIENT=yes
    for word in "$@"; do
        case $word in
        delete) describe+=(describe) ;;
        --force | --quiet) ;;
        *) describe+=("$word") ;;
        esac
    done
    look there "${describe[@]}" "--format=value(name)"
    [[ $SEEN != absent ]] || return 0
    DELETED=$((DELETED + 1))
    (act "$@")
}
