# SPDX-License-Identifier: Apache-2.0
"""The rewrite passes, in the order in which they run: a new one is a file and a line here."""

from __future__ import annotations

from dataclasses import dataclass

from convpool.passes.base import Pass
from convpool.passes.chain_concats import ChainConcats
from convpool.passes.chain_conv import ChainConv, ChainPool
from convpool.passes.chain_head import ChainHead
from convpool.passes.channels_last import ChannelsLast
from convpool.passes.fold import Fold
from convpool.passes.fuse_epilogue import FuseEpilogue
from convpool.passes.fuse_pool_conv import ChainPoolConv, FusePoolConv
from convpool.passes.fuse_prologue import FusePrologue
from convpool.passes.lower_operator import LowerOperator
from convpool.passes.offload_conv import OffloadConv
from convpool.passes.pool_first import PoolFirst


@dataclass(frozen=True)
class Stage:
    """Passes that run over the same index, in this order for each scope.

    repeats: until nothing is found, since a rewrite may make a site of its neighbours; each rewrite lowers the cost, so this
    ends.  adds_tensors: whether the passes make tensors that only shape inference knows.  rewrites: whether passes that run in a
    model with a pair alone may take a change for one.
    """

    passes: tuple[Pass, ...]
    repeats: bool = True
    adds_tensors: bool = True
    rewrites: bool = True


PASSES = (
    Stage((Fold(),), rewrites=False),
    # What an earlier run wrote, where another form is asked for now.
    Stage((LowerOperator(),), repeats=False),
    Stage((PoolFirst(), FusePoolConv())),
    Stage((ChainPoolConv(),)),
    Stage((OffloadConv(),), repeats=False),
    Stage((ChainConv(), ChainPool()), repeats=False),
    Stage((ChainHead(),), repeats=False),
    # What can go to the node in front is cheaper there, once for each result: epilogues before prologues.
    Stage((FuseEpilogue(),), adds_tensors=False),
    Stage((FusePrologue(),), adds_tensors=False),
    Stage((ChainConcats(),), repeats=False, adds_tensors=False),
    Stage((ChannelsLast(),), repeats=False),
)
