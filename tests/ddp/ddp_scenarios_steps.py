"""Scenarios about single steps: what a skipped, refused or failed one may change, which is nothing else."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from ddp_parts import batch, bits, gap, loss_of, net, sgd, train, wrap
from ddp_scenarios_faults import TwoHeads, attempt, poisoned
from ddp_worker import Place
from torch import Tensor, nn

import rtopk
from rtopk import compat


def _pair(trunk: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Two models with one trunk."""
    heads = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            heads.append(nn.Linear(5, 5))
    return nn.Sequential(trunk, heads[0]), nn.Sequential(trunk, heads[1])


def _nan(model: nn.Module, rank: int, step: int) -> Tensor:
    return loss_of(model, rank, step) * (float("nan") if rank == 1 else 1.0)


def skip_is_one_step(at: Place) -> dict[str, Any]:
    """After a skipped round healthy updates count: each case beside a twin that never met the NaN."""
    found: dict[str, Any] = {}

    def shared_trunk(step_after: bool, bad: bool) -> str:
        one, two = _pair(net())
        first, second = (rtopk.ddp.register(wrap(model), 0.05).model for model in (one, two))
        optimizer = torch.optim.SGD({*one.parameters(), *two.parameters()}, lr=0.1, momentum=0.9)
        train(second, optimizer, range(1), at.rank)
        if bad:
            optimizer.zero_grad()
            _nan(first, at.rank, 1).backward()
            if step_after:
                optimizer.step()
        train(second, optimizer, range(2, 4), at.rank)
        return bits(two)

    def wrapped_anew(step_after: bool, bad: bool) -> str:
        model = net()
        optimizer = sgd(model, momentum=0.9)
        if bad:
            old = rtopk.ddp.register(wrap(model), 0.05)
            _nan(old.model, at.rank, 1).backward()
            if step_after:
                optimizer.step()
        train(rtopk.ddp.register(wrap(model), 0.05).model, optimizer, range(3), at.rank)
        return bits(model)

    def local_steps(step_after: bool, bad: bool) -> str:
        model = net()
        ddp = rtopk.ddp.register(wrap(model), 0.05).model
        optimizer = sgd(model, momentum=0.9)
        train(ddp, optimizer, range(2), at.rank)
        if bad:
            optimizer.zero_grad(set_to_none=step_after)
            _nan(ddp, at.rank, 2).backward()
            if step_after:
                optimizer.step()
        with ddp.no_sync():
            for step in range(3, 5):
                optimizer.zero_grad(set_to_none=step_after)
                loss_of(ddp, at.rank, step).backward()
                optimizer.step()
        return bits(model)

    for case in (shared_trunk, wrapped_anew, local_steps):
        for step_after in (True, False):
            found[f"{case.__name__} {step_after}"] = [case(step_after, bad) for bad in (True, False)]
    return found


def _mean_residual(state: rtopk.ddp.State, name: str) -> Tensor:
    """Return the mean over ranks of what is kept back of a parameter."""
    residual = state.state_dict()["memory"]["residual"][name].clone()
    dist.all_reduce(residual)
    return residual / state.world_size


def second_backward(at: Place) -> dict[str, Any]:
    """Two exchanges in a step: the optimizer gets both means; if the second is bad, nothing is lost."""
    found: dict[str, Any] = {}

    def gradients(model: nn.Module) -> Tensor:
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    def kept(state: rtopk.ddp.State) -> Tensor:
        return torch.cat([_mean_residual(state, name).flatten() for name in state.parameters])

    for scope, options in (
        ("global", {}),
        ("bucket", {"gradient_as_bucket_view": True}),
        ("global", {"find_unused_parameters": True}),
        ("global", {"static_graph": True}),
    ):
        model, twin = net(), net()
        state = rtopk.ddp.register(wrap(model, **options), 0.05, scope=scope)
        other = rtopk.ddp.register(wrap(twin), 0.05, scope=scope)
        optimizer, again = sgd(model), sgd(twin)
        for step in range(0, 6, 2):
            for which, optimize, ddp in ((model, optimizer, state.model), (twin, again, other.model)):
                optimize.zero_grad(set_to_none=step == 0)
                loss_of(ddp, at.rank, step).backward()
                first = gradients(which)
                if which is twin:
                    optimize.zero_grad()
                loss_of(ddp, at.rank, step + 1).backward()
                if which is twin:
                    sizes = [parameter.numel() for parameter in twin.parameters()]
                    for parameter, mean in zip(twin.parameters(), first.split(sizes), strict=True):
                        parameter.grad += mean.view(parameter.shape)
                optimize.step()
        found[f"{scope} {options}"] = {"apart": gap(model, twin), "step": state.step}
        for scale in (1.0, float("nan")):
            optimizer.zero_grad()
            loss_of(state.model, at.rank, 6).backward()
            whole, weights = gradients(model) + kept(state), bits(model)
            (scale * loss_of(state.model, at.rank, 7)).backward()
            if scale != 1.0:
                optimizer.step()
        found[f"{scope} {options}"]["lost"] = float((kept(state) - whole).abs().max())
        found[f"{scope} {options}"]["rested"] = weights == bits(model)
    # Two models with one trunk, and one step: the trunk gets both means.
    both = []
    for clear in (False, True):
        one, two = _pair(net())
        first, second = (rtopk.ddp.register(wrap(model), 0.05).model for model in (one, two))
        loss_of(first, at.rank, 0).backward()
        mean = one[0][0].weight.grad.clone()
        if clear:
            two.zero_grad()
        loss_of(second, at.rank, 0).backward()
        both.append(one[0][0].weight.grad + (mean if clear else 0.0))
    found["shared"] = float((both[0] - both[1]).abs().max())
    # And NaN in each of them in turn, with nothing cleared in between.
    model = _pair(net())
    states = [rtopk.ddp.register(wrap(part), 0.05) for part in model]
    for state, loss in ((0, loss_of), (1, _nan), (0, loss_of), (1, loss_of)):
        loss(states[state].model, at.rank, 0).backward()
    found["skips"] = [[state.skipped, state.step] for state in states]
    both_optimizer = torch.optim.SGD({p for part in model for p in part.parameters()}, lr=0.1)
    train(states[0].model, both_optimizer, range(2), at.rank)
    found["shared_finite"] = [bits(model[0]), all(bool(p.isfinite().all()) for p in model[0].parameters())]
    found["norms"] = [state.residual_norm() for state in states]
    # A head that the second backward leaves out, on rank 1 and then on all ranks.
    for name, view, use in (("some", False, [True, False]), ("all", False, [False, False]),
                            ("some_view", True, [True, False]), ("all_view", True, [False, False])):  # fmt: skip
        torch.manual_seed(3)
        heads = TwoHeads()
        ddp = wrap(heads, find_unused_parameters=True, gradient_as_bucket_view=view)
        state = rtopk.ddp.register(ddp, 0.5)
        ddp(batch(at.rank, 0)[0], True).square().mean().backward()
        mean = heads.two.weight.grad.clone()
        ddp(batch(at.rank, 1)[0], use[at.rank]).square().mean().backward()
        found[f"idle_{name}"] = [
            bits([p.grad for p in heads.parameters()]),
            bits(mean),
            bits(heads.two.weight.grad),
        ]
        whole = heads.two.weight.grad + _mean_residual(state, "two.weight")
        (float("nan") * ddp(batch(at.rank, 2)[0], use[at.rank]).square().mean()).backward()
        optimizer = sgd(heads)
        optimizer.step()
        found[f"lost_{name}"] = float((_mean_residual(state, "two.weight") - whole).abs().max())
    # Rank 0 clears its gradients in between, rank 1 does not.
    model = net()
    state = rtopk.ddp.register(wrap(model), 0.05)
    loss_of(state.model, at.rank, 0).backward()
    if at.rank == 0:
        model.zero_grad()
    found["one_rank"] = attempt(loss_of(state.model, at.rank, 1).backward)
    # Parameters that no optimizer owns are never cleared.
    model = net()
    state = rtopk.ddp.register(wrap(model), 0.05)
    found["some"] = attempt(train, state.model, sgd(model[5]), range(3), at.rank)
    found["weights"] = bits([p.grad for p in model.parameters()])
    return found


def after_a_raise(at: Place) -> dict[str, Any]:
    """A model can be used after its error was caught; the twin never met the bad step."""
    found: dict[str, Any] = {}
    for name, how in (
        ("global", {}),
        ("bucket", {"scope": "bucket"}),
        ("static_graph", {}),
        ("find_unused_parameters", {}),
    ):
        ends, said = [], []
        for steps in ([0, 1, 2, 3, 4], [0, 1, 3, 4]):
            model = net()
            ddp = wrap(model, **({} if name in ("global", "bucket") else {name: True}))
            state = rtopk.ddp.register(ddp, 0.05, on_nonfinite="raise", **how)
            optimizer = sgd(model, momentum=0.9)
            said = [attempt(train, ddp, optimizer, [step], at.rank, poisoned) for step in steps] + said[:5]
            optimizer.step()  # on the last gradients, which count twice here
            ends.append([bits(model), bits(state.state_dict())])
        model = net()
        ddp = wrap(model, **({} if name in ("global", "bucket") else {name: True}))
        rtopk.ddp.register(ddp, 0.05, on_nonfinite="raise", **how)
        optimizer = sgd(model, momentum=0.9, weight_decay=0.1)
        first = bits(model)
        said.append(attempt(train, ddp, optimizer, [2], at.rank, poisoned))  # in the first step of all
        optimizer.step()
        found[name] = {"said": said, "ends": ends, "rested": first == bits(model)}
    return found


def densities_differ(at: Place) -> dict[str, Any]:
    """Rank 1 misses set_epoch: all ranks say so, nothing changes, and training goes on when it is mended."""
    found: dict[str, Any] = {}
    for scope in ("global", "bucket"):
        model = net()
        state = rtopk.ddp.register(wrap(model), rtopk.warm_up(0.01, steps=3), counts="epochs", scope=scope)
        optimizer = sgd(model)
        train(state.model, optimizer, range(2), at.rank)
        before = bits([bits(model), bits(state.state_dict()["memory"])])
        if at.rank == 0:
            state.set_epoch(1)
        said = attempt(train, state.model, optimizer, range(2, 3), at.rank)
        same = before == bits([bits(model), bits(state.state_dict()["memory"])])
        state.set_epoch(1)
        train(state.model, optimizer, range(2, 4), at.rank)
        found[scope] = {"said": said, "same": same, "weights": bits(model), "step": state.step}

    def breaks(step: int) -> float:
        if step == 2 and at.rank == 1 and started:
            return 1.5
        return 0.05

    started: list[bool] = []
    model = net()
    state = rtopk.ddp.register(wrap(model), breaks)
    started.append(True)
    found["broken"] = attempt(train, state.model, sgd(model), range(4), at.rank)
    return found


def openings(at: Place) -> dict[str, Any]:
    """How often a schedule is asked, and in which rounds a header goes first."""
    found: dict[str, Any] = {}
    asked: list[int] = []

    def counted(step: int) -> float:
        asked.append(step)
        return 0.05

    real = compat.all_gather_single
    for name, density, options in (
        ("constant", 0.05, {}),
        ("dense_steps", 0.05, {"dense_steps": 2}),
        ("warm_up", rtopk.warm_up(0.05, steps=3), {}),
        ("function", counted, {}),
    ):
        model = net()
        state = rtopk.ddp.register(wrap(model), density, **options)
        registered = len(asked)
        sizes: list[list[int]] = []

        def gather(out: Tensor, own: Tensor, group: Any = None, *, seen: Any = sizes) -> Any:
            seen[-1].append(own.numel())
            return real(out, own, group)

        compat.all_gather_single = gather
        try:
            for step in range(6):
                sizes.append([])
                train(state.model, sgd(model), range(step, step + 1), at.rank)
        finally:
            compat.all_gather_single = real
        found[name] = {
            "headers": [sum(size == 40 for size in step) for step in sizes],
            "sent": [state.stats.bytes_sent, sum(sizes[-1])],
            "asked": [registered, len(asked) - registered],
        }
        # A state that is loaded may be of another step: all ranks look again.
        state.load_state_dict(state.state_dict())
        found[name]["unsettled"] = not state.settled
    return found


def half_overflow(at: Place) -> dict[str, Any]:
    """Residuals of fp16 parameters grow beyond 65,504: what is applied and what is kept stay all that came in."""
    found: dict[str, Any] = {}
    for name, density in (("sparse", 0.02), ("dense", 0.5)):
        for memory in ("error-feedback", "momentum-correction"):
            model = nn.Linear(16, 8, bias=False, dtype=torch.float16)
            ddp = wrap(model)
            make = (lambda: rtopk.MomentumCorrection(0.0)) if memory != "error-feedback" else memory
            state = rtopk.ddp.register(ddp, density, memory=make, selector=rtopk.TopK())
            applied, steps = torch.zeros(8, 16), 30
            largest, finite = 0.0, True
            for _ in range(steps):
                model.weight.grad = None
                (40000.0 * ddp(torch.ones(1, 16, dtype=torch.float16))).sum().backward()
                finite &= bool(model.weight.grad.isfinite().all())
                applied += model.weight.grad.float()
            kept = state.state_dict()["memory"]["residual"]["weight"].float()
            largest = float(kept.max())
            dist.all_reduce(kept)
            whole = applied + kept / at.world
            found[f"{name} {memory}"] = {
                "finite": finite,
                "lost": float((whole - 40000.0 * steps).abs().max()),
                "largest": largest,
            }
    return found


class Functional(nn.Module):
    """Sparse gradients without a module that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Parameter(torch.ones(10, 4)), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(nn.functional.embedding(inputs, self.table, sparse=True))


def riddles(at: Place) -> dict[str, Any]:
    """What used to fail with words of torch's is refused with the reason and the way out."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    found: dict[str, str] = {}
    warnings.simplefilter("ignore")  # torch's own
    sharded = fully_shard(net(), mesh=init_device_mesh("cpu", (at.world,)))
    found["fsdp2"] = attempt(rtopk.ddp.register, sharded)
    found["fsdp1"] = attempt(
        rtopk.ddp.register, FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    )
    functional = rtopk.ddp.register(wrap(Functional()), 0.05)
    found["sparse"] = attempt(functional.model(torch.tensor([1, 2])).sum().backward)
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        found["python_reducer"] = attempt(rtopk.ddp.register, wrap(net()), 0.05)
    finally:
        torch._dynamo.config.optimize_ddp = True
        warnings.simplefilter("error")
    found["weights"] = attempt(rtopk.ddp.register, wrap(net()), 0.05, weights=[1.0, float("nan")])
    return {"said": found}
