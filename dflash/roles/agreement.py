"""What one rank works out for all, and which rank tells the user when it cannot."""

import json
from collections.abc import Callable
from datetime import timedelta

import torch


class AgreedError(Exception):
    """Another rank tells the user why this launch ends; this one only has to leave."""


class OwnError(ValueError):
    """An error that no other rank has met, so this one has to tell it."""


class Agreement:
    """Results that one rank works out and all ranks use, through the launch's store.

    Without a store (one process) everything is worked out on the spot. An error of the working rank ends the waiting
    ones with AgreedError, so the user reads it once.
    """

    def __init__(self, store: torch.distributed.Store | None, rank: int) -> None:
        self._store, self._rank = store, rank

    def once(self, key: str, work: Callable[[], str], worker: int = 0) -> str:
        """Result of `work`, run by rank `worker` alone."""
        if self._store is None:
            return work()
        if self._rank != worker:
            reply = json.loads(self._wait_for(key))
            if "error" in reply:
                raise AgreedError(reply["error"])
            return reply["value"]
        try:
            value = work()
        except BaseException as error:
            self._store.set(key, json.dumps({"error": str(error)}))
            if isinstance(error, ValueError | OSError):
                raise OwnError(str(error)) from error
            raise
        self._store.set(key, json.dumps({"value": value}))
        return value

    def _wait_for(self, key: str) -> bytes:
        """Waits as long as it takes: tokenising much data takes hours, and torchrun ends us if the worker dies."""
        assert self._store is not None
        while True:
            try:
                self._store.wait([key], timedelta(seconds=60))
                return self._store.get(key)
            except torch.distributed.DistStoreError:
                continue
