"""The sharded step on 1, 2, 3 and 4 real ranks, without Lightning: equal to the plain step, bit by bit.

Gradients are made up, the same on all ranks, as a reduction would leave them. Every rank also makes the
plain step, and compares parameters and consolidated state by their bits. One start of ranks runs every scenario.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from timm.optim import Lamb, Lars
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop

from lightning_sparse.pto import ShardedStep, choice, communicator_of
from lightning_sparse.strategy.communicator import CommunicationError, HierCommunicator
from lightning_sparse.topology import discover
from tests.helpers.distributed import RanksFailed, run_ranks

STEPS = 20
SHAPES = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2)}
SCENARIOS: dict[str, Callable[[HierCommunicator], Any]] = {}


def scenario(fn: Callable[[HierCommunicator], Any]) -> Callable[[HierCommunicator], Any]:
    SCENARIOS[fn.__name__] = fn
    return fn


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What every scenario returned, by rank."""
    nodes, devices = SHAPES[request.param]
    return run_ranks(run_scenarios, nodes=nodes, devices=devices, timeout=120)


def run_scenarios() -> dict[str, Any]:
    topology = discover()
    out = {name: fn(communicator_of(topology, "world")) for name, fn in SCENARIOS.items()}
    node = communicator_of(topology, "node")
    return {**out, "node": {name: variants(node)[name] for name in ("SGD momentum", "AdamW fused")}}


# -- what scenarios are made of ----------------------------------------------------------------------------------------


def parameters(odd: bool = True) -> list[nn.Parameter]:
    """Two large ones and several small ones; more than there are ranks, none a multiple of the other."""
    g = torch.Generator().manual_seed(0)
    shapes = [(37, 13), (37,), (29, 37), (29,), (5, 29), (5,), (), (3, 2, 5, 5)]
    made = [nn.Parameter(torch.randn(shape, generator=g)) for shape in shapes]
    if odd:
        made[-1].data = made[-1].data.to(memory_format=torch.channels_last)
        made += [nn.Parameter(torch.randn(7, generator=g).to(t)) for t in (torch.float64, torch.bfloat16)]
    return made


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    """As backward would: the same on all ranks; one parameter is unused in every third step."""
    g = torch.Generator().manual_seed(100 + step)
    for index, p in enumerate(params):
        grad = torch.randn(p.shape, generator=g).to(p.dtype)
        p.grad = None if step % 3 == 1 and index == 3 else grad.contiguous(memory_format=layout_of(p))


def layout_of(p: Tensor) -> torch.memory_format:
    return torch.channels_last if p.dim() == 4 else torch.contiguous_format


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:3], "weight_decay": 0.01}, {"params": params[3:], "lr": 0.003}]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Equal structures of tensors, bit by bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and bits(a) == bits(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def whole_state(optimizer: Any) -> Any:
    """The state_dict as rank 0 saves it, given to all ranks."""
    optimizer.consolidate_state_dict()
    held = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held)
    return held[0]


def train(params: list[nn.Parameter], optimizer: Optimizer, first: int = 0, last: int = STEPS) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    for step in range(first, last):
        set_gradients(params, step)
        grads = [p.grad for p in params]
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(params, grads, strict=True)), "gradients are not those given"
        scheduler.step()


# -- every tested optimizer --------------------------------------------------------------------------------------------

FUSED = (SGD, Adam, AdamW, Adagrad)
OPTIONS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (Adam, {"lr": 0.01, "amsgrad": True}),
    (AdamW, {"lr": 0.01, "maximize": True}),
    (Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    (RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    (NAdam, {"lr": 0.01, "decoupled_weight_decay": True}),
]


@scenario
def in_place(communicator: HierCommunicator) -> bool:
    """Parts so large that they are broadcast from where they lie to where they belong."""
    runs = []
    for shared in (True, False):
        params = [*parameters(), nn.Parameter(torch.randn(1001, 503, generator=torch.Generator().manual_seed(1)))]
        optimizer = AdamW(params, lr=0.01)
        step = ShardedStep(optimizer, communicator) if shared else None
        train(params, optimizer, last=5)
        runs.append((params, whole_state(optimizer) if step else optimizer.state_dict()))
    return same(*map(list, runs))


def test_large_parts_travel_in_place(results: list[dict[str, Any]]) -> None:
    assert all(each["in_place"] for each in results)


LAYERWISE: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Lars, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (Lamb, {"lr": 0.01, "weight_decay": 0.01, "max_grad_norm": None}),
    (Muon, {"lr": 0.01}),
]


@scenario
def variants(communicator: HierCommunicator) -> dict[str, str]:
    """By name of the variant, what is wrong with it; empty for nothing."""
    found = {}
    for cls, options in OPTIONS:
        for way in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            if "fused" in way and cls not in FUSED:
                continue
            which = " momentum" if "momentum" in options and cls is SGD else ""
            name = f"{cls.__name__}{which} {'' if way == {'foreach': False} else next(iter(way))}".strip()
            found[name] = compare(cls, {**options, **way}, communicator)
    for cls, options in LAYERWISE:
        found[cls.__name__] = compare(cls, options, communicator, whole=True)
    return found


def compare(cls: type[Optimizer], options: dict[str, Any], communicator: HierCommunicator, whole: bool = False) -> str:
    """What differs from the plain step. Whole: no parameter may be stepped in parts."""
    ours, theirs = [[p for p in parameters() if cls is not Muon or p.dim() == 2] for _ in range(2)]
    sharded, plain = cls(groups(ours), **options), cls(groups(theirs), **options)
    step = ShardedStep(sharded, communicator)
    train(ours, sharded)
    train(theirs, plain)
    wrong = [] if same(list(ours), list(theirs)) else ["parameters differ"]
    wrong += [] if same(whole_state(sharded), plain.state_dict()) else ["state differs"]
    own = {id(p): part for p, part in zip(ours, step.mine, strict=True) if part is not None}
    wrong += [] if {id(p) for p in sharded.state} <= own.keys() else ["foreign state"]
    sizes = {
        id(p): max([0, *(t.numel() for t in s.values() if isinstance(t, Tensor))]) for p, s in sharded.state.items()
    }
    wrong += [] if all(n <= max(1, own[i].end - own[i].begin) for i, n in sizes.items()) else ["state of others' parts"]
    alone = communicator.topology.num_devices == 1
    wrong += [] if alone or whole != any(len(parts) > 1 for parts in step.parts) else ["cut, or not"]
    return ", ".join(wrong)


def test_every_variant_equals_the_plain_step(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert len(each["variants"]) == 7 * 2 + 5 + 3
        assert set(each["variants"].values()) == {""}, each["variants"]
        assert set(each["node"].values()) == {""}, each["node"]


# -- things that happen in a run ---------------------------------------------------------------------------------------


@scenario
def late_group(communicator: HierCommunicator) -> dict[str, Any]:
    """add_param_group() after some steps, as fine-tuning does when it unfreezes a backbone."""
    out = []
    for sharded in (True, False):
        params = parameters()
        optimizer = AdamW(params[3:], lr=0.01)
        step = ShardedStep(optimizer, communicator) if sharded else None
        train(params[3:], optimizer, last=5)
        parts = step and list(step.parts)
        optimizer.add_param_group({"params": params[:3]})
        train([*params[3:], *params[:3]], optimizer, first=5)
        out.append((params, whole_state(optimizer) if step else optimizer.state_dict()))
        assert not step or step.parts[: len(params) - 3] == parts
    return {"equal": same(*[[list(params), state] for params, state in out])}


@scenario
def auto(communicator: HierCommunicator) -> dict[str, Any]:
    """Either way chosen, for a tested optimizer and for one that is tried beside a copy: the bits of the plain run, and
    checkpoints from every phase."""
    found = {}
    for cls in (AdamW, Stranger):
        for way in ("plain", "shared"):
            ours, theirs = parameters(), parameters()
            optimizer, plain = cls(groups(ours), lr=0.01), cls(groups(theirs), lr=0.01)
            step = ShardedStep(optimizer, communicator, auto=True)
            states = []
            with Clock(communicator, gather=0.0 if way == "shared" else 1e9) as clock:
                optimizer.register_step_pre_hook(clock.step)  # after the other, so that its time is the step's
                for first in range(0, STEPS, 5):
                    train(ours, optimizer, first, first + 5)
                    train(theirs, plain, first, first + 5)
                    held = whole_state(optimizer) if step.active else optimizer.state_dict()
                    states.append(same(held, plain.state_dict()))
                    optimizer.load_state_dict(held)
            found[cls.__name__, way] = (step.sharing == (way == "shared"), same(ours, theirs), *states)
    return found


class Stranger(AdamW):
    """Of a class that nobody has tested."""


class Clock:
    """A clock that only the step and the gather move."""

    def __init__(self, communicator: HierCommunicator, gather: float) -> None:
        self.now, self.seconds = 0.0, gather
        self._gather, self._communicator = communicator.gather, communicator

    def __enter__(self) -> "Clock":
        self._read, choice._now = choice._now, lambda _: self.now
        self._communicator.gather = self.late  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        choice._now = self._read
        self._communicator.gather = self._gather  # type: ignore[method-assign]

    def step(self, optimizer: Optimizer, *_: Any) -> None:
        """In proportion to what is stepped."""
        self.now += sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.grad is not None)

    def late(self, share: Tensor) -> Tensor:
        self.now += self.seconds
        return self._gather(share)


def test_auto_keeps_what_is_faster(results: list[dict[str, Any]]) -> None:
    for each in results:
        for (name, way), (chosen, *equal) in each["auto"].items():
            assert all(equal), (name, way, equal)
            assert chosen or len(results) == 1, (name, way)


@scenario
def closures(communicator: HierCommunicator) -> dict[str, Any]:
    """The closure runs once a step, with gradients enabled, and its result is the step's."""
    params = parameters(odd=False)
    optimizer = SGD(params, lr=0.1)
    ShardedStep(optimizer, communicator)
    called = []

    def closure() -> Tensor:
        called.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = torch.stack([p.square().sum() for p in params]).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [float(optimizer.step(closure).detach()) for _ in range(3)]
        losses.append(float(optimizer.step(closure=closure).detach()))
    expected, plain = parameters(odd=False), []
    reference = SGD(expected, lr=0.1)
    for _ in range(4):
        reference.zero_grad()
        loss = torch.stack([p.square().sum() for p in expected]).sum()
        loss.backward()
        reference.step()
        plain.append(float(loss.detach()))
    return {"called": called, "equal": same(params, expected), "losses": losses == plain}


@scenario
def onlookers(communicator: HierCommunicator) -> dict[str, Any]:
    """Post hooks, registered before and after: all gradients, all new parameters."""
    params, expected = parameters(odd=False), parameters(odd=False)
    optimizer, reference = SGD(params, lr=0.1), SGD(expected, lr=0.1)
    seen = []

    def look(*_: Any) -> None:
        seen.append(same(params, expected) and all(p.grad is not None for p in params))

    optimizer.register_step_post_hook(look)
    ShardedStep(optimizer, communicator)
    optimizer.register_step_post_hook(look)
    for step in (0, 2):
        set_gradients(expected, step)
        reference.step()
        set_gradients(params, step)
        optimizer.step()
    return {"seen": seen}


@scenario
def state_without_asking(communicator: HierCommunicator) -> dict[str, Any]:
    params = parameters()
    optimizer = Adam(params)
    ShardedStep(optimizer, communicator)
    said = []
    train(params, optimizer, last=2)
    for _ in range(2):
        try:
            optimizer.state_dict()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
        optimizer.consolidate_state_dict(to=communicator.topology.world_size - 1)  # type: ignore[attr-defined]
    return {"said": said}


@scenario
def different_ranks(communicator: HierCommunicator) -> str:
    """Gradients that no reduction has made equal."""
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    ShardedStep(optimizer, communicator, names={id(params[4]): "head.weight"})
    set_gradients(params, 0)
    if dist.get_rank() == 0:
        params[4].grad.view(-1)[3] += 1e-3  # type: ignore[union-attr]
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


@scenario
def a_step_that_raises(communicator: HierCommunicator) -> dict[str, Any]:
    """On every rank alike, as a bad option would: gradients are back, and the next step does not go on silently."""
    params = parameters(odd=False)
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    ShardedStep(optimizer, communicator)
    train(params, optimizer, last=2)
    optimizer.param_groups[0]["lr"] = "none"
    said = []
    for attempt in (optimizer.step, optimizer.step, optimizer.consolidate_state_dict):  # type: ignore[attr-defined]
        set_gradients(params, 2)
        try:
            attempt()
        except Exception as error:
            said.append(str(error))
    return {"said": said}


@scenario
def a_closure_that_raises(communicator: HierCommunicator) -> dict[str, Any]:
    """Nothing has happened yet: gradients and parameters are as they were, and the run can go on."""
    params, expected = parameters(odd=False), parameters(odd=False)
    optimizer, reference = SGD(params, lr=0.1), SGD(expected, lr=0.1)
    ShardedStep(optimizer, communicator)
    set_gradients(params, 0)

    def closure() -> float:
        raise KeyError("a bad sample")

    try:
        optimizer.step(closure)
    except KeyError as error:
        said = str(error)
    whole = all(p.grad is not None for p in params)
    train(params, optimizer)
    train(expected, reference)
    return {"said": said, "whole": whole, "equal": same(params, expected)}


def test_what_happens_in_a_run(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert each["late_group"]["equal"]
        assert each["closures"] == {"called": [True] * 4, "equal": True, "losses": True}
        assert each["onlookers"]["seen"] == [True] * 4
        assert each["a_closure_that_raises"] == {"said": "'a bad sample'", "whole": True, "equal": True}
        first, *later = each["a_step_that_raises"]["said"]
        assert "before its parameters were gathered" not in first
        assert all("before its parameters were gathered" in said for said in later)
        assert len(later) == 2
    *others, last = [each["state_without_asking"]["said"] for each in results]
    assert all("Call optimizer.consolidate_state_dict(to=rank) on all ranks" in said for say in others for said in say)
    assert (bool(last[0]), last[1]) == (True, "")


def test_ranks_that_differ_are_refused(results: list[dict[str, Any]]) -> None:
    for each in results:
        said = "" if len(results) == 1 else "parameter head.weight: ranks hold different gradients of it"
        assert said in each["different_ranks"]
        assert bool(said) == bool(each["different_ranks"])


# -- optimizers nobody has tested --------------------------------------------------------------------------------------


class Own(SGD):
    """A subclass that changes nothing, with an attribute of its own."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.first = self.param_groups[0]["params"][0]


class GlobalNorm(SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm() if grads else 1.0
        for grad in grads:
            grad /= norm
        super().step()
        return loss


class Late(SGD):
    """Independent in its first step; from then on its rate is an estimate over all parameters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.estimate = 0.0
        self.last = self.param_groups[-1]["params"][-1]

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            assert any(self.last is p for p in group["params"])
            group["lr"] = 0.1 + 0.01 * self.estimate
            self.estimate += sum(float(p.grad.sum()) for p in group["params"] if p.grad is not None)
        super().step()
        return loss


class Twice(SGD):
    """Evaluates its closure again at other parameters."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.enable_grad():
            closure()
        super().step()
        return loss


class NoCopy(SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.lock = (item for item in "cannot be copied")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@scenario
def untested(communicator: HierCommunicator) -> dict[str, Any]:
    out = {}
    for cls in (Own, GlobalNorm, Late, Twice, NoCopy):
        lines = Lines()
        logging.getLogger("lightning_sparse").addHandler(lines)
        ours, theirs = parameters(odd=False), parameters(odd=False)
        sharded, plain = cls(ours, lr=0.1, momentum=0.9), cls(theirs, lr=0.1, momentum=0.9)
        step = ShardedStep(sharded, communicator)
        for number in range(STEPS):
            for params, optimizer in ((ours, sharded), (theirs, plain)):

                def closure(params: Any = params, number: int = number) -> float:
                    set_gradients(params, number + int(params[0].sum().abs()))
                    return 1.0

                optimizer.step(closure)
        logging.getLogger("lightning_sparse").removeHandler(lines)
        state = whole_state(sharded) if step.active else sharded.state_dict()
        equal = same(ours, theirs) and same(state, plain.state_dict())
        out[cls.__name__] = {"equal": equal, "active": step.active, "lines": lines.lines}
    return out


def test_untested_optimizers_are_tried_beside_the_plain_step(results: list[dict[str, Any]]) -> None:
    alone = len(results) == 1
    for rank, each in enumerate(results):
        assert all(found["equal"] for found in each["untested"].values()), each["untested"]
        active = {name for name, found in each["untested"].items() if found["active"]}
        assert active == ({"Own", "GlobalNorm", "Late"} if alone else {"Own"})
        warned = [found["lines"] for found in each["untested"].values() if not found["active"]]
        assert all(len(lines) == (rank == 0) for lines in warned)
    said = {name: " ".join(found["lines"]) for name, found in results[0]["untested"].items()}
    assert "PTO is off for Twice, which steps as without it: it evaluates its closure more than once" in said["Twice"]
    assert "cannot be tried on a copy (TypeError" in said["NoCopy"]
    if not alone:
        assert "sharing its step changes the result" in said["GlobalNorm"]
        assert "sharing its step changes the result" in said["Late"]


# -- ranks that die ----------------------------------------------------------------------------------------------------


def test_a_rank_killed_before_the_gather_hangs_nobody() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        run_ranks(die_in_the_gather, nodes=1, devices=3, timeout=60)
    assert list(failed.value.killed) == [1]
    assert failed.value.hung == {}
    assert sorted([*failed.value.raised, *failed.value.stopped]) == [0, 2]
    assert time.monotonic() - began < 40
    assert "while step 2 gathered the parameters" in "".join(failed.value.raised.values())


def die_in_the_gather() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    step = ShardedStep(optimizer, communicator_of(discover(), "world"))
    train(params, optimizer, last=2)
    if dist.get_rank() == 1:
        step.communicator.gather = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    set_gradients(params, 2)
    try:
        optimizer.step()
    except CommunicationError:
        for attempt in (optimizer.step, optimizer.consolidate_state_dict):  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="ranks hold different ones"):
                attempt()
        raise


# -- nodes of unequal size ---------------------------------------------------------------------------------------------


def test_nodes_of_unequal_size_share_inside_each() -> None:
    for rank, each in enumerate(run_ranks(unequal_nodes, placement=[[2, 0], [1]])):
        assert each["wrong"] == ""
        assert each["owned"] == (1.0 if rank == 1 else pytest.approx(0.5, abs=0.1))


def unequal_nodes() -> dict[str, Any]:
    communicator = communicator_of(discover(), "node")
    wrong = compare(AdamW, {"lr": 0.01}, communicator)
    params = parameters()
    step = ShardedStep(SGD(params, lr=0.1), communicator)
    owned = sum(part.end - part.begin for part in step.mine if part is not None)
    return {"wrong": wrong, "owned": owned / sum(p.numel() for p in params)}
