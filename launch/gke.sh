#!/usr/bin/env bash
# Prints the run of the settings as a JobSet for Kubernetes (GKE), instead of create.sh and run.sh.
#
#   launch/setup.sh --code-only                  the code, into the bucket
#   launch/gke.sh | kubectl apply --filename -   start
#   launch/gke.sh | kubectl delete --filename -  stop: the rollout under way is saved
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
    check_hosts
    host_lines
    manifest
}

node_selector() {
    echo "                cloud.google.com/gke-tpu-accelerator: $GKE_ACCELERATOR"
    echo "                cloud.google.com/gke-tpu-topology: $TOPOLOGY"
    case $CAPACITY in
    spot) echo '                cloud.google.com/gke-spot: "true"' ;;
    flex-start) echo '                cloud.google.com/gke-flex-start: "true"' ;;
    reserved) echo "                cloud.google.com/reservation-name: $RESERVATION" ;;
    esac
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
              nodeSelector:
$(node_selector)
              containers:
                - name: notepad
                  image: $GKE_IMAGE
                  env:
                    - name: SLICE
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['jobset.sigs.k8s.io/job-index']
                  resources:
                    requests:
                      google.com/tpu: $HOST_CHIPS
                    limits:
                      google.com/tpu: $HOST_CHIPS
                  command: [bash, -euo, pipefail, -c]
                  args:
                    - |
                      cd "\$HOME"
                      $INSTALL
                      export HOST_INDEX=\$((SLICE * $HOSTS + JOB_COMPLETION_INDEX))
                      export ${WORK% bash *}
                      exec bash notepad/code/launch/host_run.sh work${WORDS[*]:+ }${WORDS[*]} > >(tee -a notepad/logs/$RUN.log) 2>&1
YAML
}

main "$@"
