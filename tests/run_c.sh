#!/bin/sh
# run_c.sh RUNNER PROGRAM...: runs the C test programs one after another (under RUNNER, an emulator, if it is not empty) and adds
# up their closing lines. A program that dies, or is not done after TEST_SECONDS, counts as a failure. Exits non-zero when anything failed.
runner=$1
shift
limit=${TEST_SECONDS:-600}
passed=0 failed=0

run() {
    output=$(timeout -k 10 "$limit" $runner "$1" 2>&1)
    status=$?
}

# Ended by the limit, or by an alarm of its own.
hung() { [ $status -eq 124 ] || [ $status -eq 137 ] || [ $status -eq 142 ]; }

for program in "$@"; do
    run "$program"
    if hung && [ -n "$runner" ]; then # an emulator can lose a wake-up; a fault of ours hangs again, and natively too
        echo "  $program hung under ${runner%% *}: once more"
        run "$program"
    fi
    ! hung || output="$output
$program: not done after $limit s"
    line=$(printf '%s\n' "$output" | tail -n 1)
    p=$(printf '%s\n' "$line" | sed -n 's/^.*: \([0-9]*\) passed, [0-9]* failed$/\1/p')
    f=$(printf '%s\n' "$line" | sed -n 's/^.*: [0-9]* passed, \([0-9]*\) failed$/\1/p')
    if [ $status -ne 0 ] || [ -z "$p" ]; then
        printf '%s\n' "$output"
        [ -n "$p" ] || printf '%s: died with status %s\n' "$program" "$status"
        [ "${f:-0}" -gt 0 ] || f=1
    else
        printf '  %s\n' "$line"
    fi
    passed=$((passed + ${p:-0}))
    failed=$((failed + f))
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
