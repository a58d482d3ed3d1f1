# SPDX-License-Identifier: Apache-2.0
"""The search for a convolution in front of a pooling."""

import pytest

from convpool.rules.pool_first.trace import conv_upstream, max_pools
from tests.support.models import graph
from tests.support.scopes import chain, index


@pytest.mark.parametrize(("count", "found"), [(1, True), (23, True), (24, False)])
def test_a_convolution_in_front_of_a_pooling_is_searched_over_24_nodes(count, found):
    (scope,) = index(
        graph(f"h = Conv<pads=[1,1,1,1]>(x, w)\n{chain(count, 'Relu', 'h', 'r')}\ny = MaxPool<kernel_shape=[2,2]>(r)")
    )
    assert conv_upstream(scope, "r") == (0 if found else None) and max_pools(scope) == found
