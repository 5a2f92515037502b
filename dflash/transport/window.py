"""How much may be on its way to one drafter: the arithmetic of credits, without any input or output."""

from collections import deque
from collections.abc import Callable, Iterable

from dflash.batch import PackedLayout

Schedule = Iterable[tuple[int, PackedLayout]]


class CreditWindow:
    """The stretch of a drafter's own micro-batches that has been admitted and not yet consumed.

    Micro-batch g is admitted when fewer than `depth` of the drafter's own lie between the last one consumed and g, in
    order of g, and when with it the bytes of the stretch stay within `max_bytes`. The next one due is always
    admitted. One window over g for all edges together cannot deadlock: the lowest g of the plan that has not been
    consumed is always admitted, its target has sent all before it, and its drafter has consumed all before it.
    Credits split per edge have no such argument.
    """

    def __init__(self, schedule: Schedule, *, depth: int, max_bytes: int | None) -> None:
        """`schedule` yields this drafter's (g, layout) in ascending order of g; it is read as the window moves."""
        assert depth >= 1 and (max_bytes is None or max_bytes >= 1)
        self._depth = depth
        self._max_bytes = max_bytes
        self._schedule = iter(schedule)
        self._last: int | None = None
        self._next = next(self._schedule, None)
        self._admitted: deque[tuple[int, PackedLayout]] = deque()
        self.num_bytes = 0
        self.watermark = -1

    def __len__(self) -> int:
        return len(self._admitted)

    @property
    def is_finished(self) -> bool:
        """Everything of the schedule has been consumed."""
        return not self._admitted and self._next is None

    @property
    def next_index(self) -> int | None:
        """The g that is due next; None when everything has been consumed."""
        if self._admitted:
            return self._admitted[0][0]
        return None if self._next is None else self._next[0]

    @property
    def first_refused(self) -> int | None:
        """The lowest g that is not admitted yet; None when all of the schedule is."""
        return None if self._next is None else self._next[0]

    def admit(self) -> list[tuple[int, PackedLayout]]:
        """Moves the watermark as far as it may go; returns what that admits."""
        admitted = []
        while self._next is not None and self._has_room(self._next[1].num_bytes):
            admitted.append(self._next)
            self._admitted.append(self._next)
            self.num_bytes += self._next[1].num_bytes
            self.watermark = self._next[0]
            self._next = self._cut(next(self._schedule, None))
        return admitted

    def consume(self) -> int:
        """Drops the oldest admitted micro-batch and returns its g."""
        index, layout = self._admitted.popleft()
        self.num_bytes -= layout.num_bytes
        return index

    def stop_after(self, last: int) -> None:
        """Ends the schedule behind g = `last`; what is admitted beyond it counts no more."""
        self._last = last
        self._next = self._cut(self._next)
        while self._admitted and self._admitted[-1][0] > last:
            self.num_bytes -= self._admitted.pop()[1].num_bytes

    def _cut(self, entry: tuple[int, PackedLayout] | None) -> tuple[int, PackedLayout] | None:
        return None if entry is None or (self._last is not None and entry[0] > self._last) else entry

    def _has_room(self, num_bytes: int) -> bool:
        if not self._admitted:
            return True
        is_within_bytes = self._max_bytes is None or self.num_bytes + num_bytes <= self._max_bytes
        return len(self._admitted) < self._depth and is_within_bytes


def num_to_start(
    schedule_of: Callable[[int], Schedule],
    drafter: int,
    num_drafters: int,
    *,
    depth: int,
    max_bytes: int | None,
    min_ready: int,
) -> int:
    """How many micro-batches a drafter waits for before it trains: `min_ready`, or fewer where that would hang.

    Before anyone has trained, targets get no further than the lowest g that any drafter refuses; whatever lies below
    it arrives in any case. To wait for more could be to wait for a target that waits for a drafter that waits in the
    all-reduce for us: a full window of our own is not enough when bytes let the windows end at different g.
    """
    admitted, refused = [], []
    for other in range(num_drafters):
        window = CreditWindow(schedule_of(other), depth=depth, max_bytes=max_bytes)
        entries = window.admit()
        if other == drafter:
            admitted = [index for index, _ in entries]
        if window.first_refused is not None:
            refused.append(window.first_refused)
    return min(min_ready, sum(all(index < limit for limit in refused) for index in admitted))
