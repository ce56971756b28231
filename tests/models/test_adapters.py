"""Adapters: what trains, what travels, what is shared; gradients against the whole model's."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from flrce.errors import BadInput
from flrce.models.adapters import LoRA, add_lora_adapters, get_adapter_rank, make_low_rank_part
from flrce.models.flat import (
    FrozenParameter,
    freeze_parameters,
    make_layout,
    pack_model,
    unpack_model,
)
from flrce.models.llama import load_llama
from flrce.models.seeds import SeedSpaceNetwork
from language_files import relative, weights, write_folder, write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("adapters") / "hf", weights())


def adapted(folder, seed=0, **options):
    torch.manual_seed(seed)
    return add_lora_adapters(load_llama(folder), **{"rank": 3, "alpha": 6.0, **options})


def test_only_adapters_travel_and_start_as_nothing(folder):
    net = adapted(folder)
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(net(ids), load_llama(folder)(ids))
    names = [slot.name for slot in make_layout(net).slots]
    assert names == [
        f"layers.{i}.self_attn.{p}.lora_{m}"
        for i in range(2)
        for p in ("q_proj", "v_proj")
        for m in "AB"
    ]
    # q: 3 (64 + 64), v: 3 (64 + 32), for two layers
    assert make_layout(net).size == make_layout(net).trainable == 2 * (3 * 128 + 3 * 96)
    assert all(isinstance(p, FrozenParameter) for p in net.parameters() if not p.requires_grad)


def test_gradients_are_those_of_the_whole_model(folder):
    """dL/dA = s B^T G, dL/dB = s G A^T with G = dL/dW, by autograd on the model with W + s B A in
    place of W.
    """
    net = adapted(folder, targets="q_proj,v_proj,down_proj")
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith("lora_B"):
                p.normal_(std=0.1)
    ids = torch.randint(0, 288, (2, 11), generator=torch.Generator().manual_seed(3))
    merged = load_llama(folder)
    whole = {name: p.data.clone() for name, p in merged.named_parameters()}
    lora = {name: layer for name, layer in net.named_modules() if isinstance(layer, LoRA)}
    for name, layer in lora.items():
        whole[f"{name}.weight"] += (layer.scale * layer.lora_B @ layer.lora_A).detach()
    whole = {name: p.requires_grad_() for name, p in whole.items()}
    loss = functional_call(merged, whole, (ids,)).log_softmax(-1)[..., 7].mean()
    loss.backward()
    mine = net(ids).log_softmax(-1)[..., 7].mean()
    torch.testing.assert_close(mine, loss)
    mine.backward()
    assert len(lora) == 6
    for name, layer in lora.items():
        G = whole[f"{name}.weight"].grad
        torch.testing.assert_close(
            layer.lora_A.grad, layer.scale * layer.lora_B.detach().T @ G, atol=1e-6, rtol=1e-3
        )
        torch.testing.assert_close(
            layer.lora_B.grad, layer.scale * G @ layer.lora_A.detach().T, atol=1e-6, rtol=1e-3
        )


def test_recomputing_blocks_changes_no_gradient(folder):
    ids, grads = torch.arange(5, 17)[None], []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = add_lora_adapters(load_llama(folder, recompute=recompute), 2).train()
        net(ids).square().mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.requires_grad]))
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_a_client_of_lower_rank_holds_the_first_units(folder):
    net = adapted(folder, rank=4)
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.normal_()
    part = make_low_rank_part(net, make_layout(net), 0.5)
    assert get_adapter_rank(part.net) == 2
    assert part.key == (0.5, 0)
    w = pack_model(net)
    small = unpack_model(copy.deepcopy(part.net), w[part.held])
    cut = copy.deepcopy(net)
    for layer in cut.modules():
        if isinstance(layer, LoRA):
            layer.lora_A.data[2:] = 0
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(small(ids), cut(ids), atol=1e-4, rtol=1e-3)
    assert next(small.parameters()).data_ptr() == next(net.parameters()).data_ptr()  # one base


def test_fixed_patterns(folder):
    net = freeze_parameters(adapted(folder), ["*.lora_A"])
    assert make_layout(net).size == 2 * (3 * 64 + 3 * 32)
    for pattern, words in (
        ("nothing*", "no parameter that trains is called"),
        ("*", "nothing would train"),
    ):
        with pytest.raises(BadInput, match=words):
            freeze_parameters(adapted(folder), [pattern])


def test_a_rank_above_what_a_layer_can_have_is_told_of(folder, caplog):
    """v_proj is 32 x 64: products of rank 33 are no more than those of 32."""
    adapted(folder, rank=32)
    assert not caplog.text
    adapted(folder, rank=33)
    assert "rank 33: no change of a layer with a side of 32 has more than that" in caplog.text


def test_targets_and_ranks_are_checked(folder):
    with pytest.raises(
        BadInput, match="'w_proj' matches no linear layer of Llama; it has down_proj"
    ):
        add_lora_adapters(load_llama(folder), targets="w_proj")
    with pytest.raises(BadInput, match=r"'all-linear' .* up_proj, v_proj \('\*': all of them\)"):
        add_lora_adapters(load_llama(folder), targets="all-linear")
    with pytest.raises(BadInput, match="rank = 0"):
        add_lora_adapters(load_llama(folder), rank=0)
    with pytest.raises(BadInput, match="targets names no layer"):
        add_lora_adapters(load_llama(folder), targets=[])
    with pytest.raises(BadInput, match="'0' matches no linear layer of Sequential; it has none"):
        add_lora_adapters(nn.Sequential(nn.ReLU()), targets="0")
    with pytest.raises(BadInput, match="adapt a network once"):
        add_lora_adapters(adapted(folder))
    with pytest.raises(BadInput, match="targets names no layer"):
        add_lora_adapters(load_llama(folder), targets=" ,")
    own = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(BadInput, match="'2' matches no linear layer"):
        add_lora_adapters(own, 1, targets="0,2")
    assert all(
        p.requires_grad for p in own.parameters()
    )  # nothing was touched: the next try is the first
    assert [type(layer) for layer in add_lora_adapters(own, 1, targets="0, 0,")] == [
        LoRA,
        nn.Linear,
    ]
    only = add_lora_adapters(load_llama(folder), 2, targets="layers.1.*.q_proj")
    assert [n for n, m in only.named_modules() if isinstance(m, LoRA)] == [
        "layers.1.self_attn.q_proj"
    ]


def test_seed_space_is_a_sum_of_directions(folder):
    net = freeze_parameters(adapted(folder), ["*.lora_A"])
    base = copy.deepcopy(net)
    seeded = SeedSpaceNetwork(net, 70, seed=5)
    assert make_layout(seeded).size == 70
    assert set(seeded.signs.unique().tolist()) == {-1, 1}
    with torch.no_grad():
        seeded.steps[3], seeded.steps[66] = 0.01, -0.02
    ids = torch.arange(3, 15)[None]
    w = pack_model(base) + 0.01 * seeded.signs[3] - 0.02 * seeded.signs[66]
    torch.testing.assert_close(seeded(ids), unpack_model(base, w)(ids), atol=1e-5, rtol=1e-4)
    again = SeedSpaceNetwork(freeze_parameters(adapted(folder), ["*.lora_A"]), 70, seed=5)
    assert torch.equal(again.signs, seeded.signs)
    with pytest.raises(BadInput, match="seeds = -5"):
        SeedSpaceNetwork(adapted(folder), -5)
    with pytest.raises(BadInput, match="something to train"):
        SeedSpaceNetwork(load_llama(folder), 5)


@pytest.mark.parametrize(
    ("dtype", "recompute", "kind"),
    [
        ("float32", False, "llama"),
        ("bfloat16", False, "llama"),
        ("float32", True, "llama"),
        ("float32", False, "qwen2"),
        ("bfloat16", False, "qwen2"),
        ("float32", True, "mistral"),
    ],
)
def test_clients_are_stacked_over_one_base(folder, tmp_path, dtype, recompute, kind):
    """Three lanes with adapters of their own in one stack, against each lane by itself."""
    import numpy as np

    from flrce.training.gpu.batch_trainer import ClientBatchTrainer
    from flrce.training.objectives import NextToken

    torch.manual_seed(0)
    if kind != "llama":
        biased = tuple(f"self_attn.{name}_proj" for name in "qkv") if kind == "qwen2" else ()
        folder = tmp_path / "hf"
        relative(
            folder,
            weights(),
            biased,
            model_type=kind,
            **({"sliding_window": 4} if kind == "mistral" else {}),
        )
    net = add_lora_adapters(load_llama(folder, dtype, recompute=recompute), 2)
    rng = torch.Generator().manual_seed(1)
    x = torch.randint(0, 288, (12, 9), generator=rng)
    y = torch.randint(0, 288, (12, 9), generator=rng)
    w = pack_model(net) + 0.05 * torch.randn(3, len(pack_model(net)), generator=rng)
    stack = ClientBatchTrainer(net, (9,), x, y, 1.0, 0.0, "cpu", objective=NextToken())
    assert stack.default_variant == "columns"
    fixed = [
        p
        for p in stack.get_network(stack.default_variant).module.parameters()
        if not p.requires_grad
    ]
    assert {p.data_ptr() for p in net.parameters() if not p.requires_grad} >= {
        p.data_ptr() for p in fixed
    }
    orders = [np.arange(lane, lane + 8) for lane in range(3)]
    sizes = [np.array([4, 4])] * 3
    together, losses, _ = stack.train(w, orders, sizes, lr=0.5)
    for lane in range(3):
        alone = unpack_model(copy.deepcopy(net), w[lane])
        for step in range(2):
            some = torch.from_numpy(orders[lane][4 * step : 4 * step + 4])
            loss = NextToken().losses(alone(x[some]), y[some]).mean()
            assert float(losses[lane][step]) == pytest.approx(
                float(loss), rel=2e-2 if dtype == "bfloat16" else 1e-4
            )
            trained = [p for p in alone.parameters() if p.requires_grad]
            for p, g in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                p.data -= 0.5 * g
        moved, there = together[lane] - w[lane], pack_model(alone) - w[lane]
        assert float((moved - there).norm()) < (5e-2 if dtype == "bfloat16" else 1e-3) * float(
            there.norm()
        )


def test_quantised_base_is_named_in_experiments(tmp_path):
    from flrce.models.nets import build_network

    file = write_gguf(tmp_path / "tiny.gguf", weights())
    net = build_network("llama", (12,), 288, 0, 288, True, {"path": str(file), "rank": 2})
    assert make_layout(net).size == 2 * (2 * 128 + 2 * 96)
    torch.testing.assert_close(
        pack_model(net),
        pack_model(
            build_network("llama", (12,), 288, 0, 288, True, {"path": str(file), "rank": 2})
        ),
    )
    with pytest.raises(BadInput, match="token ids up to 288"):
        build_network("llama", (12,), 289, 0, 289, True, {"path": str(file)})
