#!/usr/bin/env bash
# horovodrun with settings that suit the link between the hosts, each printed with its reason. See launch/horovodrun.sh --help.
here=$(cd -P "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd) || exit
if [[ ! ${VIRTUAL_ENV:-} && -r $here/.venv/bin/activate ]]; then . "$here/.venv/bin/activate"; fi
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
exec python3 -m hvdtrain.cluster.launch horovodrun "$@"
