# SPDX-License-Identifier: Apache-2.0
"""Manifests and batch scripts that start a run on many machines: written, and checked offline."""
