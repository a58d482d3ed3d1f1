# SPDX-License-Identifier: Apache-2.0
"""Cases, references and checks for tactics."""
