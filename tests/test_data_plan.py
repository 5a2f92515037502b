"""The plan against a naive one, and its promises: every document once per epoch, caps, places, determinism."""

import time
from itertools import islice
from typing import Any

import numpy as np
import pytest

from dflash.data.keys import keyed_hash
from dflash.data.plan import DocumentSet, Plan, PlanEntry


def documents(num_documents: int, seed: int = 0, longest: int = 50, first_id: int = 0) -> DocumentSet:
    lengths = np.random.default_rng(seed).integers(2, longest + 1, size=num_documents).astype(np.int32)
    return DocumentSet(np.arange(first_id, first_id + num_documents, dtype=np.int64), lengths)


def make(train: DocumentSet, evaluation: DocumentSet | None = None, **changes: Any) -> Plan:
    arguments: dict[str, Any] = {
        "tokens_per_micro_batch": 100,
        "micro_batches_per_step": 4,
        "num_epochs": 3,
        "max_steps": None,
        "eval_interval_steps": None,
        "seed": 0,
    }
    return Plan(train, evaluation, **{**arguments, **changes})


def entries(plan: Plan) -> list[PlanEntry]:
    return [plan.entry(g) for g in range(plan.num_entries)]


def as_tuple(entry: PlanEntry) -> tuple[Any, ...]:
    return entry.index, entry.step, entry.epoch, entry.is_eval, tuple(entry.document_ids.tolist())


def naive_order(
    train: DocumentSet,
    tokens: int,
    per_step: int,
    seed: int,
    num_epochs: int,
    eval_batches: list[list[int]],
    interval: int,
) -> list[tuple[Any, ...]]:
    """All entries of a plan, made one after the other with lists, sorts and comparisons alone."""
    length = dict(zip(train.ids.tolist(), train.lengths.tolist(), strict=True))
    batches: list[tuple[int, list[int]]] = []
    for epoch in range(num_epochs):
        hashes = dict(zip(length, keyed_hash(np.array(list(length)), seed, epoch, 1).tolist(), strict=True))
        windows: list[list[int]] = []
        num_before = 0
        for document in sorted(length, key=lambda i: hashes[i]):
            while len(windows) <= num_before // (32 * tokens):
                windows.append([])
            windows[num_before // (32 * tokens)].append(document)
            num_before += length[document]
        packed: list[tuple[int, list[int]]] = []
        for number, window in enumerate(windows):
            fresh = True
            for document in sorted(window, key=lambda i: length[i]):
                if fresh or sum(length[i] for i in packed[-1][1]) + length[document] > tokens:
                    packed.append((number, []))
                packed[-1][1].append(document)
                fresh = False
        places = keyed_hash(np.arange(len(packed)), seed, epoch, 2).tolist()
        order = sorted(range(len(packed)), key=lambda i: (packed[i][0], places[i]))
        batches += [(epoch, packed[i][1]) for i in order]
    result: list[tuple[Any, ...]] = []
    num_steps = -(-len(batches) // per_step)
    stream = iter(batches)
    for step in range(1, num_steps + 1):
        for epoch, ids in islice(stream, per_step):
            result.append((len(result), step, epoch, False, tuple(ids)))
        if step % interval == 0 or step == num_steps:
            for ids in eval_batches:
                result.append((len(result), step, 0, True, tuple(ids)))
    return result


@pytest.mark.parametrize("num_documents", [1, 7, 331])
@pytest.mark.parametrize("interval", [1, 3, 1000])
def test_plan_against_a_naive_one(num_documents: int, interval: int) -> None:
    train, evaluation = documents(num_documents), documents(11, seed=5)
    plan = make(train, evaluation, eval_interval_steps=interval, seed=9)
    by_length = sorted(zip(evaluation.lengths.tolist(), evaluation.ids.tolist(), strict=True))
    eval_batches: list[list[int]] = [[]]
    filled = 0
    for length, document in by_length:
        if filled + length > 100:
            eval_batches.append([])
            filled = 0
        eval_batches[-1].append(document)
        filled += length
    assert len(eval_batches) == plan.num_eval_micro_batches > 1
    expected = naive_order(train, 100, 4, 9, 3, eval_batches, interval)
    assert [as_tuple(entry) for entry in entries(plan)] == expected
    assert plan.num_entries == len(expected) and plan.num_steps == expected[-1][1]


def test_every_document_once_per_epoch_and_never_too_many_tokens() -> None:
    train = documents(500, first_id=1000)
    length = dict(zip(train.ids.tolist(), train.lengths.tolist(), strict=True))
    plan = make(train, num_epochs=4)
    by_epoch: dict[int, list[int]] = {}
    for entry in entries(plan):
        assert not entry.is_eval and entry.document_ids.dtype == np.int64
        assert 0 < sum(length[i] for i in entry.document_ids.tolist()) <= 100
        by_epoch.setdefault(entry.epoch, []).extend(entry.document_ids.tolist())
    assert list(by_epoch) == [0, 1, 2, 3]
    assert all(sorted(ids) == train.ids.tolist() for ids in by_epoch.values())
    assert len({tuple(ids) for ids in by_epoch.values()}) == 4


def test_documents_of_a_micro_batch_are_about_as_long() -> None:
    train = documents(3000, longest=90)
    plan = make(train, tokens_per_micro_batch=600, num_epochs=1)
    padded = sum(len(e.document_ids) * train.lengths[e.document_ids].max() for e in entries(plan))
    assert padded / train.num_tokens < 1.1
    assert plan.num_micro_batches * 600 < 1.15 * train.num_tokens


def test_companions_differ_from_epoch_to_epoch() -> None:
    plan = make(documents(3000), num_epochs=2)
    companions: list[set[frozenset[int]]] = [set(), set()]
    for entry in entries(plan):
        companions[entry.epoch].add(frozenset(entry.document_ids.tolist()))
    together = {ids for ids in companions[0] & companions[1] if len(ids) > 1}
    assert len(together) < 0.05 * len(companions[0])


def test_long_and_short_micro_batches_are_mixed() -> None:
    train = documents(2000)
    plan = make(train, num_epochs=1)
    means = np.array([train.lengths[entry.document_ids].mean() for entry in entries(plan)])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2


def test_determinism_seeds_and_listing() -> None:
    train = documents(200)
    plan = [as_tuple(entry) for entry in entries(make(train, seed=3))]
    assert plan == [as_tuple(entry) for entry in entries(make(documents(200), seed=3))]
    assert plan != [as_tuple(entry) for entry in entries(make(train, seed=4))]
    shuffled = np.random.default_rng(1).permutation(200)
    listed_otherwise = DocumentSet(train.ids[shuffled], train.lengths[shuffled])
    assert plan == [as_tuple(entry) for entry in entries(make(listed_otherwise, seed=3))]
    for seed in (-1, 2**63, 2**70):
        assert len(entries(make(train, seed=seed))) > 0


def test_random_access_equals_order() -> None:
    arguments: dict[str, Any] = {"num_epochs": None, "max_steps": 60, "eval_interval_steps": 7}
    in_order = [as_tuple(entry) for entry in entries(make(documents(40), documents(9), **arguments))]
    plan = make(documents(40), documents(9), **arguments)
    assert in_order[-30][2] > 5  # many epochs, of which only the last are kept
    for g in np.random.default_rng(0).permutation(len(in_order)).tolist():
        assert as_tuple(plan.entry(g)) == in_order[g]


@pytest.mark.parametrize("interval", [None, 1, 2, 3, 5, 50])
@pytest.mark.parametrize("max_steps", [None, 1, 6, 7])
@pytest.mark.parametrize("num_evaluation", [0, 1, 30])
def test_steps_and_evaluations_stand_where_they_should(
    interval: int | None, max_steps: int | None, num_evaluation: int
) -> None:
    evaluation = documents(num_evaluation, seed=2)
    plan = make(documents(90), evaluation, max_steps=max_steps, eval_interval_steps=interval, num_epochs=1)
    assert max_steps is None or plan.num_steps == max_steps
    expected_index, seen = 0, []
    for step in range(1, plan.num_steps + 1):
        assert plan.first_entry_of_step(step) == expected_index
        training, evaluating = plan.step_entries(step), plan.eval_entries(step)
        assert 1 <= len(training) <= 4 and (len(training) == 4 or step == plan.num_steps)
        follows = step == plan.num_steps or (interval is not None and step % interval == 0)
        assert len(evaluating) == (plan.num_eval_micro_batches if follows else 0)
        for entry in [*training, *evaluating]:
            assert (entry.index, entry.step) == (expected_index, step)
            assert as_tuple(plan.entry(expected_index)) == as_tuple(entry)
            expected_index += 1
        assert all(not entry.is_eval for entry in training) and all(entry.is_eval for entry in evaluating)
        if follows:
            seen.append([tuple(entry.document_ids.tolist()) for entry in evaluating])
    assert plan.num_entries == expected_index == plan.first_entry_of_step(plan.num_steps + 1)
    assert all(order == seen[0] for order in seen)
    assert sorted(i for ids in seen[0] for i in ids) == evaluation.ids.tolist()


def test_only_the_last_step_is_short_and_steps_cross_epochs() -> None:
    plan = make(documents(90), num_epochs=3)
    sizes = [len(plan.step_entries(step)) for step in range(1, plan.num_steps + 1)]
    assert set(sizes[:-1]) == {4} and sum(sizes) == plan.num_micro_batches
    assert any(len({e.epoch for e in plan.step_entries(s)}) == 2 for s in range(1, plan.num_steps + 1))


def test_the_shorter_of_epochs_and_steps_ends_it() -> None:
    train = documents(90)
    whole = make(train, num_epochs=2)
    assert make(train, num_epochs=2, max_steps=3).num_steps == 3
    assert make(train, num_epochs=2, max_steps=10_000).num_steps == whole.num_steps
    beyond = make(train, num_epochs=None, max_steps=1000)
    assert beyond.num_steps == 1000 and beyond.num_micro_batches == 4000
    assert [as_tuple(whole.entry(g)) for g in range(8)] == [as_tuple(beyond.entry(g)) for g in range(8)]


def test_settings_that_make_no_plan() -> None:
    train = documents(5)
    for changes, reason in (
        ({"num_epochs": None}, "train.num_epochs and train.max_steps are both null"),
        ({"num_epochs": 0}, "train.num_epochs: 0 must be at least 1"),
        ({"micro_batches_per_step": 0}, "train.micro_batches_per_step: 0"),
        ({"eval_interval_steps": 0}, "train.eval_interval_steps: 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            make(train, **changes)
    with pytest.raises(ValueError, match="no document to train on"):
        make(documents(0))
    long = DocumentSet(np.array([4, 8, 15]), np.array([3, 101, 7], dtype=np.int32))
    wrong = "document 8 has 101 tokens, more than data.tokens_per_micro_batch=100; raise that to at least 101"
    with pytest.raises(ValueError, match=wrong):
        make(long)
    with pytest.raises(ValueError, match=wrong):
        make(train, long)
    assert make(long, tokens_per_micro_batch=101).num_micro_batches > 0


def test_description() -> None:
    line = make(documents(90), documents(5), eval_interval_steps=10).describe()
    assert line.startswith("plan: 90 documents, ") and "over 3.0 epochs" in line and "5 held-out documents" in line
    assert "\n" not in line and "held-out" not in make(documents(90)).describe()


def test_hash_is_splitmix64_and_is_pinned() -> None:
    """Numbers that must never change, or a resumed run would go on in another order."""
    mask = (1 << 64) - 1

    def mix(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 for seed 0
    values = np.array([0, 1, 2**40, -1])
    expected = [mix(mix(mix(v & mask) ^ mix(7)) ^ mix(-3 & mask)) for v in values.tolist()]
    assert keyed_hash(values, 7, -3).tolist() == expected


def test_a_large_epoch_is_planned_fast() -> None:
    num_documents = 300_000
    train = documents(num_documents, longest=1000)
    began_s = time.process_time()
    plan = make(train, tokens_per_micro_batch=4096, num_epochs=1)
    assert time.process_time() - began_s < 3.0  # about 0.2 on an idle core
    assert plan.num_micro_batches > num_documents * 500 // 4096
