"""`pytest --again`, as CI runs the tests: a failed test runs again alone, at most twice, in a fresh process without xdist.

A test that passes then counts as passed, and the list "flaky" names it just above pytest's closing line. No test is marked as
flaky in advance. More than 20 failures, an error while tests are collected, or an interrupted run stay as they are.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

MAX_FAILED = 20  # more is a broken commit, not a busy machine
TRIES = 2


def pytest_configure(config: pytest.Config) -> None:
    """Plug in where the results arrive: not in the workers of xdist."""
    if config.option.again and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Again(config))


class Again:
    """Runs failed tests again after the last test, and corrects the counts before pytest prints them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.flaky: dict[str, str] = {}  # by test, the first failure's text

    @pytest.hookimpl(trylast=True)  # the workers of xdist have ended then
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Run each failed test again; the run has passed if all of them pass."""
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        reports = [report for key in ("failed", "error") for report in terminal.stats.get(key, [])]
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not all(isinstance(r, pytest.TestReport) for r in reports):
            return
        failures = {report.nodeid: report for report in reversed(reports)}
        if len(failures) > MAX_FAILED:
            terminal.write_line(f"\n{len(failures)} tests failed, more than {MAX_FAILED}: none runs again")
            return
        for name, report in failures.items():
            if self._passes(name, terminal):
                self.flaky[name] = report.longreprtext
                _count_as_passed(terminal.stats, report)
        if failures and len(self.flaky) == len(failures):
            session.exitstatus = pytest.ExitCode.OK

    def _passes(self, name: str, terminal: Any) -> bool:
        """Return whether the test passes alone: not skipped, not missing."""
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--color=no", name]
        for k in range(TRIES):
            terminal.write_line(f"\nagain, alone ({k + 1} of {TRIES}): {name}")
            done = subprocess.run(command, cwd=self.config.rootpath, capture_output=True, text=True, check=False)
            last = (done.stdout.strip().splitlines() or [""])[-1]
            if done.returncode == 0 and re.search(r"(^|\s)1 passed\b", last):
                return True
            terminal.write_line(done.stdout + done.stderr)
        return False

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # after all other summaries, before the closing line
    def pytest_terminal_summary(self, terminalreporter: Any) -> Iterator[None]:
        """Print the first failure of each flaky test, then their list."""
        yield
        for name, text in self.flaky.items():
            terminalreporter.write_sep("_", f"first failure of {name}")
            terminalreporter.write_line(text)
        if self.flaky:
            terminalreporter.write_sep("=", f"flaky: {len(self.flaky)} failed, then passed alone", yellow=True)
        for name in self.flaky:
            terminalreporter.write_line(f"FLAKY {name}")


def _count_as_passed(stats: dict[str, list[Any]], failure: pytest.TestReport) -> None:
    """Move a test to those that passed; a test whose teardown failed is there already."""
    for key in ("failed", "error"):
        kept = [report for report in stats.pop(key, []) if report.nodeid != failure.nodeid]
        if kept:
            stats[key] = kept
    if all(report.nodeid != failure.nodeid for report in stats.setdefault("passed", [])):
        stats["passed"].append(failure)
