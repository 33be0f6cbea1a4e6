#!/usr/bin/env bash
# Runs `make demo` as a normal user in minimal Debian systems (root, debootstrap).
#
#     sudo tools/install_matrix.sh [RELEASE ...]                    (default: bookworm trixie testing)
#     sudo HVDTRAIN_MPI=system tools/install_matrix.sh trixie       with the system's own Open MPI; the demo uses mpirun
#
# The packages come from the mirror in this machine's apt settings, and Python's from its pip settings. The log of each
# system stays in results/install-RELEASE.log. The exit code is the number of systems in which the demo failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
user=tester needed=git,make,g++,python3-venv,python3-dev,ca-certificates failed=0 root=''

run='make demo' mpi=()
if [[ ${HVDTRAIN_MPI:-} == system ]]; then
    mpi=(openmpi-bin libopenmpi-dev openssh-client)
    run='make setup FRAMEWORKS=torch && . .venv/bin/activate && mpirun --version | head -n 1 &&
        launch/mpirun.sh -H localhost:2 python -m hvdtrain.resnet --epochs 6 --seed 1'
fi

fail() { printf 'install-matrix: %s\n' "$1" >&2 && exit 69; }
((EUID == 0)) || fail "needs root for chroot; hint: sudo make install-matrix"
command -v debootstrap >/dev/null || fail "no debootstrap found; hint: apt-get install debootstrap"
# shellcheck disable=SC2016
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -v security | head -n 1)
[[ $mirror ]] || fail "apt has no package sources; hint: add Debian's to /etc/apt"

clean_up() {
    [[ $root ]] || return 0
    for mounted in proc dev; do umount -l "$root/$mounted" 2>/dev/null; done
    rm -rf --one-file-system "$root"
    root=''
}
trap clean_up EXIT

demo() { # in a fresh system of this release
    debootstrap --variant=minbase --include="$needed" "$1" "$root" "$mirror" || return
    mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev" && mount --make-rslave "$root/dev" || return
    cp -L /etc/resolv.conf /etc/hosts "$root/etc/" && cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" || return
    if ((${#mpi[@]})); then
        chroot "$root" apt-get update -qq &&
            chroot "$root" apt-get install -y -qq --no-install-recommends "${mpi[@]}" || return
    fi
    chroot "$root" useradd --create-home "$user"
    git clone --quiet --no-hardlinks . "$root/home/$user/hvdtrain" && chroot "$root" chown -R "$user:" "/home/$user"
    local settings=() name
    for name in $(compgen -e); do
        case $name in
        PIP_FIND_LINKS | PIP_CONFIG_FILE) ;; # paths on this machine
        PIP_* | *_proxy | *_PROXY | TORCH_INDEX | HVDTRAIN_MPI) settings+=("$name=${!name}") ;;
        esac
    done
    chroot "$root" runuser -u "$user" -- env -i "HOME=/home/$user" PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 \
        "${settings[@]}" bash -c "cd ~/hvdtrain && python3 --version && g++ --version | head -n 1 && $run"
}

mkdir -p results
(($#)) || set -- bookworm trixie testing
for release; do
    start=$SECONDS log=results/install-$release.log
    root=$(mktemp -d /var/tmp/hvdtrain-matrix.XXXXXX)
    chmod 755 "$root"
    result=passed
    demo "$release" >"$log" 2>&1 </dev/null || { result=failed failed=$((failed + 1)); }
    printf '%-10s %s in %d s, log in %s\n' "$release" "$result" $((SECONDS - start)) "$log"
    clean_up
done
exit "$failed"
