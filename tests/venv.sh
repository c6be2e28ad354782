#!/bin/sh
# venv.sh PYTHON DIR REQUIREMENTS [PIP OPTION...]: makes the virtual environment DIR unless it is
# there, and installs pinned packages into it; or says in one line what to do.
python=$1 dir=$2 requirements=$3
shift 3
give_up() { echo "libtinyllm: $1" >&2; exit 1; }

if ! [ -x "$dir/bin/python" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        give_up "needs python3 >= 3.10, and '$python' is not: install one, or say make PYTHON=/path/to/python3"
    echo "  VENV  $dir"
    if ! "$python" -m venv "$dir" >/dev/null 2>&1; then
        rm -rf "$dir"
        give_up "'$python' has no working venv module: install it (Debian: apt-get install python3-venv)"
    fi
fi
echo "  PIP   $requirements"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check "$@" -r "$requirements" ||
    give_up "pip could not install $requirements: is the Python package registry within reach?"
