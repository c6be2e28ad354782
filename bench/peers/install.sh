#!/bin/sh
# install.sh PYTHON DIR REQUIREMENTS: makes the virtual environment DIR and installs each line of REQUIREMENTS by itself,
# so that a package which cannot be had keeps no other out; DIR/not-installed.txt says which those are, and why.
# "# alone" after a package: without the packages it asks for.
python=$1 dir=$2 requirements=$3
log=$dir/pip.log missing=$dir/not-installed.txt

tests/venv.sh "$python" "$dir" requirements.txt || exit 1
: >"$missing"
grep -v '^#' "$requirements" | while read -r line; do
    package=${line%%[ #]*}
    echo "  PIP   $package"
    case $line in *'# alone') alone=--no-deps ;; *) alone= ;; esac
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check $alone "$package" 2>"$log" ||
        printf '%s\t%s\n' "$package" "$(grep '^ERROR' "$log" | tail -n 1)" | tee -a "$missing"
done
