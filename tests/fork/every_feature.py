# SPDX-License-Identifier: Apache-2.0
"""Every feature at every stage, those included that the release without the patch set has no trouble with.

This is what features.py runs; `make test` does not, as pytest does not collect a file of this name by itself.
"""

import pytest

from unit.common import DistributedTest
from unit.runtime.zero.zero_sized_features import FEATURES, check


@pytest.mark.parametrize("name, stage", [(name, stage) for name in FEATURES for stage in FEATURES[name].stages])
class TestFeature(DistributedTest):
    world_size = 2
    backend = "gloo"
    exec_timeout = 240

    def test(self, name, stage):
        check(name, stage)
