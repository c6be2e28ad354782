#!/bin/sh
# run_c.sh RUNNER PROGRAM...: runs the C test programs one after another (under RUNNER, an emulator, if it is not empty) and adds
# up their closing lines. A program that dies counts as a failure. Exits non-zero when anything failed.
runner=$1
shift
passed=0 failed=0
for program in "$@"; do
    output=$($runner "$program" 2>&1)
    status=$?
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
