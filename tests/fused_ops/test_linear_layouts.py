# SPDX-License-Identifier: Apache-2.0
"""The same codes in every layout: shards with the shared amax and their global coordinates."""

from dataclasses import replace

import pytest
import torch

from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.keys import OPERANDS, StreamKey
from fused_ops.linear import LinearCall, LocalComm, Runs, linear
from fused_ops.operands import amax_of, quantize_operand
from fused_ops.quantize import quantize
from fused_ops.recipe import RECIPES, recipe_from_dict
from tests.distributed import run_distributed

KEY = StreamKey(seed=5, step=17, micro_batch=2, layer=99)
TOKENS, OUT, IN = 384, 256, 512
EXACT = {"format": "nvfp4", "scale": "pow2", "rounding": "stochastic_exact"}
RECIPES_HERE = [
    RECIPES["nvfp4"], RECIPES["nvfp4_v2"], RECIPES["nvfp4_fast"], RECIPES["mxfp4_hadamard"],
    recipe_from_dict({"name": "exact_sr", "dgrad_dy": EXACT, "wgrad_dy": EXACT,
                      "fprop_x": {"format": "nvfp4", "row_scaled": True}}),
]  # fmt: skip


class Shard(LocalComm):
    """One rank of a simulated layout: the whole operand's amaxes, and where its part lies."""

    def __init__(self, amaxes=None, origins=None):
        self.amaxes, self.origins = amaxes or {}, origins or {}

    def reduce_amax(self, name, amax):
        return self.amaxes.get(name, amax)

    def origin(self, name):
        return self.origins.get(name, (0, 0))


def tensors():
    """x, w, dy with rows and columns of very different size, so that local amaxes differ."""

    def spread(rows, cols, scale):
        size = torch.exp2(torch.randint(-4, 5, (rows, 1)).float())
        return (torch.randn(rows, cols) * size * scale).bfloat16()

    return {
        "x": spread(TOKENS, IN, 1.0),
        "w": spread(OUT, IN, 0.02),
        "dy": spread(TOKENS, OUT, 1e-3),
    }


def is_columns(name):
    return name in ("dgrad.w", "wgrad.dy", "wgrad.x")


def same_bytes(a, b):
    return torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)


# Which axis of which tensor a layout cuts.
SPLITS = {
    "tp_column": {"w": 0, "dy": 1},
    "tp_row": {"x": 1, "w": 1},
    "cp": {"x": 0, "dy": 0},
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("recipe", RECIPES_HERE, ids=lambda recipe: recipe.name)
def test_sharded_equals_unsharded(recipe, split):
    """Every operand that the layout cuts, in parts of 128 and the rest, byte for byte."""
    call = LinearCall(recipe=recipe, key=KEY)
    tried = 0
    for name in OPERANDS:
        spec, tensor = call.spec(name), tensors()[name.split(".")[1]]
        axis = SPLITS[split].get(name.split(".")[1])
        if axis is None or spec.is_high_precision:
            continue
        tried += 1
        columns = is_columns(name)
        whole = quantize_operand(call, name, tensor, columns=columns)
        amax = amax_of(call, name, tensor, columns=columns)
        parts = []
        for start, stop in ((0, 128), (128, tensor.shape[axis])):
            part = tensor.narrow(axis, start, stop - start)
            own = amax
            if spec.row_scaled and (axis == 1) == columns:
                own = amax[start:stop]
            comm = Shard({name: own}, {name: (start, 0) if axis == 0 else (0, start)})
            parts.append(quantize_operand(replace(call, comm=comm), name, part, columns=columns))
        along = 1 - axis if columns else axis
        assert torch.equal(torch.cat([p.codes for p in parts], along), whole.codes), name
        scales = torch.cat([p.scales for p in parts], along)
        assert torch.equal(scales, whole.scales), name
    assert tried >= 2 or recipe.name == "exact_sr"


def test_a_shard_without_its_origin_or_amax_has_other_codes():
    """The equality above is not a triviality."""
    call = LinearCall(recipe=RECIPES["nvfp4"], key=KEY)
    dy = tensors()["dy"]
    whole = quantize_operand(call, "dgrad.dy", dy)
    amax = amax_of(call, "dgrad.dy", dy)
    part = dy[128:]
    right = replace(call, comm=Shard({"dgrad.dy": amax}, {"dgrad.dy": (128, 0)}))
    assert torch.equal(quantize_operand(right, "dgrad.dy", part).codes, whole.codes[128:])
    no_origin = replace(call, comm=Shard({"dgrad.dy": amax}))
    assert not torch.equal(quantize_operand(no_origin, "dgrad.dy", part).codes, whole.codes[128:])
    row, column = amax_of(call, "dgrad.dy", dy[:, :128]), amax_of(call, "dgrad.dy", dy[:, 128:])
    smaller = replace(right, comm=Shard({"dgrad.dy": torch.minimum(row, column) / 3},
                                        {"dgrad.dy": (128, 0)}))  # fmt: skip
    assert not torch.equal(quantize_operand(smaller, "dgrad.dy", part).codes, whole.codes[128:])


@pytest.mark.parametrize("recipe", RECIPES_HERE, ids=lambda recipe: recipe.name)
def test_zigzag_runs_of_tokens(recipe):
    """Context parallel: rank 0 of 2 holds the first and last of four chunks of the sequence."""
    call = LinearCall(recipe=recipe, key=KEY)
    dy = torch.randn(512, OUT).bfloat16()
    runs = Runs(rows=((128, 0), (128, 384)), columns=((OUT, 0),))
    part = torch.cat([dy[:128], dy[384:]])
    for name in ("dgrad.dy", "wgrad.dy"):
        columns = is_columns(name)
        whole = quantize_operand(call, name, dy, columns=columns)
        amax = amax_of(call, name, dy, columns=columns)
        comm = Shard({name: amax}, {name: runs})
        own = quantize_operand(replace(call, comm=comm), name, part, columns=columns)
        axis = 1 if columns else 0
        for field in ("codes", "scales"):
            first, _, _, last = getattr(whole, field).chunk(4, axis)
            assert torch.equal(getattr(own, field), torch.cat([first, last], axis)), (name, field)
        assert own.shape == ((OUT, 256) if columns else (256, OUT))
    if call.spec("dgrad.dy").is_random:
        broken = Runs(rows=((100, 0), (156, 384)), columns=((OUT, 0),))
        bad = replace(call, comm=Shard(origins={"wgrad.dy": broken}))
        with pytest.raises(ValueError, match=r"multiples of \d+ for .* got \[100, 156\]"):
            quantize_operand(bad, "wgrad.dy", part, columns=True)


@pytest.mark.parametrize("recipe", RECIPES_HERE, ids=lambda recipe: recipe.name)
def test_parts_of_the_output_that_are_cut_one_by_one(recipe):
    """Gate and up, on rank 1 of 2 and in a zigzag piece of the sequence, byte for byte."""
    call = LinearCall(recipe=recipe, key=KEY)
    dy = tensors()["dy"][:256]
    gate, up = dy[:, :128], dy[:, 128:]
    swapped = torch.cat([up[128:], gate[128:]], 1)
    for name in ("dgrad.dy", "wgrad.dy"):
        columns = is_columns(name)
        whole = quantize_operand(call, name, dy, columns=columns)
        amax = amax_of(call, name, dy, columns=columns)
        runs = Runs(rows=((128, 128),), columns=((128, 128), (128, 0)))
        comm = Shard({name: amax}, {name: runs})
        own = quantize_operand(replace(call, comm=comm), name, swapped, columns=columns)
        rows, along = (1, 0) if columns else (0, 1)
        for field in ("codes", "scales"):
            expected = getattr(whole, field).chunk(2, rows)[1]
            first, second = expected.chunk(2, along)
            assert torch.equal(getattr(own, field), torch.cat([second, first], along)), (
                name,
                field,
            )
        assert own.shape == ((OUT, 128) if columns else (128, OUT))


def run(call, x, w, dy):
    x, w = x.clone().requires_grad_(), torch.nn.Parameter(w.clone())
    y = linear(x, w, call=call)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_v2", "nvfp4_fast"])
def test_the_layer_computes_the_same_in_every_layout(name, split):
    """Cut outputs are equal bit for bit; cut sums up to their fp32 order (1e-6)."""
    full = {k: v.float() for k, v in tensors().items()}
    call = LinearCall(recipe=RECIPES[name], key=KEY)
    expected = run(call, **full)
    amaxes = shared_amaxes(call, full)
    cut = SPLITS[split]
    outputs = []
    for start, stop in ((0, 128), (128, None)):
        part, origins = dict(full), {}
        for key, axis in cut.items():
            stop_here = full[key].shape[axis] if stop is None else stop
            part[key] = full[key].narrow(axis, start, stop_here - start)
            offset = (start, 0) if axis == 0 else (0, start)
            origins |= {n: offset for n in OPERANDS if n.endswith("." + key)}
        outputs.append(run(replace(call, comm=Shard(amaxes, origins)), **part))
    # Axis along which each of y, dx, dw is cut; None: partial sums.
    axes = {"tp_column": (1, None, 0), "tp_row": (None, 1, 1), "cp": (0, 0, None)}[split]
    for axis, whole, first, second in zip(axes, expected, *outputs):
        if axis is None:
            error = (first + second - whole).norm() / whole.norm()
            assert float(error) < 1e-6
        else:
            assert torch.equal(torch.cat([first, second], axis), whole)


def shared_amaxes(call, full):
    """What all-reduces of the local amaxes would give, the requantized weight's included."""
    amaxes = {}
    for name in OPERANDS:
        tensor, columns = full[name.split(".")[1]], is_columns(name)
        if name == "dgrad.w" and call.spec(name).source == "forward":
            tensor = quantize_operand(call, "fprop.w", tensor).dequantize()
        amaxes[name] = amax_of(call, name, tensor, columns=columns)
    return amaxes


def _both_orders(seed):
    """Rank's view: gather(quantize(part)) and quantize(gather(part)) of each operand."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    class Group(LocalComm):
        def reduce_amax(self, name, amax):
            amax = amax.clone()
            dist.all_reduce(amax, dist.ReduceOp.MAX)
            return amax

        def origin(self, name):
            return rank * 128, 0

    def gather(part, axis):
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, axis)

    torch.manual_seed(seed + rank)
    result = {}
    for recipe in ("nvfp4", "nvfp4_v2", "nvfp4_fast"):
        local = LinearCall(recipe=RECIPES[recipe], key=KEY)
        shared = replace(local, comm=Group())
        for name in ("fprop.x", "wgrad.x", "dgrad.dy", "wgrad.dy"):
            columns = is_columns(name)
            part = (torch.randn(128, 96) * 10.0**rank).bfloat16()
            own = quantize_operand(shared, name, part, columns=columns)
            whole = quantize_operand(local, name, gather(part, 0), columns=columns)
            axis = 1 if columns else 0
            codes, scales = gather(own.codes, axis), gather(own.scales, axis)
            result[recipe, name] = (
                torch.equal(codes, whole.codes)
                and torch.equal(scales, whole.scales)
                and torch.equal(own.amax, whole.amax)
            )
    return result


def test_gather_of_quantized_is_quantized_gather_on_two_ranks():
    for result in run_distributed(_both_orders, 2, timeout=400, args=(3,)):
        assert len(result) == 12
        assert all(result.values()), [name for name, equal in result.items() if not equal]


def test_gather_first_quantizes_all_tokens_and_reduces_its_gradient():
    """Sequence parallel as the reference does it: gather, then quantize what was gathered."""
    x, w, dy = tensors().values()

    class Sequence(LocalComm):
        waited = 0

        def gather_input(self, part):
            return torch.cat([part, x[128:]])

        def reduce_input_grad(self, dx):
            return dx[:128].clone(), self

        def wait(self):
            Sequence.waited += 1

    for name in ("nvfp4", "bf16"):
        call = LinearCall(recipe=RECIPES[name], key=KEY)
        y, dx, dw = run(call, x, w, dy)
        part = run(replace(call, comm=Sequence()), x[:128], w, dy)
        assert torch.equal(part[0], y)
        assert torch.equal(part[1], dx[:128])
        assert torch.equal(part[2], dw)
    assert Sequence.waited == 2


def test_experts_split_over_ranks_have_the_codes_of_one_process():
    """Expert parallel: the second rank's first expert is number 2."""
    spec = OperandSpec(format="nvfp4", rounding="stochastic")
    dy = torch.randn(64, 32).bfloat16()
    one_process = LinearCall(recipe=RECIPES["nvfp4"], key=KEY.with_expert(2))
    rank = LinearCall(recipe=RECIPES["nvfp4"], key=replace(KEY, expert=2))
    a = quantize_operand(one_process, "dgrad.dy", dy)
    b = quantize_operand(rank, "dgrad.dy", dy)
    assert isinstance(a, QuantizedTensor)
    assert same_bytes(a, b)
    assert same_bytes(a, quantize(dy, spec, key=replace(KEY, expert=2).operand("dgrad.dy")))
    assert not same_bytes(a, quantize(dy, spec, key=KEY.operand("dgrad.dy")))
