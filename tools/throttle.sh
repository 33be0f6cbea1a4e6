#!/bin/sh
# Limits the bandwidth of links with the system's own python3: nothing need be installed. See tools/throttle.sh --help.
here=$(cd -P "$(dirname "$(readlink -f "$0")")/.." && pwd) || exit
# -I: nothing is imported from the current folder, PYTHONPATH or the user's own packages, since root runs this.
exec python3 -I -B "$here/tools/isolated.py" hvdtrain.lab.throttle "$@"
