# shellcheck shell=bash
# shellcheck disable=SC2034 # what is set here is read by the scripts
# What a generation and a topology mean: chips, hosts, and what Google Cloud calls them.
#
# Sources: Google's pages "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x", "TPU software versions" and
# "TPU types and topologies", and the tables of AI-Hypercomputer/xpk; read in November 2026.
# Above: settings.sh. A new generation is a new branch of tpu_facts and a line of the README.

# From the setting $1, TPU, sets GENERATION, TOPOLOGY, CHIPS (of a slice), USUAL (the topology that a queued resource
# of so many chips has), HOST_CHIPS, HOSTS (of a slice), ALL_HOSTS, ONE_HOST (the largest topology of
# one host), ACCELERATOR and RUNTIME (queued resources), MACHINE and IMAGES (Compute Engine), and
# GKE_ACCELERATOR. Refuses a topology that does not exist.
tpu_facts() {
    local setting=$1 tpu=${!1}
    [[ $tpu =~ ^([a-z0-9]+):([0-9]+(x[0-9]+)+)$ ]] ||
        refuse "$setting=${tpu@Q} cannot be: a generation and a topology, as v5e:2x4, v5p:2x2x1, v6e:2x2 or tpu7x:2x2x1"
    GENERATION=${BASH_REMATCH[1]} TOPOLOGY=${BASH_REMATCH[2]}
    RUNTIME="" IMAGES=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e
    case $GENERATION in
    v5e)
        flat
        ACCELERATOR=v5litepod-$CHIPS RUNTIME=v2-alpha-tpuv5-lite
        MACHINE=ct5lp-hightpu-${HOST_CHIPS}t GKE_ACCELERATOR=tpu-v5-lite-podslice
        ;;
    v6e)
        flat
        ACCELERATOR=v6e-$CHIPS RUNTIME=v2-alpha-tpuv6e
        MACHINE=ct6e-standard-${HOST_CHIPS}t GKE_ACCELERATOR=tpu-v6e-slice
        ;;
    v5p)
        solid 6144
        ACCELERATOR=v5p-$((2 * CHIPS)) RUNTIME=v2-alpha-tpuv5 # counted in cores
        MACHINE=ct5p-hightpu-4t GKE_ACCELERATOR=tpu-v5p-slice
        ;;
    tpu7x)
        solid 9216
        ACCELERATOR=tpu7x-$((2 * CHIPS)) IMAGES=ubuntu-accel-2404-amd64-tpu-tpu7x
        MACHINE=tpu7x-standard-4t GKE_ACCELERATOR=tpu7x
        ;;
    *) refuse "$setting=$tpu: there is no generation $GENERATION here; there are v5e, v5p, v6e and tpu7x" ;;
    esac
    HOSTS=$((CHIPS / HOST_CHIPS)) ALL_HOSTS=$((CHIPS * SLICES / HOST_CHIPS))
}

# The other way: from $1, an accelerator or a machine type, sets KIND_OF to the generation and OF_KIND to
# the chips of one.
chips_of() {
    local number=${1##*-}
    OF_KIND=${number//[!0-9]/}
    case $1 in
    v5litepod-* | ct5lp-*) KIND_OF=v5e ;;
    v6e-* | ct6e-*) KIND_OF=v6e ;;
    v5p-*) KIND_OF=v5p OF_KIND=$((OF_KIND / 2)) ;;
    ct5p-*) KIND_OF=v5p ;;
    tpu7x-standard-*) KIND_OF=tpu7x ;;
    tpu7x-*) KIND_OF=tpu7x OF_KIND=$((OF_KIND / 2)) ;;
    *) KIND_OF=$1 OF_KIND=1 ;;
    esac
}

# Generations wired in two dimensions. Up to 8 chips are one host; larger slices have 4 a host.
flat() {
    local known="1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
    [[ " $known " == *" $TOPOLOGY "* ]] ||
        refuse "$setting=$tpu: there is no topology $TOPOLOGY of $GENERATION; there are ${known// /, }"
    CHIPS=$((${TOPOLOGY//x/*})) USUAL=$TOPOLOGY ONE_HOST=2x4
    HOST_CHIPS=$((CHIPS > 8 ? 4 : CHIPS))
}

# Generations wired in three dimensions, 4 chips a host: the parts of a cube of 4x4x4, then whole
# cubes with A <= B <= C, at most $1 chips in all.
solid() {
    local a b c size='([1-9][0-9]{0,3})'
    [[ $TOPOLOGY =~ ^${size}x${size}x${size}$ ]] || true
    a=${BASH_REMATCH[1]:-0} b=${BASH_REMATCH[2]:-0} c=${BASH_REMATCH[3]:-0}
    CHIPS=$((a * b * c)) USUAL=$TOPOLOGY HOST_CHIPS=4 ONE_HOST=2x2x1
    case $TOPOLOGY in 2x2x1 | 2x2x2 | 2x2x4 | 2x4x4) return ;; esac
    if ((CHIPS == 0 || a % 4 || b % 4 || c % 4 || a > b || b > c || CHIPS > $1)); then
        refuse "$setting=$tpu: there is no topology $TOPOLOGY of $GENERATION; there are 2x2x1, 2x2x2, 2x2x4, 2x4x4, and AxBxC in multiples of 4 with A <= B <= C and at most $1 chips"
    fi
    usual_cubes $((CHIPS / 64))
}

# Sets USUAL for $1 cubes: of all A <= B <= C the one nearest to a cube.
usual_cubes() {
    local a b c best=100000
    for ((a = 1; a * a * a <= $1; a++)); do
        for ((b = a; a * b * b <= $1; b++)); do
            c=$(($1 / (a * b)))
            if ((a * b * c == $1 && a + b + c < best)); then
                best=$((a + b + c)) USUAL=$((4 * a))x$((4 * b))x$((4 * c))
            fi
        done
    done
}
