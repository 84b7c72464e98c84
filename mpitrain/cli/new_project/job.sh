#!/usr/bin/env bash
# Train: ./job.sh on this machine with 2 ranks, or where the options of `mpitrain run` say: ./job.sh --hosts a,b --ppn 2
#
# After a failure the job starts again, at most three times, and continues where it was.
set -euo pipefail
cd "$(dirname "$0")"
[ $# -gt 0 ] || set -- -n 2
exec mpitrain run "$@" train.py
