"""A rendezvous in a store that others can read and change, authenticated by a key that only this user has.

The key is a file of 32 random bytes in the user's home folder, created at first use and readable by this user only.
The ranks exchange nonces through the store and derive the job key from the nonces and the user's key. Nobody can
compute it from the contents of the store, and each job has a different one. From then on every message carries an HMAC
under the job key. Hosts that share the home folder share the user's key; to other hosts the user copies it, as with an
ssh key. On a single host whose home folder cannot be written, it is in the folder for temporary files.

A launcher that has given the ranks a key for their job spares them the file (`torchrun.key`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

from hvdtrain.sentinel import auth
from hvdtrain.sentinel.auth import KEY_BYTES, NONCE_BYTES
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

USER_KEY = Path(".config", "hvdtrain", "key")
LAUNCHERS_KEY = "HVDTRAIN_JOB_KEY_FD"
"""Variable with the descriptor of the launcher's key, a file in memory (memfd_create(2)) that the rank has inherited"""
MEMORY_FILE = "hvdtrain-key"


class SignedRendezvous:
    """Signs and verifies the messages of a store's rendezvous.

    Raises Failure (77) if another user could read the key, or if a message is not signed by a rank of this job.
    """

    def __init__(self, store: Any) -> None:
        """`store`: a rendezvous without a job key."""
        self.rank, self.size = store.rank, store.size
        self.local_rank, self.local_size = store.local_rank, store.local_size
        self._store, self._gathers = store, 0
        own = secrets.token_bytes(NONCE_BYTES)
        nonces = store.gather_bytes(own)
        if any(len(nonce) != NONCE_BYTES for nonce in nonces):
            raise self._not_signed([len(nonce) == NONCE_BYTES for nonce in nonces].index(False))
        if nonces[self.rank] != own:  # nonces replayed from an earlier job would give its job key
            raise self._not_signed(self.rank)
        key = launchers_key() or user_key(one_host=store.local_size == store.size)
        self.job_key = auth.code(key, b"hvdtrain job", b"".join(nonces))

    def gather_bytes(self, own: bytes) -> list[bytes]:
        self._gathers += 1
        signed = self._store.gather_bytes(auth.sign(self.job_key, self._purpose(self.rank), own))
        messages = []
        for rank, message in enumerate(signed):
            content = auth.verify(self.job_key, self._purpose(rank), message)
            if content is None:
                raise self._not_signed(rank)
            messages.append(content)
        return messages

    def _purpose(self, rank: int) -> bytes:
        return f"gather {self._gathers} of rank {rank}".encode()

    def _not_signed(self, rank: int) -> Failure:
        host = socket.gethostname()
        return Failure(
            f"rank {rank} does not have the key of {host}, ~/{USER_KEY}, or another program writes into the launcher's "
            "store; hint: if the hosts do not share the home folder, copy the key to each (ssh HOST mkdir -p "
            f".config/hvdtrain; scp -p ~/{USER_KEY} HOST:{USER_KEY}), or start with `hvdtrain launch torchrun`",
            exits.NO_PERMISSION,
        )

    def shutdown(self) -> None:
        self._store.shutdown()


def launchers_key() -> bytes | None:
    """The launcher's key for this job. None if it has made none, or if this process has not inherited it."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        descriptor = int(os.environ[LAUNCHERS_KEY])
        file = Path(f"/proc/self/fd/{descriptor}").readlink()  # a program may have closed it, and used its number again
        if file.name.startswith(f"memfd:{MEMORY_FILE} "):
            return os.pread(descriptor, KEY_BYTES, 0)
    return None


def user_key(home: Path | None = None, *, one_host: bool = False) -> bytes:
    """This user's key, created if there is none.

    With `one_host`, it is in the folder for temporary files if the home folder cannot hold it, as in many containers.
    Raises Failure (77) if it cannot be stored or others can read it.
    """
    path = Path("~", USER_KEY)
    try:
        try:
            path = (home or Path.home()) / USER_KEY
            _create(path)
        except (OSError, RuntimeError):  # RuntimeError: no home folder
            if not one_host:
                raise
            path = Path(tempfile.gettempdir(), f"hvdtrain-{os.geteuid()}.key")
            _create(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status, key = os.fstat(descriptor), file.read(KEY_BYTES + 1)
    except (OSError, RuntimeError) as error:
        raise Failure(
            f"{path}: {getattr(error, 'strerror', None) or error}; ranks that use the launcher's store need a key "
            "there; hint: set HOME to a folder that you can write and that has this key on every host (docker run -e "
            "HOME=...), or start with `hvdtrain launch torchrun` or launch/mpirun.sh",
            exits.NO_PERMISSION,
        ) from error
    private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not private or len(key) != KEY_BYTES:
        problem = f"has {len(key)} bytes, not {KEY_BYTES}" if private else "is not a file that only you can read"
        raise Failure(f"{path} {problem}; hint: remove it, and the next job creates another", exits.NO_PERMISSION)
    return key


def _create(path: Path) -> None:
    """Make a key unless there is one, first under a temporary name: other ranks may do so too, and none may read half
    of it."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".key-{secrets.token_hex(8)}")
    with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
