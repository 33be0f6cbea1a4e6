"""Jobs that continue when a host is lost: the transaction of a step, the rule for views, and real hosts that die."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    LIMIT_S,
    PROGRAMS,
    ROOT,
    SMALL,
    Cluster,
    document,
    environment,
    finished,
    forked,
    refused,
    unique,
    until,
)
from runs import read_run, results

from hvdtrain.comm.elastic import Channel
from hvdtrain.launch import line
from hvdtrain.launch.line import FROM_AGENT, BrokenLine, encoded
from hvdtrain.launch.members import Members
from hvdtrain.system.exits import Failure

FOUR = "a:1,b:1,c:1,d:1"


def on_one_machine(
    hosts: int, *words: str, launcher: Sequence[str] = ("--no-return",)
) -> subprocess.CompletedProcess[str]:
    """Runs a command on this machine, which plays several hosts."""
    names = ",".join(f"127.0.0.{1 + host}:1" for host in range(hosts))
    return finished(["launch/mpirun.sh", "--elastic", "--quiet", *launcher, "-H", names, sys.executable, *words])


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        ("hierarchical", [[1, 2, 1], [0, 4, 13], [4, 7, 19]]),
        ("powersgd:rank=2,bits=4", [[0, 2, 20], [3, 5, 40], [1, 7, 9]]),
        ("int4", [[2, 2, 11], [0, 5, 17]]),
        ("local-sgd:every=2,staleness=3+powersgd:bits=4", [[4, 1, 4], [0, 4, 21], [1, 8, 12]]),
        ("local-sgd:every=4,staleness=1,parts=4,outer_momentum=0.6+int2", [[1, 2, 5], [0, 5, 18], [3, 8, 25]]),
    ],
)
def test_survivors_lose_nothing_wherever_a_rank_dies(strategy: str, kills: list[list[int]], tmp_path: Path) -> None:
    done = on_one_machine(5, str(PROGRAMS / "elastic_ranks.py"), str(tmp_path), strategy, json.dumps(kills))
    assert done.returncode == 0, done.stderr
    killed = {rank for rank, *_ in kills}
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(5) if rank not in killed]
    assert len(list(tmp_path.iterdir())) == len(reports) == 5 - len(killed)
    for report in reports:
        assert all(report["unchanged"]), "an interrupted exchange changed weights, momentum, statistics or a residual"
        assert report["digests"] == [reports[0]["digests"][0]] * len(reports), "the replicas differ"
        assert report["totals"] == reports[0]["totals"]
        assert report["stopped"] == (reports[0]["stopped"] or 2 not in killed), "only some know of a request to stop"
        assert report["view"] == len(kills), "the survivors had to connect again"
        assert report["views"][-1] == [rank for rank in range(5) if rank not in killed]
    assert any(report["unchanged"] for report in reports)


def test_a_host_that_breaks_the_protocol_is_lost_and_one_whose_login_shell_prints_is_not() -> None:
    message, wrong_rank = "bytes that are not a message", "a message of rank 777, which it does not have"
    forged = {
        ("agent", "\x1e5"): message,
        ("agent", '\x1e"stdout"'): message,
        ("agent", '\x1e{"ended":"x","code":0}'): message,
        ("agent", '\x1e{"ended":777,"code":0}'): wrong_rank,
        ("agent", '\x1e{"from":777,"message":{"ready":true}}'): wrong_rank,
        ("agent", "\x1e\xff\xfe"): message,
        ("agent", "\x1e", 3_000): message,
        ("rank", '\x1e{"ready":["x"]}'): message,
        ("rank", '\x1e{"admit":NaN}'): message,
        ("rank", "\x1e{"): "connection to host",
    }
    done = on_one_machine(len(forged) + 1, str(PROGRAMS / "elastic_forging.py"), json.dumps([*forged]))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if "continuing with 127.0.0.1" in line]
    assert len(lines) == len(forged) and all(map(str.__contains__, lines, forged.values())), done.stderr


def test_a_line_without_an_end_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "MOST_BYTES", 1000)
    source, target = os.pipe()
    reader = line.Line(source, target, FROM_AGENT, "host a")
    try:
        os.write(target, b"Welcome! " + encoded({"beat": 1}) + b"x" * 1000)
        assert reader.receive() == [{"beat": 1}]
        os.write(target, b"x")
        with pytest.raises(BrokenLine, match="host a sent 1,001 bytes that are not a message"):
            reader.receive()
    finally:
        os.close(source), os.close(target)


def test_a_wrong_message_to_a_rank_ends_it_with_one_line() -> None:
    view = {"number": 0, "ranks": [0], "hosts": ["a"], "reason": ""}
    hello = {"job_key": "", "addresses": {}, "begun": {}, "view": view, "rank": 0, "local_rank": 0, "local_size": 1}

    def program() -> None:
        ours, theirs = socket.socketpair()
        ours.sendall(encoded(hello) + encoded({"view": view | {"number": 1}}) + b'\x1e{"view": 5}\n')
        channel = Channel(theirs.detach())
        channel.newer(1, {"broken": 0})

    done = forked(program)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "not a message: '{\"view\": 5}'" in done.stderr


@pytest.mark.slow
def test_a_rank_in_the_next_epoch_and_one_in_the_evaluation_continue_together(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = [*SMALL, "--strategy", "powersgd", "--epochs", "3", "--check-replicas", "1", "--run-dir", str(folder)]
    done = on_one_machine(4, str(PROGRAMS / "elastic_barrier.py"), "2", *flags)
    assert done.returncode == 0, done.stderr
    manifest, found = json.loads((folder / "manifest.json").read_text()), read_run(folder)
    check_samples(found, manifest["data"]["train"])
    assert [step.step for step in found["step"]] == list(range(found["summary"][0].steps))
    assert [(view.ranks, view.global_batch) for view in found["view"]] == [(3, 144)]
    assert len(found["epoch"]) == 3
    done = on_one_machine(4, str(PROGRAMS / "elastic_barrier.py"), "2", *flags, "--resume", "--epochs", "5")
    assert done.returncode == 0, done.stderr
    resumed = read_run(folder)["view"][1:]
    assert [(view.ranks, view.global_batch) for view in resumed] == [(3, 144)], "as in a run that was not resumed"


@pytest.mark.slow
def test_a_host_that_becomes_slow_stays_with_a_smaller_share(tmp_path: Path) -> None:
    """At the end of an epoch and after the loss of rank 0, batches are divided by the pace of the ranks."""
    folder, roles = tmp_path / "run", json.dumps({"slow": [2, 10], "dies": [0, 25]})
    flags = [*SMALL, "--strategy", "powersgd", "--epochs", "5", "--check-replicas", "1", "--evaluate-samples", "32"]
    words = [str(PROGRAMS / "elastic_roles.py"), str(tmp_path), roles, *flags, "--run-dir", str(folder)]
    done = on_one_machine(3, *words, "--shares", "measured")
    assert done.returncode == 0, done.stderr
    manifest, found = json.loads((folder / "manifest.json").read_text()), read_run(folder)
    check_samples(found, manifest["data"]["train"])
    (view,) = found["view"]
    divided = [epoch.shares for epoch in found["epoch"][:2]]
    assert divided[1][2] < min(divided[1][:2]) / 3, "rank 2 became slow in the second epoch"
    assert view.members == ["127.0.0.2", "127.0.0.3"] and view.shares[1] < view.shares[0] / 3
    samples = [[step.samples for step in read_run(folder, rank)["step"]] for rank in (1, 2)]
    assert samples[0][-2] > 3 * samples[1][-2]
    later = [epoch.shares for epoch in found["epoch"] if epoch.shares and epoch.step > view.step]
    kept = manifest["plan"]
    assert (kept["ranks"], kept["shares"]) == (2, [view.shares, *later][-1]), "for a resume"
    shown = {row["what"]: row["value"] for row in results("show", folder)["tables"][0]["rows"]}
    assert ":".join(f"{share:g}" for share in view.shares) + " from step" in shown["divisions"]


@pytest.mark.slow
def test_a_host_that_came_back_and_hangs_is_put_out_again(tmp_path: Path) -> None:
    """The others wait for it, and none of them ends. It comes back once more."""
    folder, roles = tmp_path / "run", json.dumps({"dies": [2, 15], "hangs": [2, 5]})
    flags = [*SMALL, "--strategy", "hierarchical", "--epochs", "999", "--check-replicas", "1"]
    flags += ["--evaluate-samples", "32"]
    words = [str(PROGRAMS / "elastic_roles.py"), str(tmp_path), roles, *flags]
    command = ["launch/mpirun.sh", "--elastic", "--quiet", "-H", "127.0.0.1:1,127.0.0.2:1,127.0.0.3:1", sys.executable]
    with (tmp_path / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [*command, *words, "--run-dir", str(folder)],
            cwd=ROOT,
            env=environment({"HVDTRAIN_STALL_LIMIT": "1"}),
            stderr=errors,
        )

        def said() -> str:
            return (tmp_path / "errors").read_text()

        try:
            until(lambda: process.poll() is not None or len(views(folder)) == 4, what=said)
            process.terminate()
            assert process.wait(LIMIT_S) == 75, said()
        finally:
            process.kill()
    assert [view.ranks for view in read_run(folder)["view"]] == [2, 3, 2, 3]
    reason = read_run(folder)["view"][2].reason
    assert "rank 2 on 127.0.0.3: other ranks have waited for it" in reason, reason
    assert "rank 2 on 127.0.0.3: other ranks have waited 1 s for it; its stack:" in said()


@pytest.mark.slow
def test_auto_chooses_again_when_members_change(tmp_path: Path) -> None:
    """From exact sums to local steps and back.

    Rank 0 dies in a step, rank 3 during the choice that follows. Hosts come back while another strategy runs than at
    the start. Every replica is compared after each step or averaging.
    """
    exact, local = "hierarchical", "local-sgd:every=2,staleness=1+powersgd:rank=4"
    folder, roles = tmp_path / "run", {"choices": [exact, local], "dies": [0, 15], "chooses": [3, 1], "stops": [1, 3]}
    flags = [*SMALL, "--strategy", "auto", "--epochs", "999", "--check-replicas", "1", "--evaluate-samples", "32"]
    words = [str(PROGRAMS / "elastic_roles.py"), str(tmp_path), json.dumps(roles), *flags, "--run-dir", str(folder)]
    done = on_one_machine(4, *words, "--checkpoint-steps", "0", launcher=[])
    assert done.returncode == 75, done.stderr
    found = read_run(folder)
    first, second, *returned = found["view"]
    assert (first.ranks, second.ranks) == (3, 2) and "127.0.0.2" in second.members
    assert returned and "came back" in returned[0].reason
    to_local, to_exact, *more = found["chosen"]
    assert (to_local.strategy, to_exact.strategy) == (local, exact)
    assert first.step <= second.step < to_local.step <= returned[0].step < to_exact.step
    steps = [step.step for step in found["step"]]
    assert steps == list(range(len(steps)))
    sends = {step.step: step.bytes_sent > 0 for step in found["step"]}
    assert not all(sends[step] for step in range(to_local.step, returned[0].step)), "local steps send nothing"
    until_step = more[0].step if more else len(steps)
    assert all(sends[step] for step in [*range(to_local.step), *range(to_exact.step, until_step)])
    back = read_run(folder, 3 if "127.0.0.4" in returned[0].members else 4)
    assert [step.step for step in back["step"]] == steps, "its records continue those of rank 0"


def test_a_view_needs_half_of_the_last_one_in_which_all_were_connected() -> None:
    members = Members(4)
    assert members.lose(3) is None
    assert members.lose(2) is None, "a tie: two of four"
    assert "1 of 4 hosts are left" in str(members.lose(0))
    members = Members(4)
    for number, host in enumerate((3, 2, 1), start=1):
        assert members.lose(host) is None
        members.establish(number)
    assert members.present == [0]


def test_new_hosts_count_in_the_rule_for_views_once_they_are_connected() -> None:
    members = Members(2)
    members.take_back([2, 3, 4])
    assert members.lose(4) is None and members.lose(3) is None and members.lose(2) is None and members.lose(1) is None
    members = Members(2)
    members.take_back([2, 3, 4])
    members.establish(1)
    assert members.lose(0) is None and members.lose(3) is None
    assert "2 of 5 hosts are left" in str(members.lose(1))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--strategy", "allreduce"], "--elastic: a job with --strategy allreduce cannot continue"),
        (["--strategy", "native"], "hint: use --strategy exact"),
        (["--strategy", "hierarchical", "--stages", "2"], "hint: use --stages 1"),
        (["--strategy", "local-sgd", "--ema", "0.9"], "hint: leave --ema out"),
    ],
)
def test_what_cannot_continue_is_refused(flags: list[str], said: str) -> None:
    variables = {"RANK": 0, "LOCAL_RANK": 0, "SIZE": 4, "LOCAL_SIZE": 1}
    extra = {f"HVDTRAIN_ELASTIC_{name}": str(value) for name, value in variables.items()}
    refused("resnet", *SMALL, *flags, code=78, said=said, extra=extra)


def test_other_options_of_the_launcher_are_refused(tmp_path: Path) -> None:
    for launcher in (["--logs", str(tmp_path)], ["--mca", "a", "b"]):
        done = on_one_machine(2, "-c", "", launcher=launcher)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


# --- virtual hosts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    """Four hosts, whose login shells print something. Those of c have two cores."""
    made = Cluster(unique())
    done = made.run("up", "--hosts", "a,b,c,d")
    assert done.returncode == 0, done.stderr
    try:
        for host in "bcd":
            run = "taskset -c 0,1 sh -c" if host == "c" else "eval"
            folder = Path("/run/hvdtrain", made.name, "hosts", host)
            with (folder / "sshd_config").open("a") as file:
                file.write(f'ForceCommand echo "Welcome to {host}!"; printf ">"; {run} "$SSH_ORIGINAL_COMMAND"\n')
            os.kill(int((folder / "sshd.pid").read_text()), signal.SIGHUP)
            until(lambda host=host: made.on("a", "ssh", host, "true").stdout == f"Welcome to {host}!\n>")
        yield made
    finally:
        assert made.run("down").returncode == 0


class Run:
    """An elastic training on virtual hosts, in the background."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *flags: str,
        launcher: Sequence[str] = ("--no-return",),
        hosts: Sequence[str] = ("-H", FOUR),
    ) -> None:
        self.cluster, self.folder = cluster, folder
        many = ["launch/mpirun.sh", "--elastic", "--quiet", *launcher, *hosts, sys.executable, "-m", "hvdtrain.resnet"]
        with folder.with_suffix(".txt").open("w") as output:
            self.process = subprocess.Popen(
                cluster.command("exec", "a", "--", *many, *SMALL[:4], "--run-dir", str(folder), *flags),
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def wait_for_step(self, step: int, rank: int = 0) -> None:
        path = self.folder / "metrics" / f"rank{rank:04d}.jsonl"
        wanted = f'"type":"step","step":{step},'
        until(lambda: self.process.poll() is not None or (path.exists() and wanted in path.read_text()), what=self.text)
        assert self.process.poll() is None, self.text()

    def ranks(self, host: str) -> list[int]:
        """The processes of the ranks on a host."""
        name = f"hvd-{self.cluster.name}-{host}"
        words = ["ip", "netns", "pids", name]
        pids = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
        return [int(pid) for pid in pids if self._is_rank(Path("/proc", pid))]

    def _is_rank(self, path: Path) -> bool:
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            return False
        return words[1:3] == ["-m", "hvdtrain.resnet"] and str(self.folder) in words

    def kill(self, host: str) -> None:
        pids = self.ranks(host)
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def end(self) -> str:
        try:
            assert self.process.wait(LIMIT_S) == 0, self.text()
        finally:
            self.process.kill()
        return self.text()

    def text(self) -> str:
        return self.folder.with_suffix(".txt").read_text()


def link(cluster: Cluster, host: str, state: str) -> None:
    port = "p" + str(1 + "abcd".index(host))
    subprocess.run(["ip", "-n", f"hvd-{cluster.name}", "link", "set", port, state], check=True)


def check_samples(run: Any, samples: int) -> None:
    """Each sample counts once per epoch."""
    assert [epoch.samples for epoch in run["epoch"]] == [samples] * len(run["epoch"])


@pytest.mark.root
@pytest.mark.slow
def test_training_continues_without_rank_0_and_without_a_host_whose_link_is_cut(four: Cluster, tmp_path: Path) -> None:
    """Every replica is compared after each step. Rank 0's records, checkpoints and summary move to another rank."""
    folder = tmp_path / "run"
    flags = ["--strategy", "powersgd", "--epochs", "5", "--batch-size", "48", "--check-replicas", "1", "--json"]
    run = Run(four, folder, *flags)
    run.wait_for_step(5)
    run.kill("a")
    run.wait_for_step(20)
    lost = run.ranks("d")
    try:
        link(four, "d", "down")
        text = run.end()
    finally:
        link(four, "d", "up")
    until(lambda: not any(Path("/proc", str(pid)).exists() for pid in lost))  # no ghost returns
    manifest, found = json.loads((folder / "manifest.json").read_text()), read_run(folder)
    check_samples(found, manifest["data"]["train"])
    assert [view.members for view in found["view"]] == [["b", "c", "d"], ["b", "c"]]
    assert "ended by SIGKILL" in found["view"][0].reason and "host d" in found["view"][1].reason
    # The wait is in the view, or in the step before it if that step counted.
    last = max(step.communication_s for step in found["step"] if step.step <= found["view"][1].step)
    assert 1 < max(found["view"][1].lost_s, last) < 20, "silence takes a while to notice, but not the time for a start"
    (summary,) = found["summary"]
    assert (summary.ranks, summary.hosts, len(found["epoch"])) == (2, 2, 5)
    steps = [step.step for step in found["step"]]
    assert steps == list(range(summary.steps)), "no step is missing or recorded twice"
    assert (folder / "COMPLETE").exists() and (folder / "checkpoints" / f"step-{summary.steps:08d}").exists()
    assert json.loads(text[text.index("{") : text.rindex("}") + 1])["ranks"] == 2
    shown = {row["what"]: row["value"] for row in results("show", folder)["tables"][0]["rows"]}
    assert "b, c, d from step" in shown["views"]


@pytest.mark.root
@pytest.mark.slow
def test_local_sgd_continues_and_keeps_the_local_changes(four: Cluster, tmp_path: Path) -> None:
    folder, strategy = tmp_path / "run", "local-sgd:every=2,staleness=1,parts=2+powersgd:rank=4,bits=4"
    flags = ["--strategy", strategy, "--epochs", "4", "--check-replicas", "1", "--checkpoint-steps", "4"]
    run = Run(four, folder, *flags, "--global-batch-size", "96")
    run.wait_for_step(5)
    run.kill("c")
    run.end()
    found = read_run(folder)
    (view,) = found["view"]
    assert (view.members, view.global_batch) == (["a", "b", "d"], 96), "a given global batch stays"
    (summary,) = found["summary"]
    assert [step.step for step in found["step"]] == list(range(summary.steps))
    assert summary.validation_scores[-1]["accuracy"] > 0.3
    more = [*SMALL[:4], "--run-dir", str(folder), "--resume", "--epochs", "5", "--json"]
    resumed = four.on("a", "launch/mpirun.sh", "-H", "a:1,b:1,d:1", sys.executable, "-m", "hvdtrain.resnet", *more)
    assert document(resumed)["steps"] > summary.steps


@pytest.mark.root
@pytest.mark.slow
def test_a_lost_host_comes_back_with_tensorflow(four: Cluster, tmp_path: Path) -> None:
    """The others give it their state between two steps. Every replica is compared after each averaging."""
    folder, strategy = tmp_path / "run", "local-sgd:every=2,staleness=1+powersgd:rank=4,bits=4"
    flags = ["--strategy", strategy, "--epochs", "400", "--check-replicas", "1", "--framework", "tensorflow"]
    flags += ["--global-batch-size", "96", "--epoch-samples", "480", "--evaluate-samples", "32"]
    run = Run(four, folder, *flags, launcher=[])
    run.wait_for_step(5)
    run.kill("c")
    try:
        until(lambda: run.process.poll() is not None or len(views(folder)) == 2, what=run.text)
        assert run.process.poll() is None, run.text()
        run.wait_for_step(views(folder)[1].step + 20)
        run.process.terminate()
        assert run.process.wait(LIMIT_S) == 75, run.text()
    finally:
        run.process.kill()
    found = read_run(folder)
    assert [view.members for view in found["view"]] == [[*"abd"], [*"abdc"]]
    assert {view.global_batch for view in found["view"]} == {96}, "a given global batch stays"
    assert "c came back" in found["view"][1].reason
    steps = [step.step for step in found["step"]]
    assert steps == list(range(len(steps)))
    assert [step.step for step in read_run(folder, 2)["step"]] == steps, "its records continue those of rank 0"


@pytest.mark.root
@pytest.mark.slow
def test_hosts_come_back_one_after_the_other(four: Cluster, tmp_path: Path) -> None:
    """The second one, which had rank 0, connects to the first, which has two ranks. Replicas and the average of the
    weights are equal. Then a host is refused, because its options have changed."""
    folder, config = tmp_path / "run", tmp_path / "options.toml"
    config.write_text("clip_norm = 0.1\n")
    flags = ["--strategy", "int4", "--ema", "0.9", "--epochs", "400", "--check-replicas", "1"]
    flags += ["--config", str(config)]
    flags += ["--global-batch-size", "96", "--epoch-samples", "480", "--evaluate-samples", "32"]
    run = Run(four, folder, *flags, launcher=[], hosts=["-H", "a:1,b:2,c:1"])
    try:
        for host in ("b", "a"):
            before = views(folder) if host == "a" else []
            run.wait_for_step(before[-1].step + 5 if before else 5)
            run.kill(host)
            count = len(before) + 2
            until(lambda count=count: run.process.poll() is not None or len(views(folder)) == count, what=run.text)
        run.wait_for_step(views(folder)[-1].step + 10)
        config.write_text("clip_norm = 0.2\n")
        run.kill("c")
        until(lambda: run.process.poll() is not None or "ended with exit code 78" in run.text(), what=run.text)
        run.wait_for_step(views(folder)[-1].step + 10)
        run.process.terminate()
        assert run.process.wait(LIMIT_S) == 75, run.text()
    finally:
        run.process.kill()
    found, text = read_run(folder), run.text()
    assert [view.members for view in found["view"]] == [[*"ac"], [*"acbb"], [*"cbb"], [*"cbba"], [*"bba"]]
    assert "a came back" in found["view"][3].reason
    steps = [step.step for step in found["step"]]
    assert steps == list(range(len(steps)))
    assert [step.step for step in read_run(folder, 4)["step"]] == steps, "its records continue those of rank 0"
    assert "c has other settings than the running job: clip_norm: 0.1 there, 0.2 here; hint: " in text
    check_samples(found, 480)


@pytest.mark.root
@pytest.mark.slow
def test_new_hosts_take_part(four: Cluster, tmp_path: Path) -> None:
    """The hostfile gets a line that is wrong, a name that is unknown, other names of members, and a host with more
    slots than its two cores. Then the host of rank 0 is lost, and another one is added. Every replica is compared after
    each step."""
    folder, hostfile = tmp_path / "run", tmp_path / "hosts"
    hostfile.write_text("a:1\nb:1\n")
    flags = ["--strategy", "powersgd", "--epochs", "400", "--check-replicas", "1", "--shares", "1:3"]
    flags += ["--epoch-samples", "480", "--evaluate-samples", "32"]
    listed = ["--hostfile", str(hostfile)]
    run = Run(four, folder, *flags, launcher=["--no-return"], hosts=listed)

    def wait_for(condition: Callable[[], object]) -> None:
        until(lambda: run.process.poll() is not None or condition(), what=run.text)
        assert run.process.poll() is None, run.text()

    try:
        run.wait_for_step(3)
        hostfile.write_text("a:1\nb:1\nc:0\n")
        wait_for(lambda: "no host was added" in run.text())
        with Path("/run/hvdtrain", four.name, "etc", "hosts").open("a") as names:
            names.write("fd00::6 six\n")
        hostfile.write_text("a:1\nb:1\nnowhere.invalid\nsix\n0\n127.0.0.1\nlocalhost\n10.77.0.2\nc slots=40\n")
        wait_for(lambda: len(views(folder)) == 1)
        run.wait_for_step(views(folder)[0].step + 9)
        run.kill("a")
        wait_for(lambda: len(views(folder)) == 2)
        with hostfile.open("a") as file:
            file.write("d:1\n")
        wait_for(lambda: len(views(folder)) == 3)
        run.wait_for_step(views(folder)[2].step + 9)
        run.process.terminate()
        assert run.process.wait(LIMIT_S) == 75, run.text()
    finally:
        run.process.kill()
    found, text = read_run(folder), run.text()
    members = [["a", "b", "c", "c"], ["b", "c", "c"], ["b", "c", "c", "d"]]
    assert [view.members for view in found["view"]] == members
    assert [found["view"][each].reason for each in (0, 2)] == ["c is new", "d is new"]
    for said in ("no host was added", "host nowhere.invalid has no IPv4 address", "host six has only IPv6 addresses"):
        assert text.count(said) == 1, said
    assert f"--hostfile {hostfile} --elastic --no-return" in text, "the command that resumes the run"
    assert "c has 2 cores, so it gets 2 ranks instead of 40" in text
    assert [text.count(f"is not added: it is {name}, which is in the job") for name in "ab"] == [3, 1]
    steps = [step.step for step in found["step"]]
    assert steps == list(range(len(steps)))
    check_samples(found, 480)
    samples = [read_run(folder, rank)["step"][-1].samples for rank in (0, 3, 4, 43)]
    shares = [share * sum(samples) / 9 for share in (3, 2, 2, 2)]
    assert all(abs(a - b) < 1 for a, b in zip(samples, shares, strict=True)), "new ranks get the mean share of 1:3"


def views(folder: Path) -> Any:
    """The changes of members so far."""
    try:
        return read_run(folder)["view"]
    except Failure:  # its records are moving to another rank
        return []


@pytest.mark.root
@pytest.mark.slow
def test_without_faults_the_run_equals_one_without_elastic_bit_by_bit(four: Cluster, tmp_path: Path) -> None:
    weights = []
    for name, launcher in (("plain", []), ("elastic", ["--elastic"])):
        folder = tmp_path / name
        flags = [*SMALL, "--strategy", "powersgd", "--epochs", "1", "--run-dir", str(folder), "--json"]
        words = ["launch/mpirun.sh", *launcher, "-H", "a:1,b:1", sys.executable, "-m", "hvdtrain.resnet", *flags]
        steps = document(four.on("a", *words))["steps"]
        saved = folder / "checkpoints" / f"step-{steps:08d}"
        weights.append([(saved / f"{part}.safetensors").read_bytes() for part in ("shared", "rank0000", "rank0001")])
    assert weights[0] == weights[1]
