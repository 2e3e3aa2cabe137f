#!/usr/bin/env bash
# A git whose last commit is the launch folder as it lies there, and two lists of requirements.
set -euo pipefail
case " $* " in
*" archive "*)
    code=$(mktemp -d)
    cp -r "$LAUNCH" "$code/launch"
    echo "name = notepad ${CODE_VERSION:-1}" >"$code/pyproject.toml"
    echo "google-jetstream==0.2.2  # a comment" >"$code/constraints.txt"
    tar -cz -C "$code" .
    rm -rf "$code"
    ;;
*" status "*) echo -n "${DIRTY:-}" ;;
*" rev-parse "*) exit "${NO_CHECKOUT:-0}" ;;
esac
