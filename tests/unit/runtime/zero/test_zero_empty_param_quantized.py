# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3 gathers zero-sized parameters in quantized buckets, and casts such buckets to the parameters' dtype."""

import pytest
import torch

from unit.runtime.zero.zero_sized import (DTYPES, ZeroSizedTest, assert_trains_as_without, batch, config, engine_of,
                                          wide_network)


class TestQuantizedBucket(ZeroSizedTest):
    world_size = 2

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_with_zero_sized_parameters(self, dtype):
        # The placeholders have no part in the result, but are gathered with the weight and the bias that they are
        # beside.
        assert_trains_as_without(lambda: wide_network((0, ), (4, 0, 3)), wide_network,
                                 config(dtype, zero_quantized_weights=True), dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_frozen_weights_are_gathered_in_the_dtype_of_the_parameters(self, dtype):
        engine = engine_of(lambda: wide_network(frozen=True), config(dtype, zero_quantized_nontrainable_weights=True))
        assert engine.module[1].weight.ds_tensor.dtype == engine.module[1].bias.ds_tensor.dtype == torch.int8
        assert engine(batch(dtype)).dtype == dtype
        engine.destroy()
