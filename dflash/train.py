"""Train a drafter: `torchrun --nproc_per_node 8 -m dflash.train [group=choice] [key=value]`."""

import os
import sys
import time
import traceback
from contextlib import suppress
from typing import NoReturn

import hydra
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from dflash.cli import one_line
from dflash.config import TrainConfig, config_folder, register_schema, to_train_config
from dflash.groups import Launch, Role, choose_topology
from dflash.profiling.files import protect_console
from dflash.profiling.report import RankReport, name_process
from dflash.roles.agreement import AgreedError, Agreement, OwnError
from dflash.roles.colocated import run_colocated
from dflash.roles.drafter import run_drafter
from dflash.roles.reporting import open_report, show_tables, start_stats
from dflash.roles.setup import Run, choose_device, prepare
from dflash.roles.stopping import StopRequest, dump_stacks_on_request, end_at_once_on_stop_signals, exit_code
from dflash.roles.target import run_target
from dflash.transport.errors import TransportError
from dflash.transport.process_groups import ProcessGroups, join

_PARTING_S = 600.0
_TELLING_S = 60.0  # a rank that starts late on a busy machine needs so long to come to the same error


def train(config: TrainConfig, launch: Launch) -> int | None:
    """Join the other ranks, agree on the run, play this rank's role to its end.

    Returns the number of the signal that ended the run early.
    """
    topology = choose_topology(
        launch.world_size, colocated=config.pipeline.colocated, num_target_ranks=config.pipeline.num_target_ranks
    )
    name_process(topology.name(launch.rank))
    device = choose_device(config.device, launch.local_rank)
    stats = start_stats(config.profiling, device)
    with stats.stage("prepare"):
        try:
            groups = None if topology.colocated else join(topology, launch.rank, device)
        except OSError as error:
            raise OwnError(str(error)) from error
        agreement = Agreement(groups.store if groups else None, launch.rank)
        run = prepare(config, topology, launch, device, agreement)
        report = None if run.is_done else open_report(run, stats)
    signal_number = None
    if report is not None:
        signal_number = play(run, groups, report)
    else:
        if launch.rank == 0:
            print(f"nothing left to train: {run.first_step - 1} of {run.plan.num_steps} steps are done", flush=True)
        if groups is not None:
            groups.barrier(_PARTING_S)
    if groups is not None:
        groups.close()
    return signal_number


def play(run: Run, groups: ProcessGroups | None, report: RankReport) -> int | None:
    """This rank's loop, to the end of its report; returns the number of the signal that ended it early."""
    dump_stacks_on_request(run.run_dir / "logs" / f"{run.name}.log")
    role = run.topology.role(run.rank)
    loop = {Role.TARGET: run_target, Role.DRAFTER: run_drafter, Role.COLOCATED: run_colocated}[role]
    try:
        try:
            signal_number = loop(run, groups, report, StopRequest())
        except BaseException:
            # To end torch.profiler's window is to wait for the device, which may wait for a peer that is gone.
            report.window = None
            # What ended the loop is to be told, not what the report may meet on the way out: a disk or a device.
            with suppress(OSError, RuntimeError):
                report.close()
            raise
        report.close()
        show_tables(run)
        return signal_number
    except (TransportError, ValueError, OSError) as error:
        raise OwnError(f"{run.name}: {error}") from error


@hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")
@record
def main(composed: DictConfig) -> None:
    launch = Launch.from_environment(os.environ)
    protect_console()
    dump_stacks_on_request()
    end_at_once_on_stop_signals()
    try:
        signal_number = train(to_train_config(composed), launch)
    except AgreedError:
        leave(is_told=False)
    except (ValueError, OSError, OmegaConfBaseException) as error:
        # Every rank meets an error of the configuration; the first one tells it.
        tells = launch.rank == 0 or isinstance(error, OwnError)
        if tells:
            print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        leave(is_told=tells)
    if signal_number is not None:
        sys.exit(exit_code(signal_number))


def leave(is_told: bool) -> NoReturn:
    """End a failed rank: at once if it has told why, since destroying a group whose members are gone may block.

    A rank that leaves the telling to another waits to be ended: the first exit makes torchrun end all the others, and
    the one with something to say must not be among them.
    """
    if not is_told:
        time.sleep(_TELLING_S)
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_available() and dist.is_initialized():
        os._exit(1)
    sys.exit(1)


def cli() -> None:
    """Run `main`, telling an error of composition, too, in one line and by one rank."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print on several lines
    register_schema()
    try:
        main()
    except hydra.errors.HydraException as error:
        tells = Launch.from_environment(os.environ).rank == 0
        if tells:
            print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        leave(is_told=tells)
    except Exception:
        # Not by way of the interpreter's end, which would wait for groups and threads that wait for others.
        traceback.print_exc()
        leave(is_told=True)


if __name__ == "__main__":
    cli()
