#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the first Python >= 3.12 that really runs and can make a virtual environment.
# Looks at $PYTHON, then PATH, then pyenv's versions. A pyenv shim on PATH may exist and refuse to
# run, so every candidate is tried. 3.12 and 3.13 come first: megatron-core has wheels for them.
looked=""

usable() { # usable COMMAND: runs, is new enough, has venv and pip
    looked="$looked $1"
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

found() {
    "$1" -c 'import sys; print(sys.executable)'
    exit 0
}

if [ -n "$PYTHON" ]; then
    usable "$PYTHON" && found "$PYTHON"
    echo "PYTHON=$PYTHON is no Python >= 3.12 that runs with venv and ensurepip; unset it or name another" >&2
    exit 2
fi
for minor in 12 13; do
    for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor"*/bin/python3; do
        case "$candidate" in */'*'*) continue ;; esac
        usable "$candidate" && found "$candidate"
    done
done
for candidate in python3 python python3.14 python3.15 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[4-9]*/bin/python3; do
    case "$candidate" in *'['*) continue ;; esac
    usable "$candidate" && found "$candidate"
done
echo "no Python >= 3.12 with venv found (megatron-core needs it); looked for:$looked on PATH and in ${PYENV_ROOT:-$HOME/.pyenv}/versions; install one, or name it: make PYTHON=/path/to/python3.12" >&2
exit 2
