#!/bin/sh
# make_venv.sh PYTHON DIR REQUIREMENTS: a fresh virtual environment with pinned packages, or one line that says what to do.
python=$1 dir=$2 requirements=$3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    { echo "libtinyllm: needs python3 >= 3.10 ('$python' is not): install it, or say make PYTHON=/path/to/python3" >&2; exit 1; }
rm -rf "$dir"
"$python" -m venv "$dir" >/dev/null 2>&1 ||
    { rm -rf "$dir"; echo "libtinyllm: python3 has no working venv module: install it (Debian: apt-get install python3-venv)" >&2; exit 1; }
echo "  PIP   $requirements into $dir"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements" ||
    { echo "libtinyllm: pip could not install $requirements: is the package registry within reach?" >&2; exit 1; }
