# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3 gathers zero-sized parameters in one bucket with others."""

import pytest

from unit.runtime.zero.zero_sized import (DTYPES, SHAPES, LinearWithPlaceholders, ZeroSizedTest,
                                          assert_trains_as_without, config, network)


class TestZeroSizedBesideSized(ZeroSizedTest):

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_shape(self, dtype):
        assert_trains_as_without(lambda: network(LinearWithPlaceholders(*SHAPES)),
                                 lambda: network(LinearWithPlaceholders()), config(dtype), dtype)

    @pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
    @pytest.mark.parametrize("place", ["first", "between", "last"])
    def test_place(self, place, trainable):
        assert_trains_as_without(lambda: network(LinearWithPlaceholders((8, 0), place=place, trainable=trainable)),
                                 lambda: network(LinearWithPlaceholders()), config())
