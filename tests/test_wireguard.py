"""Jobs through WireGuard between two virtual hosts: what an eavesdropper on their link sees."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, Cluster, environment, until

TOOLS = [tool for tool in ("wg", "wireguard-go") if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(TOOLS), reason=f"needs {TOOLS} (Debian: apt-get install wireguard-tools wireguard-go)"),
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="needs /dev/net/tun"),
]

# wireguard-go's sockets are in /var/run, of which each host needs its own. A second sshd listens inside the tunnel.
SETUP = """set -e
unshare --mount sh -ec 'mount -t tmpfs none /var
wireguard-go wg0 2>/dev/null
wg set wg0 private-key "$2" listen-port 51820 peer "$3" allowed-ips 10.99.0.0/24 endpoint "$4:51820"' setup "$@"
ip address add "10.99.0.$1/24" dev wg0
ip link set wg0 up mtu 1420
sed "s/^ListenAddress.*/ListenAddress 10.99.0.$1/; s/^PidFile.*/PidFile none/" "$5" >"$2.sshd"
/usr/sbin/sshd -f "$2.sshd"
"""

# Writes a line for each kind of IPv4 packet on eth0: its protocol, and the lower port.
LISTENER = """import socket, struct, sys
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
link.bind(("eth0", 0))
link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
seen = set()
with open(sys.argv[1], "w", buffering=1) as file:
    print("listening", file=file)
    while packet := link.recv(128)[14:]:
        ports = struct.unpack_from("!HH", packet, 4 * (packet[0] & 15))
        if (kind := (packet[9], min(ports))) not in seen:
            seen.add(kind)
            print({6: "tcp", 17: "udp"}.get(kind[0], kind[0]), kind[1], file=file)
"""


@pytest.fixture(scope="module")
def tunnel(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The cluster, with WireGuard between its hosts: 10.99.0.1 on a, 10.99.0.2 on b."""
    state, folder = Path("/run/hvdtrain", cluster.name), tmp_path_factory.mktemp("keys")
    known = (state / "ssh" / "known_hosts").read_text()
    (state / "ssh" / "known_hosts").write_text(
        f"{known}10.99.0.1,10.99.0.2 {known.splitlines()[0].partition(' ')[2]}\n"
    )
    public = {}
    for host in "ab":
        private = subprocess.run(["wg", "genkey"], capture_output=True, text=True, check=True).stdout
        (folder / host).write_text(private)
        public[host] = subprocess.run(
            ["wg", "pubkey"], input=private, capture_output=True, text=True, check=True
        ).stdout
    for number, (host, peer) in enumerate(("ab", "ba"), start=1):
        address = cluster.on(host, "getent", "hosts", peer).stdout.split()[0]
        values = [
            str(number),
            str(folder / host),
            public[peer].strip(),
            address,
            str(state / f"hosts/{host}/sshd_config"),
        ]
        done = cluster.on(host, "bash", "-c", SETUP, "setup", *values)
        assert done.returncode == 0, done.stderr
    return cluster


def seen(cluster: Cluster, folder: Path, *job: str) -> set[str]:
    """The kinds of packets on b's interface while the job runs."""
    file = folder / "packets"
    words = cluster.command("exec", "b", "--", sys.executable, "-c", LISTENER, str(file))
    listener = subprocess.Popen(words, env=environment(), cwd=ROOT)
    try:
        until(lambda: file.exists() and "listening" in file.read_text())
        done = cluster.on("a", *job)
    finally:
        listener.terminate()
        listener.wait()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return set(file.read_text().splitlines()[1:])


SCRIPT = """import torch
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_nothing_of_a_job_crosses_the_link_outside_the_tunnel(tunnel: Cluster, launcher: str, tmp_path: Path) -> None:
    """If -H has the tunnel's addresses. With `--nic` alone ssh is outside, and torchrun's mpirun daemons."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def packets(*words: str) -> set[str]:
        job = ["--strategy", "powersgd", str(tmp_path / "train.py")]
        if launcher == "mpirun":
            job = ["python", "-m", "hvdtrain.resnet", *SMALL, "--epochs", "1", "--epoch-samples", "96", *job[:2]]
            job += ["--run-dir", str(tmp_path / "-".join(words))]
        return seen(tunnel, tmp_path, "hvdtrain", "launch", launcher, *words, *job)

    assert packets("-H", "10.99.0.1:1,10.99.0.2:1") == {"udp 51820"}
    if launcher == "mpirun":
        assert packets("-H", "a:1,b:1", "--nic", "wg0") == {"udp 51820", "tcp 22"}
        outside = packets("-H", "a:1,b:1")
        assert any(kind.startswith("tcp") for kind in outside - {"tcp 22"}), "the listener must see ranks outside"
    else:
        for hosts, warned in (("10.99.0.1:1,10.99.0.2:1", False), ("a:1,b:1", True)):
            done = tunnel.on(
                "a", "hvdtrain", "launch", "torchrun", "--dry-run", "-H", hosts, "--nic", "wg0", "train.py"
            )
            assert done.returncode == 0 and ("do not go over wg0" in done.stderr) == warned, done.stderr


def test_the_doctor_names_the_tunnel(tunnel: Cluster) -> None:
    done = tunnel.on("a", "hvdtrain", "doctor", "--json", "-H", "10.99.0.1:1,10.99.0.2:1")
    checks = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "medium"]
    assert [(check["facts"]["used"], check["facts"]["kind"]) for check in checks] == [("wg0", "vpn")] * 2
