"""Environment variables: which ones launchers pass on, and how to read the numbers that batch systems put there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.system.redaction import is_secret

FOR_RANKS = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "OPAL_*", "HOROVOD_*", "HVDTRAIN_*"),
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_NUM_THREADS", "MALLOC_*", "GLOO_*", "NCCL_*", "CUDA_*", "NVIDIA_*"),
    *("TF_*", "XLA_FLAGS", "TORCH_*", "PYTORCH_*", "KERAS_*", "TMPDIR", "XDG_CACHE_HOME"),
    *("TORCHINDUCTOR_*", "TORCHDYNAMO_*", "TRITON_*", "ROCR_*", "HIP_*", "HSA_*", "UCX_*", "NUMBA_*", "NUMEXPR_*"),
    *("HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "ACCELERATE_*", "PL_*", "LIGHTNING_*"),
    *("WANDB_*", "MLFLOW_*", "COMET_*", "NEPTUNE_*", "CLEARML_*", "AWS_*", "AZURE_*", "GOOGLE_*", "KAGGLE_*"),
    *("LANG", "LC_*", "TZ", "NO_COLOR"),
)
"""Variables that every rank gets, from a launcher or through `cluster exec`."""
OF_MPI = ("OMPI_MCA_*", "OMPI_ALLOW_*", "PRTE_*", "PMIX_MCA_*", "HYDRA_*")
ON_A_HOST = (*FOR_RANKS, *OF_MPI, "COLUMNS", "TERM", "SLURM_CONF")
"""Variables that a command on a virtual host gets. The command may itself be a launcher."""
FOR_LAUNCHERS = (
    *FOR_RANKS,
    *OF_MPI,
    *("HOME", "USER", "LOGNAME", "SHELL", "TERM", "HOSTNAME", "SSH_AUTH_SOCK", "KRB5CCNAME", "SSL_CERT_FILE"),
    "SLURM_*",
)
"""Variables that mpirun, horovodrun and ssh need on the host where they start."""
OF_SESSION = (
    *("HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "MAIL", "LS_COLORS", "LANGUAGE"),
    *("TERM*", "COLORTERM", "COLUMNS", "LINES", "PS[0-9]", "PROMPT_*", "HIST*", "BASH*", "ZSH*", "FISH_*", "LESS*"),
    *("EDITOR", "VISUAL", "PAGER", "MANPATH", "INFOPATH", "DISPLAY", "WAYLAND_*", "XAUTHORITY", "WINDOWID", "DBUS_*"),
    *("XDG_*", "DESKTOP_*", "GNOME_*", "GTK_*", "QT_*", "KDE_*", "VTE_*", "TMUX*", "STY", "SSH_*", "SUDO_*", "GPG_*"),
    *("SYSTEMD_*", "INVOCATION_ID", "JOURNAL_STREAM", "MODULE*", "LMOD*", "_LM*", "LOADEDMODULES", "_ModuleTable*"),
    *("CONDA_*", "_CE_*", "VIRTUAL_ENV_PROMPT", "VSCODE_*", "GIT_*", "PIP_*", "DEBIAN_*", "DEBUGINFOD_*", "WSL*"),
    *("PYENV_*", "NVM_*", "NIX_*", "NODE_*", "RUST*", "CARGO_*", "JAVA_*", "CLOUD*", "GRPC_*", "*_CERTS*"),
    *("LD_PRELOAD", "SSL_CERT_*", "KRB5CCNAME", "container", "KUBERNETES_*", "SLURM*", "SBATCH_*", "PBS_*", "OMPI_*"),
)
"""Variables that the shell, the desktop or the batch system sets, and that ranks on other hosts do not need."""
MOST_TASKS = 1 << 20
"""Largest accepted number of ranks. It keeps a mistyped number from filling the memory."""


def passes(name: str, patterns: Sequence[str]) -> bool:
    """Whether to pass a variable on: a pattern matches and the name is not a secret's, or the exact name is listed."""
    return name in patterns or (any(fnmatchcase(name, pattern) for pattern in patterns) and not is_secret(name))


def left_out(environment: Iterable[str], extra: Sequence[str] = ()) -> list[str]:
    """The variables that ranks on other hosts do not get, without those of the session. `extra`: named by -x."""
    kept = (*FOR_RANKS, *OF_MPI, *extra)
    return [name for name in sorted(environment) if not passes(name, kept) and not passes(name, OF_SESSION)]


def number(name: str, value: str, hint: str, *, least: int = 0, most: int = MOST_TASKS) -> int:
    """Parse the whole number in the variable `name`. Raises Failure (78), whose message ends in `hint`."""
    if not re.fullmatch(r"\d{1,9}", value.strip(), re.ASCII) or not least <= int(value) <= most:
        message = f"{name}={value[:40]!r} is not a whole number from {least} to {most}"
        raise Failure(f"{message}; hint: {hint}", exits.BAD_CONFIG)
    return int(value)


def task_counts(name: str, value: str) -> list[int]:
    """Parse Slurm's tasks per node (srun(1)): `2(x3),1` means 2 on each of three nodes and 1 on the fourth.

    Raises Failure (78).
    """
    counts: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"([1-9]\d{0,5})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if match is None or len(counts) + int(match[2] or 1) > MOST_TASKS:
            message = f"{name}={value[:100]!r} is not a list of tasks per node"
            raise Failure(f"{message}; hint: write it as 2(x3),1", exits.BAD_CONFIG)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
