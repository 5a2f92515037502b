"""What the survivors say when a rank dies, freezes, fails or lies: real processes, really killed."""

import re
from pathlib import Path

import pytest
from helpers_transport import Outcome, Spec, cut_payload, exchange, lie, run_ranks

from dflash.groups import Topology


def survivors(topology: Topology, outcomes: list[Outcome], victim: str) -> list[Outcome]:
    return [outcome for rank, outcome in enumerate(outcomes) if topology.name(rank) != victim]


def assert_told(outcomes: list[Outcome], pattern: str, note: Path, within_s: float) -> None:
    died_s = float(note.read_text())
    for outcome in outcomes:
        assert outcome.error in ("PeerLost", "PeerFailed"), outcome
        assert re.search(pattern, outcome.text), outcome
        assert outcome.ended_s - died_s < within_s, outcome


@pytest.mark.parametrize(
    ("topology", "victim", "at"),
    [
        (Topology(2, 3), "target-0", 12),
        (Topology(2, 3), "drafter-3", 10),
        (Topology(1, 3), "target-0", 8),
        (Topology(3, 1), "drafter-3", 5),  # the last of its step: nobody waits in a collective
        (Topology(2, 2), "drafter-2", 8),  # two islands: the news crosses by the connection without payloads
        (Topology(2, 2), "target-1", 9),
        (Topology(2, 2), "drafter-3", 11),  # the last of its step, with the other in the all-reduce
    ],
    ids=lambda value: f"{value.num_targets}+{value.num_drafters}" if isinstance(value, Topology) else str(value),
)
def test_everyone_names_the_killed_rank(topology: Topology, victim: str, at: int, tmp_path: Path) -> None:
    spec = Spec(2000, victim=f"kill {victim}", at=at, note=str(tmp_path / "note"))
    outcomes = run_ranks(exchange, topology, spec, timeout_s=20)
    assert_told(survivors(topology, outcomes, victim), f"lost {victim}", tmp_path / "note", within_s=2.0)


@pytest.mark.parametrize("at", [3, 4, 5, 6])
def test_a_payload_announced_by_a_rank_that_has_died_since_names_it(at: int, tmp_path: Path) -> None:
    """The drafters are busy when the target announces and dies: its group is gone when they post the receive."""
    topology, slow = Topology(1, 2), {"drafter-1": 0.4, "drafter-2": 0.4}
    spec = Spec(2000, victim="kill target-0", at=at, note=str(tmp_path / "note"), seconds=slow, num_buffers=8)
    outcomes = run_ranks(exchange, topology, spec, timeout_s=20)
    assert_told(survivors(topology, outcomes, "target-0"), "lost target-0", tmp_path / "note", within_s=3.0)


def test_a_rank_killed_within_a_payload_is_named_at_once(tmp_path: Path) -> None:
    spec = Spec(2, victim="kill target-0", note=str(tmp_path / "note"))
    outcomes = run_ranks(cut_payload, Topology(1, 2), spec, timeout_s=30)
    assert outcomes[0].error == "killed"
    assert_told(outcomes[1:], "lost target-0", tmp_path / "note", within_s=2.0)


@pytest.mark.parametrize("victim", ["target-1", "drafter-2"])
def test_a_frozen_rank_is_found_by_its_silence(victim: str, tmp_path: Path) -> None:
    topology = Topology(2, 2)
    at = 9 if victim == "target-1" else 8
    spec = Spec(2000, victim=f"freeze {victim}", at=at, note=str(tmp_path / "note"), peer_timeout_s=1.5)
    outcomes = run_ranks(exchange, topology, spec, timeout_s=5)
    assert_told(survivors(topology, outcomes, victim), f"lost {victim}: no sign", tmp_path / "note", within_s=4.0)


@pytest.mark.parametrize(("victim", "at"), [("target-1", 13), ("drafter-3", 7)])
def test_an_exception_reaches_the_others_as_its_own_message(victim: str, at: int, tmp_path: Path) -> None:
    topology = Topology(2, 3)
    spec = Spec(2000, victim=f"fail {victim}", at=at, note=str(tmp_path / "note"))
    outcomes = run_ranks(exchange, topology, spec, timeout_s=20)
    assert [outcome.error for outcome in outcomes].count("ValueError") == 1
    told = survivors(topology, outcomes, victim)
    assert_told(told, f"^{victim}: ValueError: no good at g {at}$", tmp_path / "note", within_s=2.0)


@pytest.mark.parametrize(
    ("untruth", "reason"),
    [
        ("sequence", "announced with payload number 6, the plan says 4"),
        ("index", "announced with g 10, the plan says 8"),
        ("num_tokens", "announced with tokens"),
        ("num_documents", "announced with documents"),
        ("feature_width", "announced with feature width 14, the plan says 12"),
        ("feature_dtype", "announced with feature dtype torch.float16, the plan says torch.float32"),
        ("num_bytes", "announced with bytes"),
        ("trailer", "g 8: the payload's trailer says number 4, g 10, expected number 4"),
    ],
)
def test_an_untrue_announcement_stops_everyone_with_the_edge(untruth: str, reason: str) -> None:
    outcomes = run_ranks(lie, Topology(2, 2), Spec(200, victim=untruth, at=8), timeout_s=20)
    assert [outcome.error for outcome in outcomes].count("ProtocolError") == 1
    for outcome in outcomes:
        assert outcome.error in ("ProtocolError", "PeerFailed")
        assert "edge target-0 -> drafter-2, g" in outcome.text and reason in outcome.text, outcome
