# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The pytest hooks that send the tests of `DistributedTest` classes to rank processes."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from unit.common import DistributedTest, run_distributed, shut_down  # noqa: E402


def pytest_configure(config):
    """Register the marker that `DistributedTest` tests may carry."""
    config.addinivalue_line("markers", "world_size(n): run this DistributedTest test in n ranks (a number or a list)")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run the body of a `DistributedTest` test in its ranks instead of here."""
    if pyfuncitem.cls is None or not issubclass(pyfuncitem.cls, DistributedTest):
        return None
    run_distributed(pyfuncitem)
    return True


def pytest_unconfigure():
    """End every process the harness started, also after Ctrl-C."""
    shut_down()
