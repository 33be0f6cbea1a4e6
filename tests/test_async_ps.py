"""`--strategy async-ps`: one worker equals SGD, no update is lost, workers do not wait."""

from __future__ import annotations

import functools
import itertools
import json
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT_S, PROGRAMS, SMALL, Cluster, document, here, launch, resnet
from hypothesis import given
from hypothesis import strategies as some
from runs import cut_off, read_run
from test_resnet_train import assert_same_arrays, newest_arrays, started, wait_for_steps
from thread_ranks import ThreadRendezvous, at_once, meetings

from hvdtrain import strategies
from hvdtrain.comm.backends.base import Endpoint
from hvdtrain.comm.errors import PeerLost
from hvdtrain.config.options import TrainConfig
from hvdtrain.strategies import Layout
from hvdtrain.strategies.studies.async_ps import AsyncPS, Server
from hvdtrain.strategies.studies.servers import NUMBERS, ServerCommunicator
from hvdtrain.system.exits import Failure

DRAW = np.random.default_rng(3)
ASYNC = ["--strategy", "async-ps", *SMALL]
SERVED = ["--strategy", "async-ps:servers=2", *SMALL]


def server(size: int, **settings: Any) -> Server:
    new = Server(slice(0, size), TrainConfig(**settings))
    new.begin(np.zeros(size, np.float32))
    return new


# --- one server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_a_server_with_one_worker_equals_sgd_bit_for_bit(decay: float) -> None:
    weights, velocity = DRAW.normal(size=50).astype(np.float32), np.zeros(50, np.float32)
    tested = Server(slice(10, 40), TrainConfig(momentum=0.9, weight_decay=decay))
    tested.begin(weights)
    for step, lr in enumerate((0.1, 0.05, 0.3), 1):
        gradients, answer = DRAW.normal(size=50).astype(np.float32), np.empty(30, np.float32)
        numbers = tested.answer(0, np.array([lr, 1, step, 0]), gradients[10:40].copy(), answer)
        velocity = np.float32(0.9) * velocity + (gradients + np.float32(decay) * weights)
        weights = weights - np.float32(lr) * velocity
        np.testing.assert_array_equal(answer, weights[10:40])
        assert numbers.tolist() == [0, 0, 0, 0]


def test_no_update_is_lost_and_staleness_counts_the_updates_of_others() -> None:
    tested, staleness = server(1000, momentum=0.0), [[] for _ in range(8)]

    def worker(rank: int) -> None:
        answer = np.empty(1000, np.float32)
        for step in range(1, 101):
            numbers = np.array([1, 0.5, step, 0])
            staleness[rank].append(tested.answer(rank, numbers, np.full(1000, 2.0 * rank, np.float32), answer)[0])

    at_once([functools.partial(worker, rank) for rank in range(8)])
    answer = np.empty(1000, np.float32)
    last = tested.answer(0, np.zeros(NUMBERS), None, answer)[0]
    assert (answer == -100 * sum(range(8))).all()
    assert sum(staleness[0]) + last == 700, "the updates by the seven other workers"


@given(some.integers(1, 6), some.integers(0, 2**32), some.integers(1, 9))
def test_workers_agree_on_the_last_step_before_any_passes_it(workers: int, seed: int, stop_at: int) -> None:
    tested, choose, answer = server(1), random.Random(seed), np.empty(1, np.float32)
    steps, stopped = [0] * workers, [0.0] * workers
    while not all(stopped):
        rank = choose.choice([rank for rank in range(workers) if not stopped[rank]])
        steps[rank] += 1
        stop = rank == 0 and steps[rank] >= stop_at
        last_step = tested.answer(rank, np.array([0.1, 1, steps[rank], stop]), np.zeros(1, np.float32), answer)[1]
        assert last_step == 0 or last_step >= steps[rank]
        stopped[rank] = last_step if last_step == steps[rank] else 0
    assert len(set(steps)) == 1


# --- real ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "ranks", "servers", "launcher"), [("torch", 4, 3, "forks"), ("tensorflow", 2, 0, "horovodrun --gloo")]
)
@pytest.mark.slow
def test_the_weights_are_the_initial_ones_minus_all_updates(
    framework: str, ranks: int, servers: int, launcher: str, tmp_path: Path
) -> None:
    config = json.dumps({"strategy": f"async-ps:servers={servers}"})
    report = document(launch(ranks, [str(PROGRAMS / "async_ps.py"), framework, config, str(tmp_path)], launcher))
    steps, parts, slow = 6, servers or 1, ranks - 1
    expected = np.array(report["before"]) - 0.1 * np.array(report["pushed"])
    np.testing.assert_allclose(report["weights"][0], expected, rtol=1e-5, atol=1e-6)
    assert all(weights == report["weights"][0] for weights in report["weights"])
    staleness = [sum(note["staleness"] for note in notes) for notes in report["notes"]]
    assert all(0 <= note["staleness"] <= note["staleness_max"] for notes in report["notes"] for note in notes)
    assert max(staleness) <= (ranks - 1) * steps, "each update of others is counted once"
    assert staleness[slow] == (ranks - 1) * steps, "others do not wait for the slow rank"
    # Each rank exchanges with the servers on other ranks, in each step and once to synchronise.
    whole = 18 * 4
    assert sum(report["sent_bytes"]) == (2 * steps + 1) * (ranks - 1) * whole
    assert report["sent_bytes"][slow] == steps * whole * (parts - (slow < parts)) // parts
    assert not any(itertools.chain(*report["in_sync"]))
    assert report["totals"][2] == 11 * steps
    assert report["again"] is True
    assert [state["part"] for state in report["state"] if "part" in state] == [
        [18 * i // parts, 18 * (i + 1) // parts] for i in range(parts)
    ]
    assert report["sum"] == [[ranks, sum(range(ranks))]]
    assert report["agreed"] == {"own": [0, 0]}
    assert report["gathered"] == ["ä" * rank for rank in range(ranks)]


def test_impossible_combinations_are_rejected() -> None:
    for options in ({"precision": "fp16"}, {"optimizer": "adam"}):
        with pytest.raises(Failure) as error:
            strategies.resolve(TrainConfig(strategy="async-ps", **options))
        assert error.value.code == 78
    assert resnet(2, "--strategy", "async-ps:servers=3", "--epochs", "1", launcher="forks").returncode == 78


# --- ranks as threads ------------------------------------------------------------------------------------------------


def joined(addresses: list[str], program: Callable[[ServerCommunicator], Any]) -> list[Any]:
    """Run `program` on a rank for each address, and return the results. Equal addresses are one host."""

    def rank(meeting: ThreadRendezvous, address: str) -> Any:
        return program(ServerCommunicator(meeting, Endpoint(address, "lo", loopback=True)))

    pairs = zip(meetings(len(addresses)), addresses, strict=True)
    return at_once([functools.partial(rank, *pair) for pair in pairs])


class Echo:
    """A store that answers with its position."""

    def __init__(self, part: slice) -> None:
        self.part = part

    def answer(self, rank: int, numbers: np.ndarray, gradients: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        weights[:] = np.arange(self.part.start, self.part.stop)
        if gradients is not None:
            weights += gradients
        return numbers + rank


def test_servers_are_the_first_rank_of_each_host_and_then_the_second_ranks() -> None:
    def program(ranks: ServerCommunicator, parts: int) -> Any:
        served: list[slice] = []
        ranks.serve(parts, 5, lambda part: served.append(part) or Echo(part))
        weights = np.empty(5, np.float32)
        answers = ranks.ask(np.arange(4.0), np.full(5, 0.5, np.float32), weights)
        assert weights.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
        ranks.ask(np.zeros(NUMBERS), None, weights)
        assert weights.tolist() == [0, 1, 2, 3, 4]
        assert answers.tolist() == [[rank + ranks.rank for rank in range(4)]] * len(answers)
        ranks.shutdown()
        return [(part.start, part.stop) for part in served]

    addresses = ["127.0.0.1", "127.0.0.1", "127.0.0.2"]
    assert joined(addresses, lambda ranks: program(ranks, 0)) == [[(0, 2)], [], [(2, 5)]]
    assert joined(addresses, lambda ranks: program(ranks, 1)) == [[(0, 5)], [], []]
    assert joined(addresses, lambda ranks: program(ranks, 3)) == [[(0, 1)], [(3, 5)], [(1, 3)]]
    assert joined(addresses[:1], lambda ranks: program(ranks, 0)) == [[(0, 5)]]


def test_collectives_combine_all_ranks_and_fail_without_one() -> None:
    noticed = threading.Event()

    def program(ranks: ServerCommunicator) -> None:
        ranks.serve(1, 3, Echo)
        assert ranks.gather_bytes(b"%d" % ranks.rank) == [b"0", b"1", b"2", b"3"]
        assert ranks.sum(np.array([1.0, ranks.rank]), "").tolist() == [4.0, 6.0]
        assert ranks.broadcast(np.full(2, ranks.rank), "").tolist() == [0, 0]
        with pytest.raises(NotImplementedError, match="joined by servers cannot sum vectors"):
            ranks.reduce(np.ones(1))
        if ranks.rank == 0:
            with pytest.raises(PeerLost, match="rank 1"):
                ranks.gather_bytes(b"")
            noticed.set()
        elif ranks.rank == 1 or noticed.wait(LIMIT_S):  # rank 1 dies, and the others end with rank 0
            ranks._streams[0].socket.close()

    joined(["127.0.0.1"] * 4, program)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_one_worker_resumes_exactly(tmp_path: Path) -> None:
    flags = [*ASYNC, "--framework", "torch", "--epochs", "1", "--weight-decay", "0.001"]
    flags += ["--checkpoint-steps", "7", "--keep-checkpoints", "9"]
    here("resnet", "--run-dir", str(tmp_path / "whole"), *flags)
    cut_off(tmp_path / "whole", tmp_path / "cut", 7)
    here("resnet", "--run-dir", str(tmp_path / "cut"), "--resume", *flags)
    assert_same_arrays(tmp_path / "whole", tmp_path / "cut")
    losses = [{step.step: step.loss for step in read_run(tmp_path / name)["step"]} for name in ("whole", "cut")]
    assert losses[0] == losses[1]
    assert {step.staleness for step in read_run(tmp_path / "whole")["step"]} == {0}


@pytest.mark.slow
def test_ranks_stop_after_the_same_step_and_resume(tmp_path: Path) -> None:
    flags = [*SERVED, "--framework", "torch", "--batch-size", "16", "--checkpoint-steps", "9"]
    with started(3, tmp_path, *flags, "--epochs", "40") as process:
        wait_for_steps(process, tmp_path, 20)
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, errors
    assert f"stopped; continue with mpirun -np 3 python -m hvdtrain.resnet --resume {tmp_path}\n" in errors
    steps = {len(read_run(tmp_path, rank)["step"]) for rank in range(3)}
    assert len(steps) == 1
    assert [saved.step for saved in read_run(tmp_path)["saved"]][:2] == [9, 18]
    saved = newest_arrays(tmp_path)
    assert saved["rank0000.safetensors/strategy.velocity"].size == 335330 // 2
    assert saved["rank0000.safetensors/strategy.velocity"].any()
    assert "rank0002.safetensors/strategy.velocity" not in saved
    (stopped_at,) = steps
    epochs = str(stopped_at // 29 + 1)
    summary = document(resnet(3, "--run-dir", str(tmp_path), "--resume", *flags, "--epochs", epochs, "--json"))
    assert [resumed.step for resumed in read_run(tmp_path)["resumed"]] == [stopped_at]
    assert summary["ranks"] == 3


@pytest.mark.root
@pytest.mark.slow
def test_two_hosts_send_the_predicted_bytes(cluster: Cluster, tmp_path: Path) -> None:
    words = ["launch/mpirun.sh", "-H", "a:2,b:2", sys.executable, "-m", "hvdtrain.resnet", *ASYNC, "--json"]
    summary = document(cluster.on("a", *words, "--epochs", "2", "--run-dir", str(tmp_path / "run")))
    assert (summary["hosts"], summary["ranks"]) == (2, 4)
    cost = AsyncPS.cost([(summary["parameters"],)], Layout(ranks=4, hosts=2), None, None)
    expected = summary["steps"] * cost.sent_bytes
    for host in summary["nic_bytes"]:
        assert expected < host["sent_bytes"] < 1.15 * expected, "with headers and the final exchange"
