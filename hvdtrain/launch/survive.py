"""Keep a job alive when a rank dies that the other ranks can do without.

    mpirun -np 4 python -m hvdtrain.launch.survive python -m hvdtrain.resnet --strategy async-ps

A launcher ends all ranks if one is killed, runs out of memory or crashes. (Open MPI's --enable-recovery continues, but
then returns 0 for every job, even a failed one.) This process therefore stands between the launcher and the rank. If a
rank has called `may_die` and a signal then ends it, the launcher sees success. Any other end is passed on unchanged.
Signals to the process group reach the rank anyway; SIGTERM and SIGUSR1 are also forwarded, and arriving twice does no
harm.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

from hvdtrain.system import exits

VARIABLE = "HVDTRAIN_SURVIVE_FD"
"""Environment variable with the descriptor of a pipe to this process."""


def may_die() -> None:
    """Called by a rank: the other ranks can continue if this one ends."""
    if descriptor := os.environ.get(VARIABLE):
        os.write(int(descriptor), b"!")


def main(command: list[str]) -> int:
    """Run a rank to its end. Returns its exit code, or ends by the signal that ended the rank."""
    if command in ([], ["--help"]):
        print(__doc__, file=sys.stdout if command else sys.stderr)
        return exits.OK if command else exits.USAGE
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    rank: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if rank is not None and number != signal.SIGINT:
            rank.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, forward)
    try:
        rank = subprocess.Popen(command, env={**os.environ, VARIABLE: str(write_end)}, pass_fds=[write_end])
    except OSError as error:
        print(f"hvdtrain: {command[0]}: {error.strerror}", file=sys.stderr)
        return exits.USAGE
    os.close(write_end)
    code = rank.wait()
    if code >= 0:
        return code
    with contextlib.suppress(BlockingIOError):  # nothing was written, and a child of the rank still holds the pipe
        if os.read(read_end, 1):
            return exits.OK
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
