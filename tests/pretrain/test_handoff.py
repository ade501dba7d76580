# SPDX-License-Identifier: Apache-2.0
"""Packed weights from a trainer to a sampler: the same bits, and never half of two versions."""

import json
import os
import shutil
import signal
import threading

import pytest
import torch

from fused_ops import grouped_cuda
from fused_ops.errors import ConfigError
from fused_ops.linear import LocalComm
from models.generation import packed_weights
from models.generation.cached_model import CachedModel
from models.generation.packed_weights import install_weights, pack_weights, release_weights
from models.precision import PrecisionState, apply_precision
from models.precision_config import PrecisionConfig
from pretrain.generation import handoff
from pretrain.generation.handoff import (
    MANIFEST,
    VERSION,
    HandoffError,
    latest_version,
    publish_weights,
    read_weights,
    receive_weights,
)
from tests.models import toy

IDS = torch.arange(1, 25)
FILE = "model.safetensors"


def build(seed, recipe="nvfp4_pow2", pattern="M*-E", dtype=torch.float32):
    chunks, _ = toy.make(pattern, dtype=dtype)
    torch.manual_seed(seed)
    for parameter in chunks[0].parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    apply_precision(chunks, PrecisionConfig(recipe=recipe), PrecisionState())
    return chunks[0].eval().requires_grad_(False)


@torch.no_grad()
def logits(model):
    return model(IDS[None], torch.arange(len(IDS))[None], None)[0].float()


def change(model, amount):
    """What an optimizer step does to weights."""
    for parameter in model.parameters():
        parameter.data.mul_(1 + amount)
    for gemm in model._gemms:
        gemm.is_first_microbatch = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["nvfp4_pow2", "nvfp4_fwd_mxfp8_bwd", "nvfp4", "mxfp8", "bf16"])
def test_the_sampler_multiplies_with_the_trainers_codes(tmp_path, recipe, dtype):
    trainer, sampler = build(0, recipe, dtype=dtype), build(1, recipe, dtype=dtype)
    expected = logits(trainer)
    assert not torch.equal(logits(sampler), expected)
    publish_weights(tmp_path, trainer, 3)
    assert receive_weights(tmp_path, sampler) == 3
    assert torch.equal(logits(sampler), expected), "the same bits"
    assert torch.equal(logits(trainer), expected), "and the trainer is as it was"
    running = CachedModel(sampler, 1)
    found = torch.cat([running.forward([piece])[0] for piece in IDS.split(7)])
    if dtype is torch.float32 and recipe != "nvfp4":
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert receive_weights(tmp_path, sampler, known=3) == 3


def test_decoded_weights_alone_would_not_do():
    """Codes are not quantized again: FP32 values that they decode to can have other codes."""
    trainer, sampler = build(0, "nvfp4_fast"), build(1, "nvfp4_fast")
    expected = logits(trainer)
    install_weights(sampler, *pack_weights(trainer))
    assert torch.equal(logits(sampler), expected)
    experts = sampler.decoder.layers[3].mlp.experts.linear_fc1
    call = experts.gemm_call(experts.weight, LocalComm())
    assert "handed over" in grouped_cuda.reason(IDS, experts.weight, call), "on a GPU neither"
    release_weights(sampler)
    assert not torch.equal(logits(sampler), expected)


def test_a_weight_changed_behind_the_codes_is_an_error(tmp_path):
    trainer, sampler = build(0), build(1)
    install_weights(sampler, *pack_weights(trainer))
    sampler.decoder.layers[1].self_attention.linear_qkv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="were handed over, and their weight"):
        logits(sampler)
    install_weights(sampler, *pack_weights(trainer))
    assert torch.equal(logits(sampler), logits(trainer))


def test_another_back_end_is_refused():
    model = build(0)
    tensors, formats = pack_weights(model)
    for gemm in model._gemms:
        gemm.backend = "transformer_engine"
    said = "needs the GEMMs of fused_ops.*precision.backend=fused_ops"
    with pytest.raises(ConfigError, match=said):
        pack_weights(model)
    with pytest.raises(ConfigError, match=said):
        install_weights(model, tensors, formats)
    with pytest.raises(ConfigError, match=said):
        CachedModel(model, 1, batch_invariant=True)


def test_packed_weights_are_small(tmp_path):
    """Codes and scales take 4.5 bits and a little; what stays high is the rest."""
    tensors, formats = pack_weights(build(0))
    elements = sum(shape[0] * shape[1] for shape in (f["shape"] for f in formats.values()))
    held = sum(
        t.numel() * t.element_size() for name, t in tensors.items() if name.split(":")[0] in formats
    )
    assert 4.5 / 8 <= held / elements < 4.7 / 8
    assert len(formats) == 2 + 2 + 2 + 8, "mixer, attention, MLP, four experts of two"


def test_versions_grow_and_old_ones_go(tmp_path):
    model = build(0)
    for version in (1, 2, 5):
        publish_weights(tmp_path, model, version)
    assert sorted(os.listdir(tmp_path)) == [VERSION, "v00000002", "v00000005"]
    assert latest_version(tmp_path) == 5
    with pytest.raises(ConfigError, match="must be above the last, 5; got 5; count on from there"):
        publish_weights(tmp_path, model, 5)
    with pytest.raises(ConfigError, match="must be at least 0; got -1"):
        publish_weights(tmp_path / "new", model, -1)
    assert latest_version(tmp_path / "new") is None
    with pytest.raises(ConfigError, match="keep must be at least 2"):
        publish_weights(tmp_path, model, 6, keep=1)
    assert receive_weights(tmp_path / "none", model) is None


def test_weights_of_another_model_or_precision_leave_the_model_alone(tmp_path):
    publish_weights(tmp_path, build(0), 1)
    for other, said in (
        (build(1, "nvfp4"), "must be .* in 'nvfp4 16x16'"),
        (build(1, "bf16"), r"in_proj\.weight is missing"),
        (build(1, pattern="M*-"), "is not of this model"),
    ):
        before = logits(other)
        with pytest.raises(ConfigError, match=said):
            receive_weights(tmp_path, other)
        assert torch.equal(logits(other), before)


@pytest.mark.parametrize("name", [FILE, MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_version_is_refused_whole(tmp_path, name, damage):
    publish_weights(tmp_path, build(0), 1)
    path = tmp_path / "v00000001" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-3] if damage == "cut" else data)
    sampler = build(1)
    before = logits(sampler)
    with pytest.raises(HandoffError, match=r"version 1 is damaged.*hand over a new version"):
        receive_weights(tmp_path, sampler)
    assert torch.equal(logits(sampler), before)
    (tmp_path / VERSION).write_text("{")
    with pytest.raises(HandoffError, match="VERSION is not readable"):
        receive_weights(tmp_path, sampler)


def test_versions_that_go_while_they_are_read_are_not_called_damaged(tmp_path, monkeypatch):
    """Each is removed for newer ones behind its pointer: the trainer is to be slower, not anew."""
    model, real = build(0, pattern="*-"), handoff._checked

    def overtaken(place, pointer):
        for version in range(pointer["version"] + 1, pointer["version"] + 3):
            publish_weights(tmp_path, model, version)
        return real(place, pointer)

    publish_weights(tmp_path, model, 1)
    monkeypatch.setattr(handoff, "_checked", overtaken)
    with pytest.raises(HandoffError, match=r"versions 1, 3, 5 were gone .* hand over less often"):
        read_weights(tmp_path)
    monkeypatch.setattr(handoff, "_checked", real)
    assert read_weights(tmp_path).version == 7


@pytest.mark.parametrize(
    "text",
    [
        '{"version": "x", "folder": "v00000001", "manifest_sha256": "0"}',
        '{"version": null, "folder": "v00000001", "manifest_sha256": "0"}',
        '{"version": 2, "folder": "../v00000001", "manifest_sha256": "0"}',
        "[]",
    ],
)
def test_a_pointer_to_no_version_is_refused(tmp_path, text):
    model = build(0, pattern="*-")
    publish_weights(tmp_path, model, 1)
    (tmp_path / VERSION).write_text(text)
    for call in (latest_version, read_weights, lambda f: publish_weights(f, model, 5)):
        with pytest.raises(HandoffError, match="VERSION is not readable"):
            call(tmp_path)


def test_a_folder_without_room_keeps_the_version_before(tmp_path, monkeypatch):
    model = build(0, pattern="*-")
    publish_weights(tmp_path, model, 1)
    real = handoff.write_durably

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(handoff, "write_durably", full)
    with pytest.raises(HandoffError, match=r"no space left on device\); version 1 counts"):
        publish_weights(tmp_path, model, 2)
    assert latest_version(tmp_path) == 1
    monkeypatch.setattr(handoff, "write_durably", real)
    publish_weights(tmp_path, model, 2)
    assert sorted(os.listdir(tmp_path)) == [VERSION, "v00000001", "v00000002"]


def test_an_old_version_that_cannot_be_removed_fails_no_hand_over(tmp_path, monkeypatch):
    model = build(0, pattern="*-")
    for version in (1, 2):
        publish_weights(tmp_path, model, version)
    real = os.unlink

    def busy(path, **options):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "unlink", busy)
    publish_weights(tmp_path, model, 3)
    monkeypatch.setattr(os, "unlink", real)
    assert latest_version(tmp_path) == 3
    publish_weights(tmp_path, model, 4)
    assert sorted(os.listdir(tmp_path)) == [VERSION, "v00000003", "v00000004"]


WRITES = ("open", "write", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir")


def killed_at(point, folder, model, version):
    """A process that hands over and is killed at its `point`-th write; whether it was."""
    pid = os.fork()
    if pid == 0:
        count = [0]

        def stopping(real):
            def call(*args, **kwargs):
                count[0] += 1
                if count[0] == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in WRITES:
            setattr(os, name, stopping(getattr(os, name)))
        try:
            publish_weights(folder, model, version)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_trainer_killed_between_any_two_writes_leaves_one_whole_version(tmp_path):
    trainer, sampler = build(0, pattern="*-"), build(1, pattern="*-")
    first = tmp_path / "first"
    publish_weights(first, trainer, 1)
    publish_weights(first, trainer, 2)
    old = logits(trainer)
    change(trainer, 0.1)
    new = logits(trainer)
    assert not torch.equal(old, new)
    seen, point = [], 1
    while True:
        folder = tmp_path / f"at{point}"
        shutil.copytree(first, folder)
        killed = killed_at(point, folder, trainer, 3)
        version = receive_weights(folder, sampler)
        assert version in (2, 3)
        assert torch.equal(logits(sampler), {2: old, 3: new}[version]), f"killed at write {point}"
        seen.append(version)
        # The next start of the trainer goes on, whatever was left.
        if killed:
            publish_weights(folder, trainer, 4)
            assert receive_weights(folder, sampler) == 4
            assert sorted(os.listdir(folder))[0] == VERSION
            assert not list(folder.glob("*.part"))
        shutil.rmtree(folder)
        if not killed:
            break
        point += 1
    assert seen == sorted(seen), "once the new one counts, it does"
    assert seen.count(2) >= 10, seen
    assert seen.count(3) >= 2, seen


def test_half_new_is_found_where_the_order_is_wrong(tmp_path, monkeypatch):
    """The test above can fail: with VERSION moved first, a killed trainer leaves nothing whole."""
    trainer = build(0, pattern="*-")
    publish_weights(tmp_path, trainer, 1)
    real = handoff._write

    def pointer_first(part, version, tensors, formats):
        pointer = {"version": version, "folder": f"v{version:08d}", "manifest_sha256": "0"}
        (tmp_path / VERSION).write_text(json.dumps(pointer))
        real(part, version, tensors, formats)

    monkeypatch.setattr(handoff, "_write", pointer_first)
    assert killed_at(12, tmp_path, trainer, 2)
    with pytest.raises(HandoffError):
        read_weights(tmp_path)


def test_a_sampler_that_reads_while_the_trainer_writes_sees_whole_versions(tmp_path):
    trainer, sampler = build(0, pattern="*-"), build(1, pattern="*-")
    expected = {}

    def train():
        for version in range(1, 9):
            change(trainer, 0.05)
            tensors, _ = pack_weights(trainer)
            expected[version] = {name: tensor.clone() for name, tensor in tensors.items()}
            publish_weights(tmp_path, trainer, version)

    worker = threading.Thread(target=train)
    worker.start()
    versions = []
    while worker.is_alive() or not versions or versions[-1] < 8:
        received = read_weights(tmp_path)
        if received is None or (versions and received.version == versions[-1]):
            continue
        versions.append(received.version)
        for name, tensor in expected[received.version].items():
            assert torch.equal(tensor, received.tensors[name]), name
    worker.join()
    assert versions == sorted(set(versions))
    assert receive_weights(tmp_path, sampler) == 8
    assert packed_weights.weight_problems(sampler, *pack_weights(trainer)) == []
