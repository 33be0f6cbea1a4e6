#!/usr/bin/env bash
# mpirun with settings that suit the link between the hosts, each printed with its reason. See launch/mpirun.sh --help.
here=$(cd -P "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd) || exit
if [[ ! ${VIRTUAL_ENV:-} && -r $here/.venv/bin/activate ]]; then . "$here/.venv/bin/activate"; fi
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} # for the ranks
# -I: the launcher itself imports nothing from the current folder or PYTHONPATH.
code='import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), None, "__main__", True)'
exec python3 -I -c "$code" "$here" hvdtrain.cluster.launch mpirun "$@"
