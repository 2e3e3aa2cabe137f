#!/usr/bin/env bash
# Prints the run of the settings as a JobSet for Kubernetes (GKE), instead of create.sh and run.sh.
#
#   launch/setup.sh --code-only                  the code, into the bucket
#   launch/gke.sh | kubectl apply --filename -   start
#   launch/gke.sh | kubectl delete --filename -  stop: the rollout under way is saved
#
# With ROLLOUTS=4 it prints another JobSet: four servers of a policy for trainers (`notepad-jax serve
# --rl`, one TPU host each), and beside them one job with the trainer of somebody else, TRAINER in
# TRAINER_IMAGE. It begins when all servers answer, finds their addresses in ROLLOUTS, and its end ends
# all. Their keys are a secret of the name NAME:
#
#   kubectl create secret generic NAME --from-literal=NOTEPAD_API_KEY=... --from-literal=NOTEPAD_CONTROL_KEY=...
#
# With READERS=4 it prints two JobSets over one bucket: the run, which learns, and four readers of it
# (`notepad-jax rollout`), one TPU host each, that end when the run has ended. A reader that is lost is
# made again alone.
#
# The cluster has JobSet installed, and TPU nodes or Autopilot. Its pods, as GKE_SERVICE_ACCOUNT, may
# write the bucket. A pod that is lost is made again, RECREATIONS times, and goes on from the last
# copy in the bucket; launch/logs.sh and launch/status.sh read the bucket as ever. It prints and
# calls nobody, with --dry-run and without.
#
# options: --settings FILE (launch/settings.env), --set KEY=VALUE, --dry-run, --help

set -euo pipefail
# shellcheck source=launch/settings.sh
source "$(dirname "$0")/settings.sh"
# shellcheck source=launch/hosts.sh
source "$(dirname "$0")/hosts.sh"

main() {
    KUBERNETES=yes DRY_RUN=yes # no gcloud is needed
    begin "$@"
    only --
    host_lines
    if ((ROLLOUTS)); then
        check_rollouts
        rollouts
    else
        check_hosts
        ((READERS == 0)) || check_readers
        manifest
        ((READERS == 0)) || readers
    fi
}

check_rollouts() {
    ((HOSTS == 1)) || refuse "ROLLOUTS=$ROLLOUTS: a server is one host, and TPU=$TPU has $HOSTS; take $GENERATION:$ONE_HOST"
    ((SLICES == 1)) || refuse "ROLLOUTS=$ROLLOUTS counts the servers; set SLICES=1"
    [[ -n $TRAINER_IMAGE && -n $TRAINER ]] ||
        refuse "ROLLOUTS=$ROLLOUTS needs somebody who trains: TRAINER_IMAGE, and TRAINER, its command"
}

check_readers() {
    (
        reader_host
        ((HOSTS == 1)) || refuse "READERS_TPU=$READERS_TPU: a reader is one host, and that has $HOSTS; take $GENERATION:$ONE_HOST"
    )
}

# Sets what tpu_facts does to a reader's host, for a subshell.
reader_host() {
    READERS_TPU=${READERS_TPU:-$GENERATION:$ONE_HOST}
    tpu_facts READERS_TPU
}

# A container on a TPU host: all but what runs there.
tpu_container() {
    echo "              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: $GKE_ACCELERATOR
                cloud.google.com/gke-tpu-topology: $TOPOLOGY"
    case $CAPACITY in
    spot) echo '                cloud.google.com/gke-spot: "true"' ;;
    flex-start) echo '                cloud.google.com/gke-flex-start: "true"' ;;
    reserved) echo "                cloud.google.com/reservation-name: $RESERVATION" ;;
    esac
    echo "              containers:
                - name: notepad
                  image: $GKE_IMAGE
                  resources:
                    requests:
                      google.com/tpu: $HOST_CHIPS
                    limits:
                      google.com/tpu: $HOST_CHIPS
                  command: [bash, -euo, pipefail, -c]"
}

# The servers and the trainer beside them.
rollouts() {
    local pool="" server addresses=()
    for ((server = 0; server < ROLLOUTS; server++)); do
        addresses+=("http://$NAME-rollout-$server-0.$NAME:8000") # names that JobSet gives to pods
    done
    [[ -z $TRAINER_POOL ]] || pool="
              nodeSelector:
                cloud.google.com/gke-nodepool: $TRAINER_POOL"
    cat <<YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $NAME
  labels:
    notepad: $NAME
spec:
  # Servers do not end by themselves.
  successPolicy:
    operator: All
    targetReplicatedJobs: [trainer]
  failurePolicy:
    maxRestarts: $RECREATIONS
  replicatedJobs:
    - name: rollout
      replicas: $ROLLOUTS
      template:
        spec:
          parallelism: 1
          completions: 1
          # A server that is lost is made again, and the others go on.
          backoffLimit: $RECREATIONS
          template:
            metadata:
              labels:
                notepad: $NAME
            spec:
              restartPolicy: Never
              serviceAccountName: $GKE_SERVICE_ACCOUNT
$(tpu_container)
                  envFrom:
                    - secretRef:
                        name: $NAME
                  ports:
                    - containerPort: 8000
                  readinessProbe:
                    httpGet:
                      path: /ready
                      port: 8000
                    periodSeconds: 10
                    timeoutSeconds: 10
                  args:
                    - |
                      cd "\$HOME"
                      export EXTRAS=serve
                      $INSTALL
                      cd notepad/code
                      exec ../venv/bin/notepad-jax serve --rl --host 0.0.0.0 --port 8000 --config $CONFIG${WORDS[*]:+ }${WORDS[*]}
    - name: trainer
      replicas: 1
      dependsOn:
        - name: rollout
          status: Ready
      template:
        spec:
          parallelism: 1
          completions: 1
          backoffLimit: 0
          template:
            metadata:
              labels:
                notepad: $NAME
            spec:
              restartPolicy: Never
              serviceAccountName: $GKE_SERVICE_ACCOUNT$pool
              containers:
                - name: trainer
                  image: $TRAINER_IMAGE
                  envFrom:
                    - secretRef:
                        name: $NAME
                  env:
                    - name: ROLLOUTS
                      value: "${addresses[*]}"
                  command: [sh, -c]
                  args: ["exec $TRAINER"]
YAML
}

manifest() {
    cat <<YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $NAME
  labels:
    notepad: $NAME
  annotations:
    # One slice, one node pool.
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: $RECREATIONS
  replicatedJobs:
    - name: slice
      replicas: $SLICES
      template:
        spec:
          parallelism: $HOSTS
          completions: $HOSTS
          completionMode: Indexed
          backoffLimit: 0
          template:
            metadata:
              labels:
                notepad: $NAME
            spec:
              restartPolicy: Never
              serviceAccountName: $GKE_SERVICE_ACCOUNT
              # Time to save the rollout under way.
              terminationGracePeriodSeconds: 600
$(tpu_container)
                  env:
                    - name: SLICE
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['jobset.sigs.k8s.io/job-index']
                  args:
                    - |
                      cd "\$HOME"
                      $INSTALL
                      export HOST_INDEX=\$((SLICE * $HOSTS + JOB_COMPLETION_INDEX))
                      export ${WORK% flock *}
                      exec bash notepad/code/launch/host_run.sh work${WORDS[*]:+ }${WORDS[*]} > >(tee -a notepad/logs/$RUN.log) 2>&1
YAML
}

# Each reader is a job of its own: GKE takes the pods of one indexed job on TPUs for the hosts of one
# slice, and tells libtpu so. A host that is taken away is nobody's failure.
readers() {
    cat <<YAML
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $NAME-readers
  labels:
    notepad: $NAME
spec:
  failurePolicy:
    maxRestarts: $RECREATIONS
  replicatedJobs:
    - name: reader
      replicas: $READERS
      template:
        spec:
          parallelism: 1
          completions: 1
          backoffLimit: $RECREATIONS
          podFailurePolicy:
            rules:
              - action: Ignore
                onPodConditions:
                  - type: DisruptionTarget
                    status: "True"
          template:
            metadata:
              labels:
                notepad: $NAME
            spec:
              restartPolicy: Never
              serviceAccountName: $GKE_SERVICE_ACCOUNT
              # Time to put the turns that have ended into the bucket.
              terminationGracePeriodSeconds: 120
$(reader_host && tpu_container)
                  env:
                    - name: READER
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['jobset.sigs.k8s.io/job-index']
                  args:
                    - |
                      cd "\$HOME"
                      $INSTALL
                      cd notepad/code
                      exec ../venv/bin/notepad-jax rollout $ROOT/runs/$RUN --as reader-\$READER
YAML
}

main "$@"
