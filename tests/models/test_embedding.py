# SPDX-License-Identifier: Apache-2.0
"""The embedding whose gradient goes into its FP32 sum, as on a GPU, on a CPU in fp32."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import layers, mappings

from models.embedding import Embedding
from tests.models import toy


@pytest.mark.parametrize("pattern", ["*-", "*-/*-"])
def test_a_step_gives_the_same_gradients(pattern, monkeypatch):
    def gradients():
        chunks, config = toy.make(pattern)
        assert type(chunks[0].embedding.word_embeddings) is Embedding
        toy.step(chunks, config)
        return {n: p.main_grad.clone() for n, p in chunks[0].named_parameters()}

    want = gradients()
    monkeypatch.setattr(Embedding, "forward", Embedding.into_main_grad)
    got = gradients()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-8)
    rows = want["embedding.word_embeddings.weight"].abs().amax(1)
    assert 0 < int((rows > 0).sum()) <= toy.VOCAB


def test_a_shared_weight_is_left_to_upstream():
    (chunk,), _ = toy.make("*-", model={"tie_embeddings": True})
    assert type(chunk.embedding.word_embeddings) is layers.VocabParallelEmbedding


@pytest.mark.parametrize("scattered", [False, True])
def test_shards_of_the_vocabulary_add_up(scattered, monkeypatch):
    """Two shards in one process; the sum over ranks is taken by the test."""
    for name in (
        "reduce_scatter_to_sequence_parallel_region",
        "reduce_from_tensor_model_parallel_region",
    ):
        monkeypatch.setattr(mappings, name, lambda x, group: x)
    weight, ids = torch.randn(20, 8), torch.randint(0, 20, (2, 6))
    dy = torch.randn(6, 2, 8) if scattered else torch.randn(2, 6, 8)
    whole, gradients = 0, []
    for start, end in ((0, 12), (12, 20)):
        part = weight[start:end].clone().requires_grad_()
        part.main_grad = torch.zeros(end - start, 8)
        rank = SimpleNamespace(
            tp_group=SimpleNamespace(size=lambda: 2),
            vocab_start_index=start,
            vocab_end_index=end,
            weight=part,
            reduce_scatter_embeddings=scattered,
        )
        out = Embedding.into_main_grad(rank, ids)
        out.backward(dy)
        whole = whole + out.detach()
        gradients.append(part.main_grad)
    weight.requires_grad_()
    want = torch.nn.functional.embedding(ids, weight)
    want = want.transpose(0, 1) if scattered else want
    want.backward(dy)
    assert torch.equal(whole, want)
    torch.testing.assert_close(torch.cat(gradients), weight.grad)
