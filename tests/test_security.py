"""Attacks by other machines, users and files on real processes. SECURITY.md states the guarantees."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT_S, PROGRAMS, ROOT, command, document, environment, failing, fails, forked, launch, until
from thread_ranks import at_once

from hvdtrain.comm import rendezvous, signed_store
from hvdtrain.comm.launch_env import LaunchEnv
from hvdtrain.data import prepared
from hvdtrain.sentinel import auth
from hvdtrain.sentinel.watch import PURPOSE, RankReport
from hvdtrain.system import files, link_probe, socket_filter
from hvdtrain.system.exits import Failure

STRANGERS = 1100
DEEP = b"[" * 4096


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Enough for a thousand strangers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- ranks that connect ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "servers"])
def test_ranks_connect_despite_many_strangers(kind: str, tmp_path: Path, descriptors: None) -> None:
    """Some are silent, some talk, some claim to be rank 1. They exceed select(2)'s limit and rank 0's descriptors."""
    words = command(2, [str(PROGRAMS / "attacked.py"), kind, str(tmp_path)])
    job = subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    strangers: list[socket.socket] = []
    try:
        until((tmp_path / "door").exists)
        address, port = (tmp_path / "door").read_text().split()
        claim = (1).to_bytes(4, "little") + b"n" * auth.NONCE_BYTES
        loud = [b"", b"GET / HTTP/1.0\r\n\r\n" * 9, DEEP, b"\xff" * 64, claim, claim + b"p" * auth.CODE_BYTES]
        for count in range(STRANGERS):
            strangers.append(socket.create_connection((address, int(port)), LIMIT_S))
            with contextlib.suppress(OSError):  # closed by rank 0 already
                strangers[-1].sendall(loud[count % len(loud)])
        (tmp_path / "go").touch()
        out, errors = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
        job.wait()
        for stranger in strangers:
            stranger.close()
    assert job.returncode == 0, errors[-2000:]
    assert json.loads(out)["sum"] == [2.0, 1.0]


def handshake(port: int, me: auth.Party, to: int, messages: list[bytes]) -> bytes:
    """Replay the hello and proof of another handshake; return the bytes that follow."""
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(messages[0])
        link_probe.exactly(connection, auth.NONCE_BYTES + auth.CODE_BYTES)
        connection.sendall(messages[1])
        with contextlib.suppress(OSError):
            return connection.recv(1)
    return b""


def test_recorded_handshakes_cannot_be_reused() -> None:
    """Replays rank 1's messages, reflects the acceptor's proof, and uses proofs for other purposes and ranks."""
    secret = os.urandom(auth.KEY_BYTES)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    rank0, rank1 = (auth.Party(secret, b"tcp", number) for number in (0, 1))
    accepted: list[dict[int, socket.socket]] = []

    def accept(patience_s: float) -> threading.Thread:
        accepted.clear()
        thread = threading.Thread(target=lambda: accepted.append(auth.accept(listener, rank0, {1}, patience_s)))
        thread.start()
        return thread

    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as tap:  # a relay that forwards everything
        accepting = accept(10)
        joining = threading.Thread(target=lambda: auth.connect("127.0.0.1", tap.getsockname()[1], rank1, 0, 10).close())
        joining.start()
        near, _ = tap.accept()
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            heard.append(link_probe.exactly(near, auth.HELLO_BYTES))
            far.sendall(heard[0])
            answer = link_probe.exactly(far, auth.NONCE_BYTES + auth.CODE_BYTES)
            near.sendall(answer)
            heard.append(link_probe.exactly(near, auth.CODE_BYTES))
            far.sendall(heard[1])
            near.sendall(link_probe.exactly(far, 1))
            joining.join(10)
            accepting.join(10)
    assert list(accepted[0]) == [1], "a relay is not noticed: SECURITY.md says so"
    accepted[0][1].close()
    accepting = accept(1.5)
    for proof in (heard[1], answer[auth.NONCE_BYTES :], bytes(auth.CODE_BYTES)):
        assert handshake(port, rank1, 0, [heard[0], proof]) == b""
    for me in (rank1._replace(purpose=b"servers"), rank1._replace(job_key=b"x" * 32), rank1._replace(number=2)):
        with pytest.raises(OSError):
            auth.connect("127.0.0.1", port, me, 0, 0.3)
    with pytest.raises(OSError):
        auth.connect("127.0.0.1", port, rank1, 5, 0.3)
    accepting.join(10)
    listener.close()
    assert accepted == [{}]


# --- the sentinel ---------------------------------------------------------------------------------------------------


class Host:
    """A real sentinel with its own address, and a rank that only sleeps."""

    def __init__(self, index: int) -> None:
        self.address, self.index = f"127.0.0.{2 + index}", index
        program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from hvdtrain.sentinel import watch as w; "
        program += "w.SILENCE_S = 6.0; w.main()"  # test_faults.py uses the real 15 s
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, "sentinel of the tests", self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.rank = subprocess.Popen(["sleep", "600"])
        self.mouth = udp("127.0.0.1")  # the rank's
        assert self.process.stdout is not None
        self.ports: dict[str, int] = json.loads(self.process.stdout.readline())

    def begin(self, secret: bytes, hosts: list[Host]) -> None:
        about = [{"name": f"h{h.index}", "ranks": [h.index], "address": h.address, **h.ports} for h in hosts]
        ranks = [{"rank": self.index, "pid": self.rank.pid, "port": self.mouth.getsockname()[1]}]
        table = {"job_key": secret.hex(), "host": self.index, "hosts": about, "ranks": ranks}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(table).encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        for process in (self.process, self.rank):
            process.kill()
            process.communicate()
        self.mouth.close()


@pytest.mark.slow
def test_the_sentinel_survives_strangers_and_still_notices_a_lost_host() -> None:
    """Sends floods, deeply nested JSON, forged and empty datagrams. Then a host falls silent, and this is noticed."""
    secret, hosts = os.urandom(auth.KEY_BYTES), [Host(0), Host(1)]
    forged = {"number": 10**9, "host": 1, "idle": False, "finished": True, "fault": {"kind": "lost", "text": "made up"}}
    datagrams = [
        DEEP,
        b"",
        b"\xff{",
        b"\0" * 60_000,
        json.dumps({**forged, "token": "?"}).encode(),
        auth.sign(b"guess", PURPOSE, json.dumps(forged).encode()),
        auth.sign(b"", PURPOSE, DEEP),
        bytes([76]),  # the report of a rank that finished
    ]
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        for host in hosts:
            host.begin(secret, hosts)

        def attack(seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until and hosts[0].rank.poll() is None:
                for data in datagrams:
                    for target in ((hosts[0].address, hosts[0].ports["udp"]), ("127.0.0.1", hosts[0].ports["reports"])):
                        stranger.sendto(data, target)
                time.sleep(0.004)  # still more than MAX_MESSAGES in a round

        attack(4)
        assert [host.process.poll() for host in hosts] == [None, None]
        assert [host.rank.poll() for host in hosts] == [None, None]
        os.kill(hosts[1].process.pid, signal.SIGSTOP)
        attack(LIMIT_S)
        assert hosts[0].rank.poll() == -signal.SIGKILL
        assert hosts[0].process.stderr is not None
        assert "host h1 (rank 1): silent" in hosts[0].process.stderr.read().decode()
    finally:
        stranger.close()
        for host in hosts:
            host.end()


def test_a_local_flood_does_not_displace_a_ranks_report() -> None:
    host = Host(0)
    stranger = udp("127.0.0.1")
    try:
        host.begin(os.urandom(auth.KEY_BYTES), [host])
        assert host.process.stdin is not None
        assert host.process.stdout is not None
        assert host.process.stderr is not None
        host.process.stdin.write(b'{"measure": true}\n')
        host.process.stdin.flush()
        assert host.process.stdout.readline(), "it watches now"
        os.kill(host.process.pid, signal.SIGSTOP)  # so that the flood is faster than its reader
        os.waitpid(host.process.pid, os.WUNTRACED)
        for _ in range(5000):
            stranger.sendto(b"flood", ("127.0.0.1", host.ports["reports"]))
        host.mouth.sendto(bytes([RankReport.FINISHED]), ("127.0.0.1", host.ports["reports"]))
        host.rank.kill()
        host.rank.wait()
        os.kill(host.process.pid, signal.SIGCONT)
        assert host.process.wait(LIMIT_S) == 0
        assert host.process.stderr.read() == b""
    finally:
        stranger.close()
        host.end()


def udp(address: str) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind((address, 0))
    bound.settimeout(0.3)
    return bound


def test_a_flood_does_not_reach_the_queue_of_heartbeats() -> None:
    door, friend, stranger, other = udp("127.0.0.2"), udp("127.0.0.3"), udp("127.0.0.3"), udp("127.0.0.4")
    socket_filter.only_senders(door, [friend.getsockname()])
    for _ in range(5000):  # more than the queue holds
        stranger.sendto(b"flood", door.getsockname())
        other.sendto(b"flood", door.getsockname())
    friend.sendto(b"beat", door.getsockname())
    assert door.recv(100) == b"beat"
    with pytest.raises(TimeoutError):
        door.recv(100)
    for one in (door, friend, stranger, other):
        one.close()


def test_strangers_reach_only_the_decoy_of_a_shared_port() -> None:
    def program() -> None:
        os.getuid() or os.setuid(65534)
        decoy, server = socket.socket(), socket.socket()
        decoy.bind(("127.0.0.1", 0))
        socket_filter.only_strangers(decoy, ["127.0.0.1", "127.0.0.3"])
        decoy.listen()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(decoy.getsockname())
        server.listen()
        for source, reached in 5 * [("127.0.0.1", server), ("127.0.0.2", decoy), ("127.0.0.3", server)]:
            with socket.socket() as connection:
                connection.settimeout(LIMIT_S), reached.settimeout(LIMIT_S)
                connection.bind((source, 0))
                connection.connect(decoy.getsockname())
                assert reached.accept()[1] == connection.getsockname()

    done = forked(program)
    assert done.returncode == 0, done.stderr


# --- what a job listens on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("framework", "backend"), [("torch", "tcp"), ("torch", "native"), ("tensorflow", "native")])
@pytest.mark.slow
def test_a_job_on_one_host_admits_no_strangers(framework: str, backend: str) -> None:
    report = document(launch(2, [str(PROGRAMS / "listening.py"), framework, backend], "horovodrun --gloo"))
    assert report["sum"] == [2.0, 1.0]
    everywhere = [one for one in report["listening"] if not one[1].startswith("127.")]
    assert len(everywhere) == (framework == "tensorflow"), everywhere
    assert any(one[0] == "udp" for one in report["listening"]), "the sentinel has a socket"
    assert not any(report["strangers"])
    assert all(report["ranks"])
    if backend == "tcp":
        assert not any(one[0] == "tcp" for one in report["listening"]), "all ranks are connected"


# --- the launcher's open store --------------------------------------------------------------------------------------


class OpenStore:
    """horovodrun's own store. `seen` holds the requests that an eavesdropper reads."""

    def __init__(self) -> None:
        from horovod.runner.http.http_server import RendezvousServer

        self.server = RendezvousServer()
        self.port: int = self.server.start()
        self.seen: list[tuple[str, bytes]] = []
        http: Any = self.server._httpd
        put = http.RequestHandlerClass._put_value

        def noted(handler: Any, scope: str, key: str, value: bytes) -> None:
            self.seen.append((f"{scope}/{key}", value))
            put(handler, scope, key, value)

        http.RequestHandlerClass = type("Noting", (http.RequestHandlerClass,), {"_put_value": noted})

    def left(self) -> dict[str, Any]:
        http: Any = self.server._httpd
        return {scope: keys for scope, keys in http.cache.items() if keys}

    def ranks(self, program: Any) -> list[Any]:
        """The result or exception of `program` on each of two ranks."""
        where = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port)}

        def rank(number: int) -> Any:
            place = LaunchEnv(launcher="horovodrun", rank=number, size=2, local_rank=number, local_size=2)
            return program(signed_store.SignedRendezvous(rendezvous.HorovodrunRendezvous(place, where)))

        return at_once([functools.partial(rank, number) for number in range(2)], Failure)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[OpenStore]:
    monkeypatch.setenv("HOME", str(tmp_path))
    opened = OpenStore()
    yield opened
    opened.server.stop()
    http: Any = opened.server._httpd
    http.server_close()


def test_the_open_store_does_not_contain_the_key(store: OpenStore) -> None:
    def program(ranks: signed_store.SignedRendezvous) -> tuple[bytes, list[bytes]]:
        return ranks.job_key, ranks.gather_bytes(f"rank {ranks.rank}".encode())

    (secret, gathered), (other, _) = store.ranks(program)
    assert secret == other
    assert gathered == [b"rank 0", b"rank 1"]
    assert not store.left()
    key = signed_store.user_key()
    for _, value in store.seen:
        assert secret not in value
        assert key not in value
    (again, _), _ = store.ranks(program)
    assert again != secret, "each job has another key"


@pytest.mark.parametrize("replayed", [False, True])
def test_forged_values_in_the_open_store_are_rejected(replayed: bool, store: OpenStore) -> None:
    """An attacker replaces rank 1's address by another one, or replays an old message."""

    def program(ranks: signed_store.SignedRendezvous) -> list[bytes]:
        ranks.gather_bytes(b"a 10.0.0.1 1")
        if ranks.rank == 0:
            return ranks.gather_bytes(b"a 10.0.0.1 2")
        old = next(value for key, value in store.seen if key == "hvdtrain.1/1")
        return ranks._store.gather_bytes(old if replayed else b"a 10.6.6.6 1")

    failure, _ = store.ranks(program)
    assert isinstance(failure, Failure)
    assert failure.code == 77
    assert "rank 1 does not have the key of" in str(failure)


def test_replayed_nonces_are_rejected(store: OpenStore) -> None:
    def program(ranks: signed_store.SignedRendezvous) -> bytes:
        return ranks.job_key

    secret, _ = store.ranks(program)
    http: Any = store.server._httpd
    earlier, put = dict(store.seen), http.RequestHandlerClass._put_value
    http.RequestHandlerClass._put_value = lambda self, scope, key, value: put(
        self, scope, key, earlier.get(f"{scope}/{key}", value)
    )
    for failure in store.ranks(program):
        assert isinstance(failure, Failure) and "another program writes into" in str(failure), secret


@pytest.mark.parametrize("kind", ["open", "link", "fifo", "short", "folder"])
def test_unsafe_key_files_are_rejected(kind: str, tmp_path: Path) -> None:
    path = tmp_path / signed_store.USER_KEY
    path.parent.mkdir(parents=True)
    other = tmp_path / "other"
    other.write_bytes(b"k" * auth.KEY_BYTES)
    other.chmod(0o600)
    if kind == "link":
        path.symlink_to(other)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"k" * (auth.KEY_BYTES - (kind == "short")))
        path.chmod(0o644 if kind == "open" else 0o600)
    with failing(77, "key"):
        signed_store.user_key(tmp_path)


@pytest.mark.root
def test_a_user_without_an_account_needs_no_home_folder_on_one_host() -> None:
    """As in `docker run --user 12345`."""
    key = Path(tempfile.gettempdir(), "hvdtrain-12345.key")

    def program() -> None:
        os.setuid(12345)
        os.environ.pop("XDG_CACHE_HOME")
        for home in (None, "/"):
            os.environ.pop("HOME", None)
            os.environ |= {"HOME": home} if home else {}
            fails(signed_store.user_key, 77, "docker run -e HOME=")
            assert signed_store.user_key(one_host=True) == key.read_bytes()
            if home is None:
                fails(files.cache_folder, 73, "XDG_CACHE_HOME")
            with Path(__file__).open("rb") as file, prepared._verified_before(Path(__file__), file, "") as before:
                assert not before

    try:
        done = forked(program)
    finally:
        key.unlink(missing_ok=True)
    assert not done.returncode, done.stderr


# --- doctor and throttle --------------------------------------------------------------------------------------------


def test_strangers_do_not_stop_a_measurement() -> None:
    """Strangers request too much memory or time, or send malformed requests."""
    with link_probe.listening("127.0.0.1") as door:
        server = threading.Thread(target=link_probe.serve, args=(door,), daemon=True)
        server.start()
        port = door.getsockname()[1]
        request = link_probe.REQUEST.pack
        for messages in (
            b"\xff" * 64,
            request(b"m", 1 << 40, 0, 1),
            request(b"t", 0, 1e300, 1),
            request(b"t", 0, 0, 0),
            b"hi",
        ):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(messages)
        measured = link_probe.ask("127.0.0.1", port, 0.1, 0.2, sizes=[1000])
        assert len(measured["messages_s"]) == 1 and measured["bit_s"] > 0
        server.join(10)
        assert not server.is_alive()
