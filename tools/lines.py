"""Check that no folder has more lines of Python and shell than [lines] of setup.cfg allows (`make lint`)."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
allowed = configparser.ConfigParser()
allowed.read(ROOT / "setup.cfg")
listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.sh"]
counts: dict[str, int] = {}
for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split():
    if (path := ROOT / name).exists():
        lines = path.read_bytes().count(b"\n")
        for folder in [part.as_posix() for part in Path(name).parents]:
            counts[folder] = counts.get(folder, 0) + lines
over = [
    f"{name}: {counts.get(name, 0)} lines, {most} allowed"
    for name, most in allowed["lines"].items()
    if counts.get(name, 0) > int(most)
]
if over:
    print(*over, "hint: delete as many elsewhere, and move the allowance in setup.cfg", sep="\n", file=sys.stderr)
sys.exit(bool(over))
