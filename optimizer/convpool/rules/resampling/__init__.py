# SPDX-License-Identifier: Apache-2.0
"""Parts of the rules that move convolutions across a resampling: recognising one, the way to it, new nodes."""
