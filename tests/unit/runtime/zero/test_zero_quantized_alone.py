# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3 dequantizes frozen weights on a rank that has no others to gather from."""

import pytest
import torch

from unit.runtime.zero.zero_sized import DTYPES, ZeroSizedTest, batch, config, engine_of, wide_network


class TestQuantizedFrozenWeightsOfOneRank(ZeroSizedTest):
    world_size = 1

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_forward_and_gather(self, dtype):
        engine = engine_of(lambda: wide_network(frozen=True), config(dtype, zero_quantized_nontrainable_weights=True))
        weight = engine.module[1].weight
        assert weight.ds_tensor.dtype == torch.int8
        assert engine(batch(dtype)).dtype == dtype
        weight.all_gather_coalesced([weight]).wait()
        assert (weight.shape, weight.dtype) == (weight.ds_shape, dtype)
        engine.destroy()
