# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A Transformers model with zero-sized parameters learns with ZeRO++ about what it learns without quantization."""

import os
from unittest import mock

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from unit.runtime.zero.zero_sized import ZeroSizedTest, config, engine_of

STEPS = 20
WEIGHTS = {"zero_quantized_weights": True}
FROZEN = {"zero_quantized_nontrainable_weights": True}
GRADIENTS = {"zero_quantized_gradients": True}
SECONDARY = {"zero_quantized_weights": True, "zero_hpz_partition_size": 2}


def classifier(labels=3):
    """A small Llama with a rank-0 adapter beside its head, and its embedding frozen."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(vocab_size=40,
                                 hidden_size=32,
                                 intermediate_size=56,
                                 num_hidden_layers=2,
                                 num_attention_heads=4,
                                 num_labels=labels,
                                 pad_token_id=0))
    model.score.register_parameter("lora_A", torch.nn.Parameter(torch.zeros(0, 32)))
    model.score.register_parameter("lora_B", torch.nn.Parameter(torch.zeros(labels, 0)))
    model.model.embed_tokens.requires_grad_(False)
    return model


def losses_of(options):
    engine = engine_of(classifier, options)
    device = get_accelerator().current_device_name()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 40, (6, 6), generator=generator)
    labels = torch.arange(6) % 3
    losses = []
    for _ in range(STEPS):
        loss = engine(input_ids=tokens.to(device), labels=labels.to(device)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


class TestQuantizedTraining(ZeroSizedTest):
    world_size = 2
    reuse_dist_env = False  # hpZ leaves its groups of ranks behind

    @pytest.mark.parametrize("quantized", [WEIGHTS, FROZEN, GRADIENTS, SECONDARY],
                             ids=["weights", "frozen", "gradients", "secondary"])
    def test_loss(self, quantized, backend):
        if quantized == GRADIENTS and backend != "gloo":
            pytest.skip("gradients are quantized between nodes, which only CPU ranks can be told to be")
        expected = losses_of(config(torch.bfloat16))
        local_size = "1" if quantized == GRADIENTS else "2"
        with mock.patch.dict(os.environ, LOCAL_SIZE=local_size):
            losses = losses_of(config(torch.bfloat16, **quantized))
        assert losses != expected, "nothing was quantized"
        assert losses[-1] < losses[0] / 2, "nothing was learned"
        assert losses == pytest.approx(expected, abs=0.1)  # they start at 1.1
