# SPDX-License-Identifier: Apache-2.0
"""Our models behind the interface of lm-evaluation-harness, and its tasks run with them."""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    tuple, and gives a list.

    `failed` tells whether an error came of an answer, and not of a task.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer
        self.failed = False

    @contextmanager
    def _answering(self) -> Iterator[None]:
        self.failed = True
        yield
        self.failed = False

    def loglikelihood(self, requests: Sequence[Any], **_options: Any) -> list[tuple[float, bool]]:
        """args (context, continuation) -> (log-likelihood, whether greedy decoding gives it)."""
        with self._answering():
            pairs = [self.scorer.encode_pair(*request.args) for request in requests]
            return self.scorer.log_likelihoods(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_options: Any) -> list[float]:
        """args (text,) -> its log-likelihood."""
        with self._answering():
            return self.scorer.text_log_likelihoods([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Any], **_options: Any) -> list[str]:
        """args (context, settings) -> the answer; equal settings are answered together."""
        by_settings: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_settings.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        answers = [""] * len(requests)
        for members in by_settings.values():
            asked = _generation(dict(requests[members[0]].args[1]))
            texts = [requests[i].args[0] for i in members]
            with self._answering():
                for index, text in zip(members, self.scorer.answers(texts, **asked)):
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
    top_k, top_p = int(settings.get("top_k") or 0), float(settings.get("top_p") or 1.0)
    count = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or 256)
    if not (0 <= temperature < math.inf and top_k >= 0 and 0 < top_p <= 1 and count >= 1):
        raise ConfigError(
            "generation_kwargs of a task must have a temperature and a top_k of at least 0, a "
            f"top_p in (0, 1] and at least one new token; got {settings}"
        )
    return {
        "until": [end for end in ([until] if isinstance(until, str) else until) if end],
        "count": count,
        "sampling": Sampling(temperature, top_k, top_p),
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
        tasks: names that it knows, with wildcards, or YAML files of tasks.
        include: a folder of further tasks.
        num_fewshot: examples before each question; None as the task says.
        limit: at most so many questions a task (below 1 a share of them).

    Raises:
        ConfigError: the package or a task is not there, or a task cannot be used.
    """
    model = harness_model(scorer)
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if include is None else str(include))
    names, unknown = [], []
    for task in tasks:
        if task.endswith((".yaml", ".yml")):
            path = Path(task).resolve()
            found = [str(path)] if path.is_file() else []
        else:
            found = manager.match_tasks([task])
        names += found
        unknown += [] if found else [task]
    if unknown:
        raise ConfigError(
            f"--tasks must be tasks of lm-evaluation-harness, or YAML files of some; "
            f"{', '.join(unknown)} is not; `lm_eval ls tasks` lists them, --include adds a folder"
        )
    try:
        results = lm_eval.simple_evaluate(
            model,
            tasks=names,
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
        )
    except ConfigError:
        raise
    except Exception as error:
        if model.failed:
            raise
        reason = " ".join(str(error.__cause__ or error).split()) or "its data is empty"
        raise ConfigError(
            f"--tasks {', '.join(tasks)}: a task, or its data, cannot be used "
            f"({type(error).__name__}: {reason}); mend its file or its data"
        ) from error
    assert results is not None, "only other ranks get none"
    return dict(results)


def table(results: dict[str, Any]) -> str:
    """The harness's own table of its results."""
    from lm_eval.utils import make_table

    return str(make_table(results))
