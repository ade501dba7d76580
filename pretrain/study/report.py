# SPDX-License-Identifier: Apache-2.0
"""From the runs of a study to its text: results.json, references, figures, the marked parts."""

from pathlib import Path

from fused_ops.errors import ConfigError
from pretrain.comparison.reference import Reference, read_references, write_reference
from pretrain.study.figures import draw
from pretrain.study.plan import Study
from pretrain.study.results import RESULTS_FILE, ModelResults, read_results, write_results
from pretrain.study.write_up import fill


def report(study: Study, folder: Path, text: Path) -> list[str]:
    """Writes `folder`/results.json, figures and reference, and the marked parts of `text`.

    Where no run of the study has finished here, the results that are there already are used.

    Returns:
        A line for the user for each thing that was written.

    Raises:
        ConfigError: neither runs nor results, runs that are not this study's, a text that is
            missing, or one with other marks.
    """
    if not text.is_file():
        raise ConfigError(f"--report must name a text with marks, as STUDY.md; there is no {text}")
    path, said = folder / RESULTS_FILE, []
    if count := write_results(study, path):
        said.append(f"{path}: {count} runs")
    elif not path.exists():
        raise ConfigError(f"no run of the study has finished, and there is no {path}; run it first")
    base_row, models = read_results(path)
    filled = fill(text.read_text(), base_row, models, _published(folder / "reference"))
    for model in models:
        said += _references(model, base_row, folder / "reference")
    said += [str(made) for made in draw(models, base_row, folder / "figures")]
    text.write_text(filled)
    return [*said, str(text)]


def _published(folder: Path) -> list[Reference]:
    """What others have measured: the references that no report writes."""
    return (
        [one for one in read_references(folder) if one.name.startswith("published-")]
        if any(folder.rglob("*.json"))
        else []
    )


def _references(model: ModelResults, base_row: str, folder: Path) -> list[str]:
    base, said = model.find(base_row), []
    for one in model.rows:
        if base is None or one is base:
            continue
        name = f"{model.name}/{one.row.label}"
        made = write_reference(one.row, base.row, name, model.tokens_per_parameter, folder)
        said += [] if made is None else [str(made)]
    return said
