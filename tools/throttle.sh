#!/bin/sh
# Limits the bandwidth of links with the system's own python3: nothing need be installed. See tools/throttle.sh --help.
here=$(cd -P "$(dirname "$(readlink -f "$0")")/.." && pwd) || exit
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec python3 -B -m hvdtrain.cluster.throttle "$@"
