"""A meeting in a store that others can read and change, made safe by a key that only this user has.

The key is a file in the user's home folder, made at the first use: 32 random bytes, for him alone to read. The ranks
exchange nonces through the store and make the job's secret of those and the key, so nobody can work it out from what is
in the store, and each job has another. From then on each message carries a code by it. Hosts that share the home folder
share the key; to others the user copies it, as he did with his ssh key.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Any

from hvdtrain.sentinel import auth
from hvdtrain.sentinel.auth import NONCE_BYTES, SECRET_BYTES
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

KEY = Path(".config", "hvdtrain", "key")


class Sealed:
    """See `collectives.Meeting`. Raises Failure (77) if another user could read the key, or a message is not sealed."""

    def __init__(self, store: Any) -> None:
        """`store`: a meeting without a secret."""
        self.rank, self.size = store.rank, store.size
        self.local_rank, self.local_size = store.local_rank, store.local_size
        self._store, self._meetings = store, 0
        mine = secrets.token_bytes(NONCE_BYTES)
        nonces = store.gather(mine)
        if any(len(nonce) != NONCE_BYTES for nonce in nonces):
            raise self._foreign([len(nonce) == NONCE_BYTES for nonce in nonces].index(False))
        if nonces[self.rank] != mine:  # those of an earlier job, said again, would make its secret
            raise self._foreign(self.rank)
        self.secret = auth.code(user_key(), b"hvdtrain job", b"".join(nonces))

    def gather(self, mine: bytes) -> list[bytes]:
        self._meetings += 1
        told = self._store.gather(auth.sealed(self.secret, self._purpose(self.rank), mine))
        found = []
        for rank, message in enumerate(told):
            text = auth.opened(self.secret, self._purpose(rank), message)
            if text is None:
                raise self._foreign(rank)
            found.append(text)
        return found

    def _purpose(self, rank: int) -> bytes:
        return f"meeting {self._meetings} of rank {rank}".encode()

    def _foreign(self, rank: int) -> Failure:
        host = socket.gethostname()
        return Failure(
            f"rank {rank} does not have the key of {host}, ~/{KEY}, or someone else writes into the launcher's store: "
            f"if the hosts do not share the home folder, copy the key to each (ssh HOST mkdir -p .config/hvdtrain; scp "
            f"-p ~/{KEY} HOST:{KEY}), or start with launch/mpirun.sh",
            exits.NO_PERMISSION,
        )

    def leave(self) -> None:
        self._store.leave()


def user_key(home: Path | None = None) -> bytes:
    """This user's key, made if there is none. Raises Failure (77) if it cannot be kept, or others can read it."""
    try:
        path = (home or Path.home()) / KEY
        if not path.exists():
            _make(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            about, key = os.fstat(descriptor), file.read(SECRET_BYTES + 1)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        raise Failure(
            f"~/{KEY}: {getattr(error, 'strerror', None) or error}; ranks that meet in the launcher's store need a key "
            "there: make the home folder writable, or start with launch/mpirun.sh",
            exits.NO_PERMISSION,
        ) from error
    private = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
    if not private or len(key) != SECRET_BYTES:
        wrong = f"has {len(key)} bytes, not {SECRET_BYTES}" if private else "is not a file that you alone can read"
        raise Failure(f"{path} {wrong}: remove it, and the next job makes another", exits.NO_PERMISSION)
    return key


def _make(path: Path) -> None:
    """Under another name first, since other ranks may do the same and nobody must read half a key."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = path.with_name(f".key-{secrets.token_hex(8)}")
    with os.fdopen(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        made.unlink()
