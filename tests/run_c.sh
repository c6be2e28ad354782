#!/bin/sh
# run_c.sh RUNNER PROGRAM...: runs the C test programs (under RUNNER, an emulator, if it is not
# empty), as many at a time as there are CPUs or TEST_JOBS says, and adds up their closing lines. A
# program that crashes, or is not done after TEST_SECONDS, counts as a failure. Exits non-zero when
# anything failed.
limit=${TEST_SECONDS:-600}
jobs=${TEST_JOBS:-$(nproc 2>/dev/null || echo 1)}

run() {
    output=$(timeout -k 10 "$limit" $runner "$1" 2>&1)
    status=$?
}

# Ended by the limit, or by an alarm of its own.
hung() { [ $status -eq 124 ] || [ $status -eq 137 ] || [ $status -eq 142 ]; }

# The body of one program: what is to be shown, then a line "passed failed".
run_one() {
    run "$1"
    if hung && [ -n "$runner" ]; then # an emulator can lose a wake-up; a fault of ours hangs again
        echo "  $1 hung under ${runner%% *}: once more"
        run "$1"
    fi
    ! hung || output="$output
$1: not done after $limit s"
    line=$(printf '%s\n' "$output" | tail -n 1)
    p=$(printf '%s\n' "$line" | sed -n 's/^.*: \([0-9]*\) passed, [0-9]* failed$/\1/p')
    f=$(printf '%s\n' "$line" | sed -n 's/^.*: [0-9]* passed, \([0-9]*\) failed$/\1/p')
    if [ $status -ne 0 ] || [ -z "$p" ]; then
        printf '%s\n' "$output"
        [ -n "$p" ] || printf '%s: died with status %s\n' "$1" "$status"
        [ "${f:-0}" -gt 0 ] || f=1
    else
        printf '  %s\n' "$line"
    fi
    echo "${p:-0} $f"
}

if [ "${1:-}" = --one ]; then # RUNNER, a folder for what is printed, a program
    runner=$2
    run_one "$4" >"$3/${4##*/}"
    sed '$d' "$3/${4##*/}"
    exit
fi

runner=$1
shift
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
printf '%s\0' "$@" | xargs -0 -n 1 -P "$jobs" "$0" --one "$runner" "$folder"
passed=0 failed=$(($# - $(ls "$folder" | wc -l))) # one that left nothing never ran
for result in "$folder"/*; do
    counts=$(tail -n 1 "$result")
    passed=$((passed + ${counts% *}))
    failed=$((failed + ${counts#* }))
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
