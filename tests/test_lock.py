"""A run's folder has one job: real processes that want the same one, and files that are no locks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, until

from hvdtrain.system import locks
from hvdtrain.system.exits import Failure

HOLD = """import sys, pathlib
from hvdtrain.system import locks as lock
lock.take(pathlib.Path(sys.argv[1]), 'one', 'now')
print(flush=True)
input()"""


def test_another_job_is_told_who_holds_the_folder_until_that_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        with pytest.raises(Failure) as refused:
            locks.take(tmp_path, "another", "later")
        who = f"process {holder.pid} on {os.uname().nodename}, since now"
        assert refused.value.code == 73 and who in str(refused.value)
        locks.take(tmp_path, "one", "now")  # the same job on a host that shares the folder
        holder.kill()
        holder.wait()
        locks.take(tmp_path, "another", "later")


def test_a_lost_process_of_the_same_job_holds_nobody_up_and_leaves_the_lock_when_it_ends(tmp_path: Path) -> None:
    locks.release()
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        locks.take(tmp_path, "one", "now")
        locks.take_over(tmp_path, "later")
        assert not locks.holds()
        holder.kill()
        holder.wait()
        until(locks.holds)
    locks.release()


@pytest.mark.parametrize("kind", ["link", "hard link", "dangling link", "fifo", "folder", "text", "json"])
def test_what_is_no_lock_of_ours_is_refused_and_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    place, other = tmp_path / locks.NAME, tmp_path / "other"
    text = '{"mine": 1}' if kind == "json" else "mine\n"
    if kind in ("text", "json"):
        place.write_text(text)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "hard link":
        other.write_text(text)
        place.hardlink_to(other)
    else:
        place.symlink_to(other)
        if kind == "link":
            other.write_text(text)
    with pytest.raises((Failure, OSError), match=rf"{locks.NAME}"):
        locks.take(tmp_path, "one", "now")
    if kind in ("link", "hard link", "text", "json"):
        assert place.read_text() == text
    assert other.exists() == (kind in ("link", "hard link"))
