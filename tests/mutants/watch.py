"""A plugin of pytest: writes which tests passed and failed, and which copy of the package was tested.

The runner says in ``MUTANTS_REPORT`` where to write. Where ``MUTANTS_ONLY`` names a file, a list of tests in
JSON, no others run.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass(eq=False)
class Watch:
    """What has happened so far."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that passed, or that failed in its body, its setup or its teardown."""
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file whose tests could not be collected."""
        if report.failed:
            self.broken.append(report.nodeid)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that are asked for, where some are."""
        if "MUTANTS_ONLY" in os.environ:
            wanted = set(json.loads(Path(os.environ["MUTANTS_ONLY"]).read_text(encoding="utf-8")))
            items[:] = [item for item in items if item.nodeid in wanted]

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        files = (getattr(sys.modules[name], "__file__", None) for name in sorted(sys.modules) if _ours(name))
        report = {
            "passed": self.passed,
            "failed": self.failed,
            "broken": self.broken,
            "package": sorted({file for file in files if file}),
        }
        Path(os.environ["MUTANTS_REPORT"]).write_text(json.dumps(report), encoding="utf-8")


def _ours(name: str) -> bool:
    return name.partition(".")[0] == "zeropoint"


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch."""
    config.pluginmanager.register(Watch())
