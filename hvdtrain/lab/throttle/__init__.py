"""Limit the rate of links: `tools/throttle.sh 10mbit`.

`request` parses what the user asks for, `qdisc` builds tc commands, `links` knows a link's original and target state,
`watchdog` makes changes atomic, `goodput` measures links, and `remote` calls the throttle on other machines.
`__main__` is the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain.lab import virtual
from hvdtrain.system import files


def requested(path: Path = virtual.SELF / "throttle.json") -> dict[str, Any] | None:
    """The throttle requested for this host, readable by any user. None if it is not throttled.

    `__main__.document` describes the fields.
    """
    try:
        document = files.from_json(files.read(path, files.SETTINGS_BYTES))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
