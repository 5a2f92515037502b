"""Ranks, groups and routing: the only place that does arithmetic on ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What one process does; a colocated process does both."""

    TARGET = "target"
    DRAFTER = "drafter"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place in the launch, as torchrun tells it; alone when started without torchrun."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Launch":
        return cls(*(int(environment.get(key, default)) for key, default in _LAUNCH_VARIABLES))

    @property
    def node_leader(self) -> int:
        """The first rank on this rank's machine; torchrun numbers the ranks of one machine in a row."""
        return self.rank - self.local_rank


_LAUNCH_VARIABLES = (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))


@dataclass(frozen=True, slots=True)
class Topology:
    """T target ranks first, then D drafter ranks; T = D = 1 with `colocated` is one process that plays both."""

    num_targets: int
    num_drafters: int
    colocated: bool = False

    @property
    def world_size(self) -> int:
        return 1 if self.colocated else self.num_targets + self.num_drafters

    def role(self, rank: int) -> Role:
        if self.colocated:
            return Role.COLOCATED
        return Role.TARGET if rank < self.num_targets else Role.DRAFTER

    def index_in_group(self, rank: int) -> int:
        """Place of a rank among its kind, from 0."""
        return rank if rank < self.num_targets or self.colocated else rank - self.num_targets

    def name(self, rank: int) -> str:
        """Name shown in logs and by `top`, the global rank included: target-3, drafter-5."""
        return f"{self.role(rank).value}-{rank}"

    def target_rank(self, target: int) -> int:
        return target

    def drafter_rank(self, drafter: int) -> int:
        return 0 if self.colocated else self.num_targets + drafter

    def target_of(self, index: int) -> int:
        """Target that runs micro-batch g, by its place in the target group."""
        return index % self.num_targets

    def drafter_of(self, index: int) -> int:
        """Drafter that trains on micro-batch g, by its place in the drafter group."""
        return index % self.num_drafters

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The (target, drafter) pairs in use, in the order of their first micro-batch: lcm(T, D) of them."""
        count = math.lcm(self.num_targets, self.num_drafters)
        return tuple((self.target_of(index), self.drafter_of(index)) for index in range(count))


def default_num_target_ranks(world_size: int) -> int:
    """Five eighths of the ranks, rounded half up, at least one of each kind left."""
    return min(max(math.floor(world_size * 5 / 8 + 0.5), 1), world_size - 1)


def choose_topology(world_size: int, *, colocated: bool, num_target_ranks: int | None) -> Topology:
    """Topology of a launch; raises ValueError that names the key when the ranks do not fit the pipeline."""
    if colocated:
        if world_size != 1:
            raise ValueError(f"pipeline.colocated: true needs exactly one rank, but {world_size} were launched")
        if num_target_ranks is not None:
            raise ValueError("pipeline.num_target_ranks: must be null when pipeline.colocated is true")
        return Topology(1, 1, colocated=True)
    if world_size < 2:
        raise ValueError(
            "pipeline.colocated: is false, which needs at least two ranks, but one was launched; "
            "start with torchrun --nproc_per_node 2 or more, or set pipeline=colocated"
        )
    if num_target_ranks is None:
        num_target_ranks = default_num_target_ranks(world_size)
    if not 1 <= num_target_ranks < world_size:
        raise ValueError(
            f"pipeline.num_target_ranks: {num_target_ranks} must be between 1 and {world_size - 1}, "
            f"so that {world_size} ranks leave at least one drafter"
        )
    return Topology(num_target_ranks, world_size - num_target_ranks)
