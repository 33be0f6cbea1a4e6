"""Keeps the sudden end of a rank that the others can do without from ending the job.

    mpirun -np 4 python -m hvdtrain.launch.survive python -m hvdtrain.resnet --strategy async-ps

A launcher ends all ranks when one was killed, out of memory, or crashed. (Open MPI's --enable-recovery goes on, but
then returns 0 for every job, also for one that failed.) So this stays between launcher and rank: a rank that has told
it `may_die` and then dies of a signal has ended well for the launcher; any other end is handed on as it is. What is
sent to the process group reaches the rank anyway; SIGTERM and SIGUSR1 are handed on too, and do no harm twice.
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
"""Names the descriptor of a pipe to this process"""


def may_die() -> None:
    """Called by a rank: the others can go on if it ends."""
    if descriptor := os.environ.get(VARIABLE):
        os.write(int(descriptor), b"!")


def main(command: list[str]) -> int:
    """Runs a rank to its end; its exit code, or this process ends by the signal that the rank died of."""
    if command in ([], ["--help"]):
        print(__doc__, file=sys.stdout if command else sys.stderr)
        return exits.OK if command else exits.USAGE
    heard, told = os.pipe()
    os.set_blocking(heard, False)
    rank: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: FrameType | None) -> None:
        if rank is not None and number != signal.SIGINT:
            rank.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, hand_on)
    try:
        rank = subprocess.Popen(command, env={**os.environ, VARIABLE: str(told)}, pass_fds=[told])
    except OSError as error:
        print(f"hvdtrain: {command[0]}: {error.strerror}", file=sys.stderr)
        return exits.USAGE
    os.close(told)
    code = rank.wait()
    if code >= 0:
        return code
    with contextlib.suppress(BlockingIOError):  # nothing said, and something that the rank started has the pipe
        if os.read(heard, 1):
            return exits.OK
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
