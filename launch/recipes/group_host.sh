#!/usr/bin/env bash
# A reader of a managed instance group of Compute Engine: what each of its hosts runs at boot.
#
#   launch/run.sh --set READERS=4                           the trainer, with its steps in the bucket
#   gcloud compute instance-templates create note-readers --machine-type=ct6e-standard-8t \
#       --image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e --image-project=ubuntu-os-accelerator-images \
#       --maintenance-policy=TERMINATE --boot-disk-size=200GB --provisioning-model=SPOT \
#       --instance-termination-action=STOP --scopes=cloud-platform --labels=notepad=note \
#       --metadata=notepad-root=gs://my-bucket/note,notepad-run=first \
#       --metadata-from-file=startup-script=launch/recipes/group_host.sh
#   gcloud compute instance-groups managed create note-readers --zone=us-east5-a --size=4 --template=note-readers
#   gcloud compute instance-groups managed delete note-readers --zone=us-east5-a    this ends paying
#
# The group makes a host again that is taken away, under its name, and the reader goes on with what it had
# begun. When the run has ended readers end and hosts stay, and cost, until the group is deleted.

set -euo pipefail
told() {
    curl --silent --fail --header "Metadata-Flavor: Google" \
        "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
ROOT=$(told notepad-root) RUN=$(told notepad-run)
export HOME=/root
cd "$HOME"
mkdir -p notepad/code.new
gcloud storage cat "$ROOT/code.tar.gz" | tar -xz -C notepad/code.new
bash notepad/code.new/launch/host_setup.sh
cd notepad/code
until ../venv/bin/notepad-jax rollout "$ROOT/runs/$RUN" --as "$(hostname)"; do sleep 30; done
