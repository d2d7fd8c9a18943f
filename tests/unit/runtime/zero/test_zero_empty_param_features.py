# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Zero-sized parameters go unnoticed in every feature that used to fail with them."""

import pytest

from unit.runtime.zero.zero_sized import ZeroSizedTest
from unit.runtime.zero.zero_sized_features import FEATURES, check

SLOW_TO_COMPILE = ("CPUAdagradBuilder", "CPULionBuilder")  # minutes each: these are rows of the table only
BROKEN = [(name, stage) for name in FEATURES for stage in FEATURES[name].stages
          if stage in FEATURES[name].broken and FEATURES[name].op not in SLOW_TO_COMPILE]


@pytest.mark.parametrize("name, stage", BROKEN)
class TestFeature(ZeroSizedTest):
    world_size = 2

    def test(self, name, stage):
        check(name, stage)
