# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from and to model folders of transformers, and what can be done with checkpoints."""
