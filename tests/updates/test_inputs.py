"""Invalid options and optimizers are refused; unusual but valid ones work."""

import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse.checkpoint.state import State
from lightning_sparse.elastic import updates as elastic
from lightning_sparse.exchange import CommunicationError
from lightning_sparse.flavours.pytorch_lightning import MSTopKElasticFSDPStrategy, MSTopKLocalStrategy
from lightning_sparse.sharding import Part
from lightning_sparse.strategy.options import ShardsConfig
from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig, optimizer_state
from lightning_sparse.updates.buffers import Buffers
from tests.helpers.distributed import RanksFailed, RunRanks, run_ranks
from tests.helpers.lines import Lines, raised
from tests.strategy.kills import die
from tests.strategy.models import batch, flat_parameters, mlp
from tests.updates.runs import adamw, sgd, shared_of, start, steps

BAD: list[tuple[str, Any]] = [
    *(("density", value) for value in (1.5, 0.0, "auto")),
    *(("exchange", value) for value in ("auto", "flat")),
    ("value_dtype", "int8"),
    *(("step_ahead", value) for value in (1e-6, 0, 1.1, "half")),
    ("delay", 2),
    ("delay", True),
    ("sync_every", 0),
    ("sync_every", 1.5),
    ("outer_lr", 0),
    ("outer_lr", float("nan")),
    ("outer_lr", 2.001),
    ("outer_lr", True),
    ("shard_optimizer", 1),
    ("inter_gbps", 1.0),
]
UNKNOWN = [
    ("process_group", 1, "process_group"),
    ("model_averaging_period", 4, "model_averaging_period"),
    ("densities", 0.1, "has no option densities=0.1. Did you mean density?"),
    ("momentum_correction", True, "has no option momentum_correction=True"),
    ("density", 1.5, r"density=1.5 must be"),
    (
        "inter_gbps",
        1.0,
        "inter_gbps=1.0 cannot be combined with MSTopKLocalStrategy: it applies only to gradients. Omit it",
    ),
]


@pytest.mark.parametrize(("option", "value"), BAD)
def test_updates_option_out_of_range_is_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{option}={value!r}")):
        UpdatesConfig(**{option: value})


@pytest.mark.parametrize("make", [UpdatesConfig, ShardsConfig, partial(ShardsConfig, send="gradients")])
@pytest.mark.parametrize("value", ["auto", "topk"])
def test_exchange_offers_only_allowed_values(make: Callable[..., Any], value: str) -> None:
    with pytest.raises(
        ValueError, match=f"^exchange='{value}' must be one of 'sparse', 'regional', 'dense16', 'dense'"
    ):
        make(exchange=value)


@pytest.mark.parametrize(("option", "value", "says"), UNKNOWN)
def test_local_strategy_option_that_is_unknown_or_out_of_range_is_refused(option: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MSTopKLocalStrategy(**{option: value})


def refused() -> None:
    topology, config, model = discover(), UpdatesConfig(), mlp()
    one_step = sgd(model)
    one_step.consolidate_state_dict = lambda to=0: None  # type: ignore[attr-defined]
    for optimizers, said in (
        (torch.optim.LBFGS(model.parameters()), "LBFGS"),
        (one_step, "is already sharded"),
        (torch.optim.SGD([*model.parameters(), torch.zeros(3)]), r"shape \(3,\) that the module does not hold"),
        ([sgd(model), adamw(model[0])], r"parameter 0\.weight is stepped twice"),
    ):
        with pytest.raises(ValueError, match=said):
            LocalUpdates(model, optimizers, config, topology)
    model[0].weight = nn.Parameter(torch.zeros(37, 13, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"parameter 0\.weight is of torch\.complex64"):
        LocalUpdates(model, sgd(model), config, topology)
    dist.barrier()  # otherwise a rank could exit while the others still connect to it


def test_unsupported_optimizers_and_parameters_are_refused(ranks: RunRanks) -> None:
    ranks(refused, nodes=2, devices=1)


def ranks_differ() -> None:
    topology, model = discover(), mlp()
    first, parameters = topology.node_index == 0, list(model.parameters())
    with pytest.raises(ValueError, match=r"rank 1 has density=0\.1, rank 0 has 0\.05"):
        LocalUpdates(model, sgd(model), UpdatesConfig(density=0.05 if first else 0.1), topology)
    in_order = torch.optim.SGD(parameters if first else parameters[::-1])
    with pytest.raises(ValueError, match="rank 1 has module='6 tensors"):
        LocalUpdates(model, in_order, UpdatesConfig(), topology)
    model[0] = nn.Linear(13 if first else 12, 37)
    with pytest.raises(ValueError, match="rank 1 has module='6 tensors"):
        LocalUpdates(model, sgd(model), UpdatesConfig(), topology)


def test_ranks_with_different_models_or_options_are_refused(ranks: RunRanks) -> None:
    ranks(ranks_differ, nodes=2, devices=1)


def unequal() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"nodes of \[1, 2\] devices cannot exchange slices"):
        LocalUpdates(model, sgd(model), UpdatesConfig(), discover())
    dist.barrier()  # otherwise a rank could exit while the others still connect to it


def test_nodes_of_unequal_size_are_refused(ranks: RunRanks) -> None:
    ranks(unequal, nodes=2, devices=2, placement=[[0, 1], [2]])


class Sentences(nn.Module):
    """Has sparse gradients, two dtypes, a parameter without gradients and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.words = nn.EmbeddingBag(50, 8, sparse=True)
        self.hidden, self.last = nn.Linear(8, 9, dtype=torch.bfloat16), nn.Linear(9, 3)
        self.idle = nn.Parameter(torch.zeros(7), requires_grad=False)
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(self.words(x).bfloat16()).float()
        result: Tensor = self.last(hidden.relu()) + self.none.sum()
        return result


def unusual() -> list[Tensor]:
    found = []
    for make in (sgd, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)):
        ddp, optimizer, updates = start(make, Sentences(), density=0.1)
        for step in range(12):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(7 * step + dist.get_rank())
            ddp(torch.randint(0, 50, (6, 4), generator=generator)).square().mean().backward()
            optimizer.step()
            updates.step()
        found.append(shared_of(updates).float())
        updates.finish()
        found.append(flat_parameters(updates.module).float())
    return found


def test_updates_of_sparse_gradients_and_several_dtypes_keep_ranks_equal(ranks: RunRanks) -> None:
    results = ranks(unusual, nodes=2, devices=2)
    for found in results:
        assert all(torch.equal(one, other) for one, other in zip(found, results[0], strict=True))
        assert all(bool(each.isfinite().all()) for each in found)


def partly_frozen(all_given: bool, unfreezes: bool = False) -> tuple[list[Tensor], int, int]:
    """Train the last layer, with an optimizer of all parameters or of that layer only."""
    model = mlp(seed=dist.get_rank())
    layers = [each for each in model if isinstance(each, nn.Linear)]
    for parameter in nn.ModuleList(layers[:-1]).parameters():
        parameter.requires_grad_(False)
    given = model if all_given else layers[-1]
    ddp, optimizer, updates = start(lambda _: torch.optim.AdamW(given.parameters(), lr=0.01), model, density=0.1)
    (one,) = updates.optimizers
    before, first = one.state.slices.numel, layers[0].weight.detach().clone()
    steps(ddp, optimizer, updates, 0, 5)
    if unfreezes:
        layers[0].weight.requires_grad_(True)
        steps(ddp, optimizer, updates, 5, 10)
    updates.finish()
    moved = not torch.equal(first, layers[0].weight)
    assert moved == unfreezes
    return [p.detach().clone() for p in model.parameters()], before, one.state.slices.numel


def test_frozen_parameters_are_not_exchanged(ranks: RunRanks) -> None:
    for held, apart in zip(
        ranks(partly_frozen, True, nodes=2, devices=1), ranks(partly_frozen, False, nodes=2, devices=1), strict=True
    ):
        assert held[1] == apart[1]
        assert all(torch.equal(one, other) for one, other in zip(held[0], apart[0], strict=True))


def test_unfrozen_parameters_are_exchanged(ranks: RunRanks) -> None:
    zero, one = ranks(partly_frozen, True, True, nodes=2, devices=1)
    assert zero[2] == zero[1] + zero[0][0].numel()
    assert all(torch.equal(mine, other) for mine, other in zip(zero[0], one[0], strict=True))


def one_node_skips() -> tuple[Tensor, list[float]]:
    """Train with a loss scaler that skips every third step on node 1 only."""
    ddp, optimizer, updates = start(adamw, mlp(), density=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    sent = []
    for step in range(9):
        optimizer.zero_grad()
        x, y = batch(step, dist.get_rank())
        loss = nn.functional.mse_loss(ddp(x), y)
        bad = step % 3 == 1 and updates.topology.node_index == 1
        scaler.scale(loss * (torch.inf if bad else 1.0)).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        updates.step()
        sent.append(updates.exchange.stats.density)
    return shared_of(updates), sent


def test_node_that_skips_a_step_sends_pending_updates(ranks: RunRanks) -> None:
    results = ranks(one_node_skips, nodes=2, devices=2)
    for shared, sent in results:
        assert torch.equal(shared, results[0][0])
        assert shared.isfinite().all()
        assert min(sent) > 0.04


def dies(at: int, delay: int) -> None:
    ddp, optimizer, updates = start(adamw, density=0.05, delay=delay)
    for step in range(at + 3):
        if step == at and dist.get_rank() == dist.get_world_size() - 1:
            die()
        steps(ddp, optimizer, updates, step, step + 1)


@pytest.mark.parametrize("delay", [0, 1])
def test_node_that_dies_fails_the_others_and_names_the_step(delay: int) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(dies, 4, delay, nodes=3, devices=1, grace_s=30)
    assert failed.value.killed.keys() == {2}
    assert failed.value.raised.keys() == {0, 1}
    said = "".join(failed.value.raised.values())
    assert CommunicationError.__name__ in said
    assert re.search(r"all-gather between nodes \(ranks 0, 1, 2\) failed in step [45]", said)


def used_again() -> list[Tensor]:
    """Move an optimizer to a new `LocalUpdates`, where it continues with its state."""
    found = []
    for again in (False, True):
        ddp, optimizer, updates = start(adamw, mlp(), density=0.1, step_ahead=1)  # otherwise measured again
        steps(ddp, optimizer, updates, 0, 4)
        updates.finish()
        if again:
            updates.release_optimizers([optimizer])
            updates = LocalUpdates(updates.module, optimizer, updates.config, updates.topology)
        steps(ddp, optimizer, updates, 4, 8)
        found.append(shared_of(updates))
    return found


def test_reused_optimizer_continues_with_its_state(ranks: RunRanks) -> None:
    for first, second in ranks(used_again, nodes=2, devices=2):
        assert torch.equal(first, second)


def loads_weights(when: str, sync_every: int) -> tuple[Tensor, Tensor, list[str]]:
    """Load weights after `LocalUpdates` was created, and return the global weights after two steps that change none."""
    torch.manual_seed(dist.get_rank())
    ddp, optimizer, updates = start(sgd, density=0.01, sync_every=sync_every)
    optimizer.param_groups[0]["lr"] = 0.0
    logged = Lines()
    if when == "after an evaluation":
        shared_of(updates)
    updates.module.load_state_dict(mlp(seed=7).state_dict())
    steps(ddp, optimizer, updates, 0, 2)
    return shared_of(updates), flat_parameters(mlp(seed=7)), logged.lines


def loads_weights_of_two_optimizers() -> tuple[Tensor, Tensor]:
    """The second optimizer steps later. Return the global weights after steps that change none."""
    topology = discover()
    model, loaded = (nn.Sequential(mlp(seed), nn.Linear(5, 3)) for seed in (topology.rank, 7))
    dist.broadcast(loaded[1].weight.data, 0)
    dist.broadcast(loaded[1].bias.data, 0)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in model]
    updates = LocalUpdates(model, optimizers, UpdatesConfig(density=0.01), topology)
    model.load_state_dict(loaded.state_dict())
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in optimizers[: 1 + step // 2]:
            optimizer.step()
            updates.step(optimizer)
            assert not any(each.adopts_weights for each in updates.optimizers), "only in the first step of the run"
    return shared_of(updates), flat_parameters(loaded)


def test_weights_loaded_before_the_first_step_are_global_for_optimizers_that_step_later(ranks: RunRanks) -> None:
    for shown, loaded in ranks(loads_weights_of_two_optimizers, nodes=2, devices=1):
        assert torch.equal(shown, loaded)


def loads_other_weights() -> None:
    ddp, optimizer, updates = start(sgd, density=0.01)
    updates.module.load_state_dict(mlp(seed=dist.get_rank()).state_dict())
    steps(ddp, optimizer, updates, 0, 1)
    with updates.global_weights():
        pass


def test_other_weights_loaded_on_other_nodes_raise_at_the_next_evaluation() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(loads_other_weights, nodes=2, devices=1)
    assert "a loop loaded weights before its first step" in "".join(failed.value.raised.values())


@pytest.mark.parametrize("sync_every", [1, 3])
@pytest.mark.parametrize("when", ["at once", "after an evaluation"])
def test_weights_loaded_before_the_first_step_are_global_at_once(ranks: RunRanks, when: str, sync_every: int) -> None:
    results = ranks(loads_weights, when, sync_every, nodes=2, devices=2)
    for shown, loaded, _ in results:
        assert torch.equal(shown, loaded)
    assert sum("training starts from them" in line for line in results[0][2]) == 1


def added_later() -> list[Tensor]:
    """Train two optimizers. One of them gets parameters later, which are initially equal on all ranks."""
    topology = discover()
    torch.manual_seed(topology.rank)
    first, second = mlp(topology.rank), nn.Linear(5, 3)
    model = nn.Sequential(first, second)
    optimizers = [adamw(first[0]), torch.optim.SGD(first[2].parameters(), lr=0.1)]
    updates = LocalUpdates(model, optimizers, UpdatesConfig(density=0.1), topology)
    ddp = nn.parallel.DistributedDataParallel(model, process_group=topology.intra)
    for step in range(8):
        if step == 4:
            optimizers[1].add_param_group({"params": [*first[4].parameters(), *second.parameters()], "lr": 0.05})
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(batch(step, topology.rank)[0]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        updates.step()
    with updates.global_weights():
        shared = flat_parameters(model).clone()
    updates.finish()
    return [shared, flat_parameters(model).clone()]


def test_parameters_added_to_one_of_several_optimizers_are_exchanged(ranks: RunRanks) -> None:
    results = ranks(added_later, nodes=2, devices=2)
    for found in results:
        assert all(torch.equal(one, other) for one, other in zip(found, results[0], strict=True))


def resumed_in_turn() -> tuple[Tensor, Tensor]:
    """Two optimizers, one of which steps rarely, so that its messages in flight are older."""

    def begin() -> tuple[nn.Module, list[torch.optim.Optimizer], LocalUpdates]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in model]
        return model, optimizers, LocalUpdates(model, optimizers, UpdatesConfig(shard_optimizer=False), discover())

    def go_on(run: tuple[nn.Module, list[torch.optim.Optimizer], LocalUpdates], begin: int, end: int) -> None:
        model, optimizers, updates = run
        for step in range(begin, end):
            model.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + updates.topology.node_index)
            model(torch.randn(4, 40, generator=generator)).square().mean().backward()
            for optimizer in optimizers if step % 9 == 0 else optimizers[:1]:
                optimizer.step()
                updates.step(optimizer)

    whole = begin()
    go_on(whole, 0, 12)
    content, states = (whole[2].metadata(), whole[2].state()), [deepcopy(each.state_dict()) for each in whole[1]]
    resumed = begin()
    for optimizer, state in zip(resumed[1], states, strict=True):
        optimizer.load_state_dict(state)
    assert resumed[2].fits(*content)
    resumed[2].load(*content)
    for each in (whole, resumed):
        go_on(each, 12, 20)
    return shared_of(whole[2]), shared_of(resumed[2])


def test_optimizers_with_different_steps_resume_bit_identically(ranks: RunRanks) -> None:
    for whole, resumed in ranks(resumed_in_turn, nodes=2, devices=1):
        assert torch.equal(whole, resumed)


def without_optimizers() -> int:
    updates = LocalUpdates(nn.Linear(2, 2), [], UpdatesConfig(), discover())
    updates.step()
    updates.finish()
    return updates.steps


def test_loop_without_an_optimizer_runs(ranks: RunRanks) -> None:
    assert ranks(without_optimizers, nodes=2, devices=1) == [1, 1]


def moved_to_other_nodes() -> list[int]:
    """Step two optimizers, one of them every third time. Load the states of all nodes and return the steps."""
    topology = discover()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
    updates = LocalUpdates(model, optimizers, UpdatesConfig(sync_every=2), topology)
    for step in range(9):
        model(torch.randn(4, 5)).square().mean().backward()
        for optimizer in optimizers if step % 3 == 0 else optimizers[:1]:
            optimizer.step()
            updates.step(optimizer)
    saved: list[Any] = [None] * topology.world_size
    dist.all_gather_object(saved, updates.state())
    updates.load_from(updates.metadata(), [[each] for each in saved])
    return [one.steps for one in updates.optimizers]


def test_optimizers_keep_their_steps_on_other_nodes(ranks: RunRanks) -> None:
    assert ranks(moved_to_other_nodes, nodes=2, devices=1) == [[9, 3], [9, 3]]


def step_of_another() -> str:
    _, optimizer, updates = start(adamw)
    said = raised(updates.step, torch.optim.SGD(updates.module.parameters()))
    updates.step(optimizer)
    return said


def test_step_of_an_unknown_optimizer_is_refused(ranks: RunRanks) -> None:
    for said in ranks(step_of_another, nodes=2, devices=1):
        assert "given a SGD that is none of the 1 optimizer" in said
        assert "not a wrapper" in said


def test_buffers_that_become_trained_are_no_longer_averaged() -> None:
    module, stepped = nn.Linear(2, 3), set[int]()
    buffers = Buffers(module, None, lambda: stepped)  # type: ignore[arg-type]  # no communication
    buffers._drifting = {"weight", "bias"}
    assert buffers.own().keys() == {"weight", "bias"}
    stepped.add(id(module.weight))
    assert buffers.own().keys() == {"bias"}


def test_elastic_frozen_parameters_may_have_any_dtype_and_stay_frozen() -> None:
    frozen = nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False)
    one_node: Any = SimpleNamespace(num_nodes=1)
    optimizer = torch.optim.SGD([*frozen.parameters(), *nn.Linear(3, 3).parameters()])
    elastic._check([optimizer], one_node)
    frozen.requires_grad_(True)
    with pytest.raises(ValueError, match="parameters have dtype torch.float64"):
        elastic._check([optimizer], one_node)


def test_elastic_node_leaves_sigterm_to_lightning_after_the_fit() -> None:
    """The handler only ends a fit, so it must not stay for a later evaluation."""
    connector, epoch = SimpleNamespace(), SimpleNamespace()
    adapter = MSTopKElasticFSDPStrategy(lighthouse="http://host:1")
    fit = SimpleNamespace(epoch_loop=epoch)
    adapter._listen_for_signals(SimpleNamespace(_signal_connector=connector, fit_loop=fit))
    assert connector._sigterm_notifier_fn
    adapter._release_trainer()
    assert not vars(connector)
    assert not vars(epoch)


@pytest.mark.parametrize("options", [{}, {"capturable": True}])
def test_optimizer_state_of_a_scalar_is_loaded_to_its_device(options: dict[str, Any]) -> None:
    """An example is CLIP's logit scale. torch's own load does the same."""
    scale = nn.Parameter(torch.ones((), device="meta"))
    optimizer = torch.optim.AdamW([scale])
    rest = {"step": torch.tensor(3.0), "exp_avg": torch.tensor(0.5), "exp_avg_sq": torch.tensor(0.25)}
    saved = State(own={"rest": {"scale": rest}, "groups": [[{"lr": 0.1, **options}]]})
    optimizer_state.load({id(scale): "scale"}, [(optimizer, [(scale, Part(0, 0, 1))])], [saved])
    found = {name: each.device.type for name, each in optimizer.state[scale].items()}
    assert found == {"step": "meta" if options else "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


@pytest.mark.parametrize("shape", [(5, 1), (1, 5)])
def test_optimizer_state_of_row_factors_keeps_its_shape(shape: tuple[int, int]) -> None:
    """Adafactor in other packages keeps such factors of rows and columns."""
    weight, part = nn.Parameter(torch.ones(shape)), Part(0, 0, 5)
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight] = {"factor": torch.arange(5.0)}
    flats, rest = optimizer_state.split(optimizer, weight, part)
    assert not flats
    assert rest["factor"].shape == (5,)


class UnitVectors(nn.Module):
    """Has two buffers of unit length, which a mean over ranks would shorten, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(13, 7)), nn.BatchNorm1d(7))
        self.register_buffer("codebook", nn.functional.normalize(torch.randn(5, 3), dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


def unit_vectors() -> tuple[dict[str, Tensor], float]:
    """Return the averaged buffers, and the distance of this rank's own statistics from them."""
    torch.manual_seed(1)
    ddp, optimizer, updates = start(adamw, UnitVectors(), density=0.05)
    model = updates.module
    for step in range(9):
        optimizer.zero_grad()
        ddp(
            torch.randn(8, 13, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        ).square().sum().backward()
        optimizer.step()
        updates.step()
        model.codebook.copy_(nn.functional.normalize(model.codebook + 0.1 * dist.get_rank(), dim=-1))
    own = model.net[1].running_mean.clone()
    updates.finish()
    return dict(model.named_buffers()), float((model.net[1].running_mean - own).norm())


def test_unit_vectors_keep_their_length_and_statistics_are_averaged(ranks: RunRanks) -> None:
    (zero, moved), (one, _) = ranks(unit_vectors, nodes=2, devices=1)
    assert moved > 0
    for name, each in zero.items():
        assert torch.equal(each, one[name]), name
    lengths = [
        zero["net.0.parametrizations.weight.0._u"],
        zero["net.0.parametrizations.weight.0._v"],
        *zero["codebook"],
    ]
    assert [float(each.norm()) for each in lengths] == pytest.approx([1.0] * len(lengths), abs=1e-5)


def classes_seen() -> tuple[Tensor, Tensor]:
    """Return a buffer with NaN for a class that this rank has not seen: while it is averaged, and afterwards."""
    ddp, optimizer, updates = start(adamw, UnitVectors(), density=0.05)
    model = updates.module
    model.register_buffer("seen", torch.zeros(3))
    model.seen.copy_(torch.tensor([float(dist.get_rank() + 1)] * 3))
    model.seen[dist.get_rank()] = torch.nan
    ddp(torch.randn(8, 13)).square().sum().backward()
    optimizer.step()
    updates.step()
    with updates.global_weights():
        shown = model.seen.clone()
    return shown, model.seen


def test_buffer_with_nan_is_restored_after_an_evaluation(ranks: RunRanks) -> None:
    for rank, (shown, own) in enumerate(ranks(classes_seen, nodes=2, devices=1)):
        assert shown[2] == 1.5
        assert own.isnan().nonzero().tolist() == [[rank]]
        assert own[2] == rank + 1


class Caches(UnitVectors):
    """Has a cache that grows with the longest sequence of a rank, and one that exists on rank 0 only."""

    def grow(self) -> None:
        rows = dist.get_rank() + 2
        self.register_buffer("positions", torch.full((rows, 3), float(rows)), persistent=False)
        if dist.get_rank() == 0:
            self.register_buffer("late", torch.ones(5))


def unequal_buffers() -> tuple[Tensor, dict[str, Tensor], list[str]]:
    """Return the last weights, the buffers while the global weights were shown, and the warnings."""
    torch.manual_seed(1)
    ddp, optimizer, updates = start(adamw, Caches(), density=0.05)
    model = updates.module
    lines = Lines()
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(8, 13, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        ddp(x).square().sum().backward()
        optimizer.step()
        updates.step()
        if step == 2:
            model.grow()
            with updates.global_weights():
                shown = {name: buffer.clone() for name, buffer in model.named_buffers()}
    updates.finish()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(shown["positions"], model.positions)
    return weights, shown, [line for line in lines.lines if "not averaged" in line]


def test_buffers_of_other_shapes_on_other_ranks_are_left_and_the_others_averaged(ranks: RunRanks) -> None:
    (weights, zero, warned), (others, one, _) = ranks(unequal_buffers, nodes=2, devices=1)
    assert torch.equal(weights, others)
    assert (zero["positions"].shape, one["positions"].shape) == ((2, 3), (3, 3))
    assert torch.equal(zero["net.1.running_mean"], one["net.1.running_mean"])
    assert zero["late"].tolist() == [1.0] * 5
    assert len(warned) == 1
    assert warned[0].endswith("have rank 0's: late, positions")
