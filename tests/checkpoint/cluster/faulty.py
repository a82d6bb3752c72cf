"""What happens to workers: each function replaces `work`, and travels to the worker by value.

A marker is a file that the first to come creates; who finds it there continues as if nothing had happened.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zeropoint.checkpoint.cluster.worker import PlanRequest, Result, UnitBatch, work
from zeropoint.checkpoint.plan import identity

Work = Callable[[PlanRequest, UnitBatch], list[Result]]


def _first(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def dies_once(marker: Path) -> Work:
    """The first worker's process dies with a batch half done."""

    def dies(request: PlanRequest, batch: UnitBatch) -> list[Result]:
        if _first(marker):
            work(request, replace(batch, numbers=batch.numbers[:1]))
            os._exit(1)
        return work(request, batch)

    return dies


def hangs_once(marker: Path) -> Work:
    """The first worker says in ``marker``.at on which node it is, with a batch half done, and hangs."""

    def hangs(request: PlanRequest, batch: UnitBatch) -> list[Result]:
        if _first(marker):
            import ray

            work(request, replace(batch, numbers=batch.numbers[:1]))
            marker.with_suffix(".node").write_text(ray.get_runtime_context().get_node_id())
            marker.with_suffix(".node").rename(marker.with_suffix(".at"))
            while True:
                time.sleep(1)
        return work(request, batch)

    return hangs


def stays_once(marker: Path) -> Work:
    """The first worker writes its process's number into ``marker``.pid and hangs; no other begins before."""
    number = marker.with_suffix(".pid")

    def stays(request: PlanRequest, batch: UnitBatch) -> list[Result]:
        if _first(marker):
            number.with_suffix(".new").write_text(str(os.getpid()))
            number.with_suffix(".new").rename(number)
            while True:
                time.sleep(1)
        while not number.exists():
            time.sleep(0.1)
        return work(request, batch)

    return stays


def looks_elsewhere(folder: Path) -> Work:
    """Every worker sees another file system where the output should be."""

    def looks(request: PlanRequest, batch: UnitBatch) -> list[Result]:
        return work(replace(request, partials=replace(request.partials, path=folder)), batch)

    return looks


def has_version(version: str) -> Work:
    """Every worker has another version of zeropoint."""

    def has(request: PlanRequest, batch: UnitBatch) -> list[Result]:
        mine, identity.VERSION = identity.VERSION, version
        try:
            return work(request, batch)
        finally:
            identity.VERSION = mine

    return has
