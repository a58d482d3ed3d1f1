# SPDX-License-Identifier: Apache-2.0
"""Models as files and graphs: loading and saving, a read-only index, the operators' schemas.  Nothing here runs a model."""
