# SPDX-License-Identifier: Apache-2.0
"""The algebra of convolution and average pooling, on numbers alone: imports numpy and nothing else.

A question that has no answer gets a `Refusal`, a value that says what was found and what would have been right.  Whoever
asks knows the node, and says which one it is.
"""
