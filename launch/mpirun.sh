#!/usr/bin/env bash
# mpirun with settings that suit the link between the hosts, each printed with its reason. See launch/mpirun.sh --help.
here=$(cd -P "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd) || exit
if [[ ! ${VIRTUAL_ENV:-} && -r $here/.venv/bin/activate ]]; then . "$here/.venv/bin/activate"; fi
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} # for the ranks
# -I: the launcher itself imports nothing from the current folder or PYTHONPATH.
exec python3 -I "$here/tools/isolated.py" hvdtrain.launch mpirun "$@"
