# SPDX-License-Identifier: Apache-2.0
"""Runs beside each other: relative loss gaps, paired by seed, with what can and cannot be said."""
