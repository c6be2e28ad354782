#!/bin/sh
# tidy.sh: every text file ends in a newline, has no trailing blanks and no tabs outside Makefiles;
# sources carry their licence line, and their lines end at 100 columns, tables and URLs excepted.
cd "$(dirname "$0")/.." || exit 2
bad=0
complain() { echo "tidy: $1: $2"; bad=1; }
for file in $(git ls-files); do
    case $file in
        *.tlfx | *.gguf | *.png) continue ;;
        tests/L9.4/mutants/*.patch) continue ;; # a patch's blank context lines end in a blank
    esac
    [ -s "$file" ] || continue
    [ -z "$(tail -c 1 "$file")" ] || complain "$file" "does not end in a newline"
    ! grep -qn '[[:blank:]]$' "$file" || complain "$file" "trailing blanks"
    case $file in
        *Makefile) ;;
        *.txt) ;;
        *) ! grep -q "$(printf '\t')" "$file" || complain "$file" "tabs" ;;
    esac
    case $file in
        *.c | *.h | *.def)
            head -n 1 "$file" | grep -q 'SPDX-License-Identifier: MIT' ||
                complain "$file" "no licence line"
            long=$(LC_ALL=C.UTF-8 grep -nE '^.{101}' "$file" |
                grep -v -e '://' -e '^[0-9]*: *[*]* *|')
            [ -z "$long" ] || complain "$file" "lines beyond 100 columns:
$long"
            ;;
    esac
done
exit $bad
