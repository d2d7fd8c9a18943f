# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from .builder import CPUOpBuilder


class QuantizerBuilder(CPUOpBuilder):
    BUILD_VAR = "DS_BUILD_QUANTIZER"
    NAME = "quantizer"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return f'deepspeed.ops.quantizer.{self.NAME}_op'

    def sources(self):
        return ['csrc/cpu/quantization/quantizer.cpp']

    def include_paths(self):
        return ['csrc/cpu/quantization']

    def cxx_args(self):
        # Every operation rounds as it is written, so that vector and scalar code give the same result.
        args = super().cxx_args() + ['-ffp-contract=off']
        if '-D__AVX512__' in args:
            args.append('-mprefer-vector-width=512')
        return args
