"""Links as slow as asked: `tools/throttle.sh 10mbit`.

`request` reads what is asked and of which links, `qdisc` knows tc, `links` what a link was and is to be, `watchdog`
changes links so that a killed command leaves none half-way, `goodput` measures them, `remote` does it all on other
machines; `__main__` is the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain.lab import virtual
from hvdtrain.system import files


def asked(path: Path = virtual.SELF / "throttle.json") -> dict[str, Any] | None:
    """What was asked of this host's link, for any user; None without a throttle. `__main__.document` writes it."""
    try:
        found = files.from_json(files.read(path, files.SETTINGS_BYTES))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
