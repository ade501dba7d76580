# SPDX-License-Identifier: Apache-2.0
"""Our models behind the interface of lm-evaluation-harness, and its tasks run with them."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fused_ops.errors import ConfigError
from models.generation.sampling import Sampling
from pretrain.generation.scoring import Scorer

INSTALL = "python -m pip install lm_eval==0.4.13"
_SETTINGS = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "until",
    "max_gen_toks",
    "max_new_tokens",
}


def require_harness() -> None:
    """ConfigError if the package is not there."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "evaluation tasks are those of lm-evaluation-harness, and the package lm_eval is not "
            f"installed; install it: {INSTALL}"
        )


def harness_model(scorer: Scorer) -> Any:
    """The scorer as lm-evaluation-harness wants a model. ConfigError without the package."""
    require_harness()
    from lm_eval.api.model import LM

    return type("HarnessModel", (HarnessAnswers, LM), {})(scorer)


class HarnessAnswers:
    """The three questions of lm-evaluation-harness. Each takes its requests, whose `args` are a
    tuple, and gives a list."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer

    def loglikelihood(self, requests: Sequence[Any], **_options: Any) -> list[tuple[float, bool]]:
        """args (context, continuation) -> (log-likelihood, whether greedy decoding gives it)."""
        pairs = [self.scorer.encode_pair(*request.args) for request in requests]
        return self.scorer.log_likelihoods(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_options: Any) -> list[float]:
        """args (text,) -> its log-likelihood."""
        return self.scorer.text_log_likelihoods([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Any], **_options: Any) -> list[str]:
        """args (context, settings) -> the answer; equal settings are answered together."""
        by_settings: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_settings.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        answers = [""] * len(requests)
        for members in by_settings.values():
            settings = dict(requests[members[0]].args[1])
            texts = [requests[i].args[0] for i in members]
            for index, text in zip(members, self.scorer.answers(texts, **_generation(settings))):
                answers[index] = text
        return answers


def _generation(settings: dict[str, Any]) -> dict[str, Any]:
    """A task's generation settings as arguments of `Scorer.answers`."""
    if settings.get("num_beams") == 1:  # what is done here
        del settings["num_beams"]
    if unknown := sorted(set(settings) - _SETTINGS):
        raise ConfigError(
            f"generation settings of a task are {', '.join(sorted(_SETTINGS))}; got "
            f"{', '.join(unknown)}: take them out of its generation_kwargs"
        )
    until = settings.get("until") or []
    asked = settings.get("temperature")
    # Sampling without a temperature is that of the model's own distribution, as in transformers.
    temperature = float(bool(settings.get("do_sample")) if asked is None else asked)
    if not settings.get("do_sample", temperature > 0):
        temperature = 0.0
    sampling = Sampling(
        temperature, int(settings.get("top_k") or 0), float(settings.get("top_p") or 1.0)
    )
    return {
        "until": [end for end in ([until] if isinstance(until, str) else until) if end],
        "count": int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or 256),
        "sampling": sampling,
    }


def run_tasks(
    scorer: Scorer,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """Results of lm-evaluation-harness, as `lm_eval.simple_evaluate` gives them.

    Args:
        scorer: the model.
        tasks: names that it knows, or YAML files of tasks.
        include: a folder of further tasks.
        num_fewshot: examples before each question; None as the task says.
        limit: at most so many questions a task (below 1 a share of them).

    Raises:
        ConfigError: the package or a task is not there, or a task cannot be read.
    """
    model = harness_model(scorer)
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = [str(Path(name).resolve()) if name.endswith((".yaml", ".yml")) else name
             for name in tasks]  # fmt: skip
    files = [name for name in names if name.endswith((".yaml", ".yml"))]

    class Tasks(TaskManager):
        """Whatever of a task file or its data cannot be read is said in words."""

        def load(self, *arguments: Any, **settings: Any) -> Any:
            try:
                return super().load(*arguments, **settings)
            except Exception as error:
                reason = " ".join(str(error.__cause__ or error).split()) or "its data is empty"
                raise ConfigError(
                    f"--tasks {', '.join(tasks)}: a task, or its data, cannot be read "
                    f"({type(error).__name__}: {reason}); mend its file"
                ) from error

    manager = Tasks(include_path=None if include is None else str(include))
    unknown = [n for n in names if n not in files and not manager.match_tasks([n])]
    unknown += [name for name in files if not Path(name).is_file()]
    if unknown:
        raise ConfigError(
            f"--tasks must be tasks of lm-evaluation-harness, or YAML files of some; "
            f"{', '.join(unknown)} is not; `lm_eval ls tasks` lists them, --include adds a folder"
        )
    results = lm_eval.simple_evaluate(
        model,
        tasks=names,
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
    )
    assert results is not None, "only other ranks get none"
    return dict(results)


def table(results: dict[str, Any]) -> str:
    """The harness's own table of its results."""
    from lm_eval.utils import make_table

    return str(make_table(results))
