"""The plug-in that looks whether the tests changed this machine: it never costs a user pytest's own summary."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import untouched
from conftest import ROOT, WITHOUT_RIGHTS, Cluster, finished


@pytest.mark.root
def test_a_session_ends_with_its_summary_while_a_cluster_is_up(cluster: Cluster) -> None:
    """Only root may list the folders of a cluster; this session's user has no rights."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        register = "config.pluginmanager.register(untouched.Untouched('none'))"
        Path(folder, "conftest.py").write_text(f"import untouched\ndef pytest_configure(config):\n    {register}\n")
        Path(folder, "test_one.py").write_text("def test_one():\n    pass\n")
        words = [*WITHOUT_RIGHTS, sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        done = finished(words, extra={"HOME": folder, "PYTHONPATH": str(ROOT / "tests")}, cwd=Path(folder))
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert "/run/hvdtrain/pins" in done.stdout


def test_what_cannot_be_listed_is_named_and_the_rest_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = untouched.os.scandir

    def scandir(folder: Path) -> Any:
        if Path(folder).name == "closed":
            raise PermissionError(13, "Permission denied")
        return listing(folder)

    for name in ("closed/hidden", "open/deep/shown"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(untouched.os, "scandir", scandir)
    unread: set[str] = set()
    names = {path.name for path in untouched.below(tmp_path, unread, 9)}
    assert names == {"closed", "open", "deep", "shown"}
    assert unread == {f"{tmp_path / 'closed'}: Permission denied"}
    assert not [*untouched.below(tmp_path / "missing", unread)]


def test_a_check_that_fails_is_reported_and_fails_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = untouched.Untouched("none")
    monkeypatch.setattr(untouched, "links", lambda: 1 / 0)
    session, lines = SimpleNamespace(exitstatus=0), list[str]()
    plugin.pytest_sessionfinish(session)
    plugin.pytest_terminal_summary(SimpleNamespace(write_line=lambda line, **_: lines.append(line)))
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert any("ZeroDivisionError" in line for line in lines)
