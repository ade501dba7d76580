# SPDX-License-Identifier: Apache-2.0
"""Which linear layers 4 bits hurt most, each by itself, and the plan that spends BF16 on those."""
