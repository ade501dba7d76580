# SPDX-License-Identifier: Apache-2.0
"""Families of model folders that transformers reads: one table each, used in both directions.

`FAMILIES[model_type]` has the names, shape rules and configuration of a family.
"""

from models.hf_mapping import deepseek, dense, gpt_oss, hybrid, mixtures
from models.hf_mapping.table import Family

_TABLES = (dense, mixtures, deepseek, gpt_oss, hybrid)
FAMILIES: dict[str, Family] = {f.name: f for table in _TABLES for f in table.FAMILIES}
