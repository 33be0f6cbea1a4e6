#!/bin/sh
# Limits the bandwidth of links with the system's own python3: nothing need be installed. See tools/throttle.sh --help.
here=$(cd -P "$(dirname "$(readlink -f "$0")")/.." && pwd) || exit
# -I: nothing is imported from the current folder, PYTHONPATH or the user's own packages, since root runs this.
code='import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), None, "__main__", True)'
exec python3 -I -B -c "$code" "$here" hvdtrain.cluster.throttle "$@"
