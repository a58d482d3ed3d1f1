# SPDX-License-Identifier: Apache-2.0
"""`optimize`, `compile_options` and `export_onnx`: pairs of whole modules, found and rewritten by the passes for ONNX models.

module -> capture.py: graph of torch.fx -> skeleton.py: ONNX model without numbers -> passes -> rebuilding.py: graph again
"""
