"""The control connections of a rank, for as long as its loop lasts."""

from collections.abc import Iterator
from contextlib import contextmanager

from dflash.profiling.stats import ProfileStats
from dflash.roles.setup import Run
from dflash.transport.connect import connect
from dflash.transport.control import ControlPlane
from dflash.transport.errors import TransportError
from dflash.transport.process_groups import ProcessGroups

LOADING_S = 1800.0  # how long a rank may be silent while it reads a large model


@contextmanager
def connected(run: Run, groups: ProcessGroups, stats: ProfileStats) -> Iterator[ControlPlane]:
    """This rank's connections with its peers; whatever ends the loop early is told to them first."""
    with stats.stage("connect"):
        control = connect(run.topology, run.rank, groups.store, peer_timeout_s=run.config.pipeline.peer_timeout_s)
    try:
        yield control
    except TransportError:
        raise  # the transport has told them
    except BaseException as error:
        control.announce_error(f"{run.name} ended: {' '.join(str(error).split()) or type(error).__name__}")
        raise
