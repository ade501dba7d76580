# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: complete or ignored, and resumed exactly; `manager` is the entry."""
