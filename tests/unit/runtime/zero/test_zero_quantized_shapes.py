# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO++ trains models with zero-sized parameters as it trains them without."""

import os
from unittest import mock

import pytest
import torch

from unit.runtime.zero.zero_sized import (SHAPES, EmptyHead, LinearWithPlaceholders, Placeholders, RankZeroAdapter,
                                          ZeroSizedTest, assert_trains_as_without, config, network)

# A builder of a model with zero-sized parameters, and one of the same model without them
MODELS = {
    "one": (lambda: network(Placeholders((8, 0))), network),
    "several": (lambda: network(Placeholders(*SHAPES)), network),
    "frozen": (lambda: network(Placeholders(*SHAPES, trainable=False)), network),
    "head": (lambda: network(EmptyHead()), network),
    "adapter": (lambda: network(RankZeroAdapter()), network),
    "beside": (lambda: network(LinearWithPlaceholders(*SHAPES)), lambda: network(LinearWithPlaceholders())),
    "before":
    (lambda: network(LinearWithPlaceholders(*SHAPES, place="first")), lambda: network(LinearWithPlaceholders())),
}
FEATURES = {
    "weights": {
        "zero_quantized_weights": True
    },
    "frozen": {
        "zero_quantized_nontrainable_weights": True
    },
    "gradients": {
        "zero_quantized_gradients": True
    },
    "secondary": {
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 2
    },
    "all": {
        "zero_quantized_weights": True,
        "zero_quantized_nontrainable_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 2
    },
}


class TestQuantizedShapes(ZeroSizedTest):
    world_size = 2

    @pytest.mark.parametrize("feature", FEATURES)
    @pytest.mark.parametrize("model", MODELS)
    def test(self, feature, model, backend):
        quantizes_gradients = "zero_quantized_gradients" in FEATURES[feature]
        if quantizes_gradients and backend != "gloo":
            pytest.skip("gradients are quantized between nodes, which only CPU ranks can be told to be")
        with mock.patch.dict(os.environ, LOCAL_SIZE="1" if quantizes_gradients else "2"):
            assert_trains_as_without(*MODELS[model],
                                     config(torch.bfloat16, **FEATURES[feature]),
                                     torch.bfloat16,
                                     zero_init=True)
