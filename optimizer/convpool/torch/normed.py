# SPDX-License-Identifier: Apache-2.0
"""A BatchNorm in front of a fused layer, in inference: the layer's scale and shift where the caller promises constant weights.

Without the promise they would have to be made anew in every call, by four small kernels, and nobody could tell whether their type
holds them.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F

from convpool.algebra.parts import holds, keeps
from convpool.torch import constant
from convpool.torch.calls import NAMES
from convpool.torch.eager import pooled_conv, unwatched

GROUPS = 13
"""The place of the groups among the arguments of pooled_conv."""


def normed_pooled_conv(norm: tuple, *inputs: Any) -> torch.Tensor:
    """pooled_conv of x normalised.  norm: weight, bias, mean and variance, [C] each, and epsilon; no weight or bias is None."""
    x, w, b, _, _, *rest = inputs
    factors = _factors(norm, inputs)
    if factors is not None:
        return pooled_conv(x, w, b, *factors, *rest)
    weight, bias, mean, var, eps = norm
    return pooled_conv(F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps), *inputs[1:])


def _factors(norm: tuple, inputs: tuple) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scale and shift, [C] each, of x's type; None where the BatchNorm is to run by itself."""
    x, groups = inputs[0], inputs[GROUPS]
    if torch.compiler.is_compiling() or not _has_kernels(x) or not unwatched(x, inputs[1], x.device.type):
        return None
    kept = constant.current()
    if kept is None:
        return None
    key = (x.dtype, x.device, x.shape[1], groups, *(item.data_ptr() if isinstance(item, torch.Tensor) else item for item in norm))
    if key not in kept:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        kept[key] = (norm, _made(norm, x, groups))  # norm: so that nothing else gets its addresses
    return kept[key][1]


def _has_kernels(x: torch.Tensor) -> bool:
    """Whether scale and shift cost nothing there."""
    return x.is_cuda and x.dtype in NAMES


def _made(norm: tuple, x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scale and shift; None where x's type does not hold them to its precision."""
    weight, bias, mean, var = (None if tensor is None else tensor.detach().double().cpu().numpy() for tensor in norm[:4])
    scale = (1.0 if weight is None else weight) / np.sqrt(var + norm[4])
    shift = (0.0 if bias is None else bias) - mean * scale
    dtype = np.dtype(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else np.dtype(NAMES[x.dtype])
    if not keeps(scale.reshape(groups, -1), dtype) or not holds(shift, dtype):
        return None
    made = torch.from_numpy(scale).to(x.device, x.dtype), torch.from_numpy(shift).to(x.device, x.dtype)
    if x.is_cuda:
        torch.cuda.current_stream().synchronize()  # calls on other streams read them too
    return made
