"""A process that has everything imported, and forks a child for each command line that it is given.

Importing torch takes seconds and a fork milliseconds, so that hundreds of children can be killed. Requests
and replies are lines of JSON, on stdin and stdout. A child waits until it is released, so that a tracer can
take hold of it.
"""

import importlib
import json
import os
import resource
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.calls import Fault, Layer, pauses
from tests.faults.plants import planted
from tests.faults.tiny import SCHEME, small_units, write_tiny

from zeropoint.cli.main import main


def warm_up() -> None:
    """Run once, so that children find every module imported and every kernel compiled."""
    with tempfile.TemporaryDirectory() as folder:
        source = write_tiny(Path(folder) / "source")
        options = ("--to", SCHEME, "--workers", "1", "--no-report")
        status = main(["quantize", str(source), str(Path(folder) / "out"), *options])
    assert status == 0


def child(job: dict[str, Any], go: int) -> int:
    """Carry out a command line in a forked child and return its exit status."""
    for name, stream, number in (("out", sys.stdout, 1), ("err", sys.stderr, 2)):
        stream.flush()
        if job[name] is None:
            os.close(number)
            sys.stdout = None
            continue
        descriptor = os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.umask(job["umask"])
    os.environ.update(job["environment"])
    for name, limit in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    layer = Layer(
        root=Path(job["root"]),
        fault=None if job["fault"] is None else Fault(**job["fault"]),
        before=None if job["pace"] is None else pauses(job["pace"]),
    )
    os.read(go, 1)
    os.close(go)
    with small_units(), layer.installed(), planted(job["plant"]):
        status = main(job["arguments"])
    if job["record"] is not None:
        calls = [{**asdict(call), "data": len(call.data)} for call in layer.calls]
        Path(job["record"]).write_text(json.dumps(calls))
    if sys.stdout is not None:
        sys.stdout.flush()
    return status


def start(job: dict[str, Any]) -> tuple[int, int]:
    """Fork a child and return its process id, and the descriptor whose closing lets it go."""
    held, release = os.pipe()
    pid = os.fork()
    if pid:
        os.close(held)
        return pid, release
    status = 99
    try:
        os.close(release)
        status = child(job, held)
    finally:
        os._exit(status)


def serve() -> None:
    """Answer requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # What nohup, or a script that starts tests in the background, has set to be ignored would be inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    warm_up()
    released: dict[int, int] = {}
    replies.write("{}\n")
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            pid, released[pid] = start(request["job"])
            replies.write(json.dumps({"pid": pid}) + "\n")
        elif request["do"] == "load":
            importlib.import_module(request["module"])
            replies.write("{}\n")
        elif request["do"] == "go":
            os.close(released.pop(request["pid"]))
            replies.write("{}\n")
        else:
            options = {"wait": 0, "stopped": os.WUNTRACED}[request["do"]]
            _, status, usage = os.wait4(request["pid"], options)
            replies.write(json.dumps({"status": status, "peak": usage.ru_maxrss << 10}) + "\n")


if __name__ == "__main__":
    serve()
