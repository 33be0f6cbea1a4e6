"""The environment variables that the launchers and `cluster exec` pass on; all others stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from hvdtrain.system.redaction import is_secret

FOR_RANKS = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "OPAL_*", "HOROVOD_*", "HVDTRAIN_*"),
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_NUM_THREADS", "MALLOC_*", "GLOO_*", "NCCL_*", "CUDA_*", "NVIDIA_*"),
    *("TF_*", "XLA_FLAGS", "TORCH_*", "PYTORCH_*", "KERAS_*", "TMPDIR", "XDG_CACHE_HOME"),
    *("LANG", "LC_*", "TZ", "NO_COLOR"),
)
"""What every rank gets, from a launcher or through `cluster exec`"""
OF_OPEN_MPI = ("OMPI_MCA_*", "OMPI_ALLOW_*")
ON_A_HOST = (*FOR_RANKS, *OF_OPEN_MPI, "COLUMNS", "TERM", "SLURM_CONF")
"""What a command on a virtual host gets: it may be a launcher"""
FOR_LAUNCHERS = (
    *FOR_RANKS,
    *OF_OPEN_MPI,
    *("HOME", "USER", "LOGNAME", "SHELL", "TERM", "HOSTNAME", "SSH_AUTH_SOCK", "KRB5CCNAME", "SSL_CERT_FILE"),
    "SLURM_*",
)
"""What mpirun, horovodrun and ssh need on the host where they start"""


def passes(name: str, patterns: Sequence[str]) -> bool:
    """Whether a variable is passed on: a pattern fits and the name is not a secret's, or the name itself is listed."""
    return name in patterns or (any(fnmatchcase(name, one) for one in patterns) and not is_secret(name))
