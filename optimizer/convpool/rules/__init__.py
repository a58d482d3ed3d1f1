# SPDX-License-Identifier: Apache-2.0
"""The rewrite passes, in the order in which they run: a new one is a file and a line here."""

from __future__ import annotations

from dataclasses import dataclass

from convpool.rules.base import Pass
from convpool.rules.chain_concats import ChainConcats
from convpool.rules.cuda_chain.channels_last import ChannelsLast
from convpool.rules.cuda_chain.conv import ChainConv, ChainPool
from convpool.rules.cuda_chain.head import ChainHead
from convpool.rules.fold import Fold
from convpool.rules.fuse_pool_conv import ChainPoolConv, FusePoolConv
from convpool.rules.image_conv import OffloadConv
from convpool.rules.lower_operator import LowerOperator
from convpool.rules.neighbours.epilogue import FuseEpilogue
from convpool.rules.neighbours.prologue import FusePrologue
from convpool.rules.pool_first.rule import PoolFirst


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
