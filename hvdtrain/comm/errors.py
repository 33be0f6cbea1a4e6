"""Recognises a lost peer from the exceptions of Horovod, PyTorch, TensorFlow and the TCP backend."""

from __future__ import annotations

import traceback


class PeerLost(OSError):
    """The connection to another rank ended."""


# Exceptions that libraries raise when another rank is gone: the class name, and a part of the message.
PEER_ERRORS = (
    ("PeerLost", ""),
    ("RuntimeError", "PeerLost: "),  # PyTorch and TensorFlow wrap exceptions raised by our Python functions
    ("UnknownError", "PeerLost: "),
    ("HorovodInternalError", ""),
    ("UnknownError", "HorovodInternalError: "),
    ("FailedPreconditionError", "no more calls are possible"),
    ("RuntimeError", "Horovod has been shut down"),
    ("UnknownError", "Horovod has been shut down"),
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

# Parts of messages that report a mistake in the script: mismatched calls, or an unsupported request.
MISTAKES = ("ismatch", "do not agree", "is not supported")


def lost_peer(error: BaseException | None) -> bool:
    """Whether a library raised this exception, or one of its causes, because another rank went away."""
    while error is not None:
        kind, text = type(error).__name__, str(error)
        known = any(name == kind and words in text for name, words in PEER_ERRORS)
        if known and not any(words in text for words in MISTAKES) and _origin(error) in LIBRARIES:
            return True
        error = error.__cause__
    return False


def reason(error: BaseException) -> str:
    """The line of the message that says why the peer was lost. TensorFlow's messages have many."""
    lines = str(error).splitlines() or [""]
    known = (line for line in lines if "PeerLost: " in line or "Horovod has been shut down" in line)
    return next(known, lines[0]).rpartition("PeerLost: ")[2]


def _origin(error: BaseException) -> str:
    """The package that defines the exception class; for built-in classes, the package that raised the exception."""
    module = type(error).__module__
    if module == "builtins":
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        module = frames[-1].f_globals["__name__"] if frames else ""
    return module.partition(".")[0]
