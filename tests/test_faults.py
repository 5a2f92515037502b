"""Ranks of the real training command that are killed, frozen or fail: what the others say, and how soon they are gone.

The whole matrix of moments and victims is tests/soak/kill_matrix.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_faults import SERVER, Setting, complaints, launch_direct, launch_torchrun

from dflash.groups import Topology

MARGIN_S = 8.0  # a loaded machine; what is measured on an idle one stands in docs/reliability.md


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    yield Setting.make(tmp_path_factory.mktemp("faults"))
    SERVER.close()


def lost(victim: str) -> str:
    return rf"^error: \w+-\d+: lost {victim}: "


@pytest.mark.parametrize(
    ("topology", "victim", "moment"),
    [
        (Topology(2, 2), "target-1", "isend 5"),
        (Topology(2, 3), "target-0", "idle 5"),
        (Topology(2, 3), "drafter-3", "allreduce 3"),
        (Topology(2, 2), "drafter-2", "save 1"),
        (Topology(2, 2), "target-0", "eos 1"),
    ],
    ids=lambda value: f"{value.num_targets}+{value.num_drafters}" if isinstance(value, Topology) else value,
)
def test_every_survivor_names_the_killed_rank(topology: Topology, victim: str, moment: str, setting: Setting) -> None:
    more = {"checkpoint__interval_steps": 2}
    if moment.startswith("eos"):
        more["train__max_steps"] = 3
    arguments = setting.arguments(topology, setting.new_run(), **more)
    assert not complaints(launch_direct(topology, arguments, f"kill {victim} {moment}"), victim, lost(victim))


@pytest.mark.parametrize("victim", ["target-0", "drafter-1"])
def test_a_rank_killed_within_a_large_payload_is_named(victim: str, tmp_path: Path) -> None:
    setting, topology = Setting.make_wide(tmp_path), Topology(1, 2)
    arguments = setting.arguments(topology, setting.new_run(), **setting.large_payloads)
    launched = launch_direct(topology, arguments, f"kill {victim} payload 1")
    assert not complaints(launched, victim, lost(victim))
    assert launched.share is not None and 0 < launched.share < 1


def test_torchrun_ends_with_an_error_and_leaves_nothing_running(setting: Setting) -> None:
    topology = Topology(2, 2)
    arguments = setting.arguments(topology, setting.new_run())
    # Late enough that all have begun: a rank that still loads has no handlers yet, and torchrun ends it first.
    launched = launch_torchrun(topology, arguments, "kill target-1 forward 30")
    assert launched.torchrun_code != 0 and not launched.left_over
    for rank in launched.others("target-1"):
        assert len(rank.told) == 1 and re.search(lost("target-1"), rank.told[0]), rank


@pytest.mark.parametrize("victim", ["target-1", "drafter-2"])
def test_a_frozen_rank_is_found_by_its_silence(victim: str, setting: Setting) -> None:
    topology, peer_timeout_s = Topology(2, 2), 3.0
    arguments = setting.arguments(topology, setting.new_run(), pipeline__peer_timeout_s=peer_timeout_s)
    launched = launch_direct(topology, arguments, f"freeze {victim} forward 5", limit_s=peer_timeout_s + MARGIN_S)
    assert not complaints(launched, victim, lost(victim) + "no sign of life", limit_s=peer_timeout_s + MARGIN_S)
    assert launched.latest_s(victim) > peer_timeout_s / 2


def test_a_rank_that_loads_for_longer_than_peers_may_be_silent_is_waited_for(setting: Setting) -> None:
    topology = Topology(2, 2)
    more = {"pipeline__peer_timeout_s": 2.0, "train__max_steps": 2}
    arguments = setting.arguments(topology, setting.new_run(), **more)
    slow = "note target-0 load 1; sleep=6 target-0 load 1; sleep=4 drafter-2 load 1"
    launched = launch_direct(topology, arguments, slow, limit_s=90.0)
    assert [rank.exit_code for rank in launched.ranks] == [0] * 4, launched


@pytest.mark.parametrize("victim", ["target-0", "drafter-3"])
def test_an_exception_reaches_the_others_as_its_own_message(victim: str, setting: Setting) -> None:
    topology = Topology(2, 2)
    arguments = setting.arguments(topology, setting.new_run())
    launched = launch_direct(topology, arguments, f"fail {victim} forward 5")
    assert not complaints(launched, victim, rf"{victim} ended: no good at forward 5$")
    assert launched.rank(victim).exit_code == 1
    assert launched.rank(victim).told == [f"error: {victim}: no good at forward 5"]


@pytest.mark.parametrize("victim", ["target-1", "drafter-2"])
def test_a_waiting_rank_writes_its_stack_into_its_log_when_asked(victim: str, setting: Setting) -> None:
    """Targets wait for a slow drafter, or drafters for slow targets; the run goes on unharmed."""
    topology, run_dir = Topology(2, 2), setting.new_run()
    slow = "drafter-2" if victim == "target-1" else "target-0"
    more = {"train__max_steps": 6, "pipeline__queue__depth": 1}
    launched = launch_direct(
        topology,
        setting.arguments(topology, run_dir, **more),
        f"usr1 {victim} idle 2; sleep=0.2 {slow} forward 1+",
        limit_s=90.0,
    )
    assert [rank.exit_code for rank in launched.ranks] == [0] * 4, launched
    log = (run_dir / "logs" / f"{victim}.log").read_text()
    assert "most recent call first" in log and "in pump_until" in log, log
