#!/usr/bin/env bash
# progress.sh LOG COMMAND...: runs a command of pip and says what it is doing, in short lines, one at least every ten seconds.
# All of its output goes to LOG. Where the command fails, the end of it is shown, and the exit status is the command's.
set -uo pipefail

big_file='(Downloading|Using cached) ([^ /]+)-([0-9][^-]*)-[^ ]* \(([0-9.]+ MB)\)'
compiled='\[([0-9]+)/([0-9]+)\]'

show() { # reads pip's output; ninja's "[3/74]" is part of it
  local line status last=0 doing="looking for packages"
  while :; do
    IFS= read -r -t 10 line && status=0 || status=$?
    if ((status == 0)); then
      if [[ $line =~ $big_file ]]; then
        doing="downloading ${BASH_REMATCH[2]} ${BASH_REMATCH[3]}, ${BASH_REMATCH[4]}"
        printf '  %3d s: %s\n' "$SECONDS" "$doing"
        last=$SECONDS
      elif [[ $line == Installing\ collected* ]]; then
        doing="unpacking and copying files"
      elif [[ $line =~ $compiled ]]; then
        doing="compiled ${BASH_REMATCH[1]} of ${BASH_REMATCH[2]} files"
      fi
    elif ((status <= 128)); then # the end; more than 128 is a timeout
      break
    fi
    if ((SECONDS - last >= 10)); then
      printf '  %3d s: %s\n' "$SECONDS" "$doing"
      last=$SECONDS
    fi
  done
}

log=$1
shift
mkdir -p "$(dirname "$log")"
"$@" 2>&1 | tee "$log" | show
status=${PIPESTATUS[0]}
if [ "$status" != 0 ]; then
  tail -n 30 "$log" >&2
  echo "$1 failed with exit status $status; all it said is in $log" >&2
fi
exit "$status"
