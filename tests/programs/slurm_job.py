"""What Slurm's tests start instead of training: ends with 75 on a signal, and with 0 when it was started again.

Each rank writes what it sees into FOLDER/rank<N>: the start, then a signal's name.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

PATIENCE_S = 60
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def main() -> int:
    file = Path(sys.argv[1]) / f"rank{os.environ['OMPI_COMM_WORLD_RANK']}"
    restarted = file.exists()

    def note(text: str) -> None:
        with file.open("a") as output:
            output.write(f"{text}\n")

    def stop(number: int, frame: FrameType | None) -> None:
        for other in SIGNALS:  # Slurm and Open MPI may each send one
            signal.signal(other, signal.SIG_IGN)
        note(signal.Signals(number).name)
        time.sleep(0.5)  # so that every rank has its signal before mpirun hears of an end
        os._exit(75)

    for number in SIGNALS:
        signal.signal(number, stop)
    note(f"start {os.environ['HVDTRAIN_RUN_DIR']} {os.environ['HVDTRAIN_RESUME']}")
    if not restarted:
        time.sleep(PATIENCE_S)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
