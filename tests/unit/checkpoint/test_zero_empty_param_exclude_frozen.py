# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""exclude_frozen_parameters keeps the zero-sized parameters that train, and drops those that do not."""

import pytest

from unit.checkpoint.zero_sized_checkpoints import (assert_converts_to, assert_same, folder_in, mixed, save, tied,
                                                    weights_of)
from unit.runtime.zero.zero_sized import ZeroSizedTest, config, engine_of


def trainable(build, weights):
    names = {name for name, parameter in build().named_parameters(remove_duplicate=False) if parameter.requires_grad}
    return {name: weight for name, weight in weights.items() if name in names}


@pytest.mark.parametrize("stage", [1, 2, 3])
class TestExcludeFrozenParameters(ZeroSizedTest):
    world_size = [1, 2]

    @pytest.mark.parametrize("build", [mixed, tied])
    def test_zero_to_fp32(self, tmpdir, stage, build):
        expected = trainable(build, save(build, config(stage=stage), folder_in(tmpdir)))
        assert any(weight.numel() == 0 for weight in expected.values())
        assert_converts_to(build, expected, folder_in(tmpdir), exclude_frozen_parameters=True)

    @pytest.mark.parametrize("build", [mixed, tied])
    def test_save_checkpoint(self, tmpdir, stage, build):
        folder, options = folder_in(tmpdir), config(stage=stage)
        expected = trainable(build, save(build, options, folder, exclude_frozen_parameters=True))
        assert_converts_to(build, expected, folder)
        # What is left loads into a model that has its frozen parameters from elsewhere.
        engine = engine_of(build, options)
        engine.load_checkpoint(folder, load_module_strict=False)
        assert_same(trainable(build, weights_of(engine)), expected)
        engine.destroy()
