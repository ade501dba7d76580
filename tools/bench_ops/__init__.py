# SPDX-License-Identifier: Apache-2.0
"""Times of the fused ops on a GPU."""
