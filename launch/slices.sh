# shellcheck shell=bash
# shellcheck disable=SC2034 # what is set here is read by the scripts
# The slices of a launch, both ways: how they stand, made, unmade.
#
# queued: one queued resource NAME, with one node, or SLICES nodes (a multislice).
# group:  one instance template NAME, where a slice has several hosts one workload policy NAME, and
#         a managed instance group NAME-0, NAME-1, ... for each slice, all its hosts at once.
# Each piece is looked for before it is made or deleted, so that a call that was cut short is
# finished by the next one. Above: the scripts. Beside: hosts.sh. Below: gcloud.sh.

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
        [[ $DRY_RUN == yes ]] || same "hosts a slice" "$SEEN" "$HOSTS"
        found=$((found + 1))
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

create_queued() {
    local command=("${QUEUED[@]}" create "$NAME" "${AT[@]}"
        "--accelerator-type=$ACCELERATOR" "--runtime-version=$RUNTIME")
    if ((SLICES == 1)); then
        command+=("--node-id=$NAME")
    else
        command+=("--node-count=$SLICES" "--node-prefix=$NAME")
    fi
    case $CAPACITY in
    spot) command+=(--spot) ;;
    reserved) command+=(--reserved) ;;
    esac
    [[ -z $VALID_FOR ]] || command+=("--valid-until-duration=$VALID_FOR")
    [[ -z $NETWORK ]] || command+=("--network=$NETWORK")
    [[ -z $SUBNETWORK ]] || command+=("--subnetwork=$SUBNETWORK")
    [[ $IAP == no ]] || command+=(--internal-ips)
    [[ -z $SERVICE_ACCOUNT ]] || command+=("--service-account=$SERVICE_ACCOUNT")
    act "${command[@]}" --scopes=https://www.googleapis.com/auth/cloud-platform \
        "--labels=notepad=$NAME" --quiet
}

create_groups() {
    local slice policy=()
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
    local command=(gcloud compute instance-templates create "$NAME" "--project=$PROJECT"
        "--machine-type=$MACHINE" "--image-family=$IMAGES" --image-project=ubuntu-os-accelerator-images
        --maintenance-policy=TERMINATE --boot-disk-size=200GB)
    case $CAPACITY in
    spot) command+=(--provisioning-model=SPOT --instance-termination-action=STOP) ;;
    reserved) command+=(--provisioning-model=RESERVATION_BOUND --reservation-affinity=specific
        "--reservation=$RESERVATION") ;;
    esac
    [[ -z $NETWORK ]] || command+=("--network=$NETWORK")
    [[ -z $SUBNETWORK ]] || command+=("--subnet=$SUBNETWORK" "--region=$REGION")
    [[ $IAP == no ]] || command+=(--no-address)
    [[ -z $SERVICE_ACCOUNT ]] || command+=("--service-account=$SERVICE_ACCOUNT")
    act "${command[@]}" --scopes=https://www.googleapis.com/auth/cloud-platform \
        "--labels=notepad=$NAME" --quiet
}

# Deletes whatever is there; sets DELETED to how many pieces that were.
delete_slices() {
    local group groups
    here
    DELETED=0
    if [[ $WAY == queued ]]; then
        gone_after "${QUEUED[@]}" delete "$NAME" "${AT[@]}" --force --quiet
        return
    fi
    # All there are, and not those of the settings, which may have changed since they were made.
    look "$NAME-0" "${GROUPS_OF[@]}" list "--project=$PROJECT" "--filter=name~^$NAME-[0-9]+\$" "--format=value(name)"
    mapfile -t groups < <(grep . <<<"$SEEN" || true)
    for group in "${groups[@]}"; do
        DELETED=$((DELETED + 1))
        act "${GROUPS_OF[@]}" delete "$group" "${AT[@]}" --quiet
    done
    gone_after gcloud compute resource-policies delete "$NAME" "--project=$PROJECT" "--region=$REGION" --quiet
    gone_after gcloud compute instance-templates delete "$NAME" "--project=$PROJECT" --quiet
}

# Runs one deletion, unless there is nothing to delete: `describe` in the place of `delete` says so.
gone_after() {
    local word describe=()
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
    act "$@"
}
