#!/bin/sh
# Runs a program in a /tmp and a /dev/shm of its own, since what is left there counts and other programs put names there:
# alone.sh PROGRAM [ARGUMENT...]. Fails where mounts are denied.
set -eu
if [ "${1-}" != --within ]; then exec unshare --mount "$0" --within "$@"; fi
program=$2
shift 2
exec 9<"$program" # the program may lie in /tmp
mount -t tmpfs none /tmp
mount -t tmpfs none /dev/shm
exec /proc/self/fd/9 "$@"
