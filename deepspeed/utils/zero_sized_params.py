# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Access to trainable parameters without elements, which are in no group of an optimizer wrapper."""

import types

from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.utils.mixed_precision_linkage import link_hp_params
from deepspeed.utils.tensor_fragment import fragment_address, set_full_hp_grad, set_full_hp_param
from deepspeed.utils.torch import register_grad_hook


class EmptyFragment:
    """The fragment of a parameter without elements.

    It is read as that of a neighbour, a parameter that has a fragment in the same partition. So a state that the
    optimizer does not have, or a gradient that is not there yet, is the same error for both.
    """

    lp_fragment_address = fragment_address(numel=0, start=0)

    def __init__(self, neighbour):
        self.neighbour = neighbour

    def get_hp_fragment(self, optim_state_key=None):
        return self.neighbour._hp_mapping.get_hp_fragment(optim_state_key).narrow(0, 0, 0)

    def get_lp_grad_fragment(self, index_in_param_group):
        # The index is that of the neighbour, see link_zero_sized_params.
        return self.neighbour._hp_mapping.get_lp_grad_fragment(index_in_param_group).flatten().narrow(0, 0, 0)


def zero_sized_params(params):
    """Those of ``params`` that are trainable and have no elements."""
    return [param for param in params if param.requires_grad and not is_optimized_parameter(param)]


def release_grads(params):
    """Hooks that leave no gradient in ``params`` after a backward, as none is left in the parameters of a group."""

    def hook_of(param):

        def release(*_):
            param.grad = None

        return register_grad_hook(param, release)

    return [hook_of(param) for param in params]


def check_value(param, value, *shapes):
    """Raise ValueError if ``param`` has no elements, and ``value`` has none of the ``shapes``.

    Of such a value no element is missing or left over, so copying it would not fail.
    """
    if getattr(param, 'ds_numel', param.numel()) == 0 and value.shape not in shapes:
        raise ValueError(
            f"A value of shape {tuple(value.shape)} does not fit a parameter of shape {tuple(shapes[0])}: "
            "give one of the same shape.")


def _set_full_hp_param(self, value, optim_state_key=None):
    check_value(self, value, self.shape)
    set_full_hp_param(self, value, optim_state_key)


def _set_full_hp_grad(self, value):
    check_value(self, value, self.shape)
    set_full_hp_grad(self, value)


def link_zero_sized_params(params, lp_param_list, dp_group):
    """Link ``params``, which have no elements, as ``link_hp_params`` did the others of their group."""
    # No parameter has a fragment in a partition without elements, so none is looked for.
    link_hp_params(params, None, None, None, False, None, 0, 0, dp_group)
    neighbour = next((lp for lp in lp_param_list if lp._hp_mapping is not None), None)
    for param in params:
        param.set_full_hp_param = types.MethodType(_set_full_hp_param, param)
        param.set_full_hp_grad = types.MethodType(_set_full_hp_grad, param)
        if neighbour is not None:
            param._hp_mapping = EmptyFragment(neighbour)
            param._index_in_param_group = neighbour._index_in_param_group
