# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3 quantizes weights that are frozen after they were partitioned."""

import pytest
import torch
from torch import nn

from unit.runtime.zero.quantized import assert_close_to, gather_each
from unit.runtime.zero.zero_sized import DTYPES, WIDTH, ZeroSizedTest, config, engine_of

LARGE = 1024  # smaller weights stay as they are


class TestFrozenLater(ZeroSizedTest):

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_quantize_nontrainable_params(self, dtype):

        def build():
            return nn.Sequential(nn.Linear(WIDTH, LARGE), nn.Linear(LARGE, LARGE, bias=False), nn.Linear(LARGE, WIDTH),
                                 nn.Linear(WIDTH, 0))

        engine = engine_of(build, config(dtype, zero_quantized_nontrainable_weights=True), zero_init=True)
        weight = engine.module[1].weight
        original = gather_each({"weight": weight})["weight"]
        engine.module[1].requires_grad_(False)
        assert weight.ds_tensor.dtype == dtype
        engine.optimizer.quantize_nontrainable_params()
        assert weight.ds_tensor.dtype == torch.int8
        assert_close_to(gather_each({"weight": weight})["weight"], original)
        x = torch.eye(LARGE, device=weight.device, dtype=dtype)
        with torch.no_grad():
            assert_close_to(engine.module[1](x).t().cpu(), original)
        engine.destroy()
