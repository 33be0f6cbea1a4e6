"""What carries data between the ranks of a job: `Alone` says how, and each library has a file.

`meeting` lets ranks find each other without any of them, `horovod_ranks` is Horovod for both frameworks, `ddp` is
torch.distributed with DistributedDataParallel, `mwms` TensorFlow with MultiWorkerMirroredStrategy, `streams` our own
TCP for the strategies made for slow networks, `servers` the same for parameter servers. `Alone` itself serves a process
without a launcher. Only this room imports Horovod, mpi4py and torch.distributed. Each method is called by every rank,
in the same order; `name` must be the same on all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Reach:
    """How the other ranks get at this host."""

    address: str
    """IPv4, or a name"""
    interface: str | None
    """Of the link to other hosts, or loopback if there are none; None if unknown"""
    loopback: bool = False


class Meeting(Protocol):
    """Ranks that know of each other and can tell each other small things."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    secret: bytes
    """The job's: all its ranks know it, and nobody else (`meeting` says under which launcher)"""

    def gather(self, mine: bytes) -> list[bytes]:
        """What every rank gave, in rank order, on all ranks."""

    def leave(self) -> None:
        """Disconnects from the other ranks; a rank may wait here for the slowest. A second time does nothing."""


class Hosts(Protocol):
    """The hosts of a job as seen by one rank of each, its leader. Arrays are 1-d and contiguous."""

    count: int
    index: int
    """This host's, 0 to count - 1"""
    sent_bytes: int
    """Payload bytes given to the network so far"""

    def pairwise(self, part: Callable[[int], np.ndarray], *, even: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        """Sends part(j) to each other host j, and yields (host, the bytes that it sent here), in an order that never
        changes. `even`, which all hosts must say alike: all parts have one length; then part(j) is called only when its
        turn comes, while the part before is in flight, and a long part waits until its receiver is ready."""

    def exchange(self, parts: Sequence[np.ndarray], *, even: bool = False) -> list[np.ndarray]:
        """Sends parts[j] to host j; what each host sent here, in host order, its own part included. One dtype for all;
        `even` as above."""

    def gather(self, part: np.ndarray, *, even: bool = False) -> list[np.ndarray]:
        """Every host's part, in host order; `even` as above."""

    def sum(self, values: np.ndarray) -> None:
        """Element-wise sum over hosts, in place and bit for bit the same on all: 2(h-1)/h of the bytes are sent."""


class TorchStep:
    """One rank's step in PyTorch without any exchange in backward; others extend it."""

    loss_factor = 1.0
    """What the loss is multiplied by before backward, because the exchange divides by it"""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer

    def loss(self, *arrays: Any) -> Any:
        """Sum of losses of this rank's batch, and by name the sums of the run's metric."""
        return self.model.loss(*arrays)

    def backward(self, loss: Any) -> None:
        loss.backward()

    def waited_s(self) -> float | None:
        """Seconds that `backward` waited for the exchange after its last gradient; None if that cannot be told."""
        return 0.0

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """Held while the optimizer updates: its gradients have been waited for."""
        return contextlib.nullcontext()


class Alone:
    """A process by itself: rank 0 of 1, for which nothing needs to be sent. What carries data between several ranks
    extends it; its methods say what that has to do."""

    rank = local_rank = 0
    size = local_size = 1
    hosts_count = 1
    """Between which `hosts` sums; they may share a name"""
    secret = b""
    carrier = "none"
    """none, gloo, mpi, nccl, grpc, streams or servers"""
    sent_bytes = 0
    """Payload that this rank gave to the network so far, for a strategy's exchanges: `sum` is not counted"""
    local_sent_bytes = 0
    """Payload that it gave to other ranks of its host"""

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]

    def leave(self) -> None:
        pass

    def sum(self, values: np.ndarray, name: str) -> np.ndarray:
        """Element-wise sum over ranks, same shape and type."""
        return values

    def broadcast(self, values: np.ndarray, name: str) -> np.ndarray:
        """Rank 0's values; those of the others have the same shape and type."""
        first = self.gather(values.tobytes() if self.rank == 0 else b"")[0]
        return np.frombuffer(bytearray(first), values.dtype).reshape(values.shape)

    def wait(self) -> None:
        """Waits until the sums that backward started are done."""

    def state(self) -> dict[str, np.ndarray]:
        """What the exchange itself must have to continue as if never interrupted."""
        return {}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Takes what `state` gave."""

    @contextlib.contextmanager
    def hosts(self, vector: np.ndarray) -> Iterator[Hosts | None]:
        """Sums a 1-d vector over ranks, in place, in three acts: entering adds up the ranks of each host; then the
        first rank of each adds up between the hosts, as they are given to it (None to the others, who wait); leaving
        shares the outcome with the host's ranks. Raises NotImplementedError where ranks are joined in another way."""
        from hvdtrain.comm.backends.tcp import StreamHosts  # which imports this

        self._only("sum vectors by a reducer")
        yield StreamHosts([None])

    def collect(self, mine: np.ndarray) -> list[np.ndarray]:
        """What every rank gave (1-d, contiguous, any length), as bytes in rank order, on all ranks; each host's crosses
        the network once for each other host. Raises NotImplementedError where `hosts` does."""
        self._only("collect what each has")
        return [mine.view(np.uint8)]

    def _only(self, what: str) -> None:
        """Several ranks must have a way of their own to do it."""
        if self.size > 1:
            raise NotImplementedError(f"ranks joined by {self.carrier} cannot {what}")

    # --- PyTorch ------------------------------------------------------------------------------------------------

    def start_sum(self, tensor: Any, name: str) -> Any:
        """Starts the sum of a tensor over ranks, in place; `finish_sum` waits for it."""
        return tensor

    def finish_sum(self, handle: Any) -> Any:
        return handle

    def overlapped(self, model: Any, optimizer: Any, settings: Any) -> TorchStep:
        """A step whose backward starts each gradient's sum over ranks as it appears; `settings`: the strategy's."""
        self._only("exchange gradients during backward")
        return TorchStep(model, optimizer)

    # --- TensorFlow: all but `scope` are called while a graph is traced -------------------------------------------

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Held while variables are made."""
        return contextlib.nullcontext()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function` where its variables are to be read and updated."""
        return function(*arguments)

    def graph_sum(self, tensor: Any, name: str) -> Any:
        """The sum of a tensor over ranks."""
        return tensor

    def summed_gradients(self, tape: Any, loss: Any, weights: list[Any]) -> list[Any]:
        """Gradients of `loss`, summed over ranks."""
        self._only("exchange gradients during backward")
        return list(tape.gradient(loss, weights))


class PeerLost(OSError):
    """A stream to another rank ended."""


# What libraries raise when another rank is gone: the exception's class, and words of its text.
PEER_ERRORS = (
    ("PeerLost", ""),
    ("RuntimeError", "PeerLost: "),  # as PyTorch and TensorFlow pass on what a function of ours has raised
    ("UnknownError", "PeerLost: "),
    ("HorovodInternalError", ""),
    ("RuntimeError", "Horovod has been shut down"),
    *(("UnknownError", f"Horovod{kind}") for kind in ("Allreduce", "Allgather", "Broadcast")),  # names of operations
    ("DistBackendError", ""),
    ("DistNetworkError", ""),
    ("DistStoreError", ""),
    ("RuntimeError", "gloo/transport"),
    ("RuntimeError", "Gloo connectFullMesh failed"),
    ("UnavailableError", ""),
    ("AbortedError", ""),
    ("CancelledError", ""),
    ("InternalError", "Collective ops is aborted"),
)
LIBRARIES = ("hvdtrain", "horovod", "torch", "tensorflow")

# What they raise when a script is wrong: the ranks do not call the same, or nobody can have what is asked for.
MISTAKES = ("ismatch", "do not agree", "is not supported")


def lost_peer(error: BaseException | None) -> bool:
    """Whether a library raised this because another rank went away."""
    while error is not None:
        kind, text = type(error).__name__, str(error)
        known = any(name == kind and words in text for name, words in PEER_ERRORS)
        if known and not any(words in text for words in MISTAKES) and _origin(error) in LIBRARIES:
            return True
        error = error.__cause__
    return False


def _origin(error: BaseException) -> str:
    """The package that defines the exception's class; for Python's own classes, the package whose code raised it."""
    module = type(error).__module__
    if module == "builtins":
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        module = frames[-1].f_globals["__name__"] if frames else ""
    return module.partition(".")[0]
